"""The work of the devices: what launching it costs, its time by name, and the launch that is worth a closer look.

Of communication, what is waiting for other ranks: a collective takes as long as its transfer, and as the wait.
"""

import re
import shlex
from collections.abc import Sequence

import msgspec
import numpy as np

from boundby.trace.intervals import distinct
from boundby.trace.linking import KINDS, Links
from boundby.trace.structure import Structure
from boundby.trace.table import ABSENT, Trace
from boundby.trace.windows import Window


class Spread(msgspec.Struct, frozen=True):
    """Median, 95th percentile and maximum of a number of durations, in ns."""

    median_ns: int
    p95_ns: int
    max_ns: int


class LaunchStats(msgspec.Struct, frozen=True):
    """The launching calls that begin in the window and the work that they put into the queues of a device.

    Where there is nothing to take a spread of, it is None. `delay` is the time from the start of the call to the start
    of the work: short where the device waits for the host, long where the host runs ahead.
    """

    calls: int
    calls_without_work: int  # lost records, or work after the end of the trace
    work: int
    work_without_call: int
    call: Spread | None
    delay: Spread | None
    shorter_than_call: int  # kernels that take less time than the call that launched them
    mean_queue: float | None  # launched and not begun, over the time of the window
    deepest_queue: int
    empty_queue_share: float | None  # of the window; the device then has nothing else to begin


def launch_stats(structure: Structure) -> LaunchStats:
    """Return the statistics over all devices of the trace."""
    trace, linked, window = structure.trace, structure.links, structure.window
    calls = linked.calls[_inside(trace.start_ns[linked.calls], window)]
    has_call = linked.launch != ABSENT
    has_work = np.zeros(len(trace.start_ns), dtype=bool)
    has_work[linked.launch[has_call]] = True
    call_ns = np.maximum(trace.duration_ns, 0)
    work = np.flatnonzero(_inside(linked.start_ns, window))
    joined = work[has_call[work]]
    delay_ns = linked.start_ns[joined] - trace.start_ns[linked.launch[joined]]
    kernels = joined[trace.in_categories(["kernel"])[linked.rows[joined]]]
    shorter = linked.end_ns[kernels] - linked.start_ns[kernels] < call_ns[linked.launch[kernels]]
    mean_queue, deepest, empty = _queue(trace.start_ns[linked.launch[joined]], linked.start_ns[joined], window)
    return LaunchStats(
        calls=len(calls),
        calls_without_work=int((~has_work[calls]).sum()),
        work=len(work),
        work_without_call=int((~has_call[work]).sum()),
        call=spread(call_ns[distinct(np.sort(linked.launch[joined]))]),
        delay=spread(delay_ns),
        shorter_than_call=int(shorter.sum()),
        mean_queue=mean_queue,
        deepest_queue=deepest,
        empty_queue_share=empty,
    )


