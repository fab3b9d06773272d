"""Draw what was measured, and write the report that says what it means and what to do next, as text and as HTML.

Reads:  results/baseline_metrics.json; results/profiler_traces/ where step 03 has run
Writes: results/plots/, results/baseline_summary_report.txt, results/report.html, results/card.txt

    python scripts/04_visualize_results.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils import cli


@cli.step("04")
def main(run: cli.Run) -> int:
    from boundby import files
    from utils.render import html_page, plain_text
    from utils.report import assembly, card, pictures, sources

    data = sources.read(run)
    report = assembly.report(data)
    pictures.draw(report.drawings)
    files.write_text(run.layout.report, plain_text.render(report.document))
    files.write_text(run.layout.html_report, html_page.render(report.document))

    answer = "\n".join(card.card(data))
    files.write_text(run.layout.card, f"{answer}\n")

    drawn = sum(drawing.reason is None for drawing in report.drawings)
    run.say(f"drew {drawn} pictures into {run.layout.plots}")
    run.say(f"\n{answer}\n")
    run.say(f"open {run.layout.html_report} (as plain text: {run.layout.report})")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
