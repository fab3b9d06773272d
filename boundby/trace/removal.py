"""How long the window would last without a cause: the program is played again, its times taken from the trace.

The host goes through what it did, one thing after another, on the thread that launches next. Work of the device keeps
its order; it begins once its launch has come and what is before it is done. A wait of the host ends when the device has
got as far as it had at the end of that wait. Where nothing is taken out, this gives the window as it was; where
something is, what follows moves up as far as host and device let it.

Progress of the device is how long it has worked up to a moment. With s, how long the host has waited so far, and g, how
long the device has, work at progress b that is launched after c of host time needs g >= s + c - b, and a wait that the
host arrives at after a of host time, for progress p, needs s >= g + p - a: linear over (max, +), so that thousands of
waits are played by a few products of matrices (Baccelli et al., Synchronization and Linearity, 1992).
"""

from collections.abc import Collection, Mapping
from functools import cached_property

import msgspec
import numpy as np

from boundby.trace.activity import SHORT_WAIT_NS, Activity, Kind
from boundby.trace.gaps import (
    CAUSE_OF_KIND,
    CAUSES,
    LATENCY,
    LONGEST_PAUSE_NS,
    PAUSE,
    Device,
    IdleTime,
    host_pieces,
)
from boundby.trace.intervals import Intervals, distinct, sums, union
from boundby.trace.linking import KINDS
from boundby.trace.structure import Structure
from boundby.trace.table import ABSENT, Trace

NEVER = -(2**60)  # stands for minus infinity; the sum of two is an int64 as well
OF_HOST = np.array([kind not in (Kind.NOTHING, Kind.QUEUED) for kind in range(len(CAUSE_OF_KIND))])
OF_RANGES = (Kind.INPUT, Kind.TOKENIZING, Kind.GARBAGE_COLLECTION, Kind.SAVING, Kind.COMPILE, Kind.PYTHON)
RANGE_NS = 5_000  # that record_function takes itself
HOST_CAUSES = frozenset(CAUSES[cause] for cause in CAUSE_OF_KIND[OF_HOST].tolist())


class _Host(msgspec.Struct, frozen=True):
    """What the host did, piece by piece, from the start of the window on."""

    kind: np.ndarray
    lasts_ns: np.ndarray
    spent_ns: np.ndarray  # beyond waiting for the device
    waits: np.ndarray  # pieces that begin with a wait, ascending
    until: np.ndarray  # the moment up to which the device had to get for each of them
    wait_kind: np.ndarray  # of each of them


