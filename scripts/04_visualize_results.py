"""Draw what was measured, and write the report that says what it means and what to do next, as text and as HTML.

Reads:  results/baseline_metrics.json; results/profiler_traces/ where step 03 has run
Writes: results/plots/, results/baseline_summary_report.txt, results/report.html

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
    from utils.render import html_page, plain_text
    from utils.report import assembly, headline, pictures, sources

    data = sources.read(run)
    data = replace(data, pictures=pictures.draw(data))
    document = assembly.document(data)
    files.write_text(run.layout.report, plain_text.render(document))
    files.write_text(run.layout.html_report, html_page.render(document))

    run.say("\n".join(plain_text.lines([headline.summary(data)])))
    for picture in data.pictures:
        run.say(f"{picture.path}: {picture.reason}" if picture.reason else f"wrote {picture.path}")
    run.say(f"wrote {run.layout.report}")
    run.say(f"wrote {run.layout.html_report}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
