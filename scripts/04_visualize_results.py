"""Draw what was measured, and write the report that says what it means and what to do next, as text and as HTML.

Reads:  results/baseline_metrics.json; results/profiler_traces/ where step 03 has run, variants.json where step 05 has
Writes: results/plots/, results/baseline_summary_report.txt, results/report.html, results/card.txt

    python scripts/04_visualize_results.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli
from utils.steps import step


@step("04")
def main(run: cli.Run) -> int:
    from utils.report import assembly

    written = assembly.write(run)
    run.give(lambda: {"card": written.answer.splitlines(), "pictures": written.pictures})
    run.say(f"drew {written.pictures} pictures into {run.layout.plots}")
    run.say(f"\n{written.answer}\n")
    run.say(f"open {run.layout.html_report} (as plain text: {run.layout.report})")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
