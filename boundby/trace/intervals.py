"""Arithmetic on sets of half-open intervals of integer nanoseconds."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Intervals:
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
        place = np.searchsorted(self.start_ns, moments, side="right")  # of the first interval that begins later
        last = np.maximum(place - 1, 0)
        beyond = np.where(place > 0, np.maximum(self.end_ns[last] - moments, 0), 0)
        return before[place] - beyond

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
        edges = distinct(np.sort(np.concatenate([self.start_ns, self.end_ns, other.start_ns, other.end_ns])))
        in_both = (self.between(edges) > 0) & (other.between(edges) > 0)
        return union(edges[:-1][in_both], edges[1:][in_both])


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


def distinct(ascending: np.ndarray) -> np.ndarray:
    """Return each of the sorted values once. np.unique hashes integers, ten times as long, and loads numpy.ma."""
    return ascending[np.append(True, ascending[1:] != ascending[:-1])] if len(ascending) else ascending
