"""How a device spent the window of a trace: at work of which kind, and idle for which cause."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from boundby.trace.gaps import CAUSES, Contributor, Gap, IdleTime
from boundby.trace.intervals import Intervals, distinct, union
from boundby.trace.removal import HOST_CAUSES, Playback
from boundby.trace.window import Window

MOST_SPANS = 400  # of the timeline: more are not told apart in a picture


@dataclass(frozen=True)
class StepTimes:
    """One step of the program on one device. `busy_ns` by kind and `idle_ns` by cause add up to `duration_ns`."""

    number: int
    start_ns: int  # since the base of the trace
    duration_ns: int
    busy_ns: dict[str, int]
    idle_ns: dict[str, int]


@dataclass(frozen=True)
class Quartiles:
    """How a time differs from step to step, in ns, interpolated between steps."""

    first_ns: float
    median_ns: float
    third_ns: float


@dataclass(frozen=True)
class Timeline:
    """The window in spans of equal length: ns of each kind of work and of each cause of idling, in each."""

    edges_ns: tuple[int, ...]
    busy_ns: dict[str, tuple[int, ...]]
    idle_ns: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Breakdown:
    """How one device spent the window, in ns.

    `busy_ns` is united over all streams. `by_kind_ns` unites each kind by itself, so that the sum exceeds `busy_ns`
    where kinds overlap; `exposed_ns` books every busy moment on the first of `KINDS` that is at work, so it adds up.
    `causes_ns` adds up to `idle_ns` exactly.
    """

    device: int | None  # None: the host, in a trace without work of a device
    window_ns: int
    busy_ns: int
    idle_ns: int
    by_kind_ns: dict[str, int]
    exposed_ns: dict[str, int]
    communication_overlap: float | None  # the share of communication during which something is computed
    causes_ns: dict[str, int]
    cause_details: dict[str, tuple[tuple[str, int], ...]]  # what the host was in meanwhile, and for how many ns
    contributors: dict[str, Contributor]  # by cause, what takes most of its time
    without_ns: dict[str, int]  # the window if one cause or kind of work vanished and all else moved up
    least_ns: dict[str, int]  # what would be left of it at least, whatever else comes to light
    alone_ns: int  # the window if the host were always in time: the work of the device and its own pauses
    gaps: int
    longest_gaps: tuple[Gap, ...]
    steps: tuple[StepTimes, ...]
    step_quartiles: dict[str, Quartiles]  # of the duration, of each kind of work and of each cause; {} without steps
    timeline: Timeline


def clipped_union(start_ns: np.ndarray, end_ns: np.ndarray, window: Window) -> Intervals:
    """Return what of the given intervals lies in the window."""
    return union(np.maximum(start_ns, window.start_ns), np.minimum(end_ns, window.end_ns))


def breakdown(
    device: int | None,
    window: Window,
    work: Mapping[str, Intervals],
    busy: Intervals,
    idle: IdleTime,
    line: Callable[[int], str | None],
    playback: Playback | None = None,
) -> Breakdown:
    """Return how one device spent the window; `work` holds what it did of each kind, `busy` all of it.

    `line` tells in which line of the program an event of the host lies.
    Without a `playback`, the times without a cause are the window less the time that is booked on it.
    """
    edges = np.append(window.edges_ns, window.end_ns)  # the last span is what runs on after the last step
    spans = min(MOST_SPANS, max(1, window.length_ns))
    ticks = np.array([window.start_ns + span * window.length_ns // spans for span in range(spans + 1)], dtype=np.int64)
    moments = distinct(np.sort(np.concatenate([edges, ticks])))  # once for both: each costs as much as all else here
    idle_of, busy_of = idle.between(moments), _exposed(work, moments)
    causes = _summed(idle_of, moments, edges)
    exposed = {kind: _summed(spent, moments, edges) for kind, spent in busy_of.items()}
    steps = tuple(
        StepTimes(
            number=number,
            start_ns=int(edges[place]),
            duration_ns=int(edges[place + 1] - edges[place]),
            busy_ns={kind: int(spent[place]) for kind, spent in exposed.items()},
            idle_ns=dict(zip(CAUSES, causes[place].tolist(), strict=True)),
        )
        for place, number in enumerate(window.steps)
    )
    compute = work.get("compute")
    communication = work.get("communication")
    overlap = None
    if compute is not None and communication is not None and communication.total_ns:
        overlap = compute.intersection(communication).total_ns / communication.total_ns
    causes_ns = {cause: int(causes[:, place].sum()) for place, cause in enumerate(CAUSES)}
    exposed_ns = {kind: int(spent.sum()) for kind, spent in exposed.items()}
    without_ns, least_ns, alone_ns = _without(window, {**exposed_ns, **causes_ns}, busy.total_ns, playback)
    return Breakdown(
        device=device,
        window_ns=window.length_ns,
        busy_ns=busy.total_ns,
        idle_ns=window.length_ns - busy.total_ns,
        by_kind_ns={kind: intervals.total_ns for kind, intervals in work.items()},
        exposed_ns=exposed_ns,
        communication_overlap=overlap,
        causes_ns=causes_ns,
        cause_details=idle.details(),
        contributors=idle.contributors(line),
        without_ns=without_ns,
        least_ns=least_ns,
        alone_ns=alone_ns,
        gaps=len(idle.gaps),
        longest_gaps=idle.longest(),
        steps=steps,
        step_quartiles=_quartiles(steps),
        timeline=Timeline(
            edges_ns=tuple(ticks.tolist()),
            busy_ns={kind: tuple(_summed(spent, moments, ticks).tolist()) for kind, spent in busy_of.items()},
            idle_ns=dict(zip(CAUSES, map(tuple, _summed(idle_of, moments, ticks).T.tolist()), strict=True)),
        ),
    )


def _without(
    window: Window, spent_ns: Mapping[str, int], busy_ns: int, playback: Playback | None
) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the window without each cause, what is left at least, and the work of the device alone."""
    length = window.length_ns
    if playback is None:
        without = {cause: length - spent for cause, spent in spent_ns.items() if spent}
        return without, without, busy_ns
    whole = playback.length_ns()
    without = {cause: length - max(0, whole - playback.length_ns([cause])) for cause in playback.causes()}
    least = {cause: min(left, playback.least_ns(cause)) for cause, left in without.items()}
    alone = length - max(0, whole - playback.length_ns([*HOST_CAUSES, "launch_latency", "graph_pause"]))
    return without, least, alone


