"""Prove that every row was predicted once, and compute the numbers over the whole dataset, part by part."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from boundby import files
from boundby.cli import typed
from utils.command import EvaluationFolder, PipelineError
from utils.evaluation import parts, rows
from utils.evaluation.plan import Plan
from utils.evaluation.result import FullDataset
from utils.models import tasks

RUN_COMMAND = typed("evaluate", "run")
CHOICES = ("token_budget", "dtype", "precision", "strategy", "trim", "compile")  # of the plan, that the metrics repeat

Span = tuple[float, float]  # start and length in seconds, by the clock of one machine


def finalize(plan: Plan, folder: EvaluationFolder, dataset: Path, subset_sizes: Sequence[int] = ()) -> FullDataset:
    """Write predictions, quality and metrics, and return the metrics: latency in ms, throughput in samples/s.

    `samples_of` has the scores of the first n rows of the seeded sample for each n of `subset_sizes`. Raises
    PipelineError when a row is missing, doubled or has an impossible number, and InputError when a text differs from
    the plan; nothing is written then. Memory does not grow with the rows.
    """
    identity, task = plan.identity, tasks.of(plan.identity.task)
    score = task.Score(identity.labels, [size for size in subset_sizes if size <= identity.rows])
    records: list[parts.Record] = []

    def proven_rows() -> Iterator[dict[str, int | str | None]]:
        for part, texts, ranks in _proven_parts(plan, folder, dataset):
            score.add(part.table, texts, ranks)
            records.append(part.record)
            yield from score.rows(part.table)

    files.write_csv(folder.predictions, proven_rows(), task.COLUMNS)
    score.write(folder, plan.fingerprint)
    metrics: dict[str, Any] = {
        **msgspec.to_builtins(score.metrics()),
        **_cost(plan, records),
        **_memory(records),
        "plan": plan.fingerprint,
    }
    record = {"plan": plan.fingerprint, "predictions_sha256": files.sha256(folder.predictions), "metrics": metrics}
    files.write_json(folder.metrics, record)
    return cast(FullDataset, metrics)


def _proven_parts(
    plan: Plan, folder: EvaluationFolder, dataset: Path
) -> Iterator[tuple[parts.Part, Sequence[str], np.ndarray | None]]:
    """Yield all parts in order, proven to hold the dataset's rows, with texts and ranks in the seeded sample."""
    absent = [shard.id for shard in plan.shards if not folder.part(shard.id).is_file()]
    if absent:
        raise PipelineError(
            f"{folder.path}: {len(absent)} of {len(plan.shards)} shards have not been predicted, first {absent[0]}; "
            f"`{RUN_COMMAND}` predicts what is missing"
        )
    identity = plan.identity
    rows.require_planned(dataset, identity)
    positions = rows.evaluated_positions(identity.dataset_rows, identity.rows, identity.sample_seed)
    of_all = None  # in the seeded order, of each row of the dataset
    if identity.sample_seed is not None:
        of_all = np.argsort(rows.seeded_order(identity.dataset_rows, identity.sample_seed))
    for shard in plan.shards:
        texts = rows.read(dataset, shard, positions).texts
        part = parts.load(folder, plan, shard)
        if part is None:
            raise PipelineError(
                f"{folder.part(shard.id)}: is damaged or of another plan; `{RUN_COMMAND}` predicts it again"
            )
        if fault := tasks.of(identity.task).fault(part.table, len(identity.labels)):
            raise PipelineError(f"{folder.part(shard.id)}: {fault}")
        ranks = None if of_all is None or positions is None else of_all[positions[shard.start : shard.stop]]
        yield part, texts, ranks


def _cost(plan: Plan, records: Sequence[parts.Record]) -> dict[str, Any]:
    rows = plan.identity.rows
    seconds = elapsed_seconds(records)
    useful = sum(record.useful_tokens for record in records)
    computed = sum(record.computed_tokens for record in records)
    truncated = [record.truncated for record in records]
    phases_s = {name: sum(record.phases_s[name] for record in records) for name in records[0].phases_s}
    return {
        "inference_time_s": seconds,
        "worker_time_s": sum(record.seconds for record in records),
        **occupancy(records),
        "tokenize_time_s": phases_s["tokenize"],
        "phases_s": phases_s,
        "latency_per_sample_ms": 1e3 * seconds / rows,
        "throughput_samples_per_sec": rows / seconds,
        "tokens_per_sec_real": sum(record.tokens for record in records) / seconds,
        "useful_tokens": useful,
        "computed_tokens": computed,
        "padding_pct": 100 * (1 - useful / computed),
        "computed_texts": sum(record.computed_texts for record in records),
        "guarded_texts": sum(record.guarded_texts for record in records),
        "truncated": None if None in truncated else sum(count for count in truncated if count),
        "out_of_memory": sum(record.out_of_memory for record in records),
        **{name: getattr(plan.choices, name) for name in CHOICES},
        "exactness": plan.reasons.exactness,
        "exactness_reason": None if plan.reasons.exactness else plan.reasons.precision,
        "labels_doubt": plan.reasons.labels_doubt,
    }


def _memory(records: Sequence[parts.Record]) -> dict[str, Any]:
    """Return the peaks over all shards; each was measured when it was predicted, also in an earlier attempt."""
    device = [record.device_peak_bytes for record in records if record.device_peak_bytes is not None]
    process = [record.process_peak_bytes for record in records if record.process_peak_bytes is not None]
    used_mb = max(device) / 1e6 if device else None
    return {
        "gpu_mem_used": used_mb,
        "gpu_mem_used_mb": used_mb,
        "gpu_mem_used_reason": None if device else "; ".join(records[0].memory_reasons),
        "cpu_mem_peak_mb": max(process) / 1e6 if process else None,
    }


def busy_seconds(spans: Sequence[Span]) -> float:
    """Return the seconds in which at least one of the spans was going on."""
    total, until = 0.0, float("-inf")
    for start, length in sorted(spans):
        end = start + length
        if start >= until:
            total += length
        elif end > until:
            total += end - until
        until = max(until, end)
    return total


def elapsed_seconds(records: Sequence[parts.Record]) -> float:
    """Return the busy seconds of all machines, added up: their clocks cannot be compared."""
    return _added_up((record.host, record.span) for record in records)


def occupancy(records: Sequence[parts.Record]) -> dict[str, Any]:
    """Return the busy seconds of each machine, added up, and those of each device, which workers may share."""
    return {
        "machine_time_s": elapsed_seconds(records),
        "device_time_s": _added_up(((record.host, record.device_id), record.span) for record in records),
        "machine_time_reason": None,
    }


def _added_up(spans: Iterable[tuple[Hashable, Span]]) -> float:
    """Return the busy seconds of each place, added up."""
    by_owner: defaultdict[Hashable, list[Span]] = defaultdict(list)
    for owner, span in spans:
        by_owner[owner].append(span)
    return sum(busy_seconds(spans) for spans in by_owner.values())
