"""Check the configured dataset as step 01 does, without writing it, and show what it looks like.

Reads:  the configured model and dataset; with --normalised the copy that step 01 has made
Writes: nothing (a model or dataset from the Hub stays in the Hub's cache)
Exit:   0 fine · 1 rejected rows, many duplicates, unseen labels or another doubt · 2 unusable data or settings

    python scripts/validate_dataset.py [--normalised] [--json] [--config FILE] [key.sub=value ...]
"""

import functools
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument("--normalised", action="store_true", help="check the copy that step 01 has made")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")


@cli.tool(add_arguments)
def main(run: cli.Run) -> int:
    from utils import data
    from utils.models import loading as models

    config, folder, trust = run.config, run.layout.dataset.parent, run.args.trust_remote_code
    if run.args.normalised:
        model = models.locate(config.model, folder)
        receipt = data.check_receipt(config, run.layout, model)
        source = functools.partial(data.open_normalised, run.layout, receipt)
    else:
        model = models.fetch(config.model, folder, trust_remote_code=trust, progress=run.note)
        source = functools.partial(data.open_source, config.dataset, folder, run.note)
    checked = data.inspect(source, model, run.note, models.token_counter(model, trust))
    statistics = checked.statistics()
    doubts = checked.doubts(statistics)
    lines = [*statistics.lines(), *(f"finding: {doubt}" for doubt in doubts)]
    run.give(lambda: {"statistics": asdict(statistics), "findings": doubts}, lambda: "\n".join(lines))
    return 1 if doubts else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
