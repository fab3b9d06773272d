"""From a trace to its cause: where the time of every device went, who asked for it, and what may be concluded."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from boundby.trace.activity import main_thread, thread_activities
from boundby.trace.annotations import AnnotationStat, annotation_stats
from boundby.trace.breakdown import KINDS, Breakdown, breakdown, clipped_union, kinds_of_work
from boundby.trace.completeness import MOST_DEVICES, Finding, findings
from boundby.trace.gaps import Device, IdleTime
from boundby.trace.intervals import Intervals, distinct, union
from boundby.trace.kernels import KernelStat, kernel_stats
from boundby.trace.launches import LaunchStats, launch_stats
from boundby.trace.links import Links, links
from boundby.trace.memory import MemoryUse, memory_use
from boundby.trace.nesting import HostTree, host_tree
from boundby.trace.nsight_compute import KernelLaunch, slowest_launch
from boundby.trace.operators import OpStat, is_module, is_operator, launching_operators, names_of, op_stats
from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT
from boundby.trace.window import Window, window

HOST_KIND = "operators"


@dataclass(frozen=True)
class Analysis:
    """What one trace says. Times are ns since the base of the trace."""

    path: str
    rank: int | None
    world_size: int | None
    device_names: tuple[str, ...]
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

    @property
    def is_conclusive(self) -> bool:
        """Whether nothing fatal was found."""
        return not any(each.is_fatal for each in self.findings)


def analyze(trace: Trace, *, expected_steps: int | None = None, stacks_expected: bool = False) -> Analysis:
    """Return what the trace says; it never raises on an odd one, `findings` tell what is wrong with it."""
    tree, linked = host_tree(trace), links(trace)
    seen = window(trace, linked)
    launches = launch_stats(trace, linked, seen)
    kinds = kinds_of_work(trace)
    main = main_thread(trace, [thread for thread, each in tree.segments.items() if len(each.row)])
    return Analysis(
        path=str(trace.path),
        rank=trace.rank,
        world_size=trace.world_size,
        device_names=trace.device_names,
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
            devices=len(distinct(np.sort(_device_numbers(trace, linked)))),
            expected_steps=expected_steps,
            stacks_expected=stacks_expected,
        ),
        devices=_devices(trace, tree, linked, kinds, seen, main),
        launches=launches,
        operators=tuple(op_stats(trace, tree=tree, linked=linked)),
        kernels=_kernels(trace, tree, linked, kinds),
        slowest_launch=slowest_launch(trace, linked, seen),
        annotations=tuple(annotation_stats(trace, tree, linked, main)),
        memory=memory_use(trace, tree, seen),
    )


def _devices(  # noqa: PLR0913  (everything that is known of the trace)
    trace: Trace, tree: HostTree, linked: Links, kinds: np.ndarray, seen: Window, main: int | None
) -> tuple[Breakdown, ...]:
    activities = thread_activities(trace, tree, linked)

    def of(number: int | None, device: Device, work: Mapping[str, Intervals]) -> Breakdown:
        starts, ends = zip(*((each.start_ns, each.end_ns) for each in work.values()), strict=True)
        busy = union(np.concatenate(starts), np.concatenate(ends))
        gaps = busy.complement(seen.start_ns, seen.end_ns)
        return breakdown(number, seen, work, busy, IdleTime(trace, device, gaps, activities, main))

    if not len(linked.rows):
        host = _host(trace, seen)
        return (of(None, host, {HOST_KIND: clipped_union(host.start_ns, host.end_ns, seen)}),)
    numbers = _device_numbers(trace, linked)
    found = []
    for number in _busiest(numbers, linked.end_ns - linked.start_ns):
        chosen = np.flatnonzero(numbers == number)
        kind = kinds[linked.rows[chosen]]
        work = {
            name: clipped_union(linked.start_ns[chosen[kind == place]], linked.end_ns[chosen[kind == place]], seen)
            for place, name in enumerate(KINDS)
        }
        found.append(of(number, _device(trace, linked, chosen, seen), work))
    return tuple(sorted(found, key=lambda each: -each.busy_ns))


def _busiest(numbers: np.ndarray, duration_ns: np.ndarray) -> list[int]:
    """Return the devices that are told about: all but in a trace with absurdly many."""
    different, place = np.unique(numbers, return_inverse=True)
    spent = np.bincount(place, weights=duration_ns)
    return different[np.argsort(-spent, kind="stable")[:MOST_DEVICES]].tolist()


def _host(trace: Trace, seen: Window) -> Device:
    """Return the operators as work that nobody launches beforehand: each begins when its own call does."""
    rows = np.flatnonzero(is_operator(trace) & (trace.duration_ns > 0) & (trace.start_ns < seen.end_ns))
    rows = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))]
    return Device(rows, trace.start_ns[rows], trace.start_ns[rows] + trace.duration_ns[rows], rows)


def _device(trace: Trace, linked: Links, chosen: np.ndarray, seen: Window) -> Device:
    lasts = (linked.end_ns[chosen] > linked.start_ns[chosen]) & (linked.start_ns[chosen] < seen.end_ns)
    lasting = chosen[lasts]
    launch = linked.launch[lasting]
    launched = np.where(launch == ABSENT, np.iinfo(np.int64).max, trace.start_ns[launch])
    lasting = lasting[np.lexsort((launched, linked.start_ns[lasting]))]
    return Device(linked.rows[lasting], linked.start_ns[lasting], linked.end_ns[lasting], linked.launch[lasting])


def _device_numbers(trace: Trace, linked: Links) -> np.ndarray:
    """Return the number of the device of each piece of work; where its event lacks it, the process stands for it."""
    numbers = [pid if isinstance(pid, int) and abs(pid) < 2**63 else 0 for pid, _ in trace.threads]
    processes = np.array(numbers or [0], dtype=np.int64)
    number = trace.device[linked.rows]
    return np.where(number == ABSENT, processes[trace.thread[linked.rows]], number)


def _kernels(trace: Trace, tree: HostTree, linked: Links, kinds: np.ndarray) -> tuple[KernelStat, ...]:
    if not len(linked.rows):
        return ()
    is_op = is_operator(trace)
    operator = launching_operators(trace, linked, tree.nearest(np.arange(len(is_op)), is_op))
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
