"""Where the time of the steps went: by stage, over the run, and by operator."""

import csv
import io

import numpy as np
import streamlit as st

from boundby.training.records import StageTimes
from boundby.training.results import OP_STATS
from boundby.training.steps import StepTable
from boundby.training.store import file_name
from utils.monitor import charts, series, text
from utils.monitor.run import LARGEST_DOCUMENT
from utils.monitor.shown import Shown
from utils.monitor.tabs import parts

MOST_OPERATORS = 25
BINS = 40
WHOLE = "whole step; share in no stage"
OPERATORS = ("name", "calls", "cpu_self_ms", "cpu_total_ms", "device_self_ms", "flops", "input_shapes")


def show(shown: Shown) -> None:
    """Show the stages of one process, how its steps spread, and the operators of its trace."""
    times = parts.chosen_rank(shown, "timing")
    if times is None:
        return
    table = shown.processes.tables[times.rank]
    st.subheader("Stages of the steps", anchor=False)
    _course(table)
    _stages(times)
    _spread(table)
    _operators(shown, times)


def _course(table: StepTable) -> None:
    if not len(table.numbers):
        st.info("No step has ended yet.")
        return
    seconds = series.stage_seconds(table)
    groups = {name: series.grouped(table.numbers, values) for name, values in seconds.items()}
    order = [name for name in (*table.names, series.REST) if name in groups]
    rows = series.points(groups, unit=1e-3)
    charts.areas(rows, y="ms of a step", alt="time of each stage over the steps", order=order)
    st.caption("Time in a stage and in no stage inside it, on the host; undisturbed steps, averaged over neighbours.")


def _stages(times: StageTimes) -> None:
    rows = [
        {
            "stage": each.name if each.kind != "step" else WHOLE,
            "kind": each.kind,
            "share (%)": None if each.share is None else 100 * each.share,
            "times": each.host_s.n,
            "median (ms)": _ms(each.host_s.median),
            "p95 (ms)": _ms(each.host_s.p95),
            "longest (ms)": _ms(each.host_s.maximum),
            "total (s)": each.host_s.total,
            "device, median (ms)": _ms(each.device_s.median) if each.device_s else None,
            "disturbed": each.unusual,
        }
        for each in sorted(times.stages, key=lambda each: -(each.share or 0.0))
    ]
    parts.table(rows)
    if times.device is None:
        st.caption("Times of the device are not known: the run gave none, as on a CPU.")


def _spread(table: StepTable) -> None:
    seconds = table.host_s.sum(axis=1)
    if len(seconds) < 2:
        return
    st.subheader("How the steps spread", anchor=False)
    most = float(np.quantile(seconds, 0.99))
    counts, edges = np.histogram(np.minimum(seconds, most) * 1e3, bins=min(BINS, len(seconds)))
    rows = [
        {"x": low, "x2": high, "y": int(count)}
        for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True)
    ]
    charts.histogram(rows, x="ms", alt="how many steps took how long")
    st.caption("The longest hundredth of the steps is in the last bar.")


def _operators(shown: Shown, times: StageTimes) -> None:
    st.subheader("Operators of the trace", anchor=False)
    name = file_name(OP_STATS, times.rank, times.world_size)
    try:
        content = shown.folder.read(name, LARGEST_DOCUMENT)
    except FileNotFoundError:
        st.info("There is no table of operators yet: it comes from the trace, a few steps into the run.")
        return
    except (OSError, ValueError) as error:
        st.warning("The table of operators cannot be read.")
        st.text(text.reason(error, shown.folder.folder))
        return
    rows = list(csv.DictReader(io.StringIO(content.decode("utf-8", "replace"))))
    rows.sort(key=lambda row: -max(_number(row.get("cpu_self_ms")) or 0.0, _number(row.get("device_self_ms")) or 0.0))
    parts.table([_operator(row) for row in rows[:MOST_OPERATORS]])
    st.caption(f"The {min(MOST_OPERATORS, len(rows))} of {len(rows)} operators with most time of their own.")


def _operator(row: dict[str, str]) -> dict[str, str | float | None]:
    values: dict[str, str | float | None] = {name: _number(row.get(name)) for name in OPERATORS}
    return values | {name: text.plain(row.get(name) or "") for name in ("name", "input_shapes")}


def _number(cell: str | None) -> float | None:
    try:
        return float(cell or "")
    except ValueError:
        return None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
