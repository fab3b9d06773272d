"""Intervals of integer nanoseconds: sets of them, and how those of the host's threads enclose one another."""

import msgspec
import numpy as np

from boundby.trace.table import ABSENT, HOST_CATEGORIES, Trace


class Intervals(msgspec.Struct, frozen=True):
    """Disjoint intervals in ascending order, none empty: `start_ns[i]` to `end_ns[i]`, the end excluded."""

    start_ns: np.ndarray
    end_ns: np.ndarray

    def __len__(self) -> int:
        """Return the number of intervals."""
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """The sum of the lengths."""
        return int((self.end_ns - self.start_ns).sum())

    def covered_until(self, moments: np.ndarray) -> np.ndarray:
        """Return, for each moment, how many ns before it lie in one of the intervals."""
        if not len(self):
            return np.zeros(len(moments), dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])
        following = np.searchsorted(self.start_ns, moments, side="right")  # of the first interval that begins later
        last = np.maximum(following - 1, 0)
        beyond = np.where(following > 0, np.maximum(self.end_ns[last] - moments, 0), 0)
        return before[following] - beyond

    def between(self, edges: np.ndarray) -> np.ndarray:
        """Return the covered ns of each span between neighbouring `edges`."""
        return np.diff(self.covered_until(edges))

    def complement(self, start_ns: int, end_ns: int) -> "Intervals":
        """Return what of `start_ns` to `end_ns` lies in no interval."""
        starts = np.concatenate([[start_ns], np.clip(self.end_ns, start_ns, end_ns)])
        ends = np.concatenate([np.clip(self.start_ns, start_ns, end_ns), [end_ns]])
        filled = starts < ends
        return Intervals(starts[filled], ends[filled])

    def intersection(self, other: "Intervals") -> "Intervals":
        """Return what lies in both."""
        few, many = (self, other) if len(self) <= len(other) else (other, self)
        first = np.searchsorted(many.end_ns, few.start_ns, side="right")
        counts = np.searchsorted(many.start_ns, few.end_ns, side="left") - first
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        of_few, of_many = np.repeat(np.arange(len(few)), counts), np.repeat(first, counts) + within
        return Intervals(
            np.maximum(few.start_ns[of_few], many.start_ns[of_many]),
            np.minimum(few.end_ns[of_few], many.end_ns[of_many]),
        )


def union(start_ns: np.ndarray, end_ns: np.ndarray) -> Intervals:
    """Return the moments that lie in at least one of the given intervals; empty and negative ones hold none."""
    filled = start_ns < end_ns
    start_ns, end_ns = start_ns[filled], end_ns[filled]
    order = np.argsort(start_ns, kind="stable")
    start_ns, furthest = start_ns[order], np.maximum.accumulate(end_ns[order])
    opens = np.ones(len(start_ns), dtype=bool)
    opens[1:] = start_ns[1:] > furthest[:-1]
    first = np.flatnonzero(opens)
    last = np.concatenate([first[1:], [len(start_ns)]])[: len(first)] - 1
    return Intervals(start_ns[first], furthest[last])


