"""Why a device did nothing: every idle nanosecond of it booked on one cause.

A gap ends when the device begins something. Until the host began to launch that, the host was late, and what its
thread was doing meanwhile is the cause; afterwards the device was late. When the queue ran dry because the host waited
for the device, filling it again counts to that wait as well: without the wait it would have happened meanwhile.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from boundby.trace.activity import ALLOCATOR, COMPILE, INPUT, LAUNCH, NOTHING, SYNCHRONISATION, UNKNOWN, ThreadActivity
from boundby.trace.intervals import Intervals, distinct
from boundby.trace.reader import PROFILER_STEP, Trace
from boundby.trace.table import ABSENT

# From the return of the launching call to the first kernel on an idle device; also the pause between two queued ones.
LAUNCH_LATENCY_NS = 10_000
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
CAUSE_OF_KIND = {
    NOTHING: "untraced",
    LAUNCH: "launch",
    INPUT: "input",
    SYNCHRONISATION: "synchronisation",
    ALLOCATOR: "allocator",
    COMPILE: "compile",
}
STREAM_WAIT = re.compile(r"^((cuda|cu|hip)StreamWaitEvent\w*|Stream Wait Event)$")
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

    def __init__(  # noqa: PLR0913  (what the trace holds, prepared once for all devices)
        self,
        trace: Trace,
        device: Device,
        gaps: Intervals,
        activities: Mapping[int, ThreadActivity],
        main_thread: int | None,
    ) -> None:
        self.gaps = gaps
        self._trace = trace
        self._activities = activities
        self._main = main_thread
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
        self._late_until = np.clip(late_until, gaps.start_ns, gaps.end_ns)
        self._latency_until = np.clip(
            np.where(self._launched, np.maximum(returned, gaps.start_ns) + LAUNCH_LATENCY_NS, self._late_until),
            self._late_until,
            gaps.end_ns,
        )
        self._waits = self._waits_for_stream(device, ender)

    def between(self, edges: np.ndarray) -> np.ndarray:
        """Return [span, cause]: the idle ns of each span between neighbouring `edges`, causes as in `CAUSES`."""
        start, end, gap = self._cut_at(edges)
        spans = np.zeros((len(edges) - 1, len(CAUSES)), dtype=np.int64)
        np.add.at(spans, np.searchsorted(edges, start, side="right") - 1, self._booked(start, end, gap))
        return spans

    def _booked(self, start: np.ndarray, end: np.ndarray, gap: np.ndarray) -> np.ndarray:
        """Return [piece, cause]: the ns of pieces of gaps; `gap` says of which."""
        found = np.zeros((len(start), len(CAUSES)), dtype=np.int64)
        for pieces, activity in self._by_thread(gap):
            until = np.clip(self._late_until[gap[pieces]], start[pieces], end[pieces])
            spent = activity.until(until) - activity.until(start[pieces])
            spent[NOTHING] = until - start[pieces] - spent[LAUNCH:].sum(axis=0)
            is_refill = self._begins_in_wait(activity, gap[pieces])
            spent[SYNCHRONISATION] += np.where(is_refill, spent[LAUNCH], 0)
            spent[LAUNCH] = np.where(is_refill, 0, spent[LAUNCH])
            for kind, cause in CAUSE_OF_KIND.items():
                found[pieces, CAUSES.index(cause)] += spent[kind]
        late_until = np.clip(self._late_until[gap], start, end)
        latency_until = np.clip(self._latency_until[gap], late_until, end)
        found[:, CAUSES.index("launch_latency")] = latency_until - late_until
        waits = self._waits[gap]
        found[:, CAUSES.index("stream_wait")] = np.where(waits, end - latency_until, 0)
        found[:, CAUSES.index("untraced")] += np.where(waits, 0, end - latency_until)
        return found

    def details(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return, by cause, what the host was in meanwhile and for how many ns, the most first."""
        spent: Counter[tuple[str, str]] = Counter()
        for gaps, activity in self._by_thread(np.arange(len(self.gaps))):
            is_refill = self._begins_in_wait(activity, gaps)
            for cause_of_kind, chosen in ((CAUSE_OF_KIND, gaps[~is_refill]), (_REFILL, gaps[is_refill])):
                for kind, name, nanoseconds in self._inside(activity, chosen):
                    spent[cause_of_kind[kind], name] += nanoseconds
        found: dict[str, list[tuple[str, int]]] = {}
        for (cause, name), nanoseconds in spent.most_common():
            found.setdefault(cause, []).append((name, nanoseconds))
        return {cause: tuple(names[:SHOWN]) for cause, names in found.items()}

    def longest(self) -> tuple[Gap, ...]:
        """Return the longest gaps, the longest first."""
        length = self.gaps.end_ns - self.gaps.start_ns
        places = np.argsort(-length, kind="stable")[:SHOWN]
        causes = self._booked(self.gaps.start_ns[places], self.gaps.end_ns[places], places).argmax(axis=1)
        return tuple(
            Gap(int(self.gaps.start_ns[place]), int(length[place]), CAUSES[cause], self._name_of(self._ender[place]))
            for place, cause in zip(places.tolist(), causes.tolist(), strict=True)
        )

    def _name_of(self, row: int) -> str | None:
        return None if row == ABSENT else self._trace.names[self._trace.name[row]]

    def _cut_at(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return start and end of the pieces of the gaps inside the outer edges, cut at all edges, and their gap."""
        start, end = np.maximum(self.gaps.start_ns, edges[0]), np.minimum(self.gaps.end_ns, edges[-1])
        inside = np.flatnonzero(start < end)
        start, end = start[inside], end[inside]
        place = np.searchsorted(start, edges, side="left") - 1  # of the gap that an edge might lie inside
        cuts = edges[(place >= 0) & (edges < end[np.maximum(place, 0)])] if len(start) else edges[:0]
        cuts = distinct(np.sort(cuts))
        pieces = np.sort(np.concatenate([start, cuts]))
        return pieces, np.sort(np.concatenate([end, cuts])), inside[np.searchsorted(start, pieces, side="right") - 1]

    def _by_thread(self, gap: np.ndarray) -> Iterator[tuple[np.ndarray, ThreadActivity]]:
        """Yield the places in `gap` whose end the same thread launched, and what that thread did."""
        for places in _groups(self._thread[gap]):
            yield places, self._merged[int(self._thread[gap[places[0]]])]

    @cached_property
    def _thread(self) -> np.ndarray:
        main = ABSENT if self._main is None else self._main
        return np.where(self._launched, self._trace.thread[self._launch], main)

    @cached_property
    def _merged(self) -> dict[int, ThreadActivity]:
        """The activity of each launching thread; where it does nothing, that of the main thread."""
        main = self._activities.get(ABSENT if self._main is None else self._main)
        merged = {}
        for gaps in _groups(self._thread):
            thread = int(self._thread[gaps[0]])
            own = self._activities.get(thread)
            # Of the main thread no more than these gaps need: with thousands of threads each would hold a copy of it.
            near = main and main.during(int(self.gaps.start_ns[gaps].min()), int(self.gaps.end_ns[gaps].max()))
            known = [each for each in (own, near) if each is not None]
            merged[thread] = known[0].or_else(known[-1]) if known and own is not main else main or UNKNOWN
        return merged

    def _begins_in_wait(self, activity: ThreadActivity, gaps: np.ndarray) -> np.ndarray:
        """Tell of each of the `gaps` whether the host was waiting for the device when it began."""
        return activity.kind_at(self.gaps.start_ns[gaps]) == SYNCHRONISATION

    def _waits_for_stream(self, device: Device, ender: np.ndarray) -> np.ndarray:
        """Tell of each gap whether its end had to wait for another stream.

        It had where the trace tells of a wait that was put into its stream after the work before it, or, where a wait
        does not name its stream, that its thread called for between the two launches.
        """
        trace = self._trace
        waits = np.flatnonzero(trace.named(STREAM_WAIT))
        if not len(waits):
            return np.zeros(len(self.gaps), dtype=bool)
        before, launched = np.append(_launch_before(trace, device), 0)[ender], trace.start_ns[self._launch]
        found = np.zeros(len(self.gaps), dtype=bool)
        recorded = trace.correlation[waits[trace.stream[waits] != ABSENT]]
        is_streamless = trace.stream[waits] == ABSENT
        # A call that a record repeats is told by the stream of that record.
        repeated = is_streamless & np.isin(trace.correlation[waits], recorded[recorded != ABSENT])
        for chosen, column, lane in (
            (waits[is_streamless & ~repeated], trace.thread, trace.thread[self._launch]),
            (waits[~is_streamless], trace.stream, trace.stream[self._ender]),
        ):
            found |= _any_between(column[chosen], trace.start_ns[chosen], lane, before, launched)
        return found & self._launched

    def _inside(self, activity: ThreadActivity, gaps: np.ndarray) -> Iterator[tuple[int, str, int]]:
        """Yield the kind and the name of what the host was in while it was late in the `gaps`, and for how many ns."""
        late = Intervals(self.gaps.start_ns[gaps], self._late_until[gaps])
        spent = late.between(activity.start_ns)
        places = np.flatnonzero((spent > 0) & (activity.row[:-1] != ABSENT))
        names = self._trace.name[activity.row[places]].astype(np.int64)
        groups, place = np.unique(activity.kind[places] * len(self._trace.names) + names, return_inverse=True)
        sums = np.zeros(len(groups), dtype=np.int64)
        np.add.at(sums, place, spent[places])
        for group, nanoseconds in zip(groups.tolist(), sums.tolist(), strict=True):
            kind, name = divmod(group, len(self._trace.names))
            text = self._trace.names[name]
            yield kind, BETWEEN_OPERATORS if PROFILER_STEP.fullmatch(text) else text, nanoseconds


_REFILL = CAUSE_OF_KIND | {LAUNCH: CAUSE_OF_KIND[SYNCHRONISATION]}


def _any_between(
    lanes: np.ndarray, moments: np.ndarray, lane: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Tell of each span from `start` to `end` whether a moment of its `lane` lies in it, the end excluded."""
    # Moments as ranks, so that lane and moment fit into one integer.
    _, rank = np.unique(np.concatenate([moments, start, end]), return_inverse=True)
    of_moment, of_start, of_end = np.split(rank, [len(moments), len(moments) + len(start)])
    keys = np.sort(lanes.astype(np.int64) << 32 | of_moment)
    own = lane.astype(np.int64) << 32
    return np.searchsorted(keys, own | of_end) > np.searchsorted(keys, own | of_start)


def _groups(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the places of each of the different numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []


def _launch_before(trace: Trace, device: Device) -> np.ndarray:
    """Return, for each work of the device, when the one before it in its stream was launched; 0 for the first."""
    order = np.lexsort((device.start_ns, trace.stream[device.rows]))
    started = np.where(device.launch == ABSENT, 0, trace.start_ns[np.maximum(device.launch, 0)])[order]
    stream = trace.stream[device.rows][order]
    before = np.zeros(len(order), dtype=np.int64)
    before[1:] = np.where(stream[1:] == stream[:-1], started[:-1], 0)
    found = np.empty_like(before)
    found[order] = before
    return found
