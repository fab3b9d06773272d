"""Predict one shard of a plan and commit it; all it needs is the plan's file and the files that it names."""

import contextlib
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from msgspec import structs

from boundby.inference import Prediction, Predictor, PredictorOptions
from boundby.machine import MemoryMeter, host_id, pick_device, release_memory, uuid_of
from utils.command import HAVE_NONE, EvaluationFolder, InputError, PipelineError
from utils.data import Rows
from utils.evaluation import engines, parts, plan, planning, rows
from utils.models import LoadedModel, ModelSource, load, tasks, use_matmul_precision

ATTEMPTS = 3  # at a batch that ran out of memory, which another program may have taken for a moment
CLAIMED_S = 1800.0  # that the claim of another runner is waited for at most


@dataclass(frozen=True)
class Receipt:
    """What became of a shard: it was predicted, it was finished before, or another runner has claimed it."""

    shard: int
    status: Literal["predicted", "kept", "claimed"]
    rows: int = 0
    correct: int | None = 0
    seconds: float = 0.0
    sha256: str | None = None


# From the ids of shards to a receipt for each, in any order. With True, a shard that another runner has claimed is
# waited for instead of skipped. A shard may be run twice: its commit makes that harmless.
Executor = Callable[[Sequence[int], bool], Iterator[Receipt]]


class ShardPredictor:
    """Predicts the shards of one plan with one model, and commits each."""

    def __init__(self, made: plan.Plan, folder: EvaluationFolder, loaded: LoadedModel) -> None:
        self.plan, self.folder = made, folder
        identity, choices = made.identity, made.choices
        self._dataset, self._model = Path(made.places.dataset), loaded.source.path
        rows.require_planned(self._dataset, identity)
        self._task = tasks.of(identity.task)
        self._positions = rows.evaluated_positions(identity.dataset_rows, identity.rows, identity.sample_seed)
        options = PredictorOptions(
            max_length=choices.max_length,
            precision=choices.precision,
            token_budget=choices.token_budget,
            guard_margin=choices.guard_margin,
            packs=choices.packs,
            trim=choices.trim,
            compile=choices.compile,
        )
        check_texts = rows.check_texts(self._dataset, made.shards, made.check_offsets, planning.CHECK_TEXTS)
        precisions = engines.precisions_of(made)
        try:
            self._predictor = Predictor(loaded.model, loaded.tokenizer, options, check_texts, precisions=precisions)
        except ValueError as error:
            if not choices.converted:
                raise
            raise PipelineError(
                f"the converted model of the plan is refused here: {error}; `{plan.PLAN_COMMAND} --anew`"
            ) from error
        planned = _way(choices.strategy, choices.trim, choices.compile)
        way = _way(self._predictor.strategy, self._predictor.trim, self._predictor.compiled)
        if way != planned:
            raise PipelineError(
                f"the plan computes by the strategy '{planned}', which the self-check refuses here for '{way}'"
                f"{''.join(f'; {doubt}' for doubt in self._predictor.doubts)}. "
                f"Plan on this machine, `{plan.PLAN_COMMAND} --anew`"
            )

    @classmethod
    def open(cls, plan_path: Path, device: str | None = None, *, trust_remote_code: bool = False) -> "ShardPredictor":
        """Return a predictor for the plan at `plan_path`, with threads and precision of this process set as planned.

        `device` None: the planned kind.
        """
        folder = EvaluationFolder(plan_path.parent)
        made = plan.load(folder)
        wanted = pick_device(device or made.identity.device)
        _require_planned_machine(made, wanted)
        torch.set_num_threads(made.choices.threads_per_worker)
        os.environ.setdefault("RAYON_NUM_THREADS", str(made.choices.threads_per_worker))  # the tokenizer's
        use_matmul_precision(made.identity.matmul_precision)
        places, identity = made.places, made.identity
        source = ModelSource(
            places.model_name, Path(places.model), "folder", None, identity.model_fingerprint, identity.task
        )
        loaded = load(source, wanted, made.choices.model_dtype, trust_remote_code=trust_remote_code)
        planning.require_planned_model(made, source.path)
        return cls(made, folder, loaded)

    def predict_shard(self, shard_id: int, *, wait: bool = False) -> Receipt:
        """Return the receipt of a shard after it is committed, now or before.

        A shard claimed by another runner is left to it, or with `wait` waited for.
        """
        return next(self._predict([shard_id], wait))

    def predict_shards(self, shard_ids: Iterable[int], wait: bool = False) -> Iterator[Receipt]:
        """Yield a receipt for each shard, as `predict_shard` does; on a GPU the next is tokenized meanwhile.

        With `wait` one comes after another.
        """
        if wait:  # for a claim while holding another: that could be for ever
            return (self.predict_shard(shard, wait=True) for shard in shard_ids)
        return self._predict(shard_ids, False)

    def _predict(self, shard_ids: Iterable[int], wait: bool) -> Iterator[Receipt]:
        settled: deque[Receipt] = deque()
        begun: deque[_Begun] = deque()
        with contextlib.ExitStack() as claims:
            texts = self._texts(self._begin(shard_ids, wait, settled, claims), begun)
            meter = MemoryMeter(self._predictor.device)
            meter.start()
            for prediction in _explained(self._predictor.predict_each(texts), begun):
                yield self._commit(begun.popleft(), prediction, meter)
                meter.start()
                while settled:
                    yield settled.popleft()
            yield from settled

    def _begin(
        self, shard_ids: Iterable[int], wait: bool, settled: deque[Receipt], claims: contextlib.ExitStack
    ) -> Iterator["_Begun"]:
        """Yield the shards that are neither finished nor claimed elsewhere, each claimed; the others are `settled`."""
        for shard_id in shard_ids:
            shard = self.plan.shards[shard_id]
            claim = claims.enter_context(contextlib.ExitStack())
            if not claim.enter_context(_claimed(self.folder.claims / f"{shard_id:05d}.lock", wait)):
                settled.append(Receipt(shard_id, "claimed"))
                continue
            part = parts.load(self.folder, self.plan, shard)
            if part is None:
                yield _Begun(shard, rows.read(self._dataset, shard, self._positions), claim)
            else:
                claim.close()
                settled.append(_receipt(self._task, part, "kept", 0.0))

    def _texts(self, shards: Iterable["_Begun"], begun: deque["_Begun"]) -> Iterator[Sequence[str]]:
        for shard in shards:
            begun.append(shard)
            yield shard.rows.texts

    def _commit(self, begun: "_Begun", prediction: Prediction, meter: MemoryMeter) -> Receipt:
        prediction, out_of_memory = self._unhalved(begun, prediction)
        seconds, memory = prediction.seconds, meter.stop()
        table = self._task.table(begun.rows.row_ids, begun.rows.labels, prediction.lengths, prediction.logits)
        content = parts.encode(table)
        record = parts.Record(
            plan=self.plan.fingerprint,
            shard=begun.shard.id,
            part_sha256=parts.sha256(content),
            texts_sha256=begun.rows.texts_sha256,
            tokens=int(prediction.lengths.sum()),
            truncated=prediction.truncated,
            computed_texts=prediction.computed_texts,
            useful_tokens=prediction.useful_tokens,
            computed_tokens=prediction.computed_tokens,
            guarded_texts=prediction.guarded_texts,
            started_s=time.monotonic() - seconds.total_s,
            seconds=seconds.total_s,
            phases_s={name: getattr(seconds, f"{name}_s") for name in ("tokenize", "transfer", "compute", "wait")},
            host=host_id(),
            device=str(self._predictor.device),
            device_id=uuid_of(self._predictor.device) or str(self._predictor.device),
            device_peak_bytes=memory.device_peak_allocated_bytes,
            process_peak_bytes=memory.process_peak_bytes,
            memory_reasons=memory.reasons,
            out_of_memory=out_of_memory,
        )
        planning.require_planned_model(self.plan, self._model)  # mapped: who writes into the file changes them here
        parts.commit(content, record, self.folder)
        begun.claim.close()
        return _receipt(self._task, parts.Part(table, record), "predicted", record.seconds)

    def _unhalved(self, begun: "_Begun", prediction: Prediction) -> tuple[Prediction, int]:
        """Return the prediction in the planned batches, and how often memory ran out on the way.

        Halved batches may round differently, so they are tried again. Raises PipelineError if memory stays short.
        """
        failures = 0
        while prediction.halvings:
            failures += 1
            if failures == ATTEMPTS:
                raise PipelineError(
                    f"a batch of shard {begun.shard.id} ran out of memory {ATTEMPTS} times; "
                    "the finished shards stay. Free memory there and go on, or plan smaller batches: "
                    f"`{plan.PLAN_COMMAND} --anew evaluation.token_budget={self.plan.choices.token_budget // 2}`"
                )
            release_memory(self._predictor.device)
            prediction = self._predictor.predict(begun.rows.texts)
        return prediction, failures


