"""How close the quickstart model comes to this machine's measured ceilings, batch size by batch size.

Runs steps 01 and 02 on configs/quickstart.yaml into a temporary folder and prints the verdict of each row beside its
share of the measured peak. Exits 1 where a measured row has no share, or one above 110 %, or no verdict.

    python benchmarks/share_of_ceiling.py [--seconds 10] [--dtypes float32 bfloat16]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("ok", "noisy")
MOST_SHARE_PCT = 110.0


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="most measured seconds per batch size")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="dtypes of the sweep")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        document = measure(Path(folder), args.seconds, args.dtypes)
    show(document)
    problems = failures(document["batch_sizes"])
    for problem in problems:
        print(f"FAILED: {problem}")
    return int(bool(problems))


def measure(results: Path, seconds: float, dtypes: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of the quickstart sweep."""
    settings = [
        f"output.results_dir={results}",
        f"profiling.max_seconds_per_batch_size={seconds:g}",
        f"profiling.dtypes=[{','.join(dtypes)}]",
        f"model.dtype={dtypes[0]}",
        "evaluation.enabled=false",
    ]
    config = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
    for script in ("01_download_data.py", "02_baseline_inference.py"):
        command = [sys.executable, str(ROOT / "scripts" / script), *config, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((results / "baseline_metrics.json").read_text())


def show(document: Mapping[str, Any]) -> None:
    """Print the ceilings and one line per row."""
    for item in document["ceilings"]["compute"]:
        setting = f" {item['precision']}" if item["precision"] else ""
        rate, middle = item["flops_per_s"] / 1e9, item["low"] / 1e9
        print(f"ceiling {item['dtype']}{setting}: {rate:.1f} GFLOP/s (median {middle:.1f})")
    for item in document["ceilings"]["memory"]:
        print(f"ceiling {item['level']}: {item['bytes_per_s'] / 1e9:.1f} GB/s")
    print("dtype     batch  samples/s   +-%  GFLOP/s  % of peak  useful %  bound            % of limit  confidence")
    for row in document["batch_sizes"]:
        if row["status"] not in MEASURED:
            print(f"{row['dtype']:<9} {row['batch_size']:5d}  {row['status']}: {row['reasons']['all']}")
            continue
        print(
            f"{row['dtype']:<9} {row['batch_size']:5d} {row['throughput_samples_per_sec_mean']:10.1f}"
            f" {cell(row['throughput_half_width_pct'], 5)} {cell((row['flops_per_sec'] or 0) / 1e9, 8)}"
            f" {cell(row['share_of_ceiling_pct'], 10)} {cell(row['useful_flops_pct'], 9)}  {row['bound'] or '-':<15}"
            f" {cell(row['share_of_limit_pct'], 11)}  {row['confidence']}, {row['verdict']['confirmation']}"
            f"{', disturbed' if row['disturbed_rounds'] else ''}"
        )


def cell(value: float | None, width: int) -> str:
    """Return a number with one digit, or a dash, set to the right."""
    return f"{'-' if value is None else f'{value:.1f}':>{width}}"


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what no row of a sound sweep may show."""
    result = []
    for row in (row for row in rows if row["status"] in MEASURED):
        where, share = f"{row['dtype']} batch size {row['batch_size']}", row["share_of_ceiling_pct"]
        if share is None:
            result.append(f"{where}: no share of the ceiling ({row['reasons'].get('share_of_ceiling_pct')})")
        elif share > MOST_SHARE_PCT:
            result.append(f"{where}: {share:.0f} % of the ceiling")
        if row["bound"] in (None, "inconclusive"):
            result.append(f"{where}: no verdict")
    return result


if __name__ == "__main__":
    sys.exit(main())
