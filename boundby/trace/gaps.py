"""Why a device did nothing: every idle nanosecond of it booked on one cause.

A gap ends when the device begins something. Until the host began to launch that, the host was late, and what its
thread was doing meanwhile is the cause; afterwards the device was late. When the queue ran dry because the host waited
for the device, filling it again counts to that wait as well: without the wait it would have happened meanwhile.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from boundby.trace.activity import Activity
from boundby.trace.intervals import Intervals
from boundby.trace.pieces import CAUSES, LATENCY, STREAM_WAIT, UNTRACED, joined, late_device, late_host
from boundby.trace.reader import PROFILER_STEP, Trace
from boundby.trace.table import ABSENT

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
        sums = np.zeros(len(groups), dtype=np.int64)
        np.add.at(sums, place, pieces.end_ns[told] - pieces.start_ns[told])
        spent: Counter[tuple[str, str]] = Counter()
        for group, nanoseconds in zip(groups.tolist(), sums.tolist(), strict=True):
            cause, name = divmod(group, len(names))
            is_mark = PROFILER_STEP.fullmatch(names[name])
            spent[CAUSES[cause], BETWEEN_OPERATORS if is_mark else names[name]] += nanoseconds
        found: dict[str, list[tuple[str, int]]] = {}
        for (cause, name), nanoseconds in spent.most_common():
            found.setdefault(cause, []).append((name, nanoseconds))
        return {cause: tuple(most[:SHOWN]) for cause, most in found.items()}

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
        spent = np.zeros(len(CAUSES), dtype=np.int64)
        np.add.at(spent, pieces.cause[first:end], (pieces.end_ns - pieces.start_ns)[first:end])
        return CAUSES[spent.argmax()]

    def _ended_by(self, gap: int) -> str | None:
        row = self._ender[gap]
        return None if row == ABSENT else self._trace.names[self._trace.name[row]]

    def _waits_for_stream(self, device: Device, ender: np.ndarray) -> np.ndarray:
        """Tell of each gap whether its end had to wait for another stream.

        It had where the trace tells of a wait that was put into its stream after the work before it, or, where a wait
        does not name its stream, that its thread called for between the two launches.
        """
        trace = self._trace
        waits = np.flatnonzero(trace.named(WAIT_FOR_EVENT))
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
