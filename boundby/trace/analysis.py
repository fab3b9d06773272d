"""From a trace to its cause: where the time of every device went, who asked for it, and what may be concluded."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from boundby.trace.completeness import Finding, findings
from boundby.trace.gaps import CAUSES, Contributor, Device, Gap, IdleTime
from boundby.trace.intervals import Intervals, distinct, union
from boundby.trace.kernels import (
    Collectives,
    KernelLaunch,
    KernelStat,
    LaunchStats,
    collectives,
    kernel_stats,
    launch_stats,
    slowest_launch,
)
from boundby.trace.linking import KINDS, Links, host_collectives
from boundby.trace.memory import MemoryUse, memory_use
from boundby.trace.operators import (
    AnnotationStat,
    OpStat,
    annotation_stats,
    is_module,
    line_of,
    names_of,
    operator_stats,
)
from boundby.trace.removal import HOST_CAUSES, Playback
from boundby.trace.structure import Structure
from boundby.trace.table import ABSENT, Trace
from boundby.trace.windows import Window, without_excluded

HOST_KIND = "operators"
LEAST_STEPS = 3  # to see whether they agree
MOST_SPANS = 400  # of the timeline: more are not told apart in a picture


class StepTimes(msgspec.Struct, frozen=True):
    """One step of the program on one device. `busy_ns` by kind and `idle_ns` by cause add up to `duration_ns`."""

    number: int
    start_ns: int  # since the base of the trace
    duration_ns: int
    busy_ns: dict[str, int]
    idle_ns: dict[str, int]


class Quartiles(msgspec.Struct, frozen=True):
    """How a time differs from step to step, in ns, interpolated between steps."""

    first_ns: float
    median_ns: float
    third_ns: float


class Timeline(msgspec.Struct, frozen=True):
    """The window in spans of equal length: ns of each kind of work and of each cause of idling, in each."""

    edges_ns: tuple[int, ...]
    busy_ns: dict[str, tuple[int, ...]]
    idle_ns: dict[str, tuple[int, ...]]


class Breakdown(msgspec.Struct, frozen=True):
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


class Analysis(msgspec.Struct, frozen=True):
    """What one trace says. Times are ns since the base of the trace."""

    path: str
    rank: int | None
    world_size: int | None
    device_names: tuple[str, ...]
    input_types: frozenset[str]  # of the inputs of operators; empty where they were not recorded
    events: int
    start_ns: int
    window_ns: int
    step_numbers: tuple[int, ...]  # () where the trace has no marks
    steps_expected: int | None  # None: not known
    findings: tuple[Finding, ...]
    devices: tuple[Breakdown, ...]  # the busiest first; one for the host where no device did anything
    launches: LaunchStats
    operators: tuple[OpStat, ...]
    kernels: tuple[KernelStat, ...]
    slowest_launch: KernelLaunch | None  # None where no kernel computes
    annotations: tuple[AnnotationStat, ...]
    memory: tuple[MemoryUse, ...]  # () where it was not recorded
    collectives: Collectives | None = None  # of the first device; None where there is no communication
    backlog: tuple[KernelStat, ...] = ()  # of the kernels above, what was launched before the recording began
    process: Any = None  # the one of several in the file that this is of; None: the file is of one

    @property
    def is_conclusive(self) -> bool:
        """Whether nothing fatal was found."""
        return not any(finding.is_fatal for finding in self.findings)


def analyze(trace: Trace, *, expected_steps: int | None = None, stacks_expected: bool = False) -> Analysis:
    """Return what the trace says of the program's steps: what is marked as excluded is cut out before.

    It never raises on an odd one, `findings` tell what is wrong with it.
    """
    structure = Structure(without_excluded(trace))
    trace, seen, launches = structure.trace, structure.window, launch_stats(structure)
    devices = _devices(structure)
    return Analysis(
        path=str(trace.path),
        rank=trace.rank,
        world_size=trace.world_size,
        device_names=trace.device_names,
        input_types=trace.input_types,
        events=len(trace.start_ns),
        start_ns=seen.start_ns,
        window_ns=seen.length_ns,
        step_numbers=seen.steps,
        steps_expected=expected_steps,
        findings=findings(structure, launches, expected_steps=expected_steps, stacks_expected=stacks_expected),
        devices=devices,
        launches=launches,
        operators=tuple(operator_stats(structure)),
        kernels=_kernels(structure),
        slowest_launch=slowest_launch(structure),
        annotations=tuple(annotation_stats(structure)),
        memory=memory_use(structure),
        collectives=_collectives(structure, devices[0].device),
        backlog=_backlog(structure),
        process=trace.process,
    )


def _devices(structure: Structure) -> tuple[Breakdown, ...]:
    """Return how each device spent the window, the busiest first; how the host did where no device worked."""
    trace, linked, seen = structure.trace, structure.links, structure.window
    if not len(linked.rows):
        host, meets = _host(trace, seen), host_collectives(trace)
        apart = {HOST_KIND: ~meets[host.rows], "communication": meets[host.rows]}
        work = {
            name: clipped_union(host.start_ns[chosen], host.end_ns[chosen], seen)
            for name, chosen in apart.items()
            if name == HOST_KIND or chosen.any()
        }
        return (breakdown(structure, None, host, work),)
    devices = []
    for number in distinct(np.sort(linked.device)).tolist():
        chosen = np.flatnonzero(linked.device == number)
        kind = structure.kinds[linked.rows[chosen]]
        work = {
            name: clipped_union(linked.start_ns[chosen[kind == number]], linked.end_ns[chosen[kind == number]], seen)
            for number, name in enumerate(KINDS)
        }
        devices.append(breakdown(structure, number, _device(trace, linked, chosen, seen), work))
    return tuple(sorted(devices, key=lambda device: -device.busy_ns))


def _host(trace: Trace, seen: Window) -> Device:
    """Return the operators as work that nobody launches beforehand: each begins when its own call does."""
    works = trace.is_operator | host_collectives(trace)
    rows = np.flatnonzero(works & (trace.duration_ns > 0) & (trace.start_ns < seen.end_ns))
    rows = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))]
    return Device(rows, trace.start_ns[rows], trace.start_ns[rows] + trace.duration_ns[rows], rows)


def _device(trace: Trace, linked: Links, chosen: np.ndarray, seen: Window) -> Device:
    lasts = (linked.end_ns[chosen] > linked.start_ns[chosen]) & (linked.start_ns[chosen] < seen.end_ns)
    lasting = chosen[lasts]
    launch = linked.launch[lasting]
    launched = np.where(launch == ABSENT, np.iinfo(np.int64).max, trace.start_ns[launch])
    lasting = lasting[np.lexsort((launched, linked.start_ns[lasting]))]
    return Device(linked.rows[lasting], linked.start_ns[lasting], linked.end_ns[lasting], linked.launch[lasting])


def _kernels(structure: Structure) -> tuple[KernelStat, ...]:
    trace, operator = structure.trace, structure.launching_operator
    module = structure.tree.nearest(operator, is_module(trace))
    every = np.arange(len(operator))
    return tuple(kernel_stats(structure, every, names_of(trace, operator), names_of(trace, module)))


def _collectives(structure: Structure, device: int | None) -> Collectives | None:
    trace, linked, seen = structure.trace, structure.links, structure.window
    if device is None:
        rows = np.flatnonzero(host_collectives(trace))
        start_ns = trace.start_ns[rows]
        end_ns = start_ns + np.maximum(trace.duration_ns[rows], 0)
    else:
        is_one = (structure.kinds[linked.rows] == KINDS.index("communication")) & (linked.device == device)
        rows, start_ns, end_ns = linked.rows[is_one], linked.start_ns[is_one], linked.end_ns[is_one]
    inside = np.flatnonzero((start_ns >= seen.start_ns) & (start_ns < seen.end_ns))
    if not len(inside):
        return None
    order = inside[np.argsort(start_ns[inside], kind="stable")]
    return collectives(trace.names, trace.name[rows[order]], start_ns[order], end_ns[order], seen.edges_ns)


def _backlog(structure: Structure) -> tuple[KernelStat, ...]:
    work = np.flatnonzero(structure.links.is_backlog)
    nobody = np.full(len(work), ABSENT)
    return tuple(kernel_stats(structure, work, nobody, nobody))


def clipped_union(start_ns: np.ndarray, end_ns: np.ndarray, window: Window) -> Intervals:
    """Return what of the given intervals lies in the window."""
    return union(np.maximum(start_ns, window.start_ns), np.minimum(end_ns, window.end_ns))


def breakdown(structure: Structure, number: int | None, device: Device, work: Mapping[str, Intervals]) -> Breakdown:
    """Return how one device spent the window; `work` holds what it did of each kind.

    `number` is None for the host: its times without a cause are the window less the time that is booked on it.
    """
    window = structure.window
    starts, ends = zip(*((spans.start_ns, spans.end_ns) for spans in work.values()), strict=True)
    busy = union(np.concatenate(starts), np.concatenate(ends))
    gaps = busy.complement(window.start_ns, window.end_ns)
    idle = IdleTime(structure.trace, device, gaps, structure.activity)
    playback = None if number is None else Playback(structure, device, work, idle)
    edges = np.append(window.edges_ns, window.end_ns)  # the last span is what runs on after the last step
    spans = min(MOST_SPANS, max(1, window.length_ns))
    ticks = np.array([window.start_ns + span * window.length_ns // spans for span in range(spans + 1)], dtype=np.int64)
    moments = distinct(np.sort(np.concatenate([edges, ticks])))  # once for both: each costs as much as all else here
    idle_of, busy_of = idle.between(moments), _exposed(work, moments)
    causes = _summed(idle_of, moments, edges)
    exposed = {kind: _summed(spent, moments, edges) for kind, spent in busy_of.items()}
    steps = tuple(
        StepTimes(
            number=step,
            start_ns=int(edges[index]),
            duration_ns=int(edges[index + 1] - edges[index]),
            busy_ns={kind: int(spent[index]) for kind, spent in exposed.items()},
            idle_ns=dict(zip(CAUSES, causes[index].tolist(), strict=True)),
        )
        for index, step in enumerate(window.steps)
    )
    compute = work.get("compute")
    communication = work.get("communication")
    overlap = None
    if compute is not None and communication is not None and communication.total_ns:
        overlap = compute.intersection(communication).total_ns / communication.total_ns
    causes_ns = {cause: int(causes[:, number].sum()) for number, cause in enumerate(CAUSES)}
    exposed_ns = {kind: int(spent.sum()) for kind, spent in exposed.items()}
    without_ns, least_ns, alone_ns = _without(window, {**exposed_ns, **causes_ns}, busy.total_ns, playback)
    return Breakdown(
        device=number,
        window_ns=window.length_ns,
        busy_ns=busy.total_ns,
        idle_ns=window.length_ns - busy.total_ns,
        by_kind_ns={kind: intervals.total_ns for kind, intervals in work.items()},
        exposed_ns=exposed_ns,
        communication_overlap=overlap,
        causes_ns=causes_ns,
        cause_details=idle.details(),
        contributors=idle.contributors(lambda row: line_of(structure, row)),
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
    position = np.array([[0.25], [0.5], [0.75]]) * (len(rows) - 1)  # np.percentile would load numpy.ma for that: 11 ms
    below = position[:, 0].astype(int)
    lower, upper = ascending[below], ascending[np.minimum(below + 1, len(rows) - 1)]
    values = lower + (upper - lower) * (position - below[:, None])
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
