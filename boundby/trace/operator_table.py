"""The operators of a trace as rows of a CSV, and as a table like `key_averages().table()` of torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from boundby.formatting import NOTHING, clean, number, table
from boundby.trace.operators import OpStat, frame_name

Row = Mapping[str, Any]

ADDED_UP = {  # of operators with several shapes: the column, and the field of their records
    "cpu_total_ms": "cpu_total_ns",
    "cpu_self_ms": "cpu_self_ns",
    "cpu_self_pct": "cpu_self_share",
    "device_total_ms": "device_total_ns",
    "device_pct": "device_share",
    "device_self_ms": "device_self_ns",
    "flops": "flops",
}
OPERATOR_COLUMNS = ("name", "input_shapes", "calls", *ADDED_UP, "flops_per_sec", "share_of_ceiling_pct")
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


def operator_rows(stats: Sequence[OpStat], peak_flops_per_s: float | None = None) -> list[dict[str, Any]]:
    """Return the records as rows with the columns `OPERATOR_COLUMNS`, times in milliseconds; unknown is None.

    `peak_flops_per_s` is the measured ceiling that the share of an operator's FLOP/s is taken of.
    """
    rows = []
    for stat in stats:
        rate = stat.flops_per_s
        rows.append(
            {
                "name": stat.name,
                "input_shapes": stat.input_shapes,
                "calls": stat.calls,
                **{column: _in_unit(column, getattr(stat, field)) for column, field in ADDED_UP.items()},
                "flops_per_sec": rate,
                "share_of_ceiling_pct": 100 * (rate / peak_flops_per_s) if rate and peak_flops_per_s else None,
            }
        )
    return rows


def _in_unit(column: str, value: float | None) -> float | None:
    if value is None:
        return None
    return value / 1e6 if column.endswith("_ms") else 100 * value if column.endswith("_pct") else value


def rows_by_name(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per operator, its calls with different shapes added up, most CPU self time first.

    Takes the rows of `operator_rows`, also as the texts that a CSV holds; an empty cell is unknown.
    """
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        whole = sums.setdefault(row["name"], {"name": row["name"], "calls": 0, **dict.fromkeys(ADDED_UP)})
        whole["calls"] += int(row["calls"])
        for key in ADDED_UP:
            if row.get(key) not in (None, ""):
                whole[key] = (whole[key] or 0.0) + float(row[key])
    return sorted(sums.values(), key=lambda row: row["cpu_self_ms"] or 0.0, reverse=True)


def table_rows(stats: Iterable[OpStat], peak_flops_per_s: float | None = None) -> list[dict[str, Any]]:
    """Return the rows of `op_stats.csv` and what else the operators may be grouped by."""
    stats = list(stats)
    rows = zip(operator_rows(stats, peak_flops_per_s), stats, strict=True)
    return [{**row, "stack": stat.stack, "module": stat.module} for row, stat in rows]


def by_name(stats: Sequence[OpStat]) -> list[OpStat]:
    """Return one record per operator, all its shapes added up, the one with the most self time first.

    Its FLOPs are known where those of all its calls are.
    """
    groups: dict[str, list[OpStat]] = {}
    for stat in stats:
        groups.setdefault(stat.name, []).append(stat)
    return sorted(map(_whole, groups.values()), key=lambda stat: -stat.cpu_self_ns)


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
    lines = made[: len(made) - len(cells)]
    for row, line in zip(shown, made[len(lines) :], strict=True):
        lines += [line, *_details(row)]
    more = len(rows) - len(shown)
    return [*lines, f"  and {more:,} more"] if more > 0 else lines


def _details(row: Row) -> list[str]:
    """Return what a row is grouped by beside its name, the innermost frame first."""
    frames = reversed((row.get("stack") or "").split(";"))
    details = [row["input_shapes"], row.get("module"), *map(frame_name, frames)]
    return [f"    {clean(detail, LONGEST_DETAIL)}" for detail in details if detail]


def _value(row: Row, name: str) -> float | None:
    """Return the value of a column; averages per call are worked out."""
    per_call = name.endswith("_per_call_us")
    total: float | None = row[name.replace("_per_call_us", "_total_ms")]
    if not per_call:
        return total
    return None if total is None or not row["calls"] else 1e3 * total / row["calls"]


def _cell(row: Row, name: str) -> str:
    value = _value(row, name)
    if value is None:
        return NOTHING
    return f"{value:.1f}" if name.endswith("_pct") else number(value * COLUMNS[name][0])


def _whole(group: Sequence[OpStat]) -> OpStat:
    columns = {name: [getattr(stat, name) for stat in group] for name in ("calls", *ADDED_UP.values())}
    added: dict[str, Any] = {name: None if None in values else sum(values) for name, values in columns.items()}
    return msgspec.structs.replace(group[0], input_shapes=None, **added)
