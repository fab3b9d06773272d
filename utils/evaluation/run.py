"""Evaluate the dataset: plan it, predict what is missing, prove it complete."""

from typing import Any

import numpy as np

from boundby.device import synchronizer
from boundby.timer import Timer
from utils.cli import Run
from utils.data import DataReceipt, Rows, sample
from utils.evaluation import plan as plans
from utils.evaluation import shards
from utils.evaluation.finalize import finalize, subset_metrics
from utils.metrics import MB
from utils.models import LoadedModel

SAMPLE_SEED = 0


def evaluate(run: Run, loaded: LoadedModel, rows: Rows, receipt: DataReceipt, max_length: int) -> dict[str, Any]:
    """Return the metrics over all rows, or over the seeded sample that the settings ask for.

    Shards that an earlier attempt has finished are kept when the run continues one.
    """
    chosen, seed = _chosen(run, rows)
    plan = _plan(loaded, chosen, receipt, max_length, seed)
    layout = run.layout
    if plans.saved_fingerprint(layout.evaluation_plan) != plan.fingerprint:
        for stale in layout.evaluation.glob("part-*.parquet"):
            stale.unlink()
        plans.save(plan, layout.evaluation_plan)
    timer = Timer(synchronize=synchronizer(loaded.device))
    predictor = shards.ShardPredictor(loaded.model, loaded.tokenizer, loaded.device, plan, timer)
    results = []
    with run.progress(plan.rows, "evaluation") as progress:
        for shard in plan.shards:
            path = layout.evaluation_part(shard.id)
            result = shards.load(path, plan, shard) if run.resuming else None
            if result is None:
                part = slice(shard.start, shard.stop)
                result = predictor.predict(shard, chosen.row_ids[part], chosen.texts[part], chosen.labels[part])
                shards.save(result, path)
            results.append(result)
            progress.advance(shard.stop - shard.start, _pace(results))
    metrics = finalize(plan, results, chosen.row_ids, layout.predictions)
    metrics |= _memory(results)
    if run.config.dataset.sample_sizes:
        metrics["samples_of"] = subset_metrics(results, sorted(run.config.dataset.sample_sizes))
    return metrics


def _chosen(run: Run, rows: Rows) -> tuple[Rows, int | None]:
    """Return the rows to evaluate and the seed of their sample, None when it is every row in its order."""
    limits = [run.config.evaluation.limit or len(rows.texts), max(run.config.dataset.sample_sizes or [len(rows.texts)])]
    if run.config.dataset.sample_sizes or min(limits) < len(rows.texts):
        return sample(rows, min(*limits, len(rows.texts)), SAMPLE_SEED), SAMPLE_SEED
    return rows, None


def _plan(loaded: LoadedModel, rows: Rows, receipt: DataReceipt, max_length: int, seed: int | None) -> plans.Plan:
    kind = loaded.device.type
    names = loaded.model.config.id2label
    return plans.Plan(
        rows=len(rows.texts),
        dataset_sha256=receipt.dataset["sha256"],
        model_fingerprint=loaded.source.fingerprint,
        labels=tuple(names[index] for index in range(len(names))),
        dtype=loaded.dtype,
        device=kind,
        max_length=max_length,
        token_budget=plans.TOKEN_BUDGET[kind],
        sample_seed=seed,
        shards=plans.shards(len(rows.texts), plans.SHARD_ROWS[kind]),
    )


def _pace(results: list[shards.ShardResult]) -> str:
    done = sum(result.table.num_rows for result in results)
    correct = sum(int(np.sum(_equal(result))) for result in results)
    rate = done / sum(result.facts["seconds"] for result in results)
    return f"accuracy {correct / done:.4f}, {rate:.1f} samples/s"


def _equal(result: shards.ShardResult) -> np.ndarray:
    return result.table["label"].to_numpy() == result.table["prediction"].to_numpy()


def _memory(results: list[shards.ShardResult]) -> dict[str, Any]:
    """Return the peaks over all shards; each was measured when it was predicted, also in an earlier attempt."""
    facts = [result.facts for result in results]
    device = [each["device_peak_bytes"] for each in facts if each["device_peak_bytes"] is not None]
    process = [each["process_peak_bytes"] for each in facts if each["process_peak_bytes"] is not None]
    used_mb = max(device) / MB if device else None
    return {
        "gpu_mem_used": used_mb,
        "gpu_mem_used_mb": used_mb,
        "gpu_mem_used_reason": None if device else "; ".join(facts[0]["memory_reasons"]),
        "cpu_mem_peak_mb": max(process) / MB if process else None,
    }