@dataclass(frozen=True, eq=False)
class _Begun:
    """A shard that is being predicted, its rows, and the claim to it, which is closed after the commit."""

    shard: plan.Shard
    rows: Rows
    claim: contextlib.ExitStack


def _require_planned_machine(made: plan.Plan, device: torch.device) -> None:
    """Raise InputError where bytes may differ from those of the planning machine: by processor, packages or code."""
    differing = plan.differences(made.identity, structs.replace(made.identity, **planning.machine(device)))
    if differing:
        raise InputError(
            f"{platform.node()} is not such a machine as was planned for: {'; '.join(differing)}. Workers need the "
            "processor, the packages, the settings and the code of the machine that planned: bring its environment "
            f"here, or plan on a machine like the workers, `{plan.PLAN_COMMAND} --anew`"
        )


def _way(strategy: str, trim: bool, compiled: bool) -> str:
    return f"{strategy}{', last layer trimmed' if trim else ''}{', compiled' if compiled else ''}"


def _receipt(task: Any, part: parts.Part, status: Literal["predicted", "kept"], seconds: float) -> Receipt:
    record = part.record
    return Receipt(record.shard, status, part.table.num_rows, task.hits(part.table), seconds, record.part_sha256)


def _explained(predictions: Iterator[Prediction], begun: deque[_Begun]) -> Iterator[Prediction]:
    """Yield the predictions. Raises PipelineError, with the shard, for a text that cannot be predicted."""
    try:
        yield from predictions
    except ValueError as error:
        shard = begun[0].shard
        raise PipelineError(f"{rows.span(shard.first_row_id, shard.last_row_id)}: {error}") from error


@contextlib.contextmanager
def _claimed(path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock at `path`, and tell whether the shard is ours: also without locks, or after waiting `CLAIMED_S`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=CLAIMED_S if wait else 0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        yield wait  # one that holds its claim so long may be hung; two that predict a shard leave the same bytes
        return
    except OSError as error:
        if error.errno not in HAVE_NONE:
            raise
    try:
        yield True
    finally:
        lock.release()
