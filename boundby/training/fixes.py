"""The fixes of a training loop that can be tried here, each in rounds of steps with and without it, in turn.

What is predicted of a fix is its part of a step, timed alone with and without it, in the place that this part has in a
round of steps. The bound is Amdahl's law: what is left if that part vanishes.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch

from boundby.bound import Bench, Candidate, Fix, Gain, Made, Tried, Untried, try_out
from boundby.machine import (
    COMPILE_OPTIONS,
    Watch,
    compile_obstacle,
    is_gpu,
    raise_if_lost,
    usable_cpus,
    use_private_cache,
)
from boundby.timing import Timer, estimate
from boundby.training import stages
from boundby.training.judgement import LARGEST
from boundby.work import Interval

WORK = "forward and backward"
PARTS = {"worker_processes": stages.DATA, "pin_memory": stages.H2D, "fused_optimizer": stages.OPTIMIZER}
MOST_WORKERS = 2
AHEAD = 2  # batches that each worker makes before they are asked for, as is the default of a DataLoader
PART_ERROR = (
    0.10  # of the factor of a part timed alone, as of a forward's (`boundby.bound.prediction`), on its logarithm
)
REST_ERROR = 0.03  # of the step around the part
ROUNDS, LOADED = 5, 3  # to tell the parts of a step, and what workers take
PART_BLOCKS, LEAST_BLOCKS, BLOCK = 15, 5, 5  # calls of a part with and without a fix, in turn
PART_BUDGET_S = 6.0  # to time one part alone
TICK_S = 0.01  # in which the system counts the time of processes
COMPILE_S = 40.0  # forward and backward of a small model


@dataclass(frozen=True)
class Recipe:
    """How a training is made, so that it can be made again with one thing changed.

    `model` returns a copy of its own, on `device` and in training mode; `optimizer` takes its parameters, and whether
    it is fused. `batches` takes a number of workers and whether memory is pinned, and gives the loader of one round,
    which yields as many batches each time; `move` brings one to the device, and `loss` is that of the moved one.
    `workers`, `is_pinned` and `accumulate`, the batches of a step, are those of the training as it is.
    """

    device: torch.device
    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Iterable[torch.nn.Parameter], bool], torch.optim.Optimizer]
    batches: Callable[[int, bool], Iterable[Any]]
    move: Callable[[Any], Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    workers: int = 0
    is_pinned: bool = False
    accumulate: int = 1


@dataclass(frozen=True)
class Change:
    """In what a loop differs from the training as it is."""

    workers: int | None = None
    pins: bool = False
    autocasts: bool = False
    compiles: bool = False
    is_fused: bool = False


class Loop:
    """A training made after a recipe, whose `round` is what is timed."""

    def __init__(self, recipe: Recipe, change: Change) -> None:
        self._recipe = recipe
        self._change = change
        self._model = recipe.model()
        self._optimizer = recipe.optimizer(self._model.parameters(), change.is_fused)
        if change.compiles:
            use_private_cache()
        self._forward: Any = torch.compile(self._model, options=COMPILE_OPTIONS) if change.compiles else self._model
        workers = recipe.workers if change.workers is None else change.workers
        self.batches: Iterable[Any] = recipe.batches(workers, recipe.is_pinned or change.pins)

    def round(self, ended: Callable[[str], object] = lambda part: None) -> None:
        """Run the steps of a round; `ended` is told each part of a step when it is over."""
        batches, number = iter(self.batches), 0
        while (batch := next(batches, None)) is not None:
            ended(stages.DATA)
            number += 1
            batch = self._recipe.move(batch)
            ended(stages.H2D)
            self.learn(batch)
            ended(WORK)
            if number % self._recipe.accumulate == 0:
                self.update()
                ended(stages.OPTIMIZER)
                self._optimizer.zero_grad()
                ended(stages.ZERO_GRAD)

    def learn(self, batch: Any) -> None:
        """Run forward and backward on a batch that is on the device."""
        with self._precision():
            loss = self._recipe.loss(self._forward, batch)
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Run the optimizer."""
        self._optimizer.step()

    def close(self) -> None:
        """End the workers and let go of the model."""
        self.batches = ()
        del self._forward, self._model, self._optimizer

    def _precision(self) -> AbstractContextManager[Any]:
        on = self._recipe.device.type
        return torch.autocast(on, dtype=torch.bfloat16) if self._change.autocasts else nullcontext()


