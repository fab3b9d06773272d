"""Predict the whole dataset: plan it once, run the plan here or on many machines, prove it complete and score it.

Reads:  the normalised dataset and the model that step 01 left
Writes: evaluation/ in the results folder: plan.json (plan); part-*.parquet, cost-*.json (run); predictions.csv,
        per_class.csv, confusion_matrix.csv, confident_mistakes.csv, quality.json, metrics.json (finalize)
Exit:   0 done · 1 something is missing or failed · 2 usage, input, or a plan for something else · 3 no space, no device

    python scripts/evaluate.py plan [--anew] [--config FILE] [key.sub=value ...]
    python scripts/evaluate.py run [--shards i/n] [--config FILE] [key.sub=value ...]
    python scripts/evaluate.py finalize [--config FILE] [key.sub=value ...]

`run` goes on where an earlier one ended, and several at once share the work.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from utils.command import cli


def add_arguments(parser) -> None:
    parser.add_argument("action", choices=("plan", "run", "finalize"), help="what to do")
    parser.add_argument("--shards", metavar="i/n", help="run: every n-th shard from i on, for runner i of n")
    parser.add_argument("--anew", action="store_true", help="plan: move an earlier plan and its parts to previous/")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")


@cli.tool(add_arguments)
def main(run: cli.Run) -> int:
    cli.require_action(run.args, shards="run", anew="plan")
    from utils import data
    from utils.evaluation import planning
    from utils.evaluation import run as evaluation
    from utils.models import loading as models

    source = models.locate(run.config.model, run.layout.dataset.parent)
    wanted = planning.identity(run.config, data.check_receipt(run.config, run.layout, source), source)
    models.use_matmul_precision(run.config.model.matmul_precision)
    if run.args.action == "plan":
        if evaluation.kept_plan(run, wanted, run.args.anew):
            run.say(f"kept: {run.layout.evaluation} has a plan for just this; --anew makes another")
            run.give(lambda: {"action": "plan", "status": "kept", "folder": str(run.layout.evaluation)})
            return cli.DONE
        texts = models.agreement_texts(data.load_texts(run.layout).texts)
        device, limits = run.config.model.device, (wanted.max_length, wanted.min_agreement)
        trusted = run.args.trust_remote_code
        loaded, _ = models.load_agreeing(source, device, wanted.dtype, texts, limits, trust_remote_code=trusted)
        if loaded.choice.doubt:
            run.note(f"doubt: {loaded.choice.doubt}")
        made = evaluation.plan(run, loaded, wanted)
        run.say(f"planned: {evaluation.described(made)}")
        run.give(lambda: {"action": "plan", "status": "planned", **evaluation.summary(run, made)})
        return cli.DONE
    made = evaluation.planned(run, wanted, computes=run.args.action == "run")
    if run.args.action == "run":
        evaluation.predict(run, made, run.args.shards)
        run.give(lambda: {"action": "run", "shards": run.args.shards, **evaluation.summary(run, made)})
        return cli.DONE
    from utils.baseline import console_evaluation

    metrics = evaluation.conclude(run, made)
    text = "\n".join(console_evaluation(metrics, made.identity.task))
    run.give(lambda: {"action": "finalize", **evaluation.summary(run, made), "metrics": metrics}, lambda: text)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
