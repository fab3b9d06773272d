"""Take a run to where you keep results: its rows, its card and its pictures.

Reads:  RUN: a results folder in which step 02 has run; pictures and card where step 04 has
Writes: to one of these: a tracking server or local store of MLflow, a folder of Weights & Biases (offline), a folder of
        TensorBoard
Exit:   0 fine · 2 usage or input · 3 the client is not installed

    python scripts/export.py [RUN] --mlflow URI | --wandb DIR | --tensorboard DIR [--config FILE]
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
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--mlflow", metavar="URI", help="tracking URI, such as http://host:5000 or sqlite:///mlflow.db")
    target.add_argument("--wandb", type=Path, metavar="DIR", help="folder for an offline run; `wandb sync` uploads it")
    target.add_argument("--tensorboard", type=Path, metavar="DIR", help="folder for the event file")


@cli.tool(add_arguments)
def main(run: cli.Run) -> int:
    from utils.report import export

    args = run.args
    folder = Path(args.run or run.layout.results)
    results = export.read(replace(run.layout, results=folder, metrics=folder / run.layout.metrics.name))
    if args.mlflow:
        made = export.to_mlflow(results, args.mlflow)
    elif args.wandb:
        made = export.to_wandb(results, args.wandb)
    else:
        made = export.to_tensorboard(results, args.tensorboard)
    exported = {"rows": len(results.rows), "pictures": len(results.pictures), "made": made}
    run.give(lambda: exported, lambda: "exported {rows} rows and {pictures} pictures: {made}".format(**exported))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
