"""What launching costs: the calls of the host, the delay until the work begins, and how much work waits meanwhile."""

from dataclasses import dataclass

import numpy as np

from boundby.trace.intervals import distinct
from boundby.trace.links import Links
from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT
from boundby.trace.window import Window


@dataclass(frozen=True)
class Spread:
    """Median, 95th percentile and maximum of a number of durations, in ns."""

    median_ns: int
    p95_ns: int
    max_ns: int


@dataclass(frozen=True)
class LaunchStats:
    """The launching calls that begin in the window and the work that they put into the queues of a device.

    Where there is nothing to take a spread of, it is None. `delay` is the time from the start of the call to the start
    of the work: short where the device waits for the host, long where the host runs ahead.
    """

    calls: int
    calls_without_work: int  # lost records, or work after the end of the trace
    work: int
    work_without_call: int
    call: Spread | None
    delay: Spread | None
    shorter_than_call: int  # kernels that take less time than the call that launched them
    mean_queue: float | None  # launched and not begun, over the time of the window
    deepest_queue: int
    empty_queue_share: float | None  # of the window; the device then has nothing else to begin


def launch_stats(trace: Trace, linked: Links, window: Window) -> LaunchStats:
    """Return the statistics over all devices of the trace."""
    calls = linked.calls[_inside(trace.start_ns[linked.calls], window)]
    has_call = linked.launch != ABSENT
    has_work = np.zeros(len(trace.start_ns), dtype=bool)
    has_work[linked.launch[has_call]] = True
    call_ns = np.maximum(trace.duration_ns, 0)
    work = np.flatnonzero(_inside(linked.start_ns, window))
    joined = work[has_call[work]]
    delay_ns = linked.start_ns[joined] - trace.start_ns[linked.launch[joined]]
    kernels = joined[trace.in_categories(["kernel"])[linked.rows[joined]]]
    shorter = linked.end_ns[kernels] - linked.start_ns[kernels] < call_ns[linked.launch[kernels]]
    mean_queue, deepest, empty = _queue(trace.start_ns[linked.launch[joined]], linked.start_ns[joined], window)
    return LaunchStats(
        calls=len(calls),
        calls_without_work=int((~has_work[calls]).sum()),
        work=len(work),
        work_without_call=int((~has_call[work]).sum()),
        call=spread(call_ns[distinct(np.sort(linked.launch[joined]))]),
        delay=spread(delay_ns),
        shorter_than_call=int(shorter.sum()),
        mean_queue=mean_queue,
        deepest_queue=deepest,
        empty_queue_share=empty,
    )


def spread(nanoseconds: np.ndarray) -> Spread | None:
    """Return the spread of some durations; None of none."""
    if not len(nanoseconds):
        return None
    ascending, last = np.sort(nanoseconds), len(nanoseconds) - 1
    median, p95 = (int(ascending[-(-last * percent // 100)]) for percent in (50, 95))  # the next higher of two
    return Spread(median, p95, int(ascending[last]))


def _inside(moments: np.ndarray, window: Window) -> np.ndarray:
    return (moments >= window.start_ns) & (moments < window.end_ns)


def _queue(launched: np.ndarray, begun: np.ndarray, window: Window) -> tuple[float | None, int, float | None]:
    """Return the mean and the largest number of launched pieces of work that wait, and the share of time without."""
    sound = launched < begun
    moments = np.concatenate([launched[sound], begun[sound]])
    if not window.length_ns:
        return None, 0, None
    change = np.concatenate([np.ones(sound.sum(), np.int64), -np.ones(sound.sum(), np.int64)])
    order = np.argsort(moments, kind="stable")
    moments = np.clip(moments[order], window.start_ns, window.end_ns)
    depth = np.concatenate([[0], np.cumsum(change[order])])
    lengths = np.diff(np.concatenate([[window.start_ns], moments, [window.end_ns]]))
    waiting = float((depth * lengths.astype(np.float64)).sum())
    empty = int(lengths[depth == 0].sum())
    return waiting / window.length_ns, int(depth.max()), empty / window.length_ns
