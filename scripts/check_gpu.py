"""Look at everything that only a GPU can show, in eight minutes at most, and say what is not as expected.

Reads:  nothing: models have random weights, texts are made
Writes: the file of --output, one JSON document, by default docs/measurements/DATE-gpu-first-light.json
Exit:   0 all as expected · 1 a finding · 2 usage · 3 there is no GPU

    python scripts/check_gpu.py [--only WORDS] [--output FILE]
"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils import cli

SECONDS = 480.0


def add_arguments(parser) -> None:
    parser.add_argument("--only", metavar="WORDS", default="", help="the checks with these words in their name")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the figures go")


@cli.tool(add_arguments, settings=None)
def main(run: cli.Run) -> int:
    from boundby import files
    from boundby.device import is_gpu, pick_device
    from utils import first_light
    from utils.errors import EnvironmentLacksError, InputError

    device = pick_device("auto")
    if not is_gpu(device):
        raise EnvironmentLacksError("there is no GPU here that torch sees; run this on a machine with one")
    card = first_light.Card(device, until=time.monotonic() + SECONDS)
    checks = [check for check in first_light.CHECKS if run.args.only in check.name]
    if not checks:
        raise InputError(f"--only {run.args.only}: no check has these words in its name; leave it out for all of them")
    default = Path("docs/measurements") / f"{datetime.now(UTC):%Y-%m-%d}-gpu-first-light.json"
    output = run.args.output or default
    output.parent.mkdir(parents=True, exist_ok=True)
    document: dict = {"checks": []}
    for line, document in first_light.watched(card, checks):
        run.say(str(line))
        files.write_json(output, document)  # after each, lest what comes next loses it
    run.note(f"wrote {output}")
    run.give(lambda: document)
    return cli.DONE if all(line["verdict"] in ("ok", "not here") for line in document["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
