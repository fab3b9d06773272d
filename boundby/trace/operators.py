"""The operators of a trace: how often each ran, its own and its total time, and the device time it caused."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from boundby.trace.reader import ABSENT, DEVICE_CATEGORIES, PROFILER_STEP, Trace

LAUNCH_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "xpu_runtime",
    "xpu_driver",
    "privateuse1_runtime",
    "privateuse1_driver",
)
OPERATOR_COLUMNS = (
    "name",
    "input_shapes",
    "calls",
    "cpu_total_ms",
    "cpu_self_ms",
    "cpu_self_pct",
    "device_total_ms",
    "device_pct",
)


@dataclass(frozen=True)
class OpStat:
    """All calls of one operator with the same recorded input shapes.

    `cpu_total_ns` includes the operators it called, `cpu_self_ns` does not: the latter adds up to the time in which
    each thread was inside any operator. `device_total_ns` is the time of the kernels, copies and memsets launched by
    the calls and the operators they called; it overlaps between operators that call one another.
    """

    name: str
    input_shapes: str | None  # JSON text; None where shapes were not recorded
    calls: int
    cpu_total_ns: int
    cpu_self_ns: int
    cpu_self_share: float | None  # of the self time of all operators; None where that is zero
    device_total_ns: int | None  # None where the trace holds no device event
    device_share: float | None  # of the time of all device events


def op_stats(trace: Trace) -> list[OpStat]:
    """Return one record per operator and input shapes, the one with the most self time first.

    Python frames, user annotations and `ProfilerStep` marks are no operators.
    """
    is_op = _is_operator(trace)
    duration_ns = np.maximum(trace.duration_ns, 0)
    self_ns, parent = _nest(trace, is_op)
    device_ns = _device_ns(trace, is_op, parent)
    call = _outermost_dispatch(trace, is_op, parent)
    own_ns = np.zeros_like(self_ns)
    np.add.at(own_ns, call, self_ns)
    ops = np.flatnonzero(is_op & (call == np.arange(len(call))))
    key = trace.name[ops].astype(np.int64) * (len(trace.shapes) + 1) + trace.input_shapes[ops]
    _, first, group, calls = np.unique(key, return_index=True, return_inverse=True, return_counts=True)

    def per_group(nanoseconds: np.ndarray) -> list[int]:
        sums = np.zeros(len(first), dtype=np.int64)
        np.add.at(sums, group, nanoseconds[ops])
        return sums.tolist()

    device_totals = [None] * len(first) if device_ns is None else per_group(device_ns)
    whole_self = int(own_ns.sum())
    whole_device = int(duration_ns[trace.in_categories(DEVICE_CATEGORIES)].sum())
    columns = zip(ops[first], calls.tolist(), per_group(duration_ns), per_group(own_ns), device_totals, strict=True)
    stats = [
        OpStat(
            name=trace.names[trace.name[row]],
            input_shapes=None if trace.input_shapes[row] == ABSENT else trace.shapes[trace.input_shapes[row]],
            calls=count,
            cpu_total_ns=cpu_total,
            cpu_self_ns=cpu_self,
            cpu_self_share=_share(cpu_self, whole_self),
            device_total_ns=device_total,
            device_share=_share(device_total, whole_device),
        )
        for row, count, cpu_total, cpu_self, device_total in columns
    ]
    return sorted(stats, key=lambda stat: stat.cpu_self_ns, reverse=True)


def operator_rows(stats: Sequence[OpStat]) -> list[dict[str, Any]]:
    """Return the records as rows with the columns `OPERATOR_COLUMNS`, times in milliseconds; unknown is None."""
    return [
        {
            "name": stat.name,
            "input_shapes": stat.input_shapes,
            "calls": stat.calls,
            "cpu_total_ms": stat.cpu_total_ns / 1e6,
            "cpu_self_ms": stat.cpu_self_ns / 1e6,
            "cpu_self_pct": None if stat.cpu_self_share is None else 100 * stat.cpu_self_share,
            "device_total_ms": None if stat.device_total_ns is None else stat.device_total_ns / 1e6,
            "device_pct": None if stat.device_share is None else 100 * stat.device_share,
        }
        for stat in stats
    ]


def rows_by_name(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per operator, its calls with different shapes added up, most CPU self time first.

    Takes the rows of `operator_rows`, also as the texts that a CSV holds; an empty cell is unknown.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        whole = found.setdefault(row["name"], {"name": row["name"], "calls": 0, **dict.fromkeys(OPERATOR_COLUMNS[3:])})
        whole["calls"] += int(row["calls"])
        for key in OPERATOR_COLUMNS[3:]:
            if row[key] not in (None, ""):
                whole[key] = (whole[key] or 0.0) + float(row[key])
    return sorted(found.values(), key=lambda row: row["cpu_self_ms"] or 0.0, reverse=True)


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def _is_operator(trace: Trace) -> np.ndarray:
    is_step = np.array([PROFILER_STEP.fullmatch(name) is not None for name in trace.names], dtype=bool)
    return trace.in_categories(["cpu_op"]) & ~is_step[trace.name]


def _nest(trace: Trace, is_op: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every event of the trace, the self time of an operator in ns and the row of the enclosing operator.

    Operators and launches of one thread are gone through in the order of their starts.
    """
    self_ns = np.zeros(len(is_op), dtype=np.int64)
    parent = np.full(len(is_op), ABSENT, dtype=np.int64)
    duration_ns = np.maximum(trace.duration_ns, 0)
    rows = np.flatnonzero(is_op | trace.in_categories(LAUNCH_CATEGORIES))
    rows = rows[np.lexsort((-duration_ns[rows], trace.start_ns[rows], trace.thread[rows]))]
    for thread_rows in np.split(rows, np.flatnonzero(np.diff(trace.thread[rows])) + 1):
        start_ns = trace.start_ns[thread_rows]
        own, outer = _nest_thread(
            start_ns.tolist(), (start_ns + duration_ns[thread_rows]).tolist(), is_op[thread_rows].tolist()
        )
        self_ns[thread_rows] = own
        parent[thread_rows] = [ABSENT if place == ABSENT else thread_rows[place] for place in outer]
    return self_ns, parent