def _quartiles(steps: Sequence[StepTimes]) -> dict[str, Quartiles]:
    if not steps:
        return {}
    rows = [{"duration": step.duration_ns, **step.busy_ns, **step.idle_ns} for step in steps]
    ascending = np.sort(np.array([list(row.values()) for row in rows]), axis=0)
    place = np.array([[0.25], [0.5], [0.75]]) * (len(rows) - 1)  # np.percentile would load numpy.ma for that: 11 ms
    below = place[:, 0].astype(int)
    lower, upper = ascending[below], ascending[np.minimum(below + 1, len(rows) - 1)]
    values = lower + (upper - lower) * (place - below[:, None])
    return {name: Quartiles(*column) for name, column in zip(rows[0], values.T.tolist(), strict=True)}


def _summed(spent: np.ndarray, moments: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return what was spent between neighbouring `edges`, given that between neighbouring `moments`, edges included."""
    before = np.concatenate([np.zeros_like(spent[:1], shape=(1, *spent.shape[1:])), np.cumsum(spent, axis=0)])
    return np.diff(before[np.searchsorted(moments, edges)], axis=0)


def _exposed(work: Mapping[str, Intervals], edges: np.ndarray) -> dict[str, np.ndarray]:
    """Return, for each kind of work, the ns of each span in which none of the kinds before it is at work."""
    exposed = {}
    before = union(edges[:0], edges[:0])
    covered = before.between(edges)
    for kind, busy in work.items():
        before = union(np.concatenate([before.start_ns, busy.start_ns]), np.concatenate([before.end_ns, busy.end_ns]))
        exposed[kind] = before.between(edges) - covered
        covered = before.between(edges)
    return exposed
