"""Prove that every row was predicted once, and compute the numbers over the whole dataset, part by part."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from boundby import files
from boundby.stats import wilson_interval
from utils.artifacts import EvaluationFolder
from utils.columns import MB
from utils.errors import PipelineError
from utils.evaluation import confusion, parts, quality, rows
from utils.evaluation.calibration import Reliability
from utils.evaluation.mistakes import ConfidentMistakes
from utils.evaluation.occupancy import busy_seconds, occupancy
from utils.evaluation.plan import Plan, Shard

RUN_COMMAND = "python scripts/evaluate.py run"
CALIBRATION = ("mean_confidence", "ece", "ece_by_chance", "brier_score")
CHOICES = ("token_budget", "dtype", "precision", "strategy", "trim", "compile")  # of the plan, that the metrics repeat
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


def finalize(plan: Plan, folder: EvaluationFolder, dataset: Path, subset_sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Write predictions, quality and metrics, and return the metrics: latency in ms, throughput in samples/s.

    `dataset` holds the planned rows still, which is proven again. `samples_of` has the scores of the first n rows of
    the seeded sample for each n of `subset_sizes`. Raises PipelineError when a row is missing, doubled or has a number
    that cannot be, and InputError when a text is another than was planned; all files are then as they were. Memory
    does not grow with the rows.
    """
    totals = _Totals(plan, subset_sizes)
    files.write_csv(folder.predictions, _proven_rows(plan, folder, dataset, totals), PREDICTION_COLUMNS)
    mistakes, calibration = totals.mistakes.described(plan.identity.labels), totals.reliability.as_dict()
    quality.write(folder, plan.fingerprint, plan.identity.labels, totals.confusion, mistakes, calibration)
    metrics = totals.metrics() | {name: calibration[name] for name in CALIBRATION}
    record = {"plan": plan.fingerprint, "predictions_sha256": files.sha256(folder.predictions), "metrics": metrics}
    files.write_json(folder.metrics, record)
    return metrics


