"""Time a callable: alone, in a row, on the device, on the host, and until it is warm.

The clock, the device's barrier and its queue are arguments. Four times of one call are kept apart: `isolated` is what a
request waits, `pipelined` what a stream of calls costs each, `on_device` how long the device computes when nothing
keeps it waiting, `enqueue` how long the host needs to issue the call.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Clock = Callable[[], float]
Work = Callable[[], object]
Chunked = Callable[[Callable[[], None]], object]  # a call that calls its argument before each chunk of its launches
Way = Literal["backlog", "graph", "chunks", "kernels"]  # in which a device time was taken, as `device_time` has them
BACKLOG_SHARE = 1.5  # of the time to issue the call
# Launches and events that a GPU takes before the host must wait for it: not documented, about 1,024 where it was seen.
# Beyond it the host's times hold waiting, and a held device says nothing of who was late.
QUEUE_DEPTH = 1024
MOST_HELD = QUEUE_DEPTH * 3 // 4  # operators and marks that are tried behind one backlog: some are several launches
CHUNK = QUEUE_DEPTH // 4  # those of a call of more than that which go behind one
LEAST_BACKLOG_S, MOST_BACKLOG_S = 1e-3, 0.1


class DeviceQueue(Protocol):
    """The queue of a device that runs behind the host, with marks that the device passes in order."""

    def hold(self, seconds: float) -> None:
        """Queue work that keeps the device busy for about this long."""
        ...

    def mark(self) -> Any:
        """Queue a mark and return it."""
        ...

    def has_passed(self, mark: Any) -> bool:
        """Tell whether the device has passed the mark, without waiting."""
        ...

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds of device time between two marks that it has passed."""
        ...


@dataclass(frozen=True)
class DeviceTime:
    """Seconds that the device needed for a call, and in which way they were taken; None, with the reason, without."""

    seconds: float | None
    reason: str | None = None
    by: Way | None = None


def _no_wait() -> None:
    """Wait for nothing: a CPU has finished when the call returns."""


@dataclass
class Backlogs:
    """Holds the device at the begin of each chunk of a call until the host has issued it, `enqueue_s` for each.

    `chunks` are the marks at the begin and the end of those that are over. `was_late`: the device reached one of them
    before the host had issued all of it.
    """

    queue: DeviceQueue
    synchronize: Callable[[], None]
    enqueue_s: Sequence[float]
    chunks: list[tuple[Any, Any]] = field(default_factory=list)
    was_late: bool = False
    _start: Any = None

    def begin(self) -> None:
        """End the chunk before, and begin the next one on an idle device."""
        self.finish()
        expected_s = self.enqueue_s[min(len(self.chunks), len(self.enqueue_s) - 1)]
        self.queue.hold(min(MOST_BACKLOG_S, max(LEAST_BACKLOG_S, BACKLOG_SHARE * expected_s)))
        self._start = self.queue.mark()

    def finish(self) -> None:
        """End the last chunk, and wait until the device has done it."""
        if self._start is not None:
            self.chunks.append((self._start, self.queue.mark()))
            self.was_late = self.queue.has_passed(self._start) or self.was_late
            self._start = None
        self.synchronize()


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

    def enqueue(self, work: Work) -> float:
        """Return the seconds in which the host issues one call into an empty queue; the device's work comes after."""
        self.synchronize()
        start = self.clock()
        work()
        seconds = self.clock() - start
        self.synchronize()
        return seconds

    def on_device(self, work: Work, queue: DeviceQueue, enqueue_s: float) -> DeviceTime:
        """Return the device's own time for one call that the host needs `enqueue_s` to issue.

        A backlog holds the device until all of the call is queued, so that no gap of the host counts; a pair of events
        alone would measure those gaps. If the device reached the call before the host had issued it, there is no time.
        """
        if BACKLOG_SHARE * enqueue_s > MOST_BACKLOG_S:
            return DeviceTime(None, f"issuing the call takes {enqueue_s * 1e3:.0f} ms, longer than a backlog may be")

        def run(begin: Callable[[], None]) -> None:
            begin()
            work()

        return self.in_chunks(run, queue, [enqueue_s], "backlog")

    def enqueue_chunks(self, run: Chunked) -> list[float]:
        """Return the seconds in which the host issues each chunk into an empty queue."""
        starts: list[float] = []
        ends: list[float] = []

        def begin() -> None:
            ends.append(self.clock())
            self.synchronize()
            starts.append(self.clock())

        run(begin)
        ends.append(self.clock())
        self.synchronize()
        return [end - start for start, end in zip(starts, ends[1:], strict=True)]

    def in_chunks(self, run: Chunked, queue: DeviceQueue, enqueue_s: Sequence[float], by: Way = "chunks") -> DeviceTime:
        """Return the device's own time for a call, the sum over its chunks, each behind a backlog of its own.

        `enqueue_s` is what the host needs for each chunk, as `enqueue_chunks` gives it. For a call of more launches
        than the queue holds one backlog cannot be enough.
        """
        backlogs = Backlogs(queue, self.synchronize, enqueue_s)
        run(backlogs.begin)
        backlogs.finish()
        if backlogs.was_late:
            return DeviceTime(None, "the device reached the call before the host had issued all of it")
        return DeviceTime(sum(queue.seconds_between(*chunk) for chunk in backlogs.chunks), by=by)


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
