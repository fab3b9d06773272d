"""Measure a classifier over batch sizes: what is measured, on which texts, how often. The instruments are boundby's."""

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from boundby.device import is_out_of_memory, release_memory, synchronizer
from boundby.inference import Batch, Tokens, collate, forward, tokenize
from boundby.sampler import NoSource, Sampler
from boundby.sweep import Outcome, StopRule, sweep
from boundby.timer import Timer, WarmUpRule, warm_up
from utils.artifacts import started_at
from utils.metrics import MetricsCollector
from utils.visits import Timing, Visit

LEAST_ROUNDS = 5  # below five rounds two runs cannot be told apart by a rank test at 5 %
MOST_ROUNDS = 15  # or one per second of the budget, so that a larger budget always buys more rounds
DRAWS = 200  # selections of texts, of which the one closest to the mean length of all is timed
LEAST_VISIT_S_PER_RUN = 0.04  # ten runs fill 0.4 s, enough for the clock and for short disturbances
PIPELINED_BLOCK_S = 0.25  # long beside the one wait for the device at its end
HALF_WIDTH = {"cuda": 0.01, "cpu": 0.03}
WARM_TOLERANCE = {"cuda": 0.01, "cpu": 0.03}


class InferenceProfiler:
    """Profiles one model: real texts, cold call apart, warm-up to convergence, rounds until the interval is narrow."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        *,
        timer: Timer | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.timer = timer or Timer(synchronize=synchronizer(self.device))
        self.sampler = sampler or Sampler(NoSource("no sampler was given"))
        self.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.session = f"{started_at()}-{os.getpid()}"

    def profile_multiple_batch_sizes(  # noqa: PLR0913  (four of the spec, the rest by keyword alone)
        self,
        texts: Sequence[str],
        batch_sizes: Sequence[int],
        num_runs: int = 10,
        max_length: int = 512,
        *,
        num_warmup_runs: int = 3,
        ci_half_width: float | None = None,
        max_seconds: float = 15.0,
        finished: Sequence[Visit] = (),
        on_visit: Callable[[Visit], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return one row of metrics per batch size, smallest first; the columns are those of `utils.metrics`.

        `num_runs` timed and `num_warmup_runs` untimed forwards are the least work per batch size; more rounds follow
        until the 95 % interval of the throughput is `ci_half_width` of it, or `max_seconds` are spent. `finished`
        visits are not made again; `on_visit` is told of each new one. Running out of memory is a row, not an error.
        """
        rule = StopRule(
            half_width=ci_half_width or HALF_WIDTH[self.device.type],
            max_seconds=max_seconds,
            least_rounds=min(LEAST_ROUNDS, num_runs),
            most_rounds=max(MOST_ROUNDS, int(max_seconds)),
        )
        plan = _Plan(self, texts, num_runs, num_warmup_runs, max_length, max_seconds)
        visits = list(finished)

        def visit(batch_size: int, number: int) -> Outcome:
            earlier = next((each for each in visits if each.batch_size == batch_size), None)
            made = plan.visit(batch_size, number, earlier.batches if earlier else None)
            visits.append(made)
            if on_visit:
                on_visit(made)
            return made.outcome()

        sweep(batch_sizes, visit, rule, finished=[each.outcome() for each in visits])
        return MetricsCollector(self.device).rows(visits, sorted(batch_sizes), rule.half_width)


