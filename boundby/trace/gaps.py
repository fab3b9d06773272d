"""Why a device did nothing: every idle nanosecond of it booked on one cause.

A gap ends when the device begins something. Until the host began to launch that, the host was late, and what its
thread was doing meanwhile is the cause, whoever had waited before; afterwards the device was late. When the queue ran
dry because the host waited for the device, issuing work again counts to that wait, for as long as the wait had kept
the host from it while the device worked: so much would have been issued meanwhile, and no more.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property

import msgspec
import numpy as np

from boundby.trace.activity import GRAPH, KINDS, Activity, Kind
from boundby.trace.intervals import Intervals, Segments, sums
from boundby.trace.table import ABSENT, LAUNCH_CATEGORIES, PROFILER_STEP, Trace

CAUSES = (
    "input",
    "synchronisation",
    "launch",
    "allocator",
    "compile",
    "launch_latency",
    "stream_wait",
    "untraced",
    "python",
    "tokenizing",
    "garbage_collection",
    "saving",
    "loading",
    "driver",
    "graph_pause",
)
LATENCY, STREAM_WAIT, UNTRACED, PAUSE = map(CAUSES.index, ("launch_latency", "stream_wait", "untraced", "graph_pause"))
OTHER_CAUSES = {"nothing": "untraced", "call": "launch", "queued": "launch"}  # of all others it is the name
CAUSE_OF_KIND = np.array([CAUSES.index(OTHER_CAUSES.get(kind, kind)) for kind in KINDS])


class Pieces(msgspec.Struct, frozen=True):
    """Disjoint stretches of time in ascending order, the place of the cause of each in `CAUSES`, and what tells it.

    `row` is that of the event that the host was in, or `ABSENT`.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    cause: np.ndarray
    row: np.ndarray

    def between(self, edges: np.ndarray) -> np.ndarray:
        """Return [span, cause]: the ns of each span between neighbouring `edges`; the outer ones enclose all pieces."""
        count, span = len(edges) - 1, np.searchsorted(edges, self.start_ns, side="right") - 1
        spans = sums(span * len(CAUSES) + self.cause, self.end_ns - self.start_ns, count * len(CAUSES))
        spans = spans.reshape(count, len(CAUSES))
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


