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
    from utils.evaluation.run import evaluate, make_room

    source = models.locate(run.config.model, run.layout.dataset.parent)
    receipt = data.check_receipt(run.config, run.layout, source)
    make_room(run)
    rows = data.load_texts(run.layout, sha256=receipt.dataset["sha256"])
    sample = models.agreement_texts(rows.texts)
    models.use_matmul_precision(run.config.model.matmul_precision)
    found = baseline.Baseline(run, receipt)

    for dtype in baseline.dtypes(run):
        loaded = models.load(source, baseline.device(run), dtype, trust_remote_code=run.args.trust_remote_code)
        max_length = found.cut(models.effective_max_length(loaded, run.config.profiling.max_length))
        summary = models.summarize(loaded)
        run.say("\n".join(summary.lines()))
        agreement = models.agreement(loaded, sample, max_length)
        agreement.require(run.config.evaluation.min_agreement)
        found.describe_model(loaded, summary, agreement)
        run.say("PROFILING MULTIPLE BATCH SIZES")
        found.sweep(loaded, rows)
        run.say("\n".join(baseline.console_rows(found.rows[dtype])))
        if found.may_evaluate(dtype):
            run.say("FULL DATASET EVALUATION")
            found.full = evaluate(run, loaded, receipt)
            run.say("\n".join(baseline.console_evaluation(found.full, run.config.model.task)))
        del loaded  # the next dtype is measured without this one in memory

    data.check_receipt(run.config, run.layout, source)  # what was measured is still what lies there
    found.require_a_measurement()
    found.save(complete=True)
    run.say(f"wrote {run.layout.metrics}")
    return cli.INCOMPLETE if found.failed_points else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