class _Plan:
    """How one visit is made: which texts, how many batches, in which order."""

    def __init__(
        self,
        owner: InferenceProfiler,
        texts: Sequence[str],
        num_runs: int,
        num_warmup_runs: int,
        max_length: int,
        max_seconds: float,
    ) -> None:
        if not texts:
            raise ValueError("there are no texts to profile with")
        self.owner, self.texts, self.max_length = owner, texts, max_length
        self.num_runs, self.num_warmup_runs, self.max_seconds = num_runs, num_warmup_runs, max_seconds
        self.tokens: Tokens = tokenize(owner.tokenizer, texts, max_length)
        self._warmed: set[int] = set()

    def visit(self, batch_size: int, number: int, batches: int | None) -> Visit:
        """Return one visit. `batches` is how many earlier visits of this batch size timed; None in the first."""
        owner = self.owner
        collector = MetricsCollector(owner.device, sampler=owner.sampler)
        try:
            with torch.inference_mode():
                return self._measure(batch_size, number, batches, collector)
        except Exception as error:  # a model may raise anything; the other batch sizes are still worth measuring
            status = "oom" if is_out_of_memory(error) else "failed"
            message = f"{type(error).__name__}: {error}".split("\n")[0]
        release_memory(owner.device)  # outside the except block: its traceback holds the tensors
        return Visit(owner.dtype, batch_size, number, status, owner.session, message=message)

    def _measure(self, batch_size: int, number: int, batches: int | None, collector: MetricsCollector) -> Visit:
        owner, timer = self.owner, self.owner.timer
        release_memory(owner.device)  # else the allocator still holds what a larger batch size left, and counts it here
        first = self._batches(batch_size, self.num_runs)[0]
        call = _caller(owner.model, first)
        timings: list[Timing] = []
        if batch_size in self._warmed:
            warm = self._keep_warm(call)
        else:  # in a resumed sweep too, lest the first call of the new process spend the time of the warm-up
            timings.append(_timing("cold", 0, timer.isolated(call), [first]))
            warm = self._warm_up(call)
            self._warmed.add(batch_size)
        batches = batches or self._affordable(warm["seconds"] / warm["runs"])
        chosen = self._batches(batch_size, batches)
        for batch in chosen:  # every shape once before it is timed: allocator, kernels chosen by shape
            timer.isolated(_caller(owner.model, batch))
        timings.append(self._tokenize_timing(chosen))
        measurement = collector.start_measurement()
        timings += self._isolated(chosen)
        timings += self._pipelined(chosen, timings)
        seen = collector.end_measurement(measurement, batch_size, num_samples=sum(len(each.rows) for each in chosen))
        return Visit(
            dtype=owner.dtype,
            batch_size=batch_size,
            round=number,
            status="ok",
            session=owner.session,
            timings=tuple(timings),
            measured_s=sum(each.seconds for each in timings if each.quantity in ("isolated", "pipelined")),
            batches=batches,
            warm_up=warm,
            memory=seen["memory"],
            gpu_utilization_pct=tuple(seen["gpu_utilization_readings_pct"]),
            window_s=seen["window_s"],
            gpu_utilization_reason=owner.sampler.reason,
            truncated=self.tokens.truncated,
        )

    def _warm_up(self, call: Callable[[], object]) -> dict[str, Any]:
        rule = WarmUpRule(
            least_runs=self.num_warmup_runs,
            least_s=LEAST_VISIT_S_PER_RUN * self.num_runs,
            tolerance=WARM_TOLERANCE[self.owner.device.type],
            cap_s=max(self.max_seconds / 2, LEAST_VISIT_S_PER_RUN),
        )
        warm = warm_up(call, self.owner.timer, rule)
        return asdict(warm)

    def _keep_warm(self, call: Callable[[], object]) -> dict[str, Any]:
        """Call as often as asked for, where another batch size had the caches since this one was warm."""
        seconds = sum(self.owner.timer.isolated(call) for _ in range(self.num_warmup_runs))
        return {"runs": self.num_warmup_runs, "seconds": seconds, "converged": True}

    def _affordable(self, seconds_per_batch: float) -> int:
        """Return how many batches a visit times: `num_runs`, or fewer where five visits would break the budget."""
        least = math.ceil(self.num_runs / min(LEAST_ROUNDS, self.num_runs))
        share = self.max_seconds / LEAST_ROUNDS / max(seconds_per_batch, 1e-9)
        return max(least, min(self.num_runs, int(share)))

    def _batches(self, batch_size: int, count: int) -> list[Batch]:
        """Return `count` batches, each in the order of arrival of its texts."""
        rows, pad_id = self._rows(batch_size * count), self.owner.tokenizer.pad_token_id
        chosen = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        return [collate(self.tokens, each, pad_id, self.owner.device) for each in chosen]

    def _rows(self, count: int) -> list[int]:
        """Return `count` random rows whose mean length is that of all; rows repeat where there are too few.

        Ten texts at batch size 1 and 640 at 64 would otherwise differ by a fifth in length, and so would their times.
        """
        lengths = self.tokens.lengths
        if count >= len(lengths):
            return [row % len(lengths) for row in range(count)]
        rng = random.Random(count)
        draws = (rng.sample(range(len(lengths)), count) for _ in range(DRAWS))
        return min(draws, key=lambda rows: abs(lengths[rows].mean() - lengths.mean()))

    def _isolated(self, batches: list[Batch]) -> list[Timing]:
        timings: list[Timing] = []
        calls = [_caller(self.owner.model, batch) for batch in batches]
        spent = 0.0
        while not timings or spent < LEAST_VISIT_S_PER_RUN * self.num_runs:
            for index, (call, batch) in enumerate(zip(calls, batches, strict=True)):
                timings.append(_timing("isolated", index, self.owner.timer.isolated(call), [batch]))
                spent += timings[-1].seconds
        return timings

    def _pipelined(self, batches: list[Batch], so_far: list[Timing]) -> list[Timing]:
        """Return one block of queued calls; nothing on a CPU, where a call that returns has finished."""
        if self.owner.device.type == "cpu":
            return []
        one_pass = sum(each.seconds for each in so_far if each.quantity == "isolated") * len(batches)
        one_pass /= sum(each.quantity == "isolated" for each in so_far)
        repeats = max(1, math.ceil(PIPELINED_BLOCK_S / one_pass))
        queue = batches * repeats
        seconds = self.owner.timer.pipelined(_caller(self.owner.model, batch) for batch in queue)
        return [_timing("pipelined", 0, seconds, queue)]

    def _tokenize_timing(self, batches: list[Batch]) -> Timing:
        """Time the tokenizer on the same texts, batch by batch, as a server would call it."""
        owner = self.owner
        start = owner.timer.clock()
        for batch in batches:
            owner.tokenizer([self.texts[row] for row in batch.rows], truncation=True, max_length=self.max_length)
        return _timing("tokenize", 0, owner.timer.clock() - start, batches)


def _caller(model: Any, batch: Batch) -> Callable[[], object]:
    return lambda: forward(model, batch)


def _timing(quantity: Any, index: int, seconds: float, batches: Sequence[Batch]) -> Timing:
    return Timing(
        quantity=quantity,
        index=index,
        seconds=seconds,
        samples=sum(len(batch.rows) for batch in batches),
        tokens_real=sum(batch.tokens_real for batch in batches),
        tokens_padded=sum(batch.tokens_padded for batch in batches),
    )
