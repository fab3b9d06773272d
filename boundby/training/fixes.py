"""The fixes of a training loop that can be tried here, each in rounds of steps with and without it, in turn.

What is predicted of a fix is its part of a step, timed alone with and without it, in the place that this part has in
the steps of the run. The bound is Amdahl's law: what is left if that part vanishes.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from boundby.device import is_gpu
from boundby.disturbance import Watch, usable_cpus
from boundby.inference.strategies import COMPILE_OPTIONS, compile_obstacle
from boundby.roofline import Interval
from boundby.timer import Timer, Work
from boundby.training import stages
from boundby.training.judgement import LARGEST
from boundby.training.steps import IN_NO_STAGE, Share
from boundby.trials import Candidate, Made, Tried, try_out
from boundby.verdict import Fix, Gain, Untried

WORK = (stages.FORWARD, stages.BACKWARD)
IN_A_ROUND = (stages.DATA, stages.H2D, *WORK, stages.CLIP, stages.OPTIMIZER, stages.ZERO_GRAD, IN_NO_STAGE)
PARTS = {"worker_processes": (stages.DATA,), "pin_memory": (stages.H2D,), "fused_optimizer": (stages.OPTIMIZER,)}
MOST_WORKERS = 2
AHEAD = 2  # batches that each worker makes before they are asked for, as is the default of a DataLoader
PART_ERROR = 0.10  # of the factor of a part timed alone, as of a forward's (`boundby.prediction`), on its logarithm
WORKERS_ERROR = 0.15  # the processes share caches and memory with the training
REST_ERROR = 0.03  # of the step around the part
PART_BUDGET_S = 6.0  # to time one part alone
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
        self._forward: Any = torch.compile(self._model, options=COMPILE_OPTIONS) if change.compiles else self._model
        workers = recipe.workers if change.workers is None else change.workers
        self.batches: Iterable[Any] = recipe.batches(workers, recipe.is_pinned or change.pins)

    def round(self) -> None:
        """Run the steps of a round."""
        for number, batch in enumerate(self.batches, 1):
            self.learn(self._recipe.move(batch))
            if number % self._recipe.accumulate == 0:
                self.update()
                self._optimizer.zero_grad()

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


def try_fixes(  # noqa: PLR0913  (a training, what is known of it, and the instruments)
    recipe: Recipe,
    shares: Sequence[Share],
    timer: Timer,
    *,
    budget_s: float,
    watch: Watch | None = None,
    told: Callable[[str, float], object] = lambda text, left_s: None,
    pause: Callable[[float], object] = time.sleep,
) -> Tried:
    """Return what each fix did to the speed of the steps, beside what was predicted of it; and which were not tried.

    `shares` are the stages of the run as a verdict gives them. The trials take about `budget_s`, and the predictions
    some seconds more. The models of the trials are copies. What a fix raises is the reason why it was not tried.
    """
    known = _Known(recipe, {each.name: each.step_s for each in shares if each.name in IN_A_ROUND}, timer, pause)
    changes, untried = _changes(recipe)
    base, tried = Loop(recipe, Change()), Tried()
    try:
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
            half = try_out(base.round, candidates, timer, budget_s=budget_s / 2, gains=gains, watch=watch, told=told)
            tried = tried.joined(half)
    finally:
        base.close()
    return tried.joined(Tried(untried=tuple(untried)))


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


@dataclass(frozen=True)
class _Known:
    """The seconds of the stages of a step that a round has too."""

    recipe: Recipe
    seconds: dict[str, float]
    timer: Timer
    pause: Callable[[float], object]

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, *names: str) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names) / self.step_s

    def gain(self, base: Loop, fix: Fix, change: Change) -> Iterator[Gain]:
        """Yield the bound of a fix and, where its part can be timed alone, its prediction; nothing of unknown steps."""
        if not self.step_s:
            return
        parts = PARTS.get(fix.kind, WORK)
        share = self.share(*parts)
        # What is done beside the rest still takes its own time, shared by those who do it.
        beside = {"worker_processes": share / (change.workers or 1), "pin_memory": share}.get(fix.kind, 0.0)
        left = max(1 - share, beside)
        at_most = min(LARGEST, 1 / left) if left > 0 else LARGEST
        basis = f"{' and '.join(parts)}: {100 * share:.1f} % of these steps"
        predicted = None
        if not (change.pins or change.compiles):
            try:
                predicted = self._loaded_beside(change) if change.workers else self._part(base, fix, change, share)
            except Exception:  # the trial will say what it is
                predicted = None
        yield Gain(fix, at_most, basis, predicted and _capped(predicted, at_most))

    def _part(self, base: Loop, fix: Fix, change: Change, share: float) -> Interval | None:
        """Return the factor of a step whose part changes as it does alone."""
        batch = self.recipe.move(next(iter(base.batches)))
        other = Loop(self.recipe, change)

        def work(loop: Loop) -> Work:
            loop.learn(batch)
            return loop.update if change.is_fused else partial(loop.learn, batch)

        try:
            alone = try_out(
                work(base), [Candidate(fix, lambda: Made(work(other)))], self.timer, budget_s=PART_BUDGET_S
            ).trials
        finally:
            other.close()
        if not alone:
            return None
        factor = alone[0].measured
        noise = math.log(factor.high / factor.low) / 2
        apart = math.exp(math.hypot(noise, PART_ERROR))
        value, low, high = (
            1 / (1 - share + share / each) for each in (factor.value, factor.value / apart, factor.value * apart)
        )
        return _widened(value, math.hypot(math.log(high / low) / 2, REST_ERROR))

    def _loaded_beside(self, change: Change) -> Interval:
        """Return the factor of steps whose batches other processes load: the slower of both is left.

        A batch that is ready is still handed over, and without a core to spare the loading takes time from the rest.
        """
        workers, data_s = change.workers or 0, self.seconds.get(stages.DATA, 0.0)
        loader = self.recipe.batches(workers, self.recipe.is_pinned)
        count = sum(1 for _ in loader)  # which starts them
        batches = iter(loader)

        def mean(of: int) -> float:
            return sum(self.timer.isolated(lambda: next(batches)) for _ in range(of)) / of

        at_hand = min(AHEAD * workers, count - 1)
        loading_s = mean(count - at_hand)
        self.pause(AHEAD * workers * loading_s)  # until the others are ready
        handing_s = mean(at_hand)
        a_step = self.recipe.accumulate
        threads = torch.get_num_threads()
        takes_s = 0.0 if threads < len(usable_cpus()) or is_gpu(self.recipe.device) else data_s / threads
        beside_s = self.step_s - data_s + a_step * handing_s + takes_s
        slower_s = max(a_step * loading_s, beside_s)
        return _widened(self.step_s / slower_s, math.hypot(WORKERS_ERROR * self.share(stages.DATA), REST_ERROR))


def _widened(value: float, error: float) -> Interval:
    return Interval(value, value * math.exp(-error), value * math.exp(error))


def _capped(predicted: Interval, at_most: float) -> Interval:
    return Interval(*(min(at_most, end) for end in (predicted.value, predicted.low, predicted.high)))
