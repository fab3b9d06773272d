"""The one JSON document on traces: what `analyze_trace.py --json` prints and `trace_analysis.json` holds.

Plain values with the unit in every name; what is not known is null. `text` tells the same to people. docs/traces.md
explains the keys.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

import boundby
from boundby.trace import Analysis
from boundby.trace.breakdown import Breakdown
from boundby.trace.kernels import KernelStat, LaunchStats, Spread, ncu_command
from boundby.trace.operator_table import table_rows
from utils.trace_analysis import memory
from utils.trace_analysis.traces import Examination, Examined

SCHEMA_VERSION = 1


def of(found: Examination, peak_flops_per_s: float | None = None) -> dict[str, Any]:
    """Return the document; `peak_flops_per_s` is the measured ceiling that operators are held against."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "trace_analysis",
        "boundby_version": boundby.__version__,
        "operators_by": found.group_by,
        "traces": [_trace(each, peak_flops_per_s) for each in found.traces],
        "slowest": found.slowest,
        "left_out": [asdict(each) for each in found.left_out],
    }


def as_json(document: Mapping[str, Any]) -> str:
    """Return a document as one strict JSON object, in ASCII: a console must not change a character of it."""
    return json.dumps(document, indent=2, allow_nan=False)


def subject(each: Examined) -> dict[str, Any]:
    """Return what a trace is of."""
    analysis = each.analysis
    return {
        "path": analysis.path,
        "rank": each.rank,
        "world_size": analysis.world_size,
        "device_names": list(analysis.device_names),
        "events": analysis.events,
        "window_ms": milliseconds(analysis.window_ns),
        "own_ms_per_step": milliseconds(each.own_ns_per_step),
        "steps": _steps(analysis),
        "is_conclusive": not each.is_inconclusive,
        "verdict": each.verdict.as_dict(),
        "findings": [asdict(finding) for finding in analysis.findings],
    }


def milliseconds(nanoseconds: float | None) -> float | None:
    """Return the time in ms."""
    return None if nanoseconds is None else nanoseconds / 1e6


def _trace(each: Examined, peak_flops_per_s: float | None) -> dict[str, Any]:
    analysis = each.analysis
    return {
        **subject(each),
        "devices": [_device(device) for device in analysis.devices],
        "launches": _launches(analysis.launches),
        "memory": memory.entries(analysis.memory),
        "annotations": [
            {"name": a.name, "calls": a.calls, "host_ms": a.host_ns / 1e6, "device_ms": a.device_ns / 1e6}
            for a in analysis.annotations
        ],
        "operators": table_rows(each.operators, peak_flops_per_s),
        "kernels": [_kernel(kernel) for kernel in analysis.kernels],
        "nsight_compute": analysis.slowest_launch and ncu_command(analysis.slowest_launch),
    }


def _steps(analysis: Analysis) -> dict[str, Any]:
    """Return which steps there are and how long they take; the times are null without any."""
    durations = [step.duration_ns / 1e6 for step in analysis.devices[0].steps]
    ends = (0, 25, 50, 75, 100)
    spread = [float(each) for each in np.percentile(durations, ends)] if durations else [None] * len(ends)
    names = ("min_ms", "q1_ms", "median_ms", "q3_ms", "max_ms")
    return {
        "numbers": list(analysis.step_numbers),
        "expected": analysis.steps_expected,
        **dict(zip(names, spread, strict=True)),
    }


def _device(device: Breakdown) -> dict[str, Any]:
    return {
        "device": device.device,
        "window_ms": device.window_ns / 1e6,
        "busy_ms": device.busy_ns / 1e6,
        "idle_ms": device.idle_ns / 1e6,
        "by_kind_ms": _each(device.by_kind_ns),
        "exposed_ms": _each(device.exposed_ns),
        "communication_overlap_pct": _percent(device.communication_overlap),
        "idle_by_cause_ms": _each(device.causes_ns),
        "idle_details": {
            cause: [{"host_in": name, "ms": spent / 1e6} for name, spent in names]
            for cause, names in device.cause_details.items()
        },
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
                "busy_ms": _each(step.busy_ns),
                "idle_ms": _each(step.idle_ns),
            }
            for step in device.steps
        ],
        "timeline": {
            "edges_ms": [each / 1e6 for each in device.timeline.edges_ns],
            "busy_ms": {name: [each / 1e6 for each in spent] for name, spent in device.timeline.busy_ns.items()},
            "idle_ms": {name: [each / 1e6 for each in spent] for name, spent in device.timeline.idle_ns.items()},
        },
    }


def _launches(found: LaunchStats) -> dict[str, Any]:
    return {
        "calls": found.calls,
        "calls_without_work": found.calls_without_work,
        "work": found.work,
        "work_without_call": found.work_without_call,
        "call_us": _spread(found.call),
        "delay_us": _spread(found.delay),
        "shorter_than_call": found.shorter_than_call,
        "mean_queue": found.mean_queue,
        "deepest_queue": found.deepest_queue,
        "empty_queue_pct": _percent(found.empty_queue_share),
    }


def _spread(found: Spread | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {"median": found.median_ns / 1e3, "p95": found.p95_ns / 1e3, "max": found.max_ns / 1e3}


def _kernel(kernel: KernelStat) -> dict[str, Any]:
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


def _each(nanoseconds: Mapping[str, int]) -> dict[str, float]:
    return {name: spent / 1e6 for name, spent in nanoseconds.items()}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
