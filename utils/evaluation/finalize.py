"""Prove that every row was predicted once, and compute the numbers over the whole dataset."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.metrics import accuracy_score, f1_score

from boundby import files
from boundby.stats import wilson_interval
from utils.evaluation.plan import Plan
from utils.evaluation.shards import ShardResult

PREDICTION_COLUMNS = (
    "row_id",
    "label",
    "prediction",
    "label_name",
    "prediction_name",
    "correct",
    "confidence",
    "margin",
    "n_tokens",
)


def finalize(plan: Plan, results: Sequence[ShardResult], row_ids: np.ndarray, path: Path) -> dict[str, Any]:
    """Write `predictions.csv` to `path` and return the metrics; latency in ms, throughput in samples per second.

    Raises ValueError when a row is missing, doubled, or has a label the plan does not know.
    """
    table = pa.concat_tables([result.table for result in results])
    _prove_coverage(table, row_ids, plan)
    files.write_csv(path, _prediction_rows(table, plan.labels), PREDICTION_COLUMNS)
    labels, predictions = table["label"].to_numpy(), table["prediction"].to_numpy()
    correct = int((labels == predictions).sum())
    low, high = wilson_interval(correct, plan.rows)
    return {
        "samples": plan.rows,
        "correct": correct,
        **_scores(labels, predictions),
        "accuracy_ci_low": low,
        "accuracy_ci_high": high,
        **_cost(plan, [result.facts for result in results]),
    }


def subset_metrics(results: Sequence[ShardResult], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return accuracy and F1 of the first `n` evaluated rows for each `n` of `sizes`; rows come in a seeded order."""
    table = pa.concat_tables([result.table for result in results])
    labels, predictions = table["label"].to_numpy(), table["prediction"].to_numpy()
    return [{"samples": size, **_scores(labels[:size], predictions[:size])} for size in sizes if size <= len(labels)]


def _scores(labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    return {
        "accuracy": float(accuracy_score(labels, predictions)),
        "f1_macro": float(f1_score(labels, predictions, average="macro", zero_division=0)),
        "f1_weighted": float(f1_score(labels, predictions, average="weighted", zero_division=0)),
    }


def _cost(plan: Plan, facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sum(each["seconds"] for each in facts)
    real, padded = sum(each["tokens_real"] for each in facts), sum(each["tokens_padded"] for each in facts)
    truncated = [each["truncated"] for each in facts]
    return {
        "inference_time_s": seconds,
        "tokenize_time_s": sum(each["tokenize_s"] for each in facts),
        "latency_per_sample_ms": 1e3 * seconds / plan.rows,
        "throughput_samples_per_sec": plan.rows / seconds,
        "tokens_per_sec_real": real / seconds,
        "padding_pct": 100 * (1 - real / padded),
        "truncated": None if None in truncated else sum(truncated),
        "batches_halved": sum(each["halvings"] for each in facts),
        "token_budget": plan.token_budget,
        "dtype": plan.dtype,
    }


def _prove_coverage(table: pa.Table, row_ids: np.ndarray, plan: Plan) -> None:
    found = table["row_id"].to_numpy()
    if not np.array_equal(found, row_ids):
        missing = np.setdiff1d(row_ids, found)
        raise ValueError(
            f"the shards hold {len(found)} rows where {len(row_ids)} are planned; {len(missing)} are missing"
            f"{f', first {missing[0]}' if len(missing) else ''}"
        )
    for name in ("label", "prediction"):
        values = table[name].to_numpy()
        if values.size and not (values.min() >= 0 and values.max() < len(plan.labels)):
            raise ValueError(f"{name} {values.max()} is not one of {len(plan.labels)} labels")


def _prediction_rows(table: pa.Table, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for batch in table.select(["row_id", "label", "prediction", "confidence", "margin", "n_tokens"]).to_batches():
        for row in batch.to_pylist():
            label, prediction = row["label"], row["prediction"]
            yield {
                **row,
                "label_name": names[label],
                "prediction_name": names[prediction],
                "correct": int(label == prediction),
                "confidence": f"{row['confidence']:.6f}",
                "margin": f"{row['margin']:.6f}",
            }