def spread(nanoseconds: np.ndarray) -> Spread | None:
    """Return the spread of some durations; None of none."""
    if not len(nanoseconds):
        return None
    ascending, last = np.sort(nanoseconds), len(nanoseconds) - 1
    median, p95 = (int(ascending[-(-last * percent // 100)]) for percent in (50, 95))  # the next higher of two
    return Spread(median, p95, int(ascending[last]))


def _inside(moments: np.ndarray, window: Window) -> np.ndarray:
    return (moments >= window.start_ns) & (moments < window.end_ns)


def _queue(launched: np.ndarray, begun: np.ndarray, window: Window) -> tuple[float | None, int, float | None]:
    """Return the mean and the largest number of launched pieces of work that wait, and the share of time without."""
    sound = launched < begun
    moments = np.concatenate([launched[sound], begun[sound]])
    if not window.length_ns:
        return None, 0, None
    change = np.concatenate([np.ones(sound.sum(), np.int64), -np.ones(sound.sum(), np.int64)])
    order = np.argsort(moments, kind="stable")
    moments = np.clip(moments[order], window.start_ns, window.end_ns)
    depth = np.concatenate([[0], np.cumsum(change[order])])
    lengths = np.diff(np.concatenate([[window.start_ns], moments, [window.end_ns]]))
    waiting = float((depth * lengths.astype(np.float64)).sum())
    empty = int(lengths[depth == 0].sum())
    return waiting / window.length_ns, int(depth.max()), empty / window.length_ns


class KernelStat(msgspec.Struct, frozen=True):
    """All work of one name: a kernel, or the copies or memsets of one sort."""

    name: str
    kind: str  # one of KINDS
    calls: int
    total_ns: int
    median_ns: int
    max_ns: int
    share: float | None  # of the time of all work; None where that is zero
    operator: str | None  # that launched most of its time; None where the trace tells of none
    module: str | None  # likewise; recorded with Python stacks only


def kernel_stats(structure: Structure, work: np.ndarray, operator: np.ndarray, module: np.ndarray) -> list[KernelStat]:
    """Return one record per name of these pieces of work of the device, the one with the most time first.

    `operator` and `module` are the numbers of the names of those that launched each piece, or `ABSENT`.
    """
    names, rows = structure.trace.names, structure.links.rows[work]
    name, kind = structure.trace.name[rows], structure.kinds[rows]
    duration_ns = (structure.links.end_ns - structure.links.start_ns)[work]
    if not len(name):
        return []
    whole = int(duration_ns.sum())
    order = np.lexsort((duration_ns, name))
    first = np.flatnonzero(np.append(True, np.diff(name[order]) != 0))
    calls = np.diff(np.append(first, len(order)))
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.repeat(np.arange(len(first)), calls)
    columns = zip(
        order[first].tolist(),
        calls.tolist(),
        np.add.reduceat(duration_ns[order], first).tolist(),
        duration_ns[order[first + calls // 2]].tolist(),
        duration_ns[order[first + calls - 1]].tolist(),
        _most(group, len(first), operator, duration_ns),
        _most(group, len(first), module, duration_ns),
        strict=True,
    )
    stats = [
        KernelStat(
            name=names[name[row]],
            kind=KINDS[kind[row]],
            calls=count,
            total_ns=total,
            median_ns=median,
            max_ns=longest,
            share=total / whole if whole else None,
            operator=None if asked == ABSENT else names[asked],
            module=None if inside == ABSENT else names[inside],
        )
        for row, count, total, median, longest, asked, inside in columns
    ]
    return sorted(stats, key=lambda stat: -stat.total_ns)


def _most(group: np.ndarray, groups: int, numbers: np.ndarray, duration_ns: np.ndarray) -> list[int]:
    """Return the number that most of the time of each group belongs to; `ABSENT` where it has none."""
    most = np.full(groups, ABSENT, dtype=np.int64)
    known = np.flatnonzero(numbers != ABSENT)
    if len(known):
        base = int(numbers.max()) + 1
        keys, group = np.unique(group[known] * base + numbers[known], return_inverse=True)
        spent = np.bincount(group, weights=duration_ns[known])
        ascending = np.argsort(spent, kind="stable")
        most[keys[ascending] // base] = keys[ascending] % base  # the last one written to each group has the most
    return most.tolist()


UNNAMED = re.compile(r"\(anonymous namespace\)|\{anonymous\}|<unnamed>")
TEMPLATE_OR_PARAMETERS = re.compile(r"[<(]")
SPECIAL = re.compile(
    r"([\\^$.|?*+()\[\]{}])"
)  # to a regular expression of C++; what Python escapes beyond is not known
PROGRAM = ("python", "train.py")  # what stands for the program, which a trace does not name


class KernelLaunch(msgspec.Struct, frozen=True):
    """The longest launch of the kernel that takes most of the device's time; communication cannot be replayed."""

    kernel: str  # as the trace names it
    function: str  # its name without namespaces, template arguments and parameters, as Nsight Compute filters it
    step: int | None  # in which it was launched; None where that is in no step that the trace marks
    skip: int  # launches of functions of this name before it: in that step, or without one in the trace


def slowest_launch(structure: Structure) -> KernelLaunch | None:
    """Return which launch to look into; None where no kernel computes for any time."""
    trace, linked, seen = structure.trace, structure.links, structure.window
    kernels = np.flatnonzero(structure.kinds[linked.rows] == KINDS.index("compute"))
    names, spent_ns = trace.name[linked.rows[kernels]], (linked.end_ns - linked.start_ns)[kernels]
    if not spent_ns.any():
        return None
    slowest = int(np.bincount(names, weights=spent_ns).argmax())
    function = function_name(trace.names[slowest])
    if not function:
        return None
    same = np.isin(names, [number for number in set(names.tolist()) if function_name(trace.names[number]) == function])
    launched = _launched(trace, linked, kernels)
    order = np.lexsort((linked.start_ns[kernels], launched))
    order = order[same[order]]
    longest = int(np.where(names[order] == slowest, spent_ns[order], -1).argmax())
    steps = np.searchsorted(seen.edges_ns, launched[order], side="right") - 1
    step = int(steps[longest])
    if not 0 <= step < len(seen.steps):
        return KernelLaunch(trace.names[slowest], function, None, longest)
    return KernelLaunch(trace.names[slowest], function, seen.steps[step], int((steps[:longest] == step).sum()))


def ncu_command(launch: KernelLaunch) -> str:
    """Return the command that profiles the launch.

    The step is found by the range `step_N`, which `ProfilerManager` and the callbacks push when Nsight is there.
    """
    where = ["--nvtx", "--nvtx-include", f"step_{launch.step}/"] if launch.step is not None else []
    pattern = SPECIAL.sub(r"\\\1", launch.function)
    return shlex.join(
        [
            *("ncu", *where, "--kernel-name", f"regex:^{pattern}$"),
            *("--launch-skip", str(launch.skip), "--launch-count", "1"),
            *("--set", "full", "--target-processes", "all", "-o", "kernel", *PROGRAM),
        ]
    )


def function_name(kernel: str) -> str:
    """Return the name of a kernel's function as Nsight Compute filters it by default; "" where it has none."""
    head = TEMPLATE_OR_PARAMETERS.split(UNNAMED.sub("", kernel), maxsplit=1)[0].split()
    return head[-1].rpartition("::")[2] if head else ""


def _launched(trace: Trace, linked: Links, kernels: np.ndarray) -> np.ndarray:
    """Return when each kernel was launched by the host; where that is not known, when it began."""
    launch = linked.launch[kernels]
    launched: np.ndarray = np.where(launch == ABSENT, linked.start_ns[kernels], trace.start_ns[launch])
    return launched


class Collectives(msgspec.Struct, frozen=True):
    """The collectives of one rank inside the window, in the order of their starts; the arrays are parallel."""

    names: tuple[str, ...]
    name: np.ndarray  # number of `names`
    step: np.ndarray  # place of the step in which each begins
    duration_ns: np.ndarray

    @property
    def total_ns(self) -> int:
        """The sum of all durations."""
        return int(self.duration_ns.sum())


def collectives(
    names: Sequence[str], name: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray, edges_ns: np.ndarray
) -> Collectives:
    """Return those of the given names, times and edges of steps, of which only the first counts where there is none."""
    used = distinct(np.sort(name))
    return Collectives(
        names=tuple(names[number] for number in used.tolist()),
        name=np.searchsorted(used, name),
        step=np.searchsorted(edges_ns, start_ns, side="right") - 1,
        duration_ns=end_ns - start_ns,
    )


def least_wait_ns(own: Collectives) -> int | None:
    """Return how much of the time of one rank is waiting at least; None where nothing repeats.

    Of the same collective in every step (the n-th of its name, where all steps have as many) the shortest one is taken
    for its transfer. What every step waits alike is not seen.
    """
    count = len(own.names)
    steps, step = np.unique(own.step, return_inverse=True)
    if len(steps) < 2:
        return None
    per_step = np.zeros((len(steps), count), dtype=np.int64)
    np.add.at(per_step, (step, own.name), 1)
    is_regular = (per_step == per_step[0]).all(axis=0)[own.name]
    order = np.lexsort((np.arange(len(step)), own.name, step))
    first = np.searchsorted(step[order] * count + own.name[order], step[order] * count + own.name[order])
    ordinal = np.empty(len(step), dtype=np.int64)
    ordinal[order] = np.arange(len(step)) - first
    if not is_regular.any():
        return None
    largest = int(ordinal.max()) + 1
    kept = np.flatnonzero(is_regular)
    _, collective = np.unique(own.name[kept] * largest + ordinal[kept], return_inverse=True)
    shortest = np.full(int(collective.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, collective, own.duration_ns[kept])
    return int((own.duration_ns[kept] - shortest[collective]).sum())


def waits_ns(ranks: Sequence[Collectives]) -> tuple[int, ...] | None:
    """Return how long each rank waits for the others; None where their collectives do not fit one another.

    A collective ends everywhere at once and the last rank to come waits for nobody: the shortest of all ranks is the
    transfer. Needs no clock that the ranks share.
    """
    if len(ranks) < 2 or any(rank.names != ranks[0].names for rank in ranks):
        return None
    orders = [np.argsort(rank.name, kind="stable") for rank in ranks]
    names = [rank.name[order] for rank, order in zip(ranks, orders, strict=True)]
    if any(len(name) != len(names[0]) or (name != names[0]).any() for name in names) or not len(names[0]):
        return None
    durations = np.stack([rank.duration_ns[order] for rank, order in zip(ranks, orders, strict=True)])
    return tuple((durations - durations.min(axis=0)).sum(axis=1).tolist())
