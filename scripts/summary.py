"""Sum a run up for a language model, in at most 4 KB: findings, where each figure stands, and what it cannot answer.

Reads:  RUN: a results folder in which step 02 has run; its card and later files where they are there
Writes: nothing
Exit:   0 fine · 2 usage or input

    python scripts/summary.py [RUN] --for-agents [--json] [--config FILE]
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="the folder (default: output.results_dir of the settings)"
    )
    text = "the bounded summary; `view` shows the card for people"
    parser.add_argument("--for-agents", action="store_true", required=True, help=text)


@cli.tool(add_arguments)
def main(run: cli.Run) -> int:
    from utils.report import run_summary as summary

    folder = Path(run.args.run or run.layout.results)
    made = summary.of(replace(run.layout, results=folder, metrics=folder / run.layout.metrics.name))
    run.give(lambda: summary.as_json(made), lambda: summary.as_markdown(made))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
