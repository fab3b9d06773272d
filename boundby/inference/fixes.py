"""The fixes of a Hugging Face classifier that can be tried on one batch: what each needs, and which labels it keeps."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psutil
import torch

from boundby.bound import FASTER_MATMUL, Candidate, Fix, Made, SameLabels, Untried, reduced_precision_matmul
from boundby.inference.batches import Batch, Tokens, batches_in_order, collate, forward
from boundby.inference.precision import Precision, matmul_effect, tolerance
from boundby.inference.reference import in_dtype
from boundby.inference.rotary import rotary_of
from boundby.inference.selfcheck import allowed_of_own
from boundby.inference.strategies import Strategy, candidates, compile_layers
from boundby.machine import compile_obstacle, is_host, matmul_precision, memory_limit_bytes
from boundby.timing import Work, wilson_interval
from boundby.work import Interval

PACKED = ("varlen", "efficient", "grouped")  # the strategies that pad nothing
COMPILE_S = 30.0  # to compile the layers of a small classifier on two CPU cores: 17 to 35 s were measured
GPU_COMPILE_S = 10.0  # assumed: a layer once for all, by Triton, where a CPU's code goes through a C++ compiler
SPARE_MEMORY = 0.5  # of what is free, for a copy of the model


@dataclass(frozen=True)
class Subject:
    """A classifier, the batch that is timed, and the texts at `sample` whose labels are compared."""

    model: Any
    tokenizer: Any
    tokens: Tokens
    batch: Batch
    sample: Sequence[int]
    has_labels: bool = True

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.batch.input_ids.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtypes: list[torch.dtype] = [
            parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()
        ]
        return dtypes[0]

    def work(self, model: Any) -> Work:
        """Return the forward of the batch through `model`."""
        return lambda: forward(model, self.batch)

    @cached_property
    def labels(self) -> np.ndarray:
        """The label of each text of the sample, by the model as it is."""
        return self.labels_of(self.model)

    def labels_of(self, model: Any) -> np.ndarray:
        """Return the label that `model` gives each text of the sample, in batches of the size that is timed."""
        labels = np.empty(len(self.tokens.ids), dtype=np.int64)
        for rows in batches_in_order(rotary_of(model), self.tokens, self.sample, len(self.batch.rows)):
            batch = collate(self.tokens, rows, self.tokenizer.pad_token_id or 0, self.device)
            labels[rows] = forward(model, batch).argmax(dim=-1).cpu().numpy()
        return labels[list(self.sample)]

    def same_labels(self, labels: Callable[[], np.ndarray]) -> Callable[[], SameLabels | None]:
        """Return a call that compares these labels with those of the model as it is; None where it gives none."""

        def compare() -> SameLabels | None:
            if not self.has_labels or not len(self.sample):
                return None
            own = self.labels
            same, of = int((labels() == own).sum()), len(self.sample)
            return SameLabels(same, of, Interval(same / of, *wilson_interval(same, of)))

        return compare


def without_padding(subject: Subject) -> Candidate | Untried | None:
    """Return the trial of the same texts packed; None where the batch has no padding.

    Making it raises ValueError where packed texts get other logits.
    """
    fix = Fix("remove_padding")
    if not subject.batch.is_padded:
        return None
    precision = Precision(str(subject.dtype), subject.dtype)
    ways = dict(candidates(subject.model, subject.tokenizer, precision, trims=False))
    make_strategy = next((ways[name] for name in PACKED if name in ways), None)
    if make_strategy is None:
        return Untried(fix, "not_possible", "texts of this model cannot be packed here")

    def make() -> Made:
        strategy, tokens, pad_id = make_strategy(), subject.tokens, subject.tokenizer.pad_token_id or 0
        batch = np.asarray(subject.batch.rows)
        packs = strategy.batches(tokens.lengths[batch], subject.batch.tokens_padded)
        packed = [batch[rows].tolist() for rows in packs]  # one, but where rotary positions keep texts apart

        def logits() -> torch.Tensor:
            parts = [strategy.logits(tokens, rows) for rows in packed]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def padded(model: Any) -> torch.Tensor:
            batches = [collate(tokens, rows, pad_id, subject.device) for rows in packed]
            return torch.cat([forward(model, batch) for batch in batches]).float()

        own = padded(subject.model)
        effect = matmul_effect(precision, own.device)
        allowed = tolerance(effect) * float(own.abs().max())
        if subject.dtype != torch.float32:  # both have rounded, and what that does here is the measure
            exact = padded(in_dtype(subject.model, torch.float32))
            allowed = allowed_of_own(own.cpu().numpy(), exact.cpu().numpy(), effect)
        _require_equal(logits(), own, allowed)
        return Made(logits, subject.same_labels(lambda: _packed_labels(subject, strategy)))

    return Candidate(fix, make)


def _require_equal(logits: torch.Tensor, own: torch.Tensor, allowed: float) -> None:
    """Raise ValueError where packed texts get other logits than padded ones."""
    difference, largest = float((logits - own).abs().max()), float(own.abs().max())
    if not difference <= allowed:
        raise ValueError(f"without padding its logits differ by {difference:.2g}, of {largest:.2g} at most")


def _packed_labels(subject: Subject, strategy: Strategy) -> np.ndarray:
    labels = np.empty(len(subject.sample), dtype=np.int64)
    rows = np.asarray(subject.sample)
    lengths = subject.tokens.lengths[rows]
    for chosen in strategy.batches(lengths, subject.batch.tokens_padded):
        labels[chosen] = strategy.logits(subject.tokens, rows[chosen].tolist()).argmax(dim=-1).cpu().numpy()
    return labels


def in_another_dtype(subject: Subject, dtype: torch.dtype) -> Candidate:
    """Return the trial of a copy of the model in another dtype. Making it raises MemoryError where it may not fit."""

    def make() -> Made:
        _require_memory(subject, dtype)
        model = in_dtype(subject.model, dtype)
        return Made(subject.work(model), subject.same_labels(lambda: subject.labels_of(model)))

    name = str(dtype).removeprefix("torch.")
    return Candidate(Fix("dtype", {"dtype": name}), make, expected=FASTER_MATMUL)


def _require_memory(subject: Subject, dtype: torch.dtype) -> None:
    """Raise MemoryError where a copy may not fit: Linux would end the process rather than raise an error."""
    if not is_host(subject.device):
        return
    copy_bytes = sum(parameter.numel() for parameter in subject.model.parameters()) * dtype.itemsize
    own = psutil.Process().memory_info().rss
    if copy_bytes > SPARE_MEMORY * min(psutil.virtual_memory().available, memory_limit_bytes() - own):
        raise MemoryError


def with_reduced_precision_matmul(subject: Subject, precision: str, ceiling_ratio: float) -> Candidate | None:
    """Return the trial of another precision of float32 products; None where it is no faster by its limit."""

    def coarser() -> np.ndarray:
        with matmul_precision(precision):
            return subject.labels_of(subject.model)

    labels = subject.same_labels(coarser)
    return reduced_precision_matmul(subject.work(subject.model), precision, ceiling_ratio, labels)


def compile_seconds(device: torch.device) -> float:
    """Return about how long it takes to compile the layers of a model for this device."""
    return COMPILE_S if is_host(device) else GPU_COMPILE_S


def compiled(subject: Subject, seconds: float | None = None) -> Candidate | Untried:
    """Return the trial of compiled layers, which takes about `seconds` to make, None: as long as on such a device."""
    fix, obstacle = Fix("fuse_operators"), compile_obstacle(subject.device)
    if obstacle is not None:
        return Untried(fix, "not_possible", obstacle)

    def make() -> Made:
        model = in_dtype(subject.model, subject.dtype)
        compile_layers(model, but_last=False)
        return Made(subject.work(model), subject.same_labels(lambda: subject.labels_of(model)))

    return Candidate(fix, make, setup_s=compile_seconds(subject.device) if seconds is None else seconds)


def with_input_ahead(work: Work, make_input: Work) -> Candidate:
    """Return the trial of making the next input in a thread beside the forward, against one after the other."""

    def one_after_the_other() -> None:
        make_input()
        work()

    def make() -> Made:
        pool = ThreadPoolExecutor(1, thread_name_prefix="boundby-input")

        def ahead() -> None:
            coming = pool.submit(make_input)
            work()
            coming.result()

        return Made(ahead, close=pool.shutdown)

    return Candidate(Fix("overlap_input"), make, base=one_after_the_other)
