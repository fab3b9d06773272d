"""Moments of many threads on one axis, thread behind thread, so that one sort and one search serve all of them."""

from dataclasses import dataclass

import numpy as np

from boundby.trace.intervals import distinct

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

    def place(self, thread: np.ndarray | int, moments: np.ndarray) -> np.ndarray:
        """Return the place of each moment of a thread."""
        if self._known is None:
            within = np.clip(moments, self._before, self._last) - self._before
        else:
            within = np.searchsorted(self._known, moments, side="right")
        return np.asarray(thread, dtype=np.int64) * self._length + within

    def moments(self, places: np.ndarray) -> np.ndarray:
        """Return which of the `moments` stand at these places."""
        within = places % self._length
        return within + self._before if self._known is None else self._known[within - 1]


@dataclass(frozen=True)
class Segments:
    """The moments of every thread at which another event becomes the innermost one, in ascending order of `place`.

    From `start_ns[i]` to `start_ns[i + 1]` the event in row `row[i]` of the trace is innermost, or none (`ABSENT`). The
    last one of a thread is `ABSENT`, and so is one more `row` behind all, which is that of the index `ABSENT`.
    """

    lanes: Lanes
    place: np.ndarray
    start_ns: np.ndarray
    row: np.ndarray

    def at(self, thread: np.ndarray | int, moments: np.ndarray) -> np.ndarray:
        """Return the index of the last change up to each moment; that of one without an event leads to `ABSENT`."""
        return np.searchsorted(self.place, self.lanes.place(thread, moments), side="right") - 1

    def row_at(self, thread: np.ndarray | int, moments: np.ndarray) -> np.ndarray:
        """Return the row that is innermost on a thread at each moment, or `ABSENT`."""
        return self.row[self.at(thread, moments)]
