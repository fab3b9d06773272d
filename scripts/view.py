"""Show the card of a run again: what it is bound by, what was tried, and what to do next.

Reads:  RUN: a results folder in which step 04 has run
Writes: nothing
Exit:   0 fine · 2 usage, or no card there

    python scripts/view.py [RUN] [--json] [--config FILE]
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from boundby.cli import typed
from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="the folder (default: output.results_dir of the settings)"
    )


@cli.tool(add_arguments)
def main(run: cli.Run) -> int:
    from boundby import files
    from utils.command import InputError

    folder = Path(run.args.run or run.layout.results)
    layout = replace(run.layout, results=folder, metrics=folder / run.layout.metrics.name)
    try:
        card = layout.card.read_text(encoding="utf-8").rstrip()
    except OSError as error:
        raise InputError(
            f"no run with a card lies in {folder} ({error.strerror}); `{typed('run')}` measures one, "
            f"and where one was measured `{typed('report')}` writes it"
        ) from None
    measured = files.read_json(layout.metrics) if run.args.json and layout.metrics.is_file() else {}
    run.give(
        lambda: {"card": card.splitlines(), "optimal": measured.get("optimal"), "rows": measured.get("batch_sizes")},
        lambda: f"{card}\n\nopen {layout.html_report} (as plain text: {layout.report})",
    )
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
