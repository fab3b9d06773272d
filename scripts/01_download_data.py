"""Fetch the model and the dataset, and bring the dataset into the form that every later step reads.

Reads:  the Hugging Face Hub, local files, or nothing (the quickstart set is made here)
Writes: dataset.local_path (row_id, text, labels, label_name), and beside it label_mappings.json, rejected_rows.csv and
        the receipt that later steps check

    python scripts/01_download_data.py [--config FILE] [--resume] [--trust-remote-code] [key.sub=value ...]
"""

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli
from utils.steps import step


@step("01")
def main(run: cli.Run) -> int:
    from utils import data
    from utils.models import fetch

    trust = run.args.trust_remote_code
    model = fetch(run.config.model, run.layout.dataset.parent, trust_remote_code=trust, progress=run.note)

    from utils.models import token_counter

    count_tokens = token_counter(model, trust)
    receipt = data.normalise(run.config, run.layout, model, progress=run.note, count_tokens=count_tokens)
    run.say("\n".join(receipt.lines()))
    run.give(lambda: {"dataset": asdict(receipt)})
    for doubt in receipt.doubts:
        run.note(f"doubt: {doubt}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
