"""Time a callable: alone, in a row, and until it is warm. The clock and the device's barrier are arguments."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Clock = Callable[[], float]
Work = Callable[[], object]


def _no_wait() -> None:
    """Wait for nothing: a CPU has finished when the call returns."""


@dataclass(frozen=True)
class Timer:
    """A clock in seconds, and a call that waits until the device has done all queued work."""

    clock: Clock = time.perf_counter
    synchronize: Callable[[], None] = _no_wait

    def isolated(self, work: Work) -> float:
        """Return the seconds of one call, from an idle device to an idle device."""
        self.synchronize()
        start = self.clock()
        work()
        self.synchronize()
        return self.clock() - start

    def pipelined(self, works: Iterable[Work]) -> float:
        """Return the seconds of all calls queued one after another, with one wait at the end."""
        self.synchronize()
        start = self.clock()
        for work in works:
            work()
        self.synchronize()
        return self.clock() - start


@dataclass(frozen=True)
class WarmUp:
    """How a warm-up went: calls made, seconds spent, and whether two windows agreed before the cap."""

    runs: int
    seconds: float
    converged: bool


@dataclass(frozen=True)
class WarmUpRule:
    """When a callable counts as warm: twice in a row the medians of neighbouring windows agree within `tolerance`.

    `cap_s` ends a warm-up that does not converge; `least_runs` calls are made all the same.
    """

    least_runs: int = 5
    least_s: float = 1.0
    window_runs: int = 10
    window_s: float = 0.25
    tolerance: float = 0.03
    cap_s: float = 10.0


def warm_up(work: Work, timer: Timer, rule: WarmUpRule) -> WarmUp:
    """Call `work` until `rule` holds or its cap is reached; the calls go through the timer like the measured ones."""
    runs, seconds, agreements = 0, 0.0, 0
    previous: float | None = None
    while seconds < rule.cap_s or runs < rule.least_runs:
        window = [timer.isolated(work)]
        while (len(window) < rule.window_runs or sum(window) < rule.window_s) and seconds + sum(window) < rule.cap_s:
            window.append(timer.isolated(work))
        runs += len(window)
        seconds += sum(window)
        median = statistics.median(window)
        is_whole = seconds < rule.cap_s  # the cap cuts a window short, and those after it to one call
        agrees = is_whole and previous is not None and abs(median - previous) <= rule.tolerance * previous
        agreements = agreements + 1 if agrees else 0
        previous = median
        if agreements >= 2 and runs >= rule.least_runs and seconds >= rule.least_s:
            return WarmUp(runs, seconds, converged=True)
    return WarmUp(runs, seconds, converged=False)
