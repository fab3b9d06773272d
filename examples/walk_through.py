"""Walk through the whole pipeline on reduced samples, stopping at each result: about two minutes, no network.

python examples/walk_through.py [--pause]
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("results-walk-through")
REDUCED = [
    "profiling.batch_sizes=[1,8]",
    "profiling.num_measurement_runs=5",
    "profiling.max_seconds_per_batch_size=3",
    "evaluation.limit=300",
    f"output.results_dir={RESULTS}",
]


def main() -> int:
    """Run each step and show what it left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause", action="store_true", help="wait for Enter after each step")
    args = parser.parse_args()
    for number, show in enumerate((show_nothing, show_data, show_sweep, show_operators, show_report)):
        command = [sys.executable, str(ROOT / "run_pipeline.py"), "--config", str(ROOT / "configs" / "quickstart.yaml")]
        code = subprocess.run([*command, "--only", str(number), *REDUCED], check=False).returncode
        if code != 0:
            return code
        show()
        if args.pause:
            input("Enter for the next step ")
    return 0


def show_nothing() -> None:
    """Step 00 has said what it found."""


def show_data() -> None:
    """Show the first texts with their labels."""
    with Path("data/quickstart/val_df.csv").open(encoding="utf-8", newline="") as file:
        for row, _ in zip(csv.DictReader(file), range(3), strict=False):
            print(f"  {row['label_name']}: {row['text'][:90]!r}")


def show_sweep() -> None:
    """Show what the baseline says."""
    result = json.loads((RESULTS / "baseline_metrics.json").read_text(encoding="utf-8"))
    best, full = result["optimal"], result["full_dataset_metrics"]
    print(f"  use batch size {best['batch_size']}: {best['reason']}")
    print(f"  {full['correct']} of {full['samples']} right, {full['throughput_samples_per_sec']:.0f} samples/s")


def show_operators() -> None:
    """Show the most expensive operators."""
    with (RESULTS / "profiler_traces" / "op_stats.csv").open(encoding="utf-8", newline="") as file:
        for row, _ in zip(csv.DictReader(file), range(5), strict=False):
            print(f"  {float(row['cpu_self_pct']):5.1f} % {row['name']}")


def show_report() -> None:
    """Say where the report and the pictures are."""
    print(f"  read {RESULTS / 'baseline_summary_report.txt'} and open {RESULTS / 'plots'}")


if __name__ == "__main__":
    sys.exit(main())