def _nest_thread(starts: list[int], ends: list[int], is_op: list[bool]) -> tuple[list[int], list[int]]:
    """Return self time in ns and place of the enclosing operator, for events in the order of their starts.

    Every moment is booked on the operator that began last and still runs. So the self times add up to the union of
    the operators, and none is negative, also where events overlap without nesting.
    """
    self_ns = [0] * len(starts)
    parent = [ABSENT] * len(starts)
    stack: list[int] = []
    now = 0

    def advance(until: float) -> None:
        nonlocal now
        while stack and ends[stack[-1]] <= until:
            top = stack.pop()
            self_ns[top] += max(ends[top] - now, 0)
            now = max(ends[top], now)

    for place, start in enumerate(starts):
        advance(start)
        if stack:
            parent[place] = stack[-1]
            self_ns[stack[-1]] += start - now
        now = start
        if is_op[place]:
            stack.append(place)
    advance(math.inf)
    return self_ns, parent


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


def _device_ns(trace: Trace, is_op: np.ndarray, parent: np.ndarray) -> np.ndarray | None:
    """Return, for every operator, the ns of the device events that it or an operator inside it launched.

    None where the trace holds no device event.
    """
    device = np.flatnonzero(trace.in_categories(DEVICE_CATEGORIES))
    if not len(device):
        return None
    total_ns = np.zeros(len(is_op), dtype=np.int64)
    owner = _launchers(trace, is_op, parent, device)
    duration_ns = np.maximum(trace.duration_ns[device], 0)
    while (inside := owner != ABSENT).any():  # once per level of nesting
        owner, duration_ns = owner[inside], duration_ns[inside]
        np.add.at(total_ns, owner, duration_ns)
        owner = parent[owner]
    return total_ns


def _launchers(trace: Trace, is_op: np.ndarray, parent: np.ndarray, device: np.ndarray) -> np.ndarray:
    """Return, for each of the `device` events, the row of the innermost operator that launched it, or `ABSENT`.

    That is the operator around the runtime call of the same correlation; where the trace lacks the call, the operator
    of the same external id. In older traces the external id only repeats the correlation and says nothing.
    """
    calls = np.flatnonzero(trace.in_categories(LAUNCH_CATEGORIES) & (trace.correlation != ABSENT))
    around_call = dict(zip(trace.correlation[calls].tolist(), parent[calls].tolist(), strict=True))
    ops = np.flatnonzero(is_op & (trace.external_id != ABSENT))
    by_external_id = dict(zip(trace.external_id[ops].tolist(), ops.tolist(), strict=True))
    owners = []
    for row in device.tolist():
        correlation, external_id = int(trace.correlation[row]), int(trace.external_id[row])
        if correlation in around_call:
            owners.append(around_call[correlation])
        else:
            owners.append(ABSENT if external_id == correlation else by_external_id.get(external_id, ABSENT))
    return np.array(owners, dtype=np.int64)
