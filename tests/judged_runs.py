"""Stage times of loops that never ran, whose stages take the seconds that they are given, and the verdict on them."""

import random
from collections.abc import Callable

from boundby.bound.verdict import Bound, Gain, Verdict
from boundby.training import StageTimer, TimerOptions, TrainingVerdict, judge_training
from tests.fakes import FakeNanoseconds
from tests.timed_loops import Device

HEALTHY = {"data": 0.001, "h2d": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.002}
Seconds = dict[str, float] | Callable[[int], dict[str, float]]


class Stream(Device):
    """A device whose marks are reached at once, at a time of its own."""

    now = 0.0

    def mark(self) -> list:
        return [self.now, self.stream]


def run(
    seconds,
    steps=40,
    *,
    rank=0,
    world_size=1,
    idle=0.0001,
    device=None,
    metrics=None,
    error=None,
    disturbed=(),
    between=0.0,
    capacity=10_000,
):
    """Return the stage times of a loop whose stages take these seconds, within 1 %, on the host and the device."""
    clock, stream, spread = FakeNanoseconds(), Stream(), random.Random(rank)
    options = TimerOptions(rank=rank, world_size=world_size, device="cuda:0" if device else None, capacity=capacity)
    timer = StageTimer(clock=clock, marks=stream if device else None, options=options)
    timer.start()
    for step in range(steps):
        if step in disturbed:
            timer.disturb()
        for name, spent in (seconds(step) if callable(seconds) else seconds).items():
            with timer.stage(name):
                clock.advance(spent * spread.uniform(0.99, 1.01))
                stream.now += (device or {}).get(name, 0.0)
        clock.advance(idle)
        stream.now += (device or {}).get("between", 0.0)
        if metrics:
            timer.metrics(metrics(step))
        if between:
            with timer.excluded("evaluation"):
                clock.advance(between)
        timer.step()
    timer.stop(error)
    return timer.snapshot()


def trace(bound: Bound, *, gains: tuple[Gain, ...] = (), alternatives: tuple[Bound, ...] = ()) -> Verdict:
    return Verdict(bound, alternatives, 0.8, "medium", "untested", gains, ())


def judged(seconds: Seconds, steps: int = 40, *, saw: Verdict | None = None, **how: object) -> TrainingVerdict:
    return judge_training([run(seconds, steps, **how)], saw)


def gain_of(verdict: TrainingVerdict, word: str) -> float:
    (at_most,) = [gain.at_most for gain in verdict.gains if word in str(gain.fix)]
    return at_most
