"""Texts in, float32 logits out, by the fastest way that is known to be right."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from boundby.inference.batches import Tokens, tokenize
from boundby.inference.precision import EXACT, PRECISIONS, Precision, can_prepack
from boundby.inference.reference import in_dtype, margins, one_by_one, require_classifier, same_guard
from boundby.inference.selfcheck import checked_strategy
from boundby.machine import (
    allocator,
    host_threads,
    is_gpu,
    is_host,
    is_out_of_memory,
    keep_freed_blocks,
    release_memory,
    synchronizer,
)
from boundby.timing import Timer

HOST_BUDGET, GPU_BUDGET = 2048, 16384  # where nobody has searched for a better one
LARGE_BUDGET, LARGE_BYTES = 65536, 40e9  # of a GPU with so much memory: 16,384 tokens take one about as long as Python
MOST_STREAMS, BATCHES_PER_STREAM = 4, 2  # at once, and at least for each


def usual_budget(device: torch.device) -> int:
    """Return the tokens of a batch on this device where nothing else is known; by its memory on a GPU."""
    counters = allocator(device)
    if counters is None:
        return HOST_BUDGET
    return LARGE_BUDGET if counters.total >= LARGE_BYTES else GPU_BUDGET


@dataclass(frozen=True)
class PredictorOptions:
    """All that a prediction depends on besides texts, model and tokenizer, as plain values.

    - `precision`: a key of `PRECISIONS`. `token_budget` None: a default for the device.
    - `guard_margin`: rows whose best logit leads by this or less are computed again, alone in float32; where the
      precision is reduced, first in float32 batches.
    - `packs`, `trim`, `compile`: allow packed texts, a last layer for the head's tokens alone, compiled layers (a
      minute).
    """

    max_length: int
    precision: str = "float32"
    token_budget: int | None = None
    guard_margin: float = 0.0
    packs: bool = True
    trim: bool = True
    compile: bool = False


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of one call: making tokens, waiting for those made in the background, and collecting results on the host.

    On a GPU `compute_s` runs to the end of the queued work.
    """

    tokenize_s: float
    transfer_s: float
    compute_s: float
    wait_s: float
    total_s: float


@dataclass(frozen=True)
class Prediction:
    """Logits `[rows, labels]` in float32 in the order of the texts, and what they took.

    `computed_texts` and `useful_tokens` count texts with the same ids once; `computed_tokens` has the padding too.
    """

    logits: np.ndarray
    lengths: np.ndarray
    truncated: int | None
    computed_texts: int
    useful_tokens: int
    computed_tokens: int
    guarded_texts: int
    halvings: int
    seconds: TimeSplit

    @property
    def labels(self) -> np.ndarray:
        """The index of the best logit of each row."""
        best: np.ndarray = self.logits.argmax(axis=1)
        return best


@dataclass
class _Tally:
    computed_tokens: int = 0
    halvings: int = 0
    parts: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)


