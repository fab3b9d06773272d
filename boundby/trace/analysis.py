"""From a trace to its cause: where the time of every device went, who asked for it, and what may be concluded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from boundby.trace.activity import Activity, host_activity
from boundby.trace.breakdown import Breakdown, breakdown, clipped_union
from boundby.trace.collectives import Collectives, collectives
from boundby.trace.completeness import MOST_DEVICES, Finding, findings
from boundby.trace.gaps import Device, IdleTime
from boundby.trace.intervals import HostTree, Intervals, distinct, host_tree, union
from boundby.trace.kernels import KernelLaunch, KernelStat, LaunchStats, kernel_stats, launch_stats, slowest_launch
from boundby.trace.links import KINDS, Links, host_collectives, kinds_of_work, links
from boundby.trace.memory import MemoryUse, memory_use
from boundby.trace.operators import (
    AnnotationStat,
    OpStat,
    annotation_stats,
    is_module,
    launching_operators,
    line_of,
    names_of,
    op_stats,
)
from boundby.trace.removal import Playback
from boundby.trace.table import ABSENT, Trace
from boundby.trace.window import Window, window, without_excluded

HOST_KIND = "operators"


@dataclass(frozen=True)
class Analysis:
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
    trace = without_excluded(trace)
    tree, linked = host_tree(trace), links(trace)
    seen = window(trace, linked)
    launches = launch_stats(trace, linked, seen)
    kinds = kinds_of_work(trace)
    activity = host_activity(trace, tree, linked)
    devices = _devices(trace, tree, linked, kinds, seen, activity)
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
        findings=findings(
            trace,
            linked,
            seen,
            launches,
            devices=len(distinct(np.sort(linked.device))),
            expected_steps=expected_steps,
            stacks_expected=stacks_expected,
        ),
        devices=devices,
        launches=launches,
        operators=tuple(op_stats(trace, tree=tree, linked=linked)),
        kernels=_kernels(trace, tree, linked, kinds),
        slowest_launch=slowest_launch(trace, linked, seen, kinds),
        annotations=tuple(annotation_stats(trace, tree, linked, activity.main_thread)),
        memory=memory_use(trace, tree, seen),
        collectives=_collectives(trace, linked, kinds, seen, devices[0].device),
        backlog=_backlog(trace, linked, kinds),
        process=trace.process,
    )


def _devices(  # noqa: PLR0913  (all that is known of the trace)
    trace: Trace, tree: HostTree, linked: Links, kinds: np.ndarray, seen: Window, activity: Activity
) -> tuple[Breakdown, ...]:
    def of(number: int | None, device: Device, work: Mapping[str, Intervals]) -> Breakdown:
        starts, ends = zip(*((spans.start_ns, spans.end_ns) for spans in work.values()), strict=True)
        busy = union(np.concatenate(starts), np.concatenate(ends))
        gaps = busy.complement(seen.start_ns, seen.end_ns)
        idle = IdleTime(trace, device, gaps, activity)
        playback = None if number is None else Playback(trace, device, seen, work, idle, activity, kinds)
        return breakdown(number, seen, work, busy, idle, lambda row: line_of(trace, tree, row), playback)

    if not len(linked.rows):
        host, meets = _host(trace, seen), host_collectives(trace)
        apart = {HOST_KIND: ~meets[host.rows], "communication": meets[host.rows]}
        work = {
            name: clipped_union(host.start_ns[chosen], host.end_ns[chosen], seen)
            for name, chosen in apart.items()
            if name == HOST_KIND or chosen.any()
        }
        return (of(None, host, work),)
    devices = []
    for number in _busiest(linked.device, linked.end_ns - linked.start_ns):
        chosen = np.flatnonzero(linked.device == number)
        kind = kinds[linked.rows[chosen]]
        work = {
            name: clipped_union(linked.start_ns[chosen[kind == place]], linked.end_ns[chosen[kind == place]], seen)
            for place, name in enumerate(KINDS)
        }
        devices.append(of(number, _device(trace, linked, chosen, seen), work))
    return tuple(sorted(devices, key=lambda device: -device.busy_ns))


def _busiest(numbers: np.ndarray, duration_ns: np.ndarray) -> list[int]:
    """Return the devices that are told about: all but in a trace with absurdly many."""
    different, place = np.unique(numbers, return_inverse=True)
    spent = np.bincount(place, weights=duration_ns)
    busiest: list[int] = different[np.argsort(-spent, kind="stable")[:MOST_DEVICES]].tolist()
    return busiest


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


def _kernels(trace: Trace, tree: HostTree, linked: Links, kinds: np.ndarray) -> tuple[KernelStat, ...]:
    if not len(linked.rows):
        return ()
    operator = launching_operators(trace, tree, linked)
    module = tree.nearest(operator, is_module(trace))
    return tuple(
        kernel_stats(
            trace.names,
            trace.name[linked.rows],
            kinds[linked.rows],
            linked.end_ns - linked.start_ns,
            names_of(trace, operator),
            names_of(trace, module),
        )
    )


def _collectives(
    trace: Trace, linked: Links, kinds: np.ndarray, seen: Window, device: int | None
) -> Collectives | None:
    if device is None:
        rows = np.flatnonzero(host_collectives(trace))
        start_ns = trace.start_ns[rows]
        end_ns = start_ns + np.maximum(trace.duration_ns[rows], 0)
    else:
        is_one = (kinds[linked.rows] == KINDS.index("communication")) & (linked.device == device)
        rows, start_ns, end_ns = linked.rows[is_one], linked.start_ns[is_one], linked.end_ns[is_one]
    inside = np.flatnonzero((start_ns >= seen.start_ns) & (start_ns < seen.end_ns))
    if not len(inside):
        return None
    order = inside[np.argsort(start_ns[inside], kind="stable")]
    return collectives(trace.names, trace.name[rows[order]], start_ns[order], end_ns[order], seen.edges_ns)


def _backlog(trace: Trace, linked: Links, kinds: np.ndarray) -> tuple[KernelStat, ...]:
    rows = linked.rows[linked.is_backlog]
    nobody = np.full(len(rows), ABSENT)
    spent_ns = (linked.end_ns - linked.start_ns)[linked.is_backlog]
    return tuple(kernel_stats(trace.names, trace.name[rows], kinds[rows], spent_ns, nobody, nobody))
