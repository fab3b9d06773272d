"""Check the environment before anything is fetched or measured; with --load-model also load the model.

Reads:  the machine; with --load-model the dataset and the model that step 01 left
Writes: results/run.json

    python scripts/00_check_setup.py [--load-model] [--json] [--config FILE] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli
from utils.steps import step


def add_arguments(parser) -> None:
    parser.add_argument("--load-model", action="store_true", help="also load the model and compare its labels")


@step("00", add_arguments)
def main(run: cli.Run) -> int:
    from utils.steps import setup_check

    setup_check.check_machine(run)
    setup_check.check_settings(run.config)
    if run.args.load_model:
        setup_check.check_model(run)
    run.say("the environment is ready")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