class _Totals:
    """The counts of the parts seen so far."""

    def __init__(self, plan: Plan, subset_sizes: Sequence[int]) -> None:
        self.plan = plan
        self.facts: list[parts.Facts] = []
        self.costs: list[parts.Cost] = []
        classes, identity = len(plan.identity.labels), plan.identity
        self.confusion = np.zeros((classes, classes), dtype=np.int64)
        self.reliability, self.mistakes = Reliability(), ConfidentMistakes()
        self.subsets = {size: np.zeros_like(self.confusion) for size in subset_sizes if size <= identity.rows}
        self.positions = rows.evaluated_positions(identity.dataset_rows, identity.rows, identity.sample_seed)
        self._ranks: np.ndarray | None = None  # place in the seeded order of each evaluated row
        if self.subsets and identity.sample_seed is not None:
            order = np.empty(identity.dataset_rows, dtype=np.int64)
            order[rows.seeded_order(identity.dataset_rows, identity.sample_seed)] = np.arange(identity.dataset_rows)
            self._ranks = order[self.positions]

    def add(self, shard: Shard, texts: Sequence[str], part: parts.Part, cost: parts.Cost) -> None:
        """Count the part of `shard`."""
        labels, predictions = part.table["label"].to_numpy(), part.table["prediction"].to_numpy()
        classes = len(self.confusion)
        self.confusion += confusion.counted(labels, predictions, classes)
        self.reliability.add(part.table["confidence"].to_numpy(), labels == predictions)
        self.mistakes.add(part.table, texts)
        for size, counts in self.subsets.items():
            assert self._ranks is not None  # subsets are of a seeded sample
            inside = self._ranks[shard.start : shard.stop] < size
            counts += confusion.counted(labels[inside], predictions[inside], classes)
        self.facts.append(part.facts)
        self.costs.append(cost)

    def metrics(self) -> dict[str, Any]:
        """Return scores and costs over all parts."""
        correct = int(np.trace(self.confusion))
        low, high = wilson_interval(correct, self.plan.identity.rows)
        found = {
            "samples": self.plan.identity.rows,
            "correct": correct,
            **confusion.scores(self.confusion),
            "accuracy_ci_low": low,
            "accuracy_ci_high": high,
            **self._cost(),
            **self._memory(),
            "plan": self.plan.fingerprint,
        }
        if self.subsets:
            found["samples_of"] = [
                {"samples": size, **confusion.scores(counts)} for size, counts in self.subsets.items()
            ]
        return found

    def _cost(self) -> dict[str, Any]:
        rows = self.plan.identity.rows
        seconds = busy_seconds([(each.started_unix_s, each.seconds) for each in self.costs])
        useful = sum(each.useful_tokens for each in self.facts)
        computed = sum(each.computed_tokens for each in self.facts)
        truncated = [each.truncated for each in self.facts]
        return {
            "inference_time_s": seconds,
            "worker_time_s": sum(each.seconds for each in self.costs),
            **occupancy(self.costs),
            "tokenize_time_s": sum(each.phases_s["tokenize"] for each in self.costs),
            "phases_s": {name: sum(each.phases_s[name] for each in self.costs) for name in self.costs[0].phases_s},
            "latency_per_sample_ms": 1e3 * seconds / rows,
            "throughput_samples_per_sec": rows / seconds,
            "tokens_per_sec_real": sum(each.tokens for each in self.facts) / seconds,
            "useful_tokens": useful,
            "computed_tokens": computed,
            "padding_pct": 100 * (1 - useful / computed),
            "computed_texts": sum(each.computed_texts for each in self.facts),
            "guarded_texts": sum(each.guarded_texts for each in self.facts),
            "truncated": None if None in truncated else sum(each for each in truncated if each),
            "out_of_memory": sum(each.out_of_memory for each in self.costs),
            **{name: getattr(self.plan.choices, name) for name in CHOICES},
            "exactness": self.plan.reasons["exactness"],
            "exactness_reason": None if self.plan.reasons["exactness"] else self.plan.reasons["precision"],
        }

    def _memory(self) -> dict[str, Any]:
        """Return the peaks over all shards; each was measured when it was predicted, also in an earlier attempt."""
        device = [each.device_peak_bytes for each in self.costs if each.device_peak_bytes is not None]
        process = [each.process_peak_bytes for each in self.costs if each.process_peak_bytes is not None]
        used_mb = max(device) / MB if device else None
        return {
            "gpu_mem_used": used_mb,
            "gpu_mem_used_mb": used_mb,
            "gpu_mem_used_reason": None if device else "; ".join(self.costs[0].memory_reasons),
            "cpu_mem_peak_mb": max(process) / MB if process else None,
        }


def _proven_rows(plan: Plan, folder: EvaluationFolder, dataset: Path, totals: _Totals) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts in order, each part proven to hold just the rows that the dataset has there.

    The planned shards follow each other without gap and with ascending row ids, which `rows.split` made sure of.
    """
    absent = [shard.id for shard in plan.shards if not folder.part(shard.id).is_file()]
    if absent:
        raise PipelineError(
            f"{folder.path}: {len(absent)} of {len(plan.shards)} shards have not been predicted, first {absent[0]}; "
            f"`{RUN_COMMAND}` predicts what is missing"
        )
    rows.require_planned(dataset, plan.identity)
    for shard in plan.shards:
        texts = rows.read(dataset, shard, totals.positions).texts
        part, cost = parts.load(folder, plan, shard), parts.load_cost(folder, plan, shard)
        if part is None or cost is None:
            raise PipelineError(
                f"{folder.part(shard.id)}: is damaged or of another plan; `{RUN_COMMAND}` predicts it again"
            )
        found = parts.fault(part.table, plan)
        if found:
            raise PipelineError(f"{folder.part(shard.id)}: {found}")
        totals.add(shard, texts, part, cost)
        yield from _prediction_rows(part, plan.identity.labels)


def _prediction_rows(part: parts.Part, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for row in part.table.drop_columns(["logits"]).to_pylist():
        label, prediction = row["label"], row["prediction"]
        yield {
            **row,
            "label_name": names[label],
            "prediction_name": names[prediction],
            "correct": int(label == prediction),
            "confidence": f"{row['confidence']:.6f}",
            "margin": f"{row['margin']:.6f}",
        }
