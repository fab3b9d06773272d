"""Measure the baseline: a sweep over batch sizes, then accuracy and speed over the whole dataset.

Reads:  the normalised dataset and the model that step 01 left
Writes: results/baseline_metrics.json, detailed_metrics.csv, raw_samples.csv, evaluation/

    python scripts/02_baseline_inference.py [--config FILE] [--resume] [key.sub=value ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils import cli


@cli.step("02")
def main(run: cli.Run) -> int:
    from utils import baseline, data, models
    from utils.evaluation.run import evaluate

    receipt = data.check_receipt(run.config, run.layout)
    rows = data.load_texts(run.layout)
    source = models.locate(run.config.model, run.layout.dataset.parent)
    device, trust = baseline.device(run), run.args.trust_remote_code

    loaded = models.load(source, device, run.config.model.dtype, trust_remote_code=trust)
    max_length, cut = models.effective_max_length(loaded, run.config.profiling.max_length)
    summary = models.summarize(loaded)
    run.say("\n".join(summary.lines()))
    agreement = models.agreement(loaded, data.sample(rows, models.AGREEMENT_ROWS, seed=0).texts, max_length)
    agreement.require(run.config.evaluation.min_agreement)

    found = baseline.Baseline(run, receipt, max_length)
    found.doubts += [cut] if cut else []
    found.describe_model(loaded, summary, agreement)
    run.say("PROFILING MULTIPLE BATCH SIZES")
    for dtype in baseline.dtypes(run):
        found.sweep(
            loaded if dtype == loaded.dtype else models.load(source, device, dtype, trust_remote_code=trust), rows
        )
        run.say("\n".join(baseline.console_rows(found.rows[dtype])))

    found.require_a_measurement()
    if run.config.evaluation.enabled:
        run.say("FULL DATASET EVALUATION")
        found.full = evaluate(run, loaded, rows, receipt, max_length)
        run.say("\n".join(baseline.console_evaluation(found.full)))
    found.save(complete=True)
    run.say(f"wrote {run.layout.metrics}")
    return cli.INCOMPLETE if found.failed_points else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
