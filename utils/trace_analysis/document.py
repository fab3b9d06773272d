"""The JSON documents on traces: what `analyze_trace.py --json` prints and `trace_analysis.json` holds.

Plain values with the unit in every name; what is not known is null. `text` tells the same to people. docs/traces.md
explains the keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

import boundby
from boundby.trace import Analysis
from boundby.trace.analysis import Breakdown
from boundby.trace.kernels import KernelStat, LaunchStats, Spread, ncu_command
from boundby.trace.memory import MemoryUse
from boundby.trace.operator_table import table_rows
from boundby.verdict import values_of
from utils.trace_analysis.traces import Examination, Examined, Pair

if TYPE_CHECKING:
    from boundby.trace.diff import Amount, Change, Part, StepSpread, TimeChange

SCHEMA_VERSION = 1
Document = dict[str, object]


def of(examination: Examination, peak_flops_per_s: float | None = None) -> Document:
    """Return the document; `peak_flops_per_s` is the measured ceiling that operators are held against."""
    return {
        **_head("trace_analysis"),
        "operators_by": examination.group_by,
        "traces": [_trace(trace, peak_flops_per_s) for trace in examination.traces],
        "slowest": examination.slowest,
        "left_out": [values_of(file) for file in examination.left_out],
    }


def of_pair(pair: Pair) -> Document:
    """Return what differs in B from A; changes are B minus A."""
    diff = pair.diff
    a, b = diff.step_a, diff.step_b
    return {
        **_head("trace_diff"),
        "a": subject(pair.a),
        "b": subject(pair.b),
        "unlike": [values_of(each) for each in diff.unlike],
        "is_per_step": diff.is_per_step,
        "operators_matched_by": diff.matched_by,
        "step": {
            "a": _step_spread(a),
            "b": _step_spread(b),
            "median_change_ms": _milliseconds(b.median_ns - a.median_ns) if a and b else None,
            "is_beyond_spread": diff.is_beyond_spread,
        },
        "parts": [_part(part) for part in diff.parts],
        "busy": _times(diff.busy),
        "idle": _times(diff.idle),
        "operators": [_changed_operator(change) for change in diff.operators],
        "kernels": [_changed_kernel(change) for change in diff.kernels],
    }


def subject(trace: Examined) -> Document:
    """Return what a trace is of, and the verdict on it."""
    analysis = trace.analysis
    return {
        "path": analysis.path,
        "rank": trace.rank,
        "process": None if analysis.process is None else str(analysis.process),
        "world_size": analysis.world_size,
        "device_names": list(analysis.device_names),
        "events": analysis.events,
        "window_ms": analysis.window_ns / 1e6,
        "own_ms_per_step": trace.own_ns_per_step / 1e6,
        "waits_for_ranks_ms": _milliseconds(trace.waits_ns),
        "steps": _steps(analysis),
        "is_conclusive": not trace.is_inconclusive,
        "verdict": trace.verdict.as_dict(),
        "findings": [values_of(finding) for finding in analysis.findings],
    }


def _head(kind: str) -> Document:
    return {"schema_version": SCHEMA_VERSION, "kind": kind, "boundby_version": boundby.__version__}


def _trace(trace: Examined, peak_flops_per_s: float | None) -> Document:
    analysis = trace.analysis
    return {
        **subject(trace),
        "devices": [_device(device) for device in analysis.devices],
        "launches": _launches(analysis.launches),
        "memory": [_memory(use) for use in analysis.memory],
        "annotations": [
            {"name": a.name, "calls": a.calls, "host_ms": a.host_ns / 1e6, "device_ms": a.device_ns / 1e6}
            for a in analysis.annotations
        ],
        "operators": table_rows(trace.operators, peak_flops_per_s),
        "kernels": [_kernel(kernel) for kernel in analysis.kernels],
        "nsight_compute": analysis.slowest_launch and ncu_command(analysis.slowest_launch),
    }


def _steps(analysis: Analysis) -> Document:
    """Return which steps there are and how long they take; the times are null without any."""
    durations = [step.duration_ns / 1e6 for step in analysis.devices[0].steps]
    names = {"min_ms": 0, "q1_ms": 25, "median_ms": 50, "q3_ms": 75, "max_ms": 100}
    spread = map(float, np.percentile(durations, list(names.values()))) if durations else [None] * len(names)
    return {
        "numbers": list(analysis.step_numbers),
        "expected": analysis.steps_expected,
        **dict(zip(names, spread, strict=True)),
    }


def _device(device: Breakdown) -> Document:
    timeline = device.timeline
    return {
        "device": device.device,
        "window_ms": device.window_ns / 1e6,
        "busy_ms": device.busy_ns / 1e6,
        "idle_ms": device.idle_ns / 1e6,
        "by_kind_ms": _by_name(device.by_kind_ns),
        "exposed_ms": _by_name(device.exposed_ns),
        "communication_overlap_pct": _percent(device.communication_overlap),
        "idle_by_cause_ms": _by_name(device.causes_ns),
        "idle_details": {
            cause: [{"host_in": name, "ms": spent / 1e6} for name, spent in names]
            for cause, names in device.cause_details.items()
        },
        "contributors": {
            cause: {"host_in": most.name, "ms": most.spent_ns / 1e6, "where": most.where}
            for cause, most in device.contributors.items()
        },
        "without_ms": _by_name(device.without_ns),
        "least_without_ms": _by_name(device.least_ns),
        "alone_ms": device.alone_ns / 1e6,
        "gaps": device.gaps,
        "longest_gaps": [
            {
                "start_ms": gap.start_ns / 1e6,
                "duration_ms": gap.duration_ns / 1e6,
                "cause": gap.cause,
                "ended_by": gap.ended_by,
            }
            for gap in device.longest_gaps
        ],
        "steps": [
            {
                "number": step.number,
                "start_ms": step.start_ns / 1e6,
                "duration_ms": step.duration_ns / 1e6,
                "busy_ms": _by_name(step.busy_ns),
                "idle_ms": _by_name(step.idle_ns),
            }
            for step in device.steps
        ],
        "timeline": {
            "edges_ms": _in_ms(timeline.edges_ns),
            "busy_ms": {name: _in_ms(spent) for name, spent in timeline.busy_ns.items()},
            "idle_ms": {name: _in_ms(spent) for name, spent in timeline.idle_ns.items()},
        },
    }


def _launches(launches: LaunchStats) -> Document:
    return {
        "calls": launches.calls,
        "calls_without_work": launches.calls_without_work,
        "work": launches.work,
        "work_without_call": launches.work_without_call,
        "call_us": _spread(launches.call),
        "delay_us": _spread(launches.delay),
        "shorter_than_call": launches.shorter_than_call,
        "mean_queue": launches.mean_queue,
        "deepest_queue": launches.deepest_queue,
        "empty_queue_pct": _percent(launches.empty_queue_share),
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {"median": spread.median_ns / 1e3, "p95": spread.p95_ns / 1e3, "max": spread.max_ns / 1e3}


def _memory(use: MemoryUse) -> Document:
    """Return the use of one device, times in ms since the base of the trace as everywhere in the document."""
    entry = values_of(use)
    timeline, peak_ns = entry.pop("timeline"), entry.pop("peak_ns")
    times_ms = _in_ms(timeline.pop("times_ns"))
    return {**entry, "peak_ms": peak_ns / 1e6, "timeline": {"times_ms": times_ms, **timeline}}


def _kernel(kernel: KernelStat) -> Document:
    return {
        "name": kernel.name,
        "kind": kernel.kind,
        "calls": kernel.calls,
        "total_ms": kernel.total_ns / 1e6,
        "median_us": kernel.median_ns / 1e3,
        "max_us": kernel.max_ns / 1e3,
        "share_pct": _percent(kernel.share),
        "operator": kernel.operator,
        "module": kernel.module,
    }


def _step_spread(spread: "StepSpread | None") -> Document | None:
    if spread is None:
        return None
    quartiles = {"median_ms": spread.median_ns, "q1_ms": spread.q1_ns, "q3_ms": spread.q3_ns}
    return {"steps": spread.steps, **{name: value / 1e6 for name, value in quartiles.items()}}


def _times(changes: "Sequence[TimeChange]") -> list[Document]:
    return [
        {
            "name": change.name,
            "a_ms": _milliseconds(change.a_ns),
            "b_ms": _milliseconds(change.b_ns),
            "change_ms": _milliseconds(change.change_ns),
        }
        for change in changes
    ]


def _part(part: "Part") -> Document:
    by = part.contributor
    return {
        "name": part.name,
        "change_ms": part.change_ns / 1e6,
        "mostly": None
        if by is None
        else {
            "name": by.name,
            "change_ms": by.change_ns / 1e6,
            "calls_change": by.calls_change,
            "called_by": by.caller and by.caller.operator,
            "called_in": by.caller and by.caller.place,
        },
    }


def _changed_operator(change: "Change") -> Document:
    return {
        "name": change.name,
        "input_shapes": change.input_shapes,
        "place": change.place,
        "only_in": change.only_in,
        **_sides(change, "calls", "calls"),
        **_sides(change, "cpu_self_ns", "cpu_self_ms"),
        **_sides(change, "device_self_ns", "device_self_ms"),
        **_sides(change, "device_total_ns", "device_total_ms"),
    }


def _changed_kernel(change: "Change") -> Document:
    return {
        "name": change.name,
        "kind": change.kind,
        "only_in": change.only_in,
        **_sides(change, "calls", "calls"),
        **_sides(change, "device_self_ns", "total_ms"),
        "per_call_us_a": _per_call_us(change.a),
        "per_call_us_b": _per_call_us(change.b),
    }


def _sides(change: "Change", quantity: str, name: str) -> dict[str, float | None]:
    """Return a quantity in A, in B, and the difference; a trace without the operator has null."""
    a, b = (getattr(side, quantity) if side else None for side in (change.a, change.b))
    values = {f"{name}_a": a, f"{name}_b": b, f"{name}_change": change.difference(quantity)}
    return {key: _milliseconds(value) for key, value in values.items()} if quantity.endswith("_ns") else values


def _per_call_us(side: "Amount | None") -> float | None:
    return None if side is None or side.per_call_ns is None else side.per_call_ns / 1e3


def _milliseconds(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e6


def _in_ms(nanoseconds: Iterable[int]) -> list[float]:
    return [moment / 1e6 for moment in nanoseconds]


def _by_name(nanoseconds: Mapping[str, int]) -> dict[str, float]:
    return {name: spent / 1e6 for name, spent in nanoseconds.items()}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
