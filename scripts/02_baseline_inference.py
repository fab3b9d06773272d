"""Measure the baseline: a sweep over batch sizes, then accuracy and speed over the whole dataset.

Reads:  the normalised dataset and the model that step 01 left
Writes: results/baseline_metrics.json, detailed_metrics.csv, raw_samples.csv, evaluation/

    python scripts/02_baseline_inference.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli
from utils.steps import step


@step("02")
def main(run: cli.Run) -> int:
    from utils import data
    from utils.baseline import sweep as baseline
    from utils.evaluation import make_room
    from utils.models import loading as models
    from utils.report import show_card

    source = models.locate(run.config.model, run.layout.dataset.parent)
    receipt = data.check_receipt(run.config, run.layout, source)
    make_room(run)
    rows = data.load_texts(run.layout, sha256=receipt.dataset.sha256)
    models.use_matmul_precision(run.config.model.matmul_precision)
    result = baseline.measure(run, receipt, source, rows, show_card)
    run.say(f"wrote {run.layout.metrics}")
    run.give(result.answer)
    return cli.INCOMPLETE if result.failed_points else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