class Predictor:
    """Predicts with one model on the device it is on; the caller's model is left as it is.

    `check_texts`: some 64 texts like those to come, on which a strategy is compared with the stock forward before it is
    used; `check` has the result. The options' precision is looked up in `precisions`.

    Raises ValueError for a regression, for padding on the left, and without check texts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: PredictorOptions,
        check_texts: Sequence[str],
        timer: Timer | None = None,
        precisions: Mapping[str, Precision] = PRECISIONS,
    ) -> None:
        require_classifier(model, tokenizer)
        if not check_texts:
            raise ValueError("a predictor needs some texts to check itself on, there are none")
        self.options, self.device = options, model.device
        keep_freed_blocks(self.device)
        self._tokenizer = tokenizer
        self._timer = timer or Timer(synchronize=synchronizer(model.device))
        self._precision = precisions[options.precision]
        checked = tokenize(tokenizer, check_texts, options.max_length)
        self._strategy, self.check = checked_strategy(
            model,
            tokenizer,
            checked,
            self._precision,
            packs=options.packs,
            trims=options.trim,
            compiles=options.compile,
        )
        self._classes = model.config.num_labels
        self._stock = cache(partial(in_dtype, model, torch.float32))  # a half precision may fit where that does not

        def exact() -> Predictor:
            name = EXACT[0 if can_prepack(self.device) else 1]
            wanted = replace(options, precision=name, guard_margin=0.0, token_budget=None, compile=False)
            made = Predictor(model, tokenizer, wanted, check_texts, self._timer)
            return made.with_guard_margin(same_guard(made.check.max_abs_difference, made.check.largest_logit))

        self._exact = cache(exact)
        if options.guard_margin:
            self._guarding()

    @property
    def strategy(self) -> str:
        """The name of the way in which batches are computed."""
        return self._strategy.name

    @property
    def is_padded(self) -> bool:
        """Whether shorter texts of a batch are padded to its longest."""
        return self._strategy.is_padded

    @property
    def model(self) -> Any:
        """The working copy of the model that computes the batches."""
        return self._strategy.model

    @property
    def trim(self) -> bool:
        """Whether the last layer computes only the tokens that the head reads."""
        return self._strategy.trims

    @property
    def compiled(self) -> bool:
        """Whether the layers are compiled."""
        return self.check.compile_s is not None

    @property
    def matmul_effect(self) -> float:
        """The largest error of a product in this precision against float64, as a share of its largest element."""
        return self.check.matmul_effect

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why faster strategies were not taken; () where the fastest was."""
        return self.check.doubts

    @property
    def token_budget(self) -> int:
        """Tokens per batch."""
        return self.options.token_budget or usual_budget(self.device)

    @property
    def dtype(self) -> str:
        """The dtype of weights and activations; the head computes in float32 always."""
        return str(self._precision.dtype).removeprefix("torch.")

    def forwards(self, tokens: Tokens) -> list[Callable[[], torch.Tensor]]:
        """Return one call per batch that computes it and does nothing else, so that its work can be counted."""
        distinct = tokens.distinct()[0]

        def forward(rows: list[int]) -> torch.Tensor:
            with torch.inference_mode(), self._precision.active(self.device):
                return self._strategy.logits(distinct, rows)

        batches = self._strategy.batches(distinct.lengths, self.token_budget)
        return [partial(forward, rows) for rows in batches]

    @property
    def exact(self) -> "Predictor":
        """The same model in float32, with near ties computed again: its labels are those of one text at a time."""
        return self._exact()

    def with_token_budget(self, token_budget: int) -> "Predictor":
        """Return a predictor with another budget on the same weights; nothing is checked again."""
        return self._with(replace(self.options, token_budget=token_budget))

    def with_guard_margin(self, guard_margin: float) -> "Predictor":
        """Return a predictor that recomputes near ties below another margin; nothing is checked again."""
        return self._with(replace(self.options, guard_margin=guard_margin))

    def _with(self, options: PredictorOptions) -> "Predictor":
        other = copy.copy(self)
        other.options = options
        return other

    def _guarding(self) -> "Predictor | None":
        """Return what computes near ties again in batches; None where each is computed alone."""
        return self._exact() if self.options.guard_margin and self._precision.name not in EXACT else None

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return the token ids of the texts, cut to `max_length`. Raises ValueError for a text without tokens."""
        return tokenize(self._tokenizer, texts, self.options.max_length)

    def predict(self, texts: Sequence[str]) -> Prediction:
        """Return the logits of the texts.

        Raises ValueError for a text without tokens and where a logit is not finite, naming the text's place.
        """
        return next(self.predict_each([texts]))

    def predict_each(self, shards: Iterable[Sequence[str]]) -> Iterator[Prediction]:
        """Yield the prediction of each shard; on a GPU the next one is tokenized meanwhile, on a CPU before."""
        if not is_gpu(self.device):
            for texts in shards:
                start = self._timer.clock()
                tokens, seconds = self._timed_tokens(texts)
                yield self.predict_tokens(tokens, tokenize_s=seconds, started_s=start)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="boundby-tokenize") as background:
            coming = None
            for texts in shards:
                following = background.submit(self._timed_tokens, texts)
                if coming is not None:
                    yield self._awaited(coming)
                coming = following
            if coming is not None:
                yield self._awaited(coming)

    def _awaited(self, coming: "Future[tuple[Tokens, float]]") -> Prediction:
        start = self._timer.clock()
        tokens, seconds = coming.result()
        waited = self._timer.clock() - start
        return self.predict_tokens(tokens, tokenize_s=seconds, wait_s=waited, started_s=start)

    def predict_tokens(
        self, tokens: Tokens, *, tokenize_s: float = 0.0, wait_s: float = 0.0, started_s: float | None = None
    ) -> Prediction:
        """Return the logits of tokenized texts."""
        clock = self._timer.clock
        start = clock() if started_s is None else started_s
        distinct, where = tokens.distinct()
        lengths = distinct.lengths
        began = clock()
        tally = self._computed(distinct)
        self._timer.synchronize()
        computed = clock()
        logits = self._collected(tally, len(distinct.ids))
        collected = clock()
        guarded = self._guard(distinct, logits)
        end = clock()
        self._require_finite(logits, where)
        return Prediction(
            logits=logits[where],
            lengths=tokens.lengths,
            truncated=tokens.truncated,
            computed_texts=len(distinct.ids),
            useful_tokens=int(lengths.sum()),
            computed_tokens=tally.computed_tokens,
            guarded_texts=guarded,
            halvings=tally.halvings,
            seconds=TimeSplit(
                tokenize_s, collected - computed, computed - began + end - collected, wait_s, clock() - start
            ),
        )

    def _timed_tokens(self, texts: Sequence[str]) -> tuple[Tokens, float]:
        start = self._timer.clock()
        return self.tokenize(texts), self._timer.clock() - start

    def _computed(self, tokens: Tokens) -> _Tally:
        """Return the logits of all batches, still on the device.

        A CPU computes several at once, each on its share of the threads: small kernels and dispatch overhead then
        overlap.
        """
        threads = torch.get_num_threads()
        batches = self._strategy.batches(tokens.lengths, self.token_budget)
        streams = self._streams(len(batches), threads)
        waiting = deque(self._evened(tokens.lengths, batches, streams))
        with self._precision.active(self.device):  # a setting of the process
            if streams == 1:
                return self._tally(tokens, waiting)
            share = threads // streams
            with (
                host_threads(share),  # what a thread sets is the default of those to come
                ThreadPoolExecutor(streams, "boundby-batches", torch.set_num_threads, (share,)) as pool,
            ):
                running = [pool.submit(self._tally, tokens, waiting) for _ in range(streams)]
                try:
                    tallies = [future.result() for future in running]
                finally:
                    waiting.clear()  # after an error or a signal
        return _Tally(
            sum(tally.computed_tokens for tally in tallies),
            sum(tally.halvings for tally in tallies),
            [part for tally in tallies for part in tally.parts],
        )

    def _streams(self, batches: int, threads: int) -> int:
        """Return how many batches to compute at once, a divisor of the threads."""
        if not is_host(self.device) or self.options.compile or not self._strategy.is_reentrant:
            return 1
        most = max(1, min(MOST_STREAMS, batches // BATCHES_PER_STREAM))
        return max(streams for streams in range(1, most + 1) if threads % streams == 0)

    def _evened(self, lengths: np.ndarray, batches: list[list[int]], streams: int) -> list[list[int]]:
        """Return as many batches or a few more, of about one size, so that all streams end together."""
        most = -(-len(batches) // streams) * streams
        if streams == 1:
            return batches
        budget = -(-sum(self._strategy.cells(lengths[rows]) for rows in batches) // most)
        while budget < self.token_budget:
            evened = self._strategy.batches(lengths, budget)
            if len(evened) <= most:
                return evened
            budget += max(1, budget // 100)
        return batches

    def _tally(self, tokens: Tokens, waiting: deque[list[int]]) -> _Tally:
        """Take batches off the front of `waiting` until there is none, and return what was computed."""
        tally, lengths = _Tally(), tokens.lengths
        with torch.inference_mode():
            while waiting:
                try:
                    rows = waiting.popleft()
                except IndexError:  # another stream was quicker
                    break
                logits = self._attempt(tokens, rows)
                if logits is None:  # out of memory: the same rows in two halves
                    tally.halvings += 1
                    middle = len(rows) // 2
                    waiting.extendleft([rows[middle:], rows[:middle]])
                    continue
                tally.parts.append((rows, logits))
                tally.computed_tokens += self._strategy.cells(lengths[rows])
        return tally

    def _attempt(self, tokens: Tokens, rows: list[int]) -> torch.Tensor | None:
        try:
            return self._strategy.logits(tokens, rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(rows) == 1:
                raise
        release_memory(self.device)  # outside the except block: its traceback holds the tensors
        return None

    def _collected(self, tally: _Tally, rows: int) -> np.ndarray:
        """Return all logits in the order of the rows: one copy from the device."""
        logits = np.empty((rows, self._classes), dtype=np.float32)
        if tally.parts:
            order = np.concatenate([rows for rows, _ in tally.parts])
            logits[order] = torch.cat([logits for _, logits in tally.parts]).cpu().numpy()
        return logits

    def _guard(self, tokens: Tokens, logits: np.ndarray) -> int:
        """Recompute the rows that are too close to call, in place, and return how many there were."""
        if not self.options.guard_margin or not len(logits):
            return 0
        close = np.flatnonzero(margins(logits) <= self.options.guard_margin)
        if close.size:
            rows, guarding = close.tolist(), self._guarding()
            if guarding is None:
                logits[close] = one_by_one(self._stock(), tokens, rows)
            else:
                logits[close] = guarding.predict_tokens(Tokens([tokens.ids[row] for row in rows], None)).logits
        return int(close.size)

    def _require_finite(self, logits: np.ndarray, where: np.ndarray) -> None:
        broken = ~np.isfinite(logits).all(axis=1)
        if broken.any():
            row = int(np.flatnonzero(broken[where])[0])
            raise ValueError(
                f"text {row} has logits that are not finite in {self._precision.name}"
                + ("" if self._precision.name == "float32" else "; try float32")
            )
