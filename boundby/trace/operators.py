"""The operators of a trace: how often each ran, its own and its total time, and the device time it caused."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from boundby.trace.flops import operator_flops
from boundby.trace.links import Links, links
from boundby.trace.nesting import HostTree, host_tree
from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT, PYTHON_FRAME

OPERATOR_COLUMNS = (
    "name",
    "input_shapes",
    "calls",
    "cpu_total_ms",
    "cpu_self_ms",
    "cpu_self_pct",
    "device_total_ms",
    "device_pct",
    "device_self_ms",
    "flops",
    "flops_per_sec",
    "share_of_ceiling_pct",
)
ADDED_UP = ("cpu_total_ms", "cpu_self_ms", "cpu_self_pct", "device_total_ms", "device_pct", "device_self_ms", "flops")
MODULE = "nn.Module: "
LARGEST_KEY = 2**63 - 1
STACK_FRAMES = 5  # of the innermost ones, as in torch's own table
Grouping = Literal["shapes", "stack", "module"]


@dataclass(frozen=True)
class OpStat:
    """All calls of one operator that agree in what they are grouped by.

    `cpu_total_ns` includes the operators it called, `cpu_self_ns` does not: the latter adds up to the time in which
    each thread was inside any operator. `device_total_ns` is the time of the kernels, copies and memsets launched by
    the calls and the operators they called; it overlaps between operators that call one another. `device_self_ns`
    leaves the called ones out and adds up to the time of all work that an operator launched.
    """

    name: str
    input_shapes: str | None  # JSON text; None where shapes were not recorded or not grouped by
    calls: int
    cpu_total_ns: int
    cpu_self_ns: int
    cpu_self_share: float | None  # of the self time of all operators; None where that is zero
    device_total_ns: int | None  # None where the trace holds no device event
    device_share: float | None  # of the time of all device events
    device_self_ns: int | None
    flops: int | None = None  # of all calls; None where no formula is known for the operator or no shapes
    stack: str | None = None  # the innermost frames, outermost first, joined by ";"
    module: str | None = None  # the innermost nn.Module that made the call

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s over the device time, or the CPU time where there is no device; None where unknown or no time."""
        nanoseconds = self.cpu_total_ns if self.device_total_ns is None else self.device_total_ns
        return self.flops / nanoseconds * 1e9 if self.flops and nanoseconds else None


def op_stats(
    trace: Trace,
    group_by: Collection[Grouping] = ("shapes",),
    *,
    tree: HostTree | None = None,
    linked: Links | None = None,
) -> list[OpStat]:
    """Return one record per operator and whatever else it is grouped by, the one with the most self time first.

    Python frames, user annotations and `ProfilerStep` marks are no operators. `tree` and `linked` are those of the
    trace, where the caller has them already.
    """
    tree = tree or host_tree(trace)
    calls = _Calls(trace, tree, linked or links(trace))
    groups = _Groups(trace, tree, calls.rows, group_by)
    whole_self = int(calls.self_ns.sum())
    columns = zip(
        groups.first.tolist(),
        groups.counts.tolist(),
        groups.sums(np.maximum(trace.duration_ns, 0)),
        groups.sums(calls.self_ns),
        groups.sums(calls.device_total_ns),
        groups.sums(calls.device_self_ns),
        strict=True,
    )
    stats = []
    for place, count, cpu_total, cpu_self, device_total, device_self in columns:
        name, shapes, stack, module = groups.labels(place)
        flops = operator_flops(name, shapes)
        stats.append(
            OpStat(
                name=name,
                input_shapes=shapes,
                calls=count,
                cpu_total_ns=cpu_total,
                cpu_self_ns=cpu_self,
                cpu_self_share=_share(cpu_self, whole_self),
                device_total_ns=device_total,
                device_share=_share(device_total, calls.whole_device_ns),
                device_self_ns=device_self,
                flops=None if flops is None else flops * count,
                stack=stack,
                module=module,
            )
        )
    return sorted(stats, key=lambda stat: stat.cpu_self_ns, reverse=True)