class HostPieces(msgspec.Struct, frozen=True):
    """Disjoint ascending stretches of time, cut where the host went on to something else: the kind of each and its row.

    Each tells what its own thread was doing and, where that did nothing, the main one.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    kind: np.ndarray
    row: np.ndarray
    stretch: np.ndarray  # the place of that which each is a piece of


def host_pieces(activity: Activity, start_ns: np.ndarray, end_ns: np.ndarray, thread: np.ndarray) -> HostPieces:
    """Return the pieces of disjoint ascending stretches of time, each of a `thread`; none may be empty."""
    main = ABSENT if activity.main_thread is None else activity.main_thread
    segments, others = activity.segments, np.flatnonzero(thread != main)
    own, of_own = _changes_in(segments, thread, start_ns, end_ns)
    of_main, index = _changes_in(segments, main, start_ns[others], end_ns[others])
    moments = np.concatenate([start_ns, segments.start_ns[own], segments.start_ns[of_main]])
    stretch = np.concatenate([np.arange(len(start_ns)), of_own, others[index]])
    order = np.argsort(moments, kind="stable")
    moments, stretch = moments[order], stretch[order]
    change = segments.at(thread[stretch], moments)
    idle = np.flatnonzero(activity.kind[change] == Kind.NOTHING)
    change[idle] = segments.at(main, moments[idle])
    ends = np.minimum(np.append(moments[1:], end_ns[-1:]), end_ns[stretch])
    return HostPieces(moments, ends, activity.kind[change], activity.row[change], stretch)


def late_host(activity: Activity, start_ns: np.ndarray, end_ns: np.ndarray, thread: np.ndarray) -> Pieces:
    """Return disjoint ascending stretches in which the host had not launched, each piece booked on what it was doing.

    One that begins while the host waits for the device, or frees memory, which waits as well, is a refill: launching
    counts to that wait, for as long as the wait had lasted when the device ran dry.
    """
    late = np.flatnonzero(start_ns < end_ns)
    start_ns, thread = start_ns[late], thread[late]
    pieces = host_pieces(activity, start_ns, end_ns[late], thread)
    cause = CAUSE_OF_KIND[pieces.kind]
    first = np.searchsorted(pieces.stretch, np.arange(len(late)))  # a piece may be empty, none is missing
    refills = np.flatnonzero(np.isin(pieces.kind[first], (Kind.SYNCHRONISATION, Kind.ALLOCATOR)))
    if not len(refills):
        return Pieces(pieces.start_ns, pieces.end_ns, cause, pieces.row)
    waited_ns = np.zeros(len(late), dtype=np.int64)
    waited_ns[refills] = start_ns[refills] - _began_waiting(activity, thread[refills], start_ns[refills])
    lasts = pieces.end_ns - pieces.start_ns
    issues = np.flatnonzero(np.isin(pieces.kind, (Kind.LAUNCH, Kind.CALL)) & (waited_ns[pieces.stretch] > 0))
    stretch = pieces.stretch[issues]
    until = np.cumsum(lasts[issues])
    opens = np.append(True, stretch[1:] != stretch[:-1])[: len(stretch)]
    before = np.repeat((until - lasts[issues])[opens], np.diff(np.append(np.flatnonzero(opens), len(stretch))))
    left_ns = np.clip(waited_ns[stretch] - (until - lasts[issues] - before), 0, lasts[issues])
    # The part of each such piece that is left of the wait goes to it; the piece itself begins that much later.
    claimed = Pieces(
        pieces.start_ns[issues],
        pieces.start_ns[issues] + left_ns,
        cause[first[stretch]],
        pieces.row[first[stretch]],
    )
    start_ns = pieces.start_ns.copy()
    start_ns[issues] += left_ns
    return joined(Pieces(start_ns, pieces.end_ns, cause, pieces.row), claimed)


def _began_waiting(activity: Activity, thread: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Return when the wait began in which a thread, or else the main one, is at each moment."""
    kinds, main = activity.by_kind(), ABSENT if activity.main_thread is None else activity.main_thread
    change = kinds.segments.at(thread, moments)
    idle = np.flatnonzero(kinds.kind[change] == Kind.NOTHING)
    change[idle] = kinds.segments.at(main, moments[idle])
    began: np.ndarray = kinds.segments.start_ns[change]
    return began