def sums(group: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Return the exact sum of the values of each of `count` groups."""
    totals = np.zeros(count, dtype=np.int64)
    np.add.at(totals, group, values)
    return totals


def distinct(ascending: np.ndarray) -> np.ndarray:
    """Return each of the sorted values once. np.unique hashes integers, ten times as long, and loads numpy.ma."""
    return ascending[np.append(True, ascending[1:] != ascending[:-1])] if len(ascending) else ascending


LAST_PLACE = 2**63 - 1


class Lanes:
    """An axis on which `moments` keep their order within a thread and those of a later thread come later.

    Any other moment takes the place of the last one of `moments` before it. Thread `ABSENT` comes before all others.
    """

    def __init__(self, threads: int, moments: np.ndarray) -> None:
        first, last = int(moments.min(initial=0)), int(moments.max(initial=0))
        self._before, self._last = first - 1, last
        self._length = last - first + 2
        self._known = None
        if self._length * (threads + 1) > LAST_PLACE:  # years between two events: ranks take the place of times
            self._known = distinct(np.sort(moments))
            self._length = len(self._known) + 1

    def position(self, thread: np.ndarray | int, moments: np.ndarray) -> np.ndarray:
        """Return the place of each moment of a thread."""
        if self._known is None:
            within = np.clip(moments, self._before, self._last) - self._before
        else:
            within = np.searchsorted(self._known, moments, side="right")
        positions: np.ndarray = np.asarray(thread, dtype=np.int64) * self._length + within
        return positions

    def moments(self, positions: np.ndarray) -> np.ndarray:
        """Return which of the `moments` stand at these places."""
        within = positions % self._length
        moments: np.ndarray = within + self._before if self._known is None else self._known[within - 1]
        return moments


class Segments(msgspec.Struct, frozen=True):
    """The moments of every thread at which another event becomes the innermost one, in ascending order of `position`.

    From `start_ns[i]` to `start_ns[i + 1]` the event in row `row[i]` of the trace is innermost, or none (`ABSENT`). The
    last one of a thread is `ABSENT`, and so is one more `row` behind all, which is that of the index `ABSENT`.
    """

    lanes: Lanes
    position: np.ndarray
    start_ns: np.ndarray
    row: np.ndarray

    def at(self, thread: np.ndarray | int, moments: np.ndarray) -> np.ndarray:
        """Return the index of the last change up to each moment; that of one without an event leads to `ABSENT`."""
        return np.searchsorted(self.position, self.lanes.position(thread, moments), side="right") - 1

    def row_at(self, thread: np.ndarray | int, moments: np.ndarray) -> np.ndarray:
        """Return the row that is innermost on a thread at each moment, or `ABSENT`."""
        rows: np.ndarray = self.row[self.at(thread, moments)]
        return rows


DEEP = 16  # levels that are gone through one by one


class HostTree(msgspec.Struct, frozen=True):
    """The nesting of operators, annotations, Python frames and calls of the runtime, thread by thread.

    `parent` has a value for every event of the trace: the row of the event that encloses it most closely, or `ABSENT`.
    Where events of one thread overlap without nesting, the one that began last encloses what begins while it runs.
    """

    parent: np.ndarray
    segments: Segments
    is_active: np.ndarray  # of each thread, whether it has an event that lasts

    def nearest(self, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Return, for each of `rows`, itself or its closest encloser that is `wanted` (a mask of all), or `ABSENT`."""
        enclosing, outer = rows.copy(), self.parent
        searching = np.flatnonzero((enclosing != ABSENT) & ~wanted[enclosing])
        level = 0
        while len(searching):
            enclosing[searching] = outer[enclosing[searching]]
            searching = searching[(enclosing[searching] != ABSENT) & ~wanted[enclosing[searching]]]
            level += 1
            if level > DEEP:  # skip ever more levels at once: frames may be nested by the thousand
                passes = (outer != ABSENT) & ~wanted[outer]
                outer = np.where(passes, outer[outer], outer)
        return enclosing


def host_tree(trace: Trace) -> HostTree:
    """Return the nesting of the host's events; those without a positive duration enclose nothing."""
    parent = np.full(len(trace.start_ns), ABSENT, dtype=np.int64)
    on_host = trace.in_categories(HOST_CATEGORIES)
    lasts = trace.duration_ns > 0
    rows = np.flatnonzero(on_host & lasts)
    start_ns, end_ns, thread = trace.start_ns[rows], trace.start_ns[rows] + trace.duration_ns[rows], trace.thread[rows]
    lanes = Lanes(len(trace.threads), np.concatenate([start_ns, end_ns]))
    start, end = lanes.position(thread, start_ns), lanes.position(thread, end_ns)
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
    walked, walked_moments, walked_innermost = _overlapping(start[odd], end[odd])
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
    index = np.arange(count)
    depth = index - np.searchsorted(np.sort(end), start, side="right")
    keys = np.sort(depth * count + index)
    before = np.searchsorted(keys, (depth - 1) * count + index) - 1
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


def _overlapping(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `_nest` does, for intervals that may overlap without nesting, as whole µs make them.

    An interval lasts as long as what began in it, so stretches without a break are the outermost ones, each begun by
    the one that encloses all others of it; what is left of each is taken apart the same way, level by level.
    """
    outer, lasting = np.full(len(start), ABSENT), end.copy()
    left = np.arange(len(start))
    while len(left):
        furthest = np.maximum.accumulate(end[left])
        opens = np.append(True, start[left[1:]] >= furthest[:-1])
        first = np.flatnonzero(opens)
        lasting[left[first]] = furthest[np.append(first[1:], len(left)) - 1]
        around = left[first][np.cumsum(opens) - 1]
        left, around = left[~opens], around[~opens]
        outer[left] = around
    return outer, *_changes(start, lasting, outer, np.arange(len(start)))
