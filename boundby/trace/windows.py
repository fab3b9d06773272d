"""The stretch of time that a trace is judged by, its steps, and what the program takes out of it."""

import re

import msgspec
import numpy as np

from boundby.trace.intervals import Intervals, distinct, union
from boundby.trace.linking import Links
from boundby.trace.table import ABSENT, ANNOTATION, HOST_CATEGORIES, Trace, chosen

EXCLUDED = "excluded: "  # in front of the name of the range
MARK = re.compile(f"^{EXCLUDED}")


class Window(msgspec.Struct, frozen=True):
    """From the start of the first step to the end of the last one and of all work that was launched until then.

    Step k lasts from `edges_ns[k]` to `edges_ns[k + 1]`: what the host does after a step belongs to it. Work of a
    device that still runs after the last step lies in the window and in no step. Without `ProfilerStep` marks, `steps`
    is empty, the only edge is the start, and the window is that of all events.
    """

    steps: tuple[int, ...]  # the numbers in the marks
    edges_ns: np.ndarray  # since the base of the trace; one more than steps
    end_ns: int
    repeated: tuple[int, ...] = ()  # steps whose number is marked again after the first mark with it has ended

    @property
    def start_ns(self) -> int:
        """When the window begins."""
        return int(self.edges_ns[0])

    @property
    def length_ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.start_ns


def window(trace: Trace, linked: Links) -> Window:
    """Return the window of the trace; one without events begins and ends at 0."""
    marks = np.flatnonzero(trace.is_step_mark & ~trace.in_categories(["gpu_user_annotation"]))
    if not len(marks):
        rows = np.flatnonzero(trace.in_categories(HOST_CATEGORIES))
        starts = np.concatenate([trace.start_ns[rows], linked.start_ns])
        ends = np.concatenate([trace.start_ns[rows] + np.maximum(trace.duration_ns[rows], 0), linked.end_ns])
        if not len(starts):
            return Window((), np.zeros(1, dtype=np.int64), 0)
        return Window((), np.array([starts.min()]), int(ends.max()))
    marks = marks[np.argsort(trace.start_ns[marks], kind="stable")]
    start_ns = trace.start_ns[marks]
    end_ns = start_ns + np.maximum(trace.duration_ns[marks], 0)
    of_mark = [int(trace.names[name].rpartition("#")[2]) for name in trace.name[marks].tolist()]
    # A mark may stand in the trace once per thread.
    numbers, first, number = np.unique(of_mark, return_index=True, return_inverse=True)
    is_again = (start_ns >= end_ns[first][number]) & (start_ns > start_ns[first][number])
    repeated = numbers[distinct(np.sort(number[is_again]))]
    order = np.argsort(start_ns[first], kind="stable")
    end = int(end_ns.max())
    launched = linked.launch != ABSENT
    launched[launched] = trace.start_ns[linked.launch[launched]] < end
    last = max(end, int(linked.end_ns[launched].max(initial=end)))
    edges_ns = np.append(start_ns[first][order], end)
    return Window(tuple(numbers[order].tolist()), edges_ns, last, tuple(repeated.tolist()))


def without_excluded(trace: Trace) -> Trace:
    """Return the trace as if the host had never been in a range whose name begins with `EXCLUDED`.

    What lies in one is left out, and what comes after it moves to its begin. Work of a device belongs to the range
    during which it runs, so whoever marks one lets the device finish at both ends.
    """
    marks = np.flatnonzero(trace.in_categories([ANNOTATION]) & trace.named(MARK))
    spans = union(trace.start_ns[marks], trace.start_ns[marks] + trace.duration_ns[marks])
    if not len(spans):
        return trace
    end_ns = trace.start_ns + np.maximum(trace.duration_ns, 0)
    kept = ~_are_inside(trace.start_ns, end_ns, spans)
    moved = _moved(trace.start_ns, spans)
    duration_ns = np.where(trace.duration_ns < 0, trace.duration_ns, _moved(end_ns, spans) - moved)
    changes = trace.memory.start_ns
    memory = msgspec.structs.replace(trace.memory, start_ns=_moved(changes, spans))
    return msgspec.structs.replace(
        chosen(msgspec.structs.replace(trace, start_ns=moved, duration_ns=duration_ns), kept),
        memory=chosen(memory, ~_are_inside(changes, changes, spans)),
    )


def _are_inside(start_ns: np.ndarray, end_ns: np.ndarray, spans: Intervals) -> np.ndarray:
    """Return a mask of the events that lie wholly in one of the spans."""
    span = np.searchsorted(spans.start_ns, start_ns, side="right") - 1
    return (span >= 0) & (end_ns <= spans.end_ns[span])


def _moved(moments: np.ndarray, spans: Intervals) -> np.ndarray:
    """Return the moments, each moved back by the length of the spans before it."""
    earlier: np.ndarray = moments - spans.covered_until(moments)
    return earlier
