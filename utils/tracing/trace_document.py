"""The JSON documents on traces: what `analyze_trace.py --json` prints and `trace_analysis.json` holds.

Plain values with the unit in every name; what is not known is null. `text` tells the same to people. docs/traces.md
explains the keys.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

import boundby
from boundby.trace import Analysis, Breakdown, Spread, ncu_command, table_rows
from utils.tracing.traces import Examination, Examined, Pair

SCHEMA_VERSION = 2
Document = dict[str, Any]
# By the end of a name in the document. A record has ns and shares; of a field that ends with `_ns` it is ms.
UNITS: dict[str, Callable[[float], float]] = {
    "ms": lambda nanoseconds: nanoseconds / 1e6,
    "us": lambda nanoseconds: nanoseconds / 1e3,
    "pct": lambda share: 100 * share,
}
# What the document calls a field otherwise, by the name of its record.
NAMES = {
    "Breakdown": {
        "communication_overlap": "communication_overlap_pct",
        "causes_ns": "idle_by_cause_ms",
        "cause_details": "idle_details",
        "least_ns": "least_without_ms",
    },
    "LaunchStats": {"call": "call_us", "delay": "delay_us", "empty_queue_share": "empty_queue_pct"},
    "KernelStat": {"median_ns": "median_us", "max_ns": "max_us", "share": "share_pct"},
    "Part": {"contributor": "mostly"},
    "Contributor": {"name": "host_in", "spent_ns": "ms"},
}


def of(examination: Examination, peak_flops_per_s: float | None = None) -> Document:
    """Return the document; `peak_flops_per_s` is the measured ceiling that operators are held against."""
    return {
        **_head("trace_analysis"),
        "operators_by": examination.group_by,
        "traces": [_trace(trace, peak_flops_per_s) for trace in examination.traces],
        "slowest": examination.slowest,
        "left_out": _plain(examination.left_out),
    }


def of_pair(pair: Pair) -> Document:
    """Return both traces side by side, amounts of B beside those of A; a side is None where only the other has it."""
    return {
        **_head("trace_diff"),
        "a": subject(pair.a),
        "b": subject(pair.b),
        "is_beyond_spread": pair.diff.is_beyond_spread,
        **_plain(pair.diff),
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
        "findings": _plain(analysis.findings),
    }


def _head(kind: str) -> Document:
    return {"schema_version": SCHEMA_VERSION, "kind": kind, "boundby_version": boundby.__version__}


def _trace(trace: Examined, peak_flops_per_s: float | None) -> Document:
    analysis = trace.analysis
    return {
        **subject(trace),
        "devices": [_device(device) for device in analysis.devices],
        "launches": _plain(analysis.launches),
        "memory": _plain(analysis.memory),
        "annotations": _plain(analysis.annotations),
        "operators": table_rows(trace.operators, peak_flops_per_s),
        "kernels": _plain(analysis.kernels),
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
    content: Document = _plain(device)
    del content["step_quartiles"]  # `steps` has what they are of
    details = device.cause_details.items()
    content["idle_details"] = {
        cause: [{"host_in": name, "ms": spent / 1e6} for name, spent in names] for cause, names in details
    }
    return content


def _plain(record: Any) -> Any:
    """Return a record, or a list of some, as plain values under the names of the document, with its units."""
    if isinstance(record, list | tuple):
        return [_plain(item) for item in record]
    if isinstance(record, Mapping):
        return {key: _plain(item) for key, item in record.items()}
    if not isinstance(record, msgspec.Struct):
        return record
    content, names = {}, NAMES.get(type(record).__name__, {})
    for field, value in asdict(record).items():
        name = names.get(field) or (f"{field.removesuffix('_ns')}_ms" if field.endswith("_ns") else field)
        unit = UNITS.get(name.rpartition("_")[2])
        content[name] = _in_unit(unit, value) if unit else _plain(value)
    return content


def _in_unit(unit: Callable[[float], float], value: Any) -> Any:
    """Return a number in another unit, or all numbers of a list, of a record or by name; what is not known is None."""
    if isinstance(value, list | tuple):
        return [_in_unit(unit, item) for item in value]
    if isinstance(value, Mapping):
        return {name: _in_unit(unit, item) for name, item in value.items()}
    if isinstance(value, Spread):
        return {name.removesuffix("_ns"): unit(item) for name, item in asdict(value).items()}
    return None if value is None else unit(value)


def _milliseconds(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e6