def operator_rows(stats: Sequence[OpStat], peak_flops_per_s: float | None = None) -> list[dict[str, Any]]:
    """Return the records as rows with the columns `OPERATOR_COLUMNS`, times in milliseconds; unknown is None.

    `peak_flops_per_s` is the measured ceiling that the share of an operator's FLOP/s is taken of.
    """
    return [
        {
            "name": stat.name,
            "input_shapes": stat.input_shapes,
            "calls": stat.calls,
            "cpu_total_ms": stat.cpu_total_ns / 1e6,
            "cpu_self_ms": stat.cpu_self_ns / 1e6,
            "cpu_self_pct": _percent(stat.cpu_self_share),
            "device_total_ms": _milliseconds(stat.device_total_ns),
            "device_pct": _percent(stat.device_share),
            "device_self_ms": _milliseconds(stat.device_self_ns),
            "flops": stat.flops,
            "flops_per_sec": stat.flops_per_s,
            "share_of_ceiling_pct": _percent(_share(stat.flops_per_s, peak_flops_per_s)),
        }
        for stat in stats
    ]


def rows_by_name(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per operator, its calls with different shapes added up, most CPU self time first.

    Takes the rows of `operator_rows`, also as the texts that a CSV holds; an empty cell is unknown.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        whole = found.setdefault(row["name"], {"name": row["name"], "calls": 0, **dict.fromkeys(ADDED_UP)})
        whole["calls"] += int(row["calls"])
        for key in ADDED_UP:
            if row.get(key) not in (None, ""):
                whole[key] = (whole[key] or 0.0) + float(row[key])
    return sorted(found.values(), key=lambda row: row["cpu_self_ms"] or 0.0, reverse=True)


class _Calls:
    """The calls of operators and what each took.

    `rows` are those in the trace; the arrays of ns have a value for every event of the trace. The two of the device
    are None where it did nothing.
    """

    def __init__(self, trace: Trace, tree: HostTree, linked: Links) -> None:
        is_op = trace.is_operator
        every = np.arange(len(is_op))
        operator = tree.nearest(every, is_op)  # the event itself, or the operator around it
        parent = tree.nearest(tree.parent, is_op)
        call = _outermost_dispatch(trace, is_op, parent)
        self.rows = np.flatnonzero(is_op & (call == every))
        self.self_ns = np.zeros(len(is_op), dtype=np.int64)
        segments = tree.segments
        inside = np.flatnonzero(segments.row != ABSENT)
        owner = operator[segments.row[inside]]
        inside, owner = inside[owner != ABSENT], owner[owner != ABSENT]
        np.add.at(self.self_ns, owner, segments.start_ns[inside + 1] - segments.start_ns[inside])
        self.self_ns = _moved(self.self_ns, call)
        self.device_total_ns = self.device_self_ns = self.whole_device_ns = None
        if len(linked.rows):
            self._add_device_time(launching_operators(trace, tree, linked), parent, call, linked)

    def _add_device_time(self, owner: np.ndarray, parent: np.ndarray, call: np.ndarray, linked: Links) -> None:
        duration_ns = linked.end_ns - linked.start_ns
        self.whole_device_ns = int(duration_ns.sum())
        own_ns = np.zeros(len(parent), dtype=np.int64)
        np.add.at(own_ns, owner[owner != ABSENT], duration_ns[owner != ABSENT])
        self.device_self_ns = _moved(own_ns, call)
        self.device_total_ns = own_ns.copy()
        owner = np.flatnonzero(own_ns)
        carried_ns = own_ns[owner]
        while len(owner):  # once per level of nesting
            owner = parent[owner]
            owner, carried_ns = owner[owner != ABSENT], carried_ns[owner != ABSENT]
            np.add.at(self.device_total_ns, owner, carried_ns)


class _Groups:
    """Calls that agree in name and whatever else is asked for: `first` is the place of one of them in `rows`."""

    def __init__(self, trace: Trace, tree: HostTree, rows: np.ndarray, group_by: Collection[Grouping]) -> None:
        self._trace, self._rows = trace, rows
        self._by_shapes = "shapes" in group_by
        self._modules = self._frames = None
        keys = [trace.name[rows]]
        if self._by_shapes:
            keys.append(trace.input_shapes[rows])
        if "module" in group_by:
            self._modules = names_of(trace, tree.nearest(tree.parent[rows], is_module(trace)))
            keys.append(self._modules)
        if "stack" in group_by:
            self._frames = _frames(trace, tree, rows)
            keys += list(self._frames)
        _, self.first, self._group, self.counts = np.unique(
            _combined(keys), return_index=True, return_inverse=True, return_counts=True
        )

    def sums(self, nanoseconds: np.ndarray | None) -> list[int] | list[None]:
        """Return the sum of each group over an array with a value for every event, None for each where it is None."""
        if nanoseconds is None:
            return [None] * len(self.first)
        sums = np.zeros(len(self.first), dtype=np.int64)
        np.add.at(sums, self._group, nanoseconds[self._rows])
        return sums.tolist()

    def labels(self, place: int) -> tuple[str, str | None, str | None, str | None]:
        """Return name, shapes, stack and module of the group that the call at `place` belongs to."""
        trace, row = self._trace, self._rows[place]
        shapes = trace.input_shapes[row] if self._by_shapes else ABSENT
        stack = None
        if self._frames is not None:
            stack = ";".join(trace.names[name] for name in self._frames[::-1, place].tolist() if name != ABSENT)
        module = ABSENT if self._modules is None else self._modules[place]
        return (
            trace.names[trace.name[row]],
            None if shapes == ABSENT else trace.shapes[shapes],
            stack or None,
            None if module == ABSENT else trace.names[module].removeprefix(MODULE),
        )


def launching_operators(trace: Trace, tree: HostTree, linked: Links) -> np.ndarray:
    """Return, for each piece of work of the device, the row of the innermost operator that launched it, or `ABSENT`.

    Where the trace lacks the launching call, the operator of the same external id is taken; in older traces that id
    only repeats the correlation and says nothing.
    """
    owner = tree.nearest(linked.launch, trace.is_operator)
    lacking = np.flatnonzero(linked.launch == ABSENT)
    external_id = trace.external_id[linked.rows[lacking]]
    lacking = lacking[(external_id != ABSENT) & (external_id != trace.correlation[linked.rows[lacking]])]
    if len(lacking):
        ops = np.flatnonzero(trace.is_operator & (trace.external_id != ABSENT))
        of_id = dict(zip(trace.external_id[ops].tolist(), ops.tolist(), strict=True))
        owner[lacking] = [of_id.get(each, ABSENT) for each in trace.external_id[linked.rows[lacking]].tolist()]
    return owner


def _combined(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Return one integer per place that is equal where all keys are."""
    whole = keys[0].astype(np.int64)
    size = int(whole.max(initial=0)) + 1
    for key in keys[1:]:
        values = int(key.max(initial=0)) + 2
        if size * values > LARGEST_KEY:
            different, whole = np.unique(whole, return_inverse=True)
            size = len(different)
        whole = whole * values + key + 1
        size *= values
    return whole


def _frames(trace: Trace, tree: HostTree, rows: np.ndarray) -> np.ndarray:
    """Return the names of the innermost Python frames around `rows`, one line per frame, the innermost first."""
    is_frame = trace.in_categories([PYTHON_FRAME])
    frames, found = tree.nearest(tree.parent[rows], is_frame), []
    for _ in range(STACK_FRAMES):
        found.append(names_of(trace, frames))
        frames = tree.nearest(np.where(frames == ABSENT, ABSENT, tree.parent[frames]), is_frame)
    return np.stack(found)


def names_of(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Return the number of the name of each row; that of `ABSENT` is `ABSENT`."""
    return np.where(rows == ABSENT, ABSENT, trace.name[rows])


def _moved(nanoseconds: np.ndarray, call: np.ndarray) -> np.ndarray:
    """Return the values added up at the call that each event belongs to."""
    moved = np.zeros_like(nanoseconds)
    filled = np.flatnonzero(nanoseconds)
    np.add.at(moved, call[filled], nanoseconds[filled])
    return moved


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _milliseconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e6


def is_module(trace: Trace) -> np.ndarray:
    """Return a mask of the events that are calls of an nn.Module, recorded with Python stacks."""
    is_module = np.array([name.startswith(MODULE) for name in trace.names], dtype=bool)
    return is_module[trace.name] & trace.in_categories([PYTHON_FRAME])


def _outermost_dispatch(trace: Trace, is_op: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Return, for every event, the row of the call that it belongs to: itself, unless an operator dispatched to itself.

    An operator with nothing inside but one of its own name (`aten::mul` with a number does so) is one call, as in the
    tables of torch. In old traces of whole µs, one of 0 µs may also have come just before.
    """
    inner = np.flatnonzero(is_op & (parent != ABSENT))
    outer = parent[inner]
    is_only_one = np.bincount(outer, minlength=len(parent))[outer] == 1
    again = is_only_one & (trace.name[inner] == trace.name[outer]) & (trace.duration_ns[inner] > 0)
    call = np.arange(len(parent))
    call[inner[again]] = outer[again]
    while not np.array_equal(call, call[call]):
        call = call[call]
    return call
