"""Idle time cut into pieces, each booked on one cause; while the host is late, what it does is the cause."""

from dataclasses import dataclass

import numpy as np

from boundby.trace.activity import ALLOCATOR, COMPILE, INPUT, LAUNCH, NOTHING, SYNCHRONISATION, Activity
from boundby.trace.lanes import Segments
from boundby.trace.table import ABSENT

CAUSES = (
    "input",
    "synchronisation",
    "launch",
    "allocator",
    "compile",
    "launch_latency",
    "stream_wait",
    "untraced",
)
LATENCY, STREAM_WAIT, UNTRACED = (CAUSES.index(cause) for cause in ("launch_latency", "stream_wait", "untraced"))
CAUSE_OF_KIND = {
    NOTHING: "untraced",
    LAUNCH: "launch",
    INPUT: "input",
    SYNCHRONISATION: "synchronisation",
    ALLOCATOR: "allocator",
    COMPILE: "compile",
}
_CAUSE_OF_KIND = np.array([CAUSES.index(CAUSE_OF_KIND[kind]) for kind in range(len(CAUSE_OF_KIND))])


@dataclass(frozen=True)
class Pieces:
    """Disjoint stretches of time in ascending order, the place of the cause of each in `CAUSES`, and what tells it.

    `row` is that of the event that the host was in, or `ABSENT`.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    cause: np.ndarray
    row: np.ndarray

    def between(self, edges: np.ndarray) -> np.ndarray:
        """Return [span, cause]: the ns of each span between neighbouring `edges`; the outer ones enclose all pieces."""
        spans = np.zeros((len(edges) - 1, len(CAUSES)), dtype=np.int64)
        span = np.searchsorted(edges, self.start_ns, side="right") - 1
        np.add.at(spans.reshape(-1), span * len(CAUSES) + self.cause, self.end_ns - self.start_ns)
        # Each piece is now in the span in which it begins; what of it lies behind an edge belongs to the next one.
        inner = edges[1:-1]
        piece = np.searchsorted(self.start_ns, inner, side="left") - 1
        crossed = np.flatnonzero((piece >= 0) & (np.append(self.end_ns, 0)[piece] > inner))
        piece = piece[crossed]
        behind_ns = self.end_ns[piece] - inner[crossed]
        spans[crossed, self.cause[piece]] -= behind_ns
        spans[crossed + 1, self.cause[piece]] += behind_ns
        return spans


def joined(*parts: Pieces) -> Pieces:
    """Return all pieces that last, in the order of time."""
    start_ns, end_ns, cause, row = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("start_ns", "end_ns", "cause", "row")
    )
    lasting = np.flatnonzero(start_ns < end_ns)
    lasting = lasting[np.argsort(start_ns[lasting], kind="stable")]
    return Pieces(start_ns[lasting], end_ns[lasting], cause[lasting], row[lasting])


def late_device(start_ns: np.ndarray, end_ns: np.ndarray, cause: np.ndarray) -> Pieces:
    """Return pieces in which the host had launched and the device had not begun; some may be empty."""
    return Pieces(start_ns, end_ns, cause, np.full(len(start_ns), ABSENT))


def late_host(activity: Activity, start_ns: np.ndarray, end_ns: np.ndarray, thread: np.ndarray) -> Pieces:
    """Return disjoint ascending stretches in which the host had not launched, cut where it went on to something else.

    Each is booked on what its own `thread` was doing and, where that did nothing, the `main` one. One that begins while
    the host waits for the device is a refill: launching counts to that wait.
    """
    late = np.flatnonzero(start_ns < end_ns)
    start_ns, end_ns, thread = start_ns[late], end_ns[late], thread[late]
    main = ABSENT if activity.main_thread is None else activity.main_thread
    segments, others = activity.segments, np.flatnonzero(thread != main)
    own, of_own = _changes_in(segments, thread, start_ns, end_ns)
    of_main, place = _changes_in(segments, main, start_ns[others], end_ns[others])
    moments = np.concatenate([start_ns, segments.start_ns[own], segments.start_ns[of_main]])
    stretch = np.concatenate([np.arange(len(late)), of_own, others[place]])
    order = np.argsort(moments, kind="stable")
    moments, stretch = moments[order], stretch[order]
    change = segments.at(thread[stretch], moments)
    idle = np.flatnonzero(activity.kind[change] == NOTHING)
    change[idle] = segments.at(main, moments[idle])
    kind = activity.kind[change]
    begins_in_wait = kind[np.searchsorted(stretch, np.arange(len(late)))] == SYNCHRONISATION
    kind = np.where((kind == LAUNCH) & begins_in_wait[stretch], SYNCHRONISATION, kind)
    ends = np.minimum(np.append(moments[1:], end_ns[-1:]), end_ns[stretch])
    return Pieces(moments, ends, _CAUSE_OF_KIND[kind], activity.row[change])


def _changes_in(
    segments: Segments, thread: np.ndarray | int, start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes after the start of each stretch up to its end on its thread, and the stretch of each."""
    first = segments.at(thread, start_ns) + 1
    counts = segments.at(thread, end_ns) + 1 - first
    stretch = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(stretch)) - (np.cumsum(counts) - counts - first)[stretch], stretch
