"""Why a device did nothing: every idle nanosecond of it booked on one cause.

A gap ends when the device begins something. Until the host began to launch that, the host was late, and what its
thread was doing meanwhile is the cause; afterwards the device was late. When the queue ran dry because the host waited
for the device, filling it again counts to that wait as well: without the wait it would have happened meanwhile.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from boundby.trace.intervals import HostTree, Intervals, Segments, sums
from boundby.trace.links import Links
from boundby.trace.table import ABSENT, HOST_CATEGORIES, PROFILER_STEP, Trace

NOTHING, LAUNCH, INPUT, SYNCHRONISATION, ALLOCATOR, COMPILE = range(6)
# The innermost event that says what the thread does; everything else on the thread is launching or Python.
PATTERNS = {
    INPUT: re.compile(r"DataLoader\b.*__next__|dataloader\.py\(\d+\): __next__|dataloader_next|get_batch_samples"),
    SYNCHRONISATION: re.compile(
        r"^((cuda|cu|hip)\w*Synchronize(_ptsz)?|(cuda|hip)Memcpy(2D|3D)?|cuMemcpy(HtoD|DtoH|DtoD)?(_v2)?"
        r"|zeEventHostSynchronize|aten::item|aten::_local_scalar_dense|aten::is_nonzero)$"
    ),
    ALLOCATOR: re.compile(r"^((cuda|hip)(Malloc|Free|Host|Mem)(?!cpy|set)\w*|cuMem(?!cpy|set)\w+)$"),
    COMPILE: re.compile(
        r"\(dynamo_timed\)|^_compile\.|\b(compile_fx|async_compile|convert_frame)\b|triton/compiler/"
        r"|^(cuda|cu|hip|nvrtc|hiprtc)\w*(ModuleLoad|LibraryLoad|LinkCreate|LinkComplete|CompileProgram)"
    ),
}
BLOCKING_COPY = re.compile(r"DtoH.*Pageable|Device -> Pageable")


@dataclass(frozen=True)
class Activity:
    """What every thread did over time: from each change of `segments` on, `kind` of it, and the event that says so.

    `row` is `ABSENT` where no event runs; where one runs that says nothing special, it is the innermost one. Both have
    one more entry, that of the index `ABSENT`.
    """

    main_thread: int | None  # that carries the step marks, else the one with most events; None where there is none
    segments: Segments
    kind: np.ndarray
    row: np.ndarray


def host_activity(trace: Trace, tree: HostTree, linked: Links) -> Activity:
    """Return the activity of the threads of the host."""
    of_event = np.full(len(trace.name), LAUNCH, dtype=np.int8)
    on_host = trace.in_categories(HOST_CATEGORIES)
    for kind, pattern in PATTERNS.items():
        of_event[trace.named(pattern, on_host)] = kind
    blocks = trace.named(BLOCKING_COPY, trace.in_categories(["gpu_memcpy"]))[linked.rows]
    of_event[linked.launch[blocks & (linked.launch != ABSENT)]] = SYNCHRONISATION
    every = np.arange(len(of_event))
    teller = tree.nearest(every, of_event != LAUNCH)
    kind_of = np.append(np.where(teller == ABSENT, LAUNCH, of_event[teller]), NOTHING)  # the last is that of ABSENT
    row_of = np.append(np.where(teller == ABSENT, every, teller), ABSENT)
    return Activity(_main_thread(trace, tree), tree.segments, kind_of[tree.segments.row], row_of[tree.segments.row])


def _main_thread(trace: Trace, tree: HostTree) -> int | None:
    if not tree.is_active.any():
        return None
    counted = trace.thread[trace.is_step_mark]
    counted = counted[tree.is_active[counted]]
    if not len(counted):
        counted = trace.thread[tree.is_active[trace.thread]]
    return int(np.bincount(counted).argmax())


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
OF_KINDS = ("untraced", "launch", "input", "synchronisation", "allocator", "compile")  # of activity, from NOTHING on
CAUSE_OF_KIND = np.array([CAUSES.index(cause) for cause in OF_KINDS])


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
    return Pieces(moments, ends, CAUSE_OF_KIND[kind], activity.row[change])


def _changes_in(
    segments: Segments, thread: np.ndarray | int, start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes after the start of each stretch up to its end on its thread, and the stretch of each."""
    first = segments.at(thread, start_ns) + 1
    counts = segments.at(thread, end_ns) + 1 - first
    stretch = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(stretch)) - (np.cumsum(counts) - counts - first)[stretch], stretch