def _changes_in(
    segments: Segments, thread: np.ndarray | int, start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes after the start of each stretch and before its end on its thread, and the stretch of each."""
    first = segments.at(thread, start_ns) + 1
    counts = segments.at(thread, end_ns - 1) + 1 - first
    stretch = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(stretch)) - (np.cumsum(counts) - counts - first)[stretch], stretch


# From the return of the launching call to the first kernel on an idle device; also the pause between two queued ones.
LAUNCH_LATENCY_NS = 10_000
LONGEST_PAUSE_NS = 100_000  # between two pieces of a graph lie about 1 us; in more, something ran that nobody recorded
WAIT_FOR_EVENT = re.compile(r"^((cuda|cu|hip)StreamWaitEvent\w*|Stream Wait Event)$")
BETWEEN_OPERATORS = "between operators"
UNNAMED = (CAUSES.index("launch"), CAUSES.index("python"))
SHOWN = 5  # names per cause, and longest gaps


class Contributor(msgspec.Struct, frozen=True):
    """What the host was in for most of the time that is booked on a cause."""

    name: str
    spent_ns: int
    where: str | None  # `file.py:12`, the innermost line of the program itself; None where no stacks were recorded


class Gap(msgspec.Struct, frozen=True):
    """One stretch in which a device did nothing."""

    start_ns: int  # since the base of the trace
    duration_ns: int
    cause: str  # of most of it
    ended_by: str | None  # the work that ended it; None at the end of the window


class Device(msgspec.Struct, frozen=True):
    """The work of one device that lasts, in the order of starts, of equal ones the first launched first.

    `launch` is the row of the launching call or `ABSENT`; all arrays are parallel.
    """

    rows: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    launch: np.ndarray


class IdleTime:
    """The gaps of one device inside a window, and what they are booked on."""

    def __init__(self, trace: Trace, device: Device, gaps: Intervals, activity: Activity) -> None:
        self.gaps = gaps
        self._trace = trace
        ender = np.searchsorted(device.start_ns, gaps.end_ns, side="left")
        is_ended = np.append(device.start_ns, -1)[ender] == gaps.end_ns  # not at the end of the window
        ender = np.where(is_ended, ender, len(device.rows))
        self._ender = np.append(device.rows, ABSENT)[ender]
        self._launch = np.append(device.launch, ABSENT)[ender]
        self._launched = self._launch != ABSENT
        started = trace.start_ns[self._launch] + activity.late_ns[self._launch]
        returned = trace.start_ns[self._launch] + np.maximum(trace.duration_ns[self._launch], 0)
        # What no launch is known of says nothing about the host; at the end of the window the host launched nothing.
        late_until = np.where(self._launched, started, np.where(self._ender == ABSENT, gaps.end_ns, gaps.start_ns))
        # Between the pieces of one launch, those of a graph, neither the host nor the launching is in the way.
        in_graph = self._launched & (np.append(ABSENT, device.launch)[ender] == self._launch)
        in_graph &= trace.named(GRAPH, trace.in_categories(LAUNCH_CATEGORIES))[self._launch]
        is_pause = in_graph & (gaps.end_ns - gaps.start_ns <= LONGEST_PAUSE_NS)
        late_until = np.where(in_graph, gaps.start_ns, np.clip(late_until, gaps.start_ns, gaps.end_ns))
        latency_until = np.clip(
            np.where(self._launched, np.maximum(returned, gaps.start_ns) + LAUNCH_LATENCY_NS, late_until),
            late_until,
            gaps.end_ns,
        )
        latency_until = np.where(in_graph, late_until, latency_until)
        main = ABSENT if activity.main_thread is None else activity.main_thread
        thread = trace.thread[self._launch]
        thread = np.where(self._launched & activity.leads[thread], thread, main)
        waits = self._waits_for_stream(device, ender)
        self.late_until, self.latency_until = late_until, latency_until
        self.device_cause = np.where(is_pause, PAUSE, np.where(waits & ~in_graph, STREAM_WAIT, UNTRACED))
        self._pieces = joined(
            late_host(activity, gaps.start_ns, late_until, thread),
            late_device(late_until, latency_until, np.full(len(gaps), LATENCY)),
            late_device(latency_until, gaps.end_ns, self.device_cause),
        )

    def between(self, edges: np.ndarray) -> np.ndarray:
        """Return [span, cause]: the idle ns of each span between neighbouring `edges`, causes as in `CAUSES`."""
        return self._pieces.between(edges)

    def details(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return, by cause, what the host was in meanwhile and for how many ns, the most first."""
        by_cause: dict[str, list[tuple[str, int]]] = {}
        for (cause, name), nanoseconds in self._spent.most_common():
            by_cause.setdefault(cause, []).append((name, nanoseconds))
        return {cause: tuple(most[:SHOWN]) for cause, most in by_cause.items()}

    def contributors(self, line: Callable[[int], str | None]) -> dict[str, Contributor]:
        """Return what takes most of each cause; `line` gives the line of the program that an event lies in."""
        most_of = {}
        pieces, names = self._pieces, self._trace.name
        for cause, ((name, nanoseconds), *_) in self.details().items():
            chosen = np.flatnonzero((pieces.cause == CAUSES.index(cause)) & (pieces.row != ABSENT))
            if name != BETWEEN_OPERATORS:
                chosen = chosen[names[pieces.row[chosen]] == self._trace.names.index(name)]
            longest = chosen[(pieces.end_ns[chosen] - pieces.start_ns[chosen]).argmax()] if len(chosen) else None
            where = None if longest is None else line(int(pieces.row[longest]))
            most_of[cause] = Contributor(name, nanoseconds, where)
        return most_of

    @cached_property
    def _spent(self) -> Counter[tuple[str, str]]:
        """By cause and what the host was in: how many ns."""
        names, pieces = self._trace.names, self._pieces
        # A row that no event tells is Python between operators where the cause is the host's.
        unnamed = (pieces.row == ABSENT) & np.isin(pieces.cause, UNNAMED)
        chosen = np.flatnonzero((pieces.row != ABSENT) | unnamed)
        name = np.where(unnamed[chosen], len(names), np.append(self._trace.name, 0)[pieces.row[chosen]])
        keys = pieces.cause[chosen] * (len(names) + 1) + name
        totals = sums(keys, pieces.end_ns[chosen] - pieces.start_ns[chosen], len(CAUSES) * (len(names) + 1))
        groups = np.flatnonzero(totals)
        spent: Counter[tuple[str, str]] = Counter()
        for group, nanoseconds in zip(groups.tolist(), totals[groups].tolist(), strict=True):
            cause, number = divmod(group, len(names) + 1)
            is_unnamed = number == len(names) or PROFILER_STEP.fullmatch(names[number])
            spent[CAUSES[cause], BETWEEN_OPERATORS if is_unnamed else names[number]] += nanoseconds
        return spent

    def longest(self) -> tuple[Gap, ...]:
        """Return the longest gaps, the longest first."""
        length = self.gaps.end_ns - self.gaps.start_ns
        longest = np.argsort(-length, kind="stable")[:SHOWN]
        return tuple(
            Gap(int(self.gaps.start_ns[gap]), int(length[gap]), self._cause_of(gap), self._ended_by(gap))
            for gap in longest.tolist()
        )

    def _cause_of(self, gap: int) -> str:
        """Return the cause of most of a gap."""
        pieces = self._pieces
        first, end = np.searchsorted(pieces.start_ns, [self.gaps.start_ns[gap], self.gaps.end_ns[gap]])
        lengths = pieces.end_ns[first:end] - pieces.start_ns[first:end]
        return CAUSES[sums(pieces.cause[first:end], lengths, len(CAUSES)).argmax()]

    def _ended_by(self, gap: int) -> str | None:
        row = self._ender[gap]
        return None if row == ABSENT else self._trace.names[self._trace.name[row]]

    def _waits_for_stream(self, device: Device, ender: np.ndarray) -> np.ndarray:
        """Tell for each gap whether its end had to wait for another stream.

        It had where the trace tells of a wait that was put into its stream after the work before it, or, where a wait
        does not name its stream, that its thread called for between the two launches.
        """
        trace = self._trace
        waits = np.flatnonzero(trace.named(WAIT_FOR_EVENT))
        if not len(waits):
            return np.zeros(len(self.gaps), dtype=bool)
        before, launched = np.append(_launch_before(trace, device), 0)[ender], trace.start_ns[self._launch]
        is_awaited: np.ndarray = np.zeros(len(self.gaps), dtype=bool)
        recorded = trace.correlation[waits[trace.stream[waits] != ABSENT]]
        is_streamless = trace.stream[waits] == ABSENT
        # A call that a record repeats is told by the stream of that record.
        repeated = is_streamless & np.isin(trace.correlation[waits], recorded[recorded != ABSENT])
        for chosen, column, lane in (
            (waits[is_streamless & ~repeated], trace.thread, trace.thread[self._launch]),
            (waits[~is_streamless], trace.stream, trace.stream[self._ender]),
        ):
            is_awaited |= _any_between(column[chosen], trace.start_ns[chosen], lane, before, launched)
        is_awaited &= self._launched
        return is_awaited


def _any_between(
    lanes: np.ndarray, moments: np.ndarray, lane: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Tell for each span from `start` to `end` (excluded) whether a moment of its `lane` lies in it."""
    # Moments as ranks, so that lane and moment fit into one integer.
    _, rank = np.unique(np.concatenate([moments, start, end]), return_inverse=True)
    of_moment, of_start, of_end = np.split(rank, [len(moments), len(moments) + len(start)])
    keys = np.sort(lanes.astype(np.int64) << 32 | of_moment)
    own = lane.astype(np.int64) << 32
    is_any: np.ndarray = np.searchsorted(keys, own | of_end) > np.searchsorted(keys, own | of_start)
    return is_any


def _launch_before(trace: Trace, device: Device) -> np.ndarray:
    """Return, for each work of the device, when the one before it in its stream was launched; 0 for the first."""
    order = np.lexsort((device.start_ns, trace.stream[device.rows]))
    started = np.where(device.launch == ABSENT, 0, trace.start_ns[np.maximum(device.launch, 0)])[order]
    stream = trace.stream[device.rows][order]
    before = np.zeros(len(order), dtype=np.int64)
    before[1:] = np.where(stream[1:] == stream[:-1], started[:-1], 0)
    before[order] = before.copy()
    return before
