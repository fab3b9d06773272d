"""The layers as columns, which the scripts of the page draw, sort and search."""

from typing import Any

from boundby.dashboard.wording import clean, layer_name
from boundby.layers.records import LayerProfile, ModelProfile
from boundby.stats import Summary

LONGEST_SHAPES = 200  # characters of all shapes of one layer
CONCURRENT = "called from another thread; its time is part of no other layer's"


def columns(profile: ModelProfile) -> dict[str, list[Any]]:
    """Return a list per column, a value per layer; times in seconds, sizes in bytes, None where it is not known."""
    place = {each.path: at for at, each in enumerate(profile.layers)}
    rows = [_row(each, place) for each in profile.layers]
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def _row(layer: LayerProfile, place: dict[str, int]) -> dict[str, Any]:
    return {
        "path": layer_name(layer.path),
        "name": clean(layer.name) if layer.name != layer.path else None,
        "type": clean(layer.type) or "(unprintable class)",
        "parent": place.get(layer.parent, -1) if layer.parent is not None else -1,
        "depth": layer.depth,
        "order": layer.order,
        "calls": _short(layer.calls),
        **_times("self", layer.self_s),
        **_times("inclusive", layer.inclusive_s),
        "runs": layer.self_s.n if layer.self_s else None,
        "parameters": layer.parameters,
        "flops": _short(layer.flops_self),
        "bytes": _short(layer.bytes_self),
        "bound": layer.bound,
        "shareOfLimit": _short(layer.share_of_limit),
        "gain": _short(layer.gain_at_limit_s),
        "outputBytes": layer.output_bytes,
        "before": layer.memory_before_bytes,
        "after": layer.memory_after_bytes,
        "activationPeak": layer.activation_peak_bytes,
        "inputs": clean("; ".join(layer.input_shapes), LONGEST_SHAPES) or None,
        "outputs": clean("; ".join(layer.output_shapes), LONGEST_SHAPES) or None,
        "counted": layer.self_s is not None and not layer.is_concurrent,
        "doubts": clean("; ".join(_doubts(layer)), 2 * LONGEST_SHAPES) or None,
    }


def _doubts(layer: LayerProfile) -> tuple[str, ...]:
    return (*layer.doubts, CONCURRENT) if layer.is_concurrent else layer.doubts


def _times(key: str, of: Summary | None) -> dict[str, float | None]:
    return {
        f"{key}P50": _short(of.median) if of else None,
        f"{key}P95": _short(of.p95) if of else None,
        f"{key}Max": _short(of.maximum) if of else None,
    }


def _short(value: float | None) -> float | None:
    """Return the value with six significant digits, which keeps 5,000 layers below 2 MB."""
    return None if value is None else float(f"{value:.6g}")
