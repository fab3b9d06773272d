"""The operators of a trace as a table of text, like `key_averages().table()` of torch, made from the trace alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from boundby.formatting import NOTHING, clean, number, table
from boundby.trace.operators import OpStat, operator_rows
from boundby.trace.stacks import frame_name

Row = Mapping[str, Any]

LONGEST_OPERATOR = 36  # characters; with all other columns the table is then at most 120 wide
LONGEST_DETAIL = 110
COLUMNS = {  # of the rows of `table_rows`: column, factor, header
    "cpu_self_ms": (1, "self CPU\nms"),
    "cpu_self_pct": (1, "self\nCPU %"),
    "cpu_total_ms": (1, "CPU\ntotal ms"),
    "cpu_per_call_us": (1, "CPU us\nper call"),
    "device_self_ms": (1, "device\nself ms"),
    "device_total_ms": (1, "device\ntotal ms"),
    "device_per_call_us": (1, "device us\nper call"),
    "flops_per_sec": (1e-9, "GFLOP/s"),
}


def table_rows(stats: Iterable[OpStat], peak_flops_per_s: float | None = None) -> list[dict[str, Any]]:
    """Return the rows of `op_stats.csv` and what else the operators may be grouped by."""
    stats = list(stats)
    return [
        {**row, "stack": each.stack, "module": each.module}
        for row, each in zip(operator_rows(stats, peak_flops_per_s), stats, strict=True)
    ]


def by_name(stats: Sequence[OpStat]) -> list[OpStat]:
    """Return one record per operator, all its shapes added up, the one with the most self time first.

    Its FLOPs are known where those of all its calls are.
    """
    found: dict[str, OpStat] = {}
    for each in stats:
        own = replace(each, input_shapes=None)
        found[each.name] = _sum(found[each.name], own) if each.name in found else own
    return sorted(found.values(), key=lambda stat: -stat.cpu_self_ns)


def table_lines(rows: Sequence[Row], top: int | None = None, by: str = "cpu_self_ms") -> list[str]:
    """Return the table of at most `top` rows, the largest `by` first; shapes, module and stack stand below their row.

    Columns without any value are left out. Rows are those of `table_rows`.
    """
    shown = sorted(rows, key=lambda row: -(row[by] or 0.0))[:top]
    columns = [name for name in COLUMNS if any(_value(row, name) is not None for row in shown)]
    headers = ["operator", "calls", *(COLUMNS[name][1] for name in columns)]
    cells = [
        [clean(row["name"], LONGEST_OPERATOR), f"{row['calls']:,}", *(_cell(row, name) for name in columns)]
        for row in shown
    ]
    made = table(headers, cells, left=[0])
    found = made[: len(made) - len(cells)]
    for row, line in zip(shown, made[len(found) :], strict=True):
        found += [line, *_details(row)]
    more = len(rows) - len(shown)
    return [*found, f"  and {more:,} more"] if more > 0 else found


def _details(row: Row) -> list[str]:
    """Return what a row is grouped by beside its name, the innermost frame first."""
    frames = reversed((row.get("stack") or "").split(";"))
    found = [row["input_shapes"], row.get("module"), *(frame_name(each) for each in frames)]
    return [f"    {clean(each, LONGEST_DETAIL)}" for each in found if each]


def _value(row: Row, name: str) -> float | None:
    """Return the value of a column; averages per call are worked out."""
    if not name.endswith("_per_call_us"):
        return row[name]
    total = row[name.replace("_per_call_us", "_total_ms")]
    return None if total is None or not row["calls"] else 1e3 * total / row["calls"]


def _cell(row: Row, name: str) -> str:
    value = _value(row, name)
    if value is None:
        return NOTHING
    return f"{value:.1f}" if name.endswith("_pct") else number(value * COLUMNS[name][0])


def _sum(one: OpStat, other: OpStat) -> OpStat:
    fields = ("calls", "cpu_total_ns", "cpu_self_ns", "cpu_self_share", "device_total_ns", "device_share")
    return replace(one, **{name: _plus(one, other, name) for name in (*fields, "device_self_ns", "flops")})


def _plus(one: OpStat, other: OpStat, name: str) -> Any:
    values = getattr(one, name), getattr(other, name)
    return None if None in values else sum(values)