# From the return of the launching call to the first kernel on an idle device; also the pause between two queued ones.
LAUNCH_LATENCY_NS = 10_000
WAIT_FOR_EVENT = re.compile(r"^((cuda|cu|hip)StreamWaitEvent\w*|Stream Wait Event)$")
BETWEEN_OPERATORS = "between operators"
SHOWN = 5  # names per cause, and longest gaps


@dataclass(frozen=True)
class Gap:
    """One stretch in which a device did nothing."""

    start_ns: int  # since the base of the trace
    duration_ns: int
    cause: str  # of most of it
    ended_by: str | None  # the work that ended it; None at the end of the window


@dataclass(frozen=True)
class Device:
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
        started = trace.start_ns[self._launch]
        returned = started + np.maximum(trace.duration_ns[self._launch], 0)
        # What no launch is known of says nothing about the host; at the end of the window the host launched nothing.
        late_until = np.where(self._launched, started, np.where(self._ender == ABSENT, gaps.end_ns, gaps.start_ns))
        late_until = np.clip(late_until, gaps.start_ns, gaps.end_ns)
        latency_until = np.clip(
            np.where(self._launched, np.maximum(returned, gaps.start_ns) + LAUNCH_LATENCY_NS, late_until),
            late_until,
            gaps.end_ns,
        )
        main = ABSENT if activity.main_thread is None else activity.main_thread
        thread = np.where(self._launched, trace.thread[self._launch], main)
        waits = self._waits_for_stream(device, ender)
        self._pieces = joined(
            late_host(activity, gaps.start_ns, late_until, thread),
            late_device(late_until, latency_until, np.full(len(gaps), LATENCY)),
            late_device(latency_until, gaps.end_ns, np.where(waits, STREAM_WAIT, UNTRACED)),
        )

    def between(self, edges: np.ndarray) -> np.ndarray:
        """Return [span, cause]: the idle ns of each span between neighbouring `edges`, causes as in `CAUSES`."""
        return self._pieces.between(edges)

    def details(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return, by cause, what the host was in meanwhile and for how many ns, the most first."""
        names, pieces = self._trace.names, self._pieces
        told = np.flatnonzero(pieces.row != ABSENT)
        keys = pieces.cause[told] * len(names) + self._trace.name[pieces.row[told]]
        groups, place = np.unique(keys, return_inverse=True)
        lengths = sums(place, pieces.end_ns[told] - pieces.start_ns[told], len(groups))
        spent: Counter[tuple[str, str]] = Counter()
        for group, nanoseconds in zip(groups.tolist(), lengths.tolist(), strict=True):
            cause, name = divmod(group, len(names))
            is_mark = PROFILER_STEP.fullmatch(names[name])
            spent[CAUSES[cause], BETWEEN_OPERATORS if is_mark else names[name]] += nanoseconds
        by_cause: dict[str, list[tuple[str, int]]] = {}
        for (cause, name), nanoseconds in spent.most_common():
            by_cause.setdefault(cause, []).append((name, nanoseconds))
        return {cause: tuple(most[:SHOWN]) for cause, most in by_cause.items()}

    def longest(self) -> tuple[Gap, ...]:
        """Return the longest gaps, the longest first."""
        length = self.gaps.end_ns - self.gaps.start_ns
        places = np.argsort(-length, kind="stable")[:SHOWN]
        return tuple(
            Gap(int(self.gaps.start_ns[place]), int(length[place]), self._cause_of(place), self._ended_by(place))
            for place in places.tolist()
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
