"""What encloses what on the threads of the host, and which event was innermost at each moment."""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT, LAUNCH_CATEGORIES, OPERATOR, PYTHON_FRAME

HOST_CATEGORIES = (OPERATOR, "user_annotation", PYTHON_FRAME, *LAUNCH_CATEGORIES)
DEEP = 16  # levels that are gone through one by one
FEW = 24  # events of a thread, for which a loop is faster than arrays


@dataclass(frozen=True)
class Segments:
    """The moments of one thread at which another event becomes the innermost one, in ascending order.

    From `start_ns[i]` to `start_ns[i + 1]` the event in row `row[i]` of the trace is innermost, or none (`ABSENT`).
    The last one is `ABSENT` and has no end.
    """

    start_ns: np.ndarray
    row: np.ndarray

    def row_at(self, moments: np.ndarray) -> np.ndarray:
        """Return the innermost row at each moment, or `ABSENT`."""
        if not len(self.row):
            return np.full(len(moments), ABSENT, dtype=np.int64)
        place = np.searchsorted(self.start_ns, moments, side="right") - 1
        return np.where(place >= 0, self.row[np.maximum(place, 0)], ABSENT)


@dataclass(frozen=True)
class HostTree:
    """The nesting of operators, annotations, Python frames and calls of the runtime, thread by thread.

    `parent` has a value for every event of the trace: the row of the event that encloses it most closely, or `ABSENT`.
    Where events of one thread overlap without nesting, the one that began last encloses what begins while it runs.
    """

    parent: np.ndarray
    segments: dict[int, Segments]  # by thread, as numbered in the trace

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
    segments: dict[int, Segments] = {}
    rows = np.flatnonzero(trace.in_categories(HOST_CATEGORIES))
    rows = rows[np.argsort(trace.thread[rows], kind="stable")]
    for of_thread in np.split(rows, np.flatnonzero(np.diff(trace.thread[rows])) + 1):
        if len(of_thread):
            segments[int(trace.thread[of_thread[0]])] = _nest(trace, of_thread, parent)
    return HostTree(parent, segments)


def _nest(trace: Trace, rows: np.ndarray, parent: np.ndarray) -> Segments:
    """Fill in `parent` for the rows of one thread and return its segments."""
    lasting = rows[trace.duration_ns[rows] > 0]
    lasting = lasting[np.lexsort((-trace.duration_ns[lasting], trace.start_ns[lasting]))]
    start_ns = trace.start_ns[lasting]
    end_ns = start_ns + trace.duration_ns[lasting]
    outer = None if len(lasting) < FEW else _enclosing(start_ns, end_ns)
    if outer is None:
        outer, moments, innermost = _walk(start_ns.tolist(), end_ns.tolist())
    else:
        moments, innermost = _changes(start_ns, end_ns, outer)
    lasting = np.append(lasting, ABSENT)  # so that the place ABSENT, which is -1, is taken from here
    parent[lasting[:-1]] = lasting[outer]
    segments = Segments(moments, lasting[innermost])
    instant = rows[trace.duration_ns[rows] <= 0]
    parent[instant] = segments.row_at(trace.start_ns[instant])
    return segments


def _enclosing(start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray | None:
    """Return the place of the closest enclosing interval, or None where intervals overlap without nesting.

    Takes them by start and, from the same start, the longest first. The enclosing one is the last of those one level
    further out that began before.
    """
    count = len(start_ns)
    places = np.arange(count)
    depth = places - np.searchsorted(np.sort(end_ns), start_ns, side="right")
    keys = np.sort(depth * count + places)
    before = np.searchsorted(keys, (depth - 1) * count + places) - 1
    outer = np.where(depth > 0, keys[np.maximum(before, 0)] % count, ABSENT)
    inner = np.flatnonzero(depth > 0)
    is_nested = (depth[outer[inner]] == depth[inner] - 1) & (end_ns[outer[inner]] >= end_ns[inner])
    return outer if is_nested.all() else None


def _changes(start_ns: np.ndarray, end_ns: np.ndarray, outer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the moments at which the innermost of properly nested intervals changes, and its place from then on."""
    places = np.arange(len(start_ns))
    # At the same moment ends come before starts, and inner ends before outer ones; the last of them is what holds.
    moments = np.concatenate([end_ns[::-1], start_ns])
    innermost = np.concatenate([outer[::-1], places])
    order = np.argsort(moments, kind="stable")
    moments, innermost = moments[order], innermost[order]
    holds = np.ones(len(moments), dtype=bool)
    holds[:-1] = moments[:-1] != moments[1:]
    return moments[holds], innermost[holds]


def _walk(starts: list[int], ends: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `_enclosing` and `_changes` do, for intervals that may overlap without nesting."""
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