class Playback:
    """One device and its host, ready to be played without a cause."""

    def __init__(self, structure: Structure, device: Device, work: Mapping[str, Intervals], idle: IdleTime) -> None:
        """Take the work of one device inside the window, by its kind."""
        trace, window, activity = structure.trace, structure.window, structure.activity
        self._window, self._work, self._idle = window, work, idle
        self._busy = _united(list(work.values()))
        self._kind = structure.kinds[device.rows]
        _, self._stream = np.unique(trace.stream[device.rows], return_inverse=True)
        self._begins_ns, self._call = device.start_ns, device.launch
        self._lasts_ns = np.minimum(device.end_ns, window.end_ns) - np.maximum(device.start_ns, window.start_ns)
        self._lasts_ns = np.maximum(self._lasts_ns, 0)
        known = np.flatnonzero((device.launch != ABSENT) & activity.leads[trace.thread[device.launch]])
        called = trace.start_ns[device.launch[known]]
        inside = known[(called >= window.start_ns) & (called <= device.start_ns[known])]
        launch, start_ns = device.launch[inside], device.start_ns[inside]
        returned = trace.start_ns[launch] + np.where(activity.is_blocking[launch], 0, trace.duration_ns[launch])
        launched = np.maximum(np.minimum(returned, np.minimum(start_ns, window.end_ns)), trace.start_ns[launch])
        order = np.argsort(launched, kind="stable")
        launched, launch, inside = launched[order], launch[order], inside[order]
        self._ready_ns, self._latency_ns = self._delays(device.start_ns[inside], launched)
        self._maybe_ns = {"python": activity.short_python_ns, "launch": activity.long_python_ns}
        activity = activity.by_kind()
        self._host, self._launch = self._host_of(activity, launched, trace.thread[launch], device.end_ns[inside])
        self._wait_of = np.searchsorted(self._host.waits, self._launch)
        self._nothing = union(self._busy.start_ns[:0], self._busy.end_ns[:0])
        self._parts = self._parts_of()
        self._anywhere_ns = self._anywhere(trace, activity)
        self._progresses: dict[frozenset[str], _Progress] = {}

    def _delays(self, start_ns: np.ndarray, launched: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return up to when each work was on its way, and how long it is so at least after its launch."""
        if not len(start_ns):
            return start_ns, start_ns
        idle, gap = self._idle, np.searchsorted(self._idle.gaps.end_ns, start_ns)
        is_ender = (np.append(idle.gaps.end_ns, -1)[gap] == start_ns) & (launched >= np.append(idle.late_until, 0)[gap])
        ready_ns = np.where(is_ender, np.append(idle.latency_until, 0)[gap], start_ns)
        delay_ns = ready_ns - launched
        return ready_ns, np.where(is_ender, delay_ns, np.minimum(delay_ns, delay_ns.min()))

    def _host_of(
        self, activity: Activity, launched: np.ndarray, thread: np.ndarray, end_ns: np.ndarray
    ) -> tuple[_Host, np.ndarray]:
        """Return the pieces of the host and the piece before which each work was launched."""
        window = self._window
        last = int(window.edges_ns[-1]) if window.steps else int(activity.segments.start_ns.max(initial=0))
        last = min(max(last, window.start_ns), window.end_ns)
        main = ABSENT if activity.main_thread is None else activity.main_thread
        edges = np.concatenate([[window.start_ns], launched, [max(last, int(launched.max(initial=0)))]])
        threads = np.append(thread, main)
        filled = np.flatnonzero(edges[:-1] < edges[1:])
        if not len(filled):
            none = np.zeros(0, dtype=np.int64)
            return _Host(none, none, none, none, none, none), np.zeros(len(launched), dtype=np.int64)
        pieces = host_pieces(activity, edges[:-1][filled], edges[1:][filled], threads[filled])
        lasts = pieces.start_ns < pieces.end_ns
        start, end, kind = pieces.start_ns[lasts], pieces.end_ns[lasts], pieces.kind[lasts]
        launch = np.searchsorted(start, launched)
        may_wait = np.isin(kind, (Kind.SYNCHRONISATION, Kind.QUEUED, Kind.ALLOCATOR))
        blocks = np.flatnonzero(may_wait & (np.append(kind[1:], -1) != kind))
        # What was launched before the end of a wait is what it may have waited for.
        latest = np.append(NEVER, np.maximum.accumulate(end_ns))[np.searchsorted(launched, end[blocks])]
        done = self._last_busy(end[blocks])
        until = np.where(latest <= end[blocks], np.maximum(latest, NEVER), done)
        until = np.maximum(np.minimum(until, end[blocks]), self._window.start_ns)
        # Work that was launched in time and still runs is not what it waited for: only a wait that lasts tells.
        lasts = end[blocks] - start[blocks] >= SHORT_WAIT_NS
        waits = (latest <= end[blocks]) | lasts & (until > start[blocks]) & (kind[blocks] != Kind.ALLOCATOR)
        waits &= (kind[blocks] != Kind.ALLOCATOR) | (until > start[blocks])  # freeing memory waits, allocating does not
        blocks, until = blocks[waits], until[waits]
        lasts = end - start
        spent = lasts.copy()
        spent[blocks] = end[blocks] - np.maximum(start[blocks], until)
        return _Host(kind, lasts, spent, blocks, until, kind[blocks]), launch

    def causes(self) -> tuple[str, ...]:
        """Return what can be taken out of it: what the host did, pauses, and what the device need not do itself."""
        on_host = [cause for cause, spent in self._on_host.items() if spent]
        own = ("stream_wait", "graph_pause", "communication", "memcpy")
        return tuple(
            dict.fromkeys([*on_host, CAUSES[LATENCY], *(part for part in own if len(self._parts.get(part, ())))])
        )

    def least_ns(self, cause: str) -> int:
        """Return what of the window is left at least without a cause.

        Of the work that the window's length rests on, one piece behind the other, at most as much is gone as there is
        of the cause or may be, and no stream of the device gets done sooner than with its own work alone.
        """
        idle, length = self._idle, self._window.length_ns
        spent = max(self._on_host.get(cause, 0), self._anywhere_ns.get(cause, 0)) + self._maybe_ns.get(cause, 0)
        if cause == "python":  # is what nothing tells, perhaps
            spent += int(self._host.lasts_ns[self._host.kind == Kind.NOTHING].sum())
        if cause == "launch":  # and each range takes a moment itself
            spent += RANGE_NS * int(np.isin(self._host.kind, OF_RANGES).sum())
        if cause in self._work:
            spent = self._work[cause].total_ns
        elif cause in CAUSES:
            number = CAUSES.index(cause)
            spent += int((idle.latency_until - idle.late_until).sum()) if number == LATENCY else 0
            pauses = int((idle.gaps.end_ns - idle.latency_until)[idle.device_cause == number].sum())
            spent += max(pauses, self._pauses_ns()) if number == PAUSE else pauses
        if cause != CAUSES[CAUSE_OF_KIND[Kind.SYNCHRONISATION]]:
            spent += self._unexplained_ns()
        return min(length, max(length - spent, self._longest_stream_ns(cause)))

    def _unexplained_ns(self) -> int:
        """Return how long the host waited for what no leading thread had launched: earlier, it may not have to."""
        host = self._host
        spent = host.spent_ns[host.waits[host.wait_kind == Kind.SYNCHRONISATION]]
        return int(spent[spent >= SHORT_WAIT_NS].sum())

    @cached_property
    def _on_host(self) -> dict[str, int]:
        """Return the time of the host by cause, waits in whole; what is launching work counts to the latency too."""
        by_kind = sums(self._host.kind, self._host.lasts_ns, len(CAUSE_OF_KIND)).tolist()
        spent = {CAUSES[LATENCY]: by_kind[Kind.CALL]}
        for kind in np.flatnonzero(OF_HOST).tolist():
            cause = CAUSES[CAUSE_OF_KIND[kind]]
            spent[cause] = spent.get(cause, 0) + by_kind[kind]
        return spent

    def _anywhere(self, trace: Trace, activity: Activity) -> dict[str, int]:
        """Return how long any thread at all was at each cause that has a name of its own.

        Where one keeps the driver from another, all that threads beside those that launch do with it counts as well.
        """
        segments, kind = activity.segments, activity.kind[:-1]
        rows = np.flatnonzero(~np.isin(kind, (Kind.NOTHING, Kind.LAUNCH, Kind.CALL, Kind.QUEUED, Kind.PYTHON)))
        start, end = segments.start_ns[rows], segments.start_ns[np.minimum(rows + 1, len(kind) - 1)]
        start, end = np.maximum(start, self._window.start_ns), np.minimum(end, self._window.end_ns)
        kind, holds = kind[rows], ~activity.leads[trace.thread[segments.row[rows]]]
        holds &= (kind == Kind.ALLOCATOR) | (kind == Kind.LOADING)
        return {
            CAUSES[CAUSE_OF_KIND[number]]: union(start[chosen], end[chosen]).total_ns
            for number in distinct(np.sort(kind)).tolist()
            for chosen in (np.flatnonzero((kind == number) | (holds if number == Kind.DRIVER else False)),)
        }

    def _pauses_ns(self) -> int:
        """Return how long streams pause between pieces of one launch, other streams at work or not."""
        order = np.lexsort((self._begins_ns, self._stream))
        stream, call, start = self._stream[order], self._call[order], self._begins_ns[order]
        pause = start[1:] - (start + self._lasts_ns[order])[:-1]
        return int(
            pause[
                (stream[1:] == stream[:-1])
                & (call[1:] == call[:-1])
                & (call[1:] != ABSENT)
                & (pause > 0)
                & (pause <= LONGEST_PAUSE_NS)
            ].sum()
        )

    def _longest_stream_ns(self, without: str) -> int:
        """Return the time of the stream that takes longest, leaving out a kind of work."""
        kept = self._kind != KINDS.index(without) if without in KINDS else slice(None)
        stream = self._stream[kept]
        return int(sums(stream, self._lasts_ns[kept], int(stream.max(initial=-1)) + 1).max(initial=0))

    def _last_busy(self, moments: np.ndarray) -> np.ndarray:
        """Return the last moment up to each at which the device was at work."""
        if not len(self._busy):
            return np.full(len(moments), NEVER)
        last = np.searchsorted(self._busy.start_ns, moments) - 1
        moment: np.ndarray = np.where(last >= 0, np.minimum(self._busy.end_ns[last], moments), NEVER)
        return moment

    def length_ns(self, without: Collection[str] = ()) -> int:
        """Return how long the window lasts without these causes, names of `CAUSES` or of kinds of work."""
        host = self._host
        progress = self._progress(without)
        removed = OF_HOST & np.array([CAUSES[cause] in without for cause in CAUSE_OF_KIND])
        removed[Kind.CALL] |= CAUSES[LATENCY] in without
        spent = np.where(removed[host.kind], 0, host.spent_ns)
        before = np.zeros(len(spent) + 1, dtype=np.int64)
        np.cumsum(spent, out=before[1:])
        ahead = progress.awaited_ns - before[host.waits]
        wait_of = self._wait_of
        kept = np.flatnonzero(~removed[host.wait_kind])
        if len(kept) < len(host.waits):
            ahead, wait_of = ahead[kept], np.searchsorted(host.waits[kept], self._launch)
        needed = before[self._launch] - progress.ready_ns
        if "launch_latency" not in without:
            needed += self._latency_ns
        least = np.full(len(ahead) + 1, NEVER)
        if len(needed):
            opens = np.flatnonzero(np.append(True, wait_of[1:] != wait_of[:-1]))
            least[wait_of[opens]] = np.maximum.reduceat(needed, opens)
        waited, delayed = _played(least[:-1], ahead)
        delayed = max(delayed, waited + int(least[-1]))
        return max(waited + int(before[-1]), delayed + progress.whole_ns)

    def _progress(self, without: Collection[str]) -> "_Progress":
        """Return how far the device gets, which depends on what of its own is taken out alone."""
        gone = frozenset(self._parts.keys() & set(without))
        if gone not in self._progresses:
            solid = _united([self._nothing, *(part for name, part in self._parts.items() if name not in gone)])
            self._progresses[gone] = _Progress(
                whole_ns=solid.total_ns,
                ready_ns=solid.covered_until(self._ready_ns),
                awaited_ns=solid.covered_until(self._host.until),
            )
        return self._progresses[gone]

    def _parts_of(self) -> dict[str, Intervals]:
        """Return when the device is at work or pauses of its own accord, by kind of work or cause of the pause."""
        idle, parts, before = self._idle, {}, None
        for kind, spans in self._work.items():
            if len(spans):
                parts[kind] = spans if before is None else _without(spans, before)
                before = spans if before is None else _united([before, spans])
        for cause in distinct(np.sort(idle.device_cause)).tolist():
            own = np.flatnonzero(idle.device_cause == cause)
            parts[CAUSES[cause]] = union(idle.latency_until[own], idle.gaps.end_ns[own])
        # Latency on the heels of other work is a pause of the device; behind a late host it is the launch's.
        own = np.flatnonzero(idle.late_until == idle.gaps.start_ns)
        parts[CAUSES[LATENCY]] = union(idle.late_until[own], idle.latency_until[own])
        return parts


class _Progress(msgspec.Struct, frozen=True):
    """How long the device works in all, until each work is on its way, and until each wait of the host ends."""

    whole_ns: int
    ready_ns: np.ndarray
    awaited_ns: np.ndarray


def _without(spans: Intervals, others: Intervals) -> Intervals:
    if not len(spans):
        return spans
    return spans.intersection(others.complement(int(spans.start_ns[0]), int(spans.end_ns[-1])))


def _united(parts: list[Intervals]) -> Intervals:
    return union(np.concatenate([part.start_ns for part in parts]), np.concatenate([part.end_ns for part in parts]))


def _played(least: np.ndarray, ahead: np.ndarray) -> tuple[int, int]:
    """Return how long the host and the device have waited after all waits of the host.

    `least` is what the device needs at least before each of them, over what the host has waited by then; `ahead` is by
    how much the progress that is waited for exceeds the time of the host.
    """
    if not len(least):
        return 0, 0
    row_s = np.stack([np.maximum(0, ahead + least), ahead], axis=1)
    row_g = np.stack([least, np.zeros_like(least)], axis=1)
    step = np.stack([row_s, row_g], axis=1)
    while len(step) > 1:
        if len(step) % 2:
            step = np.concatenate([step, [[[0, NEVER], [NEVER, 0]]]])
        first, second = step[::2], step[1::2]
        step = np.maximum((second[:, :, :, None] + first[:, None, :, :]).max(axis=2), NEVER)
    host, device = step[0].max(axis=1).tolist()
    return max(host, 0), max(device, 0)