def processor_time_beside() -> float:
    """Return the processor time that the processes have taken which this one started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(spent.user + spent.system for spent in times))


def try_fixes(
    recipe: Recipe,
    timer: Timer,
    *,
    budget_s: float,
    watch: Watch | None = None,
    told: Callable[[str, float], object] = lambda text, left_s: None,
    pause: Callable[[float], object] = time.sleep,
    spent_beside_s: Callable[[], float] = processor_time_beside,
) -> Tried:
    """Return what each fix did to the speed of the steps, beside what was predicted of it; and which were not tried.

    The trials take about `budget_s`, and the predictions some seconds more. The models of the trials are copies. What
    a fix raises is the reason why it was not tried. `spent_beside_s` returns the processor time of the processes that
    this one has started.
    """
    changes, untried = _changes(recipe)
    base, tried = Loop(recipe, Change()), Tried()
    bench = Bench(timer, watch=watch or Watch(), tell=told, trials_s=budget_s / 2)
    try:
        known = _Known(recipe, _parts(base, timer), timer, pause, spent_beside_s)
        gains = [gain for fix, change in changes for gain in known.gain(base, fix, change)]
        for is_last in (
            False,
            True,
        ):  # half of the time is kept for a compiler: nobody knows its own
            candidates = [
                Candidate(fix, partial(_made, recipe, change), setup_s=COMPILE_S if is_last else 0.0)
                for fix, change in changes
                if change.compiles == is_last
            ]
            tried = tried.joined(try_out(base.round, candidates, bench))
    finally:
        base.close()
    return tried.with_predictions(gains).joined(Tried(untried=tuple(untried)))


def _made(recipe: Recipe, change: Change) -> Made:
    loop = Loop(recipe, change)
    return Made(loop.round, close=loop.close)


def _changes(recipe: Recipe) -> tuple[list[tuple[Fix, Change]], list[Untried]]:
    """Return the fixes to try, and those that cannot be, with the reason."""
    workers = min(MOST_WORKERS, len(usable_cpus()))
    on_gpu, obstacle = is_gpu(recipe.device), compile_obstacle(recipe.device)
    pinned = "it is pinned already" if recipe.is_pinned else None if on_gpu else "it is pinned for copies to a GPU"
    loaded = f"{recipe.workers} load it already" if recipe.workers else None
    listed = [
        (Fix("worker_processes", {"workers": workers}), Change(workers=workers), loaded),
        (Fix("pin_memory"), Change(pins=True), pinned),
        (Fix("autocast"), Change(autocasts=True), None),
        (Fix("fused_optimizer"), Change(is_fused=True), None),
        (Fix("fuse_operators"), Change(compiles=True), obstacle),
    ]
    able = [(fix, change) for fix, change, reason in listed if reason is None]
    return able, [Untried(fix, "not_possible", reason) for fix, _, reason in listed if reason is not None]


def _parts(base: Loop, timer: Timer) -> dict[str, float]:
    """Return the seconds that each part takes in a round, the median of some."""
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS + 1):
        seconds: dict[str, float] = {}
        timer.synchronize()
        last = timer.clock()

        def ended(part: str, seconds: dict[str, float] = seconds) -> None:
            nonlocal last
            timer.synchronize()
            now = timer.clock()
            seconds[part] = seconds.get(part, 0.0) + now - last
            last = now

        base.round(ended)
        rounds.append(seconds)
    return {part: statistics.median(seconds[part] for seconds in rounds[1:]) for part in rounds[0]}


@dataclass(frozen=True)
class _Known:
    """The seconds of each part of a round."""

    recipe: Recipe
    seconds: dict[str, float]
    timer: Timer
    pause: Callable[[float], object]
    spent_beside_s: Callable[[], float]

    @property
    def round_s(self) -> float:
        return sum(self.seconds.values())

    def gain(self, base: Loop, fix: Fix, change: Change) -> Iterator[Gain]:
        """Yield the bound of a fix and, where its part can be timed alone, its prediction."""
        part = PARTS.get(fix.kind, WORK)
        share = self.seconds.get(part, 0.0) / self.round_s
        # What is done beside the rest still takes its own time, shared by those who do it.
        beside = {"worker_processes": share / (change.workers or 1), "pin_memory": share}.get(fix.kind, 0.0)
        left = max(1 - share, beside)
        at_most = min(LARGEST, 1 / left) if left > 0 else LARGEST
        predicted = None
        if not (change.pins or change.compiles):
            try:
                predicted = self._loaded_beside(base, change) if change.workers else self._part(base, change, share)
            except Exception as error:  # the trial will say what it is
                raise_if_lost(error)
                predicted = None
        yield Gain(
            fix, at_most, f"{part}: {100 * share:.1f} % of these steps", predicted and _capped(predicted, at_most)
        )

    def _part(self, base: Loop, change: Change, share: float) -> Interval:
        """Return the factor of a step whose part changes as it does alone, right after what comes before it."""
        calls: list[str] = []
        base.round(calls.append)
        part = PARTS["fused_optimizer"] if change.is_fused else WORK
        in_round_s = self.seconds[part] / calls.count(part)
        batch = self.recipe.move(next(iter(base.batches)))
        other = Loop(self.recipe, change)

        def seconds(loop: Loop) -> float:
            if not change.is_fused:
                return self.timer.isolated(partial(loop.learn, batch))
            loop.learn(batch)  # which leaves other things in the caches than an update does
            return self.timer.isolated(loop.update)

        factors: list[float] = []
        try:
            for loop in (base, other) * BLOCK:
                seconds(loop)
            start = self.timer.clock()
            while len(factors) < LEAST_BLOCKS or (
                len(factors) < PART_BLOCKS and self.timer.clock() - start < PART_BUDGET_S
            ):
                pairs = [(seconds(base), seconds(other)) for _ in range(BLOCK)]
                alone_s, other_s = (statistics.median(column) for column in zip(*pairs, strict=True))
                # What the round adds to the part, such as fetching from memory, it adds with the fix as well.
                factors.append(in_round_s / (in_round_s + (other_s - alone_s) * min(1.0, in_round_s / alone_s)))
        finally:
            other.close()
        factor = Interval.of(estimate(factors))
        noise = math.log(factor.high / factor.low) / 2
        apart = math.exp(math.hypot(noise, PART_ERROR))
        value, low, high = (
            1 / (1 - share + share / end) for end in (factor.value, factor.value / apart, factor.value * apart)
        )
        error = math.hypot(math.log(high / low) / 2, REST_ERROR)
        return Interval(value, value * math.exp(-error), value * math.exp(error))

    def _loaded_beside(self, base: Loop, change: Change) -> Interval:
        """Return the factor of a round whose batches other processes load: the slower of both is left.

        Loading takes at least what it takes here, divided by the workers, and at most as long as without pause: then
        their threads that load and hand over wait for each other, which they do not where the rest leaves them time.
        A batch that is ready is still handed over, at least as quickly as right after another, at most as slowly as
        with caches that learning has filled, and the first one of a round is waited for. With a core to spare the
        loading takes nothing from the rest. Without, it takes at most all of its own processor time, since threads that
        compute together wait for the one that was interrupted; at least nothing, since they do not always compute.
        """
        workers = change.workers or 0
        loader = self.recipe.batches(workers, self.recipe.is_pinned)
        count = sum(1 for _ in loader)  # which starts them
        at_hand = min(AHEAD * workers, count - 2)
        spent_s, rounds = self.spent_beside_s(), [self._loaded(base, loader, count, at_hand) for _ in range(LOADED)]
        means = [statistics.fmean(column) for column in zip(*rounds, strict=True)]
        loading_s, slow_s, quick_s = (means[0] + (count - 1) * mean for mean in means[1:])
        quick_s = min(quick_s, slow_s, loading_s)  # without pause each batch is handed over as well
        spent_s = (self.spent_beside_s() - spent_s + TICK_S) / LOADED
        cores, threads = len(usable_cpus()), torch.get_num_threads()
        here_s = self.seconds.get(stages.DATA, 0.0)
        rest_s = self.round_s - here_s
        least_loading_s = min(loading_s, means[0] + here_s * (count - 1) / count / workers)
        takes_s = 0.0 if threads + workers <= cores or is_gpu(self.recipe.device) else min(spent_s, cores * loading_s)
        least_s = max(least_loading_s, rest_s + quick_s, (rest_s + quick_s + takes_s) / cores)
        most_s = max(loading_s, rest_s + slow_s + takes_s)
        ends = self.round_s / most_s, self.round_s / least_s
        return Interval(math.sqrt(ends[0] * ends[1]), ends[0] * math.exp(-REST_ERROR), ends[1] * math.exp(REST_ERROR))

    def _loaded(self, base: Loop, loader: Iterable[Any], count: int, at_hand: int) -> tuple[float, ...]:
        """Return the seconds until the first batch of a round, of loading each, and of handing one over that is ready.

        The latter twice: after a batch was learnt from, when caches hold other things and the workers sleep, and right
        after another.
        """
        start = self.timer.clock()
        batches = iter(loader)
        batch = next(batches)
        first_s = self.timer.clock() - start
        others = count - 1 - at_hand
        each_s = sum(self.timer.isolated(lambda: next(batches)) for _ in range(others)) / others
        self.pause(max(10 * TICK_S, at_hand * each_s))  # until the others are ready
        handed: tuple[list[float], list[float]] = ([], [])
        for number in range(at_hand):
            if number % 2 == 0:
                base.learn(self.recipe.move(batch))
            start = self.timer.clock()
            batch = next(batches)
            handed[number % 2].append(self.timer.clock() - start)
        return first_s, each_s, *(statistics.fmean(seconds) for seconds in handed)


def _capped(predicted: Interval, at_most: float) -> Interval:
    return Interval(*(min(at_most, end) for end in (predicted.value, predicted.low, predicted.high)))
