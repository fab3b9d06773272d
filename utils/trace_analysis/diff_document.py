"""What differs between two traces as the one JSON document that `analyze_trace.py --diff --json` prints."""

from collections.abc import Sequence
from typing import Any

import boundby
from boundby.trace import diff
from boundby.trace.diff import Amount, Change, Diff, StepSpread, TimeChange
from utils.trace_analysis.document import SCHEMA_VERSION, milliseconds, subject
from utils.trace_analysis.traces import Examined


def of(a: Examined, b: Examined) -> dict[str, Any]:
    """Return what differs in `b` from `a` as plain values; changes are B minus A."""
    found = diff(a.analysis, b.analysis)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "trace_diff",
        "boundby_version": boundby.__version__,
        "a": subject(a),
        "b": subject(b),
        "is_per_step": found.is_per_step,
        "operators_matched_by": "name and shapes" if found.by_shapes else "name",
        "step": _step(found),
        "busy": _times(found.busy),
        "idle": _times(found.idle),
        "operators": [_operator(each) for each in found.operators],
        "kernels": [_kernel(each) for each in found.kernels],
    }


def _step(found: Diff) -> dict[str, Any]:
    a, b = found.step_a, found.step_b
    return {
        "a": _spread(a),
        "b": _spread(b),
        "median_change_ms": milliseconds(b.median_ns - a.median_ns) if a and b else None,
        "is_beyond_spread": found.is_beyond_spread,
    }


def _spread(found: StepSpread | None) -> dict[str, Any] | None:
    if found is None:
        return None
    quartiles = {"median_ms": found.median_ns, "q1_ms": found.q1_ns, "q3_ms": found.q3_ns}
    return {"steps": found.steps, **{name: milliseconds(value) for name, value in quartiles.items()}}


def _times(changes: Sequence[TimeChange]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "a_ms": milliseconds(each.a_ns),
            "b_ms": milliseconds(each.b_ns),
            "change_ms": milliseconds(each.change_ns),
        }
        for each in changes
    ]


def _operator(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "input_shapes": change.input_shapes,
        "only_in": _only_in(change),
        **_sides(change, "calls", "calls"),
        **_sides(change, "cpu_self_ns", "cpu_self_ms"),
        **_sides(change, "device_self_ns", "device_self_ms"),
        **_sides(change, "device_total_ns", "device_total_ms"),
    }


def _kernel(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "kind": change.kind,
        "only_in": _only_in(change),
        **_sides(change, "calls", "calls"),
        **_sides(change, "device_self_ns", "total_ms"),
        "per_call_us_a": _per_call(change.a),
        "per_call_us_b": _per_call(change.b),
    }


def _sides(change: Change, quantity: str, name: str) -> dict[str, float | None]:
    """Return a quantity in A, in B, and the difference; a trace without the operator has null."""
    a, b = (getattr(side, quantity) if side else None for side in (change.a, change.b))
    found = {f"{name}_a": a, f"{name}_b": b, f"{name}_change": change.difference(quantity)}
    return {key: milliseconds(value) for key, value in found.items()} if quantity.endswith("_ns") else found


def _per_call(side: Amount | None) -> float | None:
    return side.device_total_ns / side.calls / 1e3 if side and side.device_total_ns is not None else None


def _only_in(change: Change) -> str | None:
    return "a" if change.b is None else "b" if change.a is None else None
