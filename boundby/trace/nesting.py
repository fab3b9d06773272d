"""What encloses what on the threads of the host, and which event was innermost at each moment."""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from boundby.trace.lanes import Lanes, Segments
from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT, LAUNCH_CATEGORIES, OPERATOR, PYTHON_FRAME

HOST_CATEGORIES = (OPERATOR, "user_annotation", PYTHON_FRAME, *LAUNCH_CATEGORIES)
DEEP = 16  # levels that are gone through one by one


@dataclass(frozen=True)
class HostTree:
    """The nesting of operators, annotations, Python frames and calls of the runtime, thread by thread.

    `parent` has a value for every event of the trace: the row of the event that encloses it most closely, or `ABSENT`.
    Where events of one thread overlap without nesting, the one that began last encloses what begins while it runs.
    """

    parent: np.ndarray
    segments: Segments
    is_active: np.ndarray  # of each thread, whether it has an event that lasts

    def nearest(self, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Return, for each of `rows`, itself or its closest encloser that is `wanted` (a mask of all), or `ABSENT`."""
        found, outer = rows.copy(), self.parent
        searching = np.flatnonzero((found != ABSENT) & ~wanted[found])
        for level in itertools.count():
            if not len(searching):
                return found
            found[searching] = outer[found[searching]]
            searching = searching[(found[searching] != ABSENT) & ~wanted[found[searching]]]
            if level >= DEEP:  # skip ever more levels at once: frames may be nested by the thousand
                passes = (outer != ABSENT) & ~wanted[outer]
                outer = np.where(passes, outer[outer], outer)


def host_tree(trace: Trace) -> HostTree:
    """Return the nesting of the host's events; those without a positive duration enclose nothing."""
    parent = np.full(len(trace.start_ns), ABSENT, dtype=np.int64)
    on_host = trace.in_categories(HOST_CATEGORIES)
    lasts = trace.duration_ns > 0
    rows = np.flatnonzero(on_host & lasts)
    start_ns, end_ns, thread = trace.start_ns[rows], trace.start_ns[rows] + trace.duration_ns[rows], trace.thread[rows]
    lanes = Lanes(len(trace.threads), np.concatenate([start_ns, end_ns]))
    start, end = lanes.place(thread, start_ns), lanes.place(thread, end_ns)
    order = np.lexsort((-end, start))
    rows = np.append(rows[order], ABSENT)  # so that the place ABSENT, which is -1, is taken from here
    outer, moments, innermost = _nest(start[order], end[order], thread[order])
    parent[rows[:-1]] = rows[outer]
    segments = Segments(lanes, moments, lanes.moments(moments), np.append(rows[innermost], ABSENT))
    instant = np.flatnonzero(on_host & ~lasts)
    if len(instant):
        parent[instant] = segments.row_at(trace.thread[instant], trace.start_ns[instant])
    is_active = np.zeros(len(trace.threads), dtype=bool)
    is_active[thread] = True
    return HostTree(parent, segments, is_active)


def _nest(start: np.ndarray, end: np.ndarray, thread: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the place of the closest enclosing interval, the moments at which the innermost changes, and to which.

    Takes the intervals by start and, from the same start, the longest first.
    """
    outer, is_nested = _enclosing(start, end)
    if is_nested.all():
        return outer, *_changes(start, end, outer, np.arange(len(start)))
    is_odd = np.isin(thread, thread[~is_nested])
    good, odd = np.flatnonzero(~is_odd), np.flatnonzero(is_odd)
    moments, innermost = _changes(start[good], end[good], outer[good], good)
    walked, walked_moments, walked_innermost = _walk(start[odd].tolist(), end[odd].tolist())
    odd = np.append(odd, ABSENT)
    outer[odd[:-1]] = odd[walked]
    moments = np.concatenate([moments, walked_moments])
    order = np.argsort(moments, kind="stable")
    return outer, moments[order], np.concatenate([innermost, odd[walked_innermost]])[order]


def _enclosing(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of the closest enclosing interval, and whether this is so: not where some overlap otherwise.

    The enclosing one is the last of those one level further out that began before.
    """
    count = len(start)
    places = np.arange(count)
    depth = places - np.searchsorted(np.sort(end), start, side="right")
    keys = np.sort(depth * count + places)
    before = np.searchsorted(keys, (depth - 1) * count + places) - 1
    is_inner = depth > 0
    outer = np.where(is_inner, keys[np.maximum(before, 0)] % max(count, 1), ABSENT)
    return outer, ~is_inner | ((depth[outer] == depth - 1) & (end[outer] >= end))


def _changes(
    start: np.ndarray, end: np.ndarray, outer: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the moments at which the innermost of properly nested intervals changes, and its place from then on."""
    # At the same moment ends come before starts, and inner ends before outer ones; the last of them is what holds.
    moments = np.concatenate([end[::-1], start])
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    holds = np.ones(len(moments), dtype=bool)
    holds[:-1] = moments[:-1] != moments[1:]
    return moments[holds], np.concatenate([outer[::-1], places])[order[holds]]


def _walk(starts: list[int], ends: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `_nest` does, for intervals that may overlap without nesting, in a tenth of its speed."""
    outer = [ABSENT] * len(starts)
    moments: list[int] = []
    innermost: list[int] = []
    stack: list[int] = []

    def advance(until: float) -> None:
        while stack and ends[stack[-1]] <= until:
            moment = ends[stack.pop()]
            while stack and ends[stack[-1]] <= moment:  # began earlier, and has ended while the inner one still ran
                stack.pop()
            change(moment, stack[-1] if stack else ABSENT)

    def change(moment: int, place: int) -> None:
        if moments and moments[-1] == moment:
            innermost[-1] = place
        else:
            moments.append(moment)
            innermost.append(place)

    for place, start in enumerate(starts):
        advance(start)
        if stack:
            outer[place] = stack[-1]
        stack.append(place)
        change(start, place)
    advance(math.inf)
    return np.array(outer, np.int64), np.array(moments, np.int64), np.array(innermost, np.int64)
