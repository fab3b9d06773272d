"""Draw what was measured, and write the report that says what it means and what to do next.

Reads:  results/baseline_metrics.json; results/profiler_traces/ where step 03 has run
Writes: results/plots/, results/baseline_summary_report.txt

    python scripts/04_visualize_results.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils import cli


@cli.step("04")
def main(run: cli.Run) -> int:
    from dataclasses import replace

    from boundby import files
    from utils.report import assembly, headline, pictures, sources

    data = sources.read(run)
    drawn = pictures.draw(data)
    data = replace(data, pictures=drawn)
    files.write_text(run.layout.report, assembly.text(data))

    run.say("\n".join(headline.summary(data)))
    for path, reason in drawn.items():
        run.say(f"{path}: {reason}" if reason else f"wrote {path}")
    run.say(f"wrote {run.layout.report}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
