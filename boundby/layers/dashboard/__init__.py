"""A profile by layer as one HTML page that holds its data, its script and plotly.js, and fetches nothing.

Each section is here in words too, for those who do not see its chart; the script of the page draws, sorts and searches
the columns of the layers. Loads no torch, and plotly and jinja2 only to make a page.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from boundby import formatting
from boundby.bound import OF_CAUSES_ON_HOST, Bound, Fix, plain
from boundby.formatting import duration, listed, size
from boundby.layers.ranking import blocks, label
from boundby.layers.records import LayerProfile, ModelProfile
from boundby.layers.report import passes_text
from boundby.layers.webpage import environment
from boundby.timing import Summary

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["page"]

FOLDER = Path(__file__).parent
TEMPLATE = "page.html.j2"
SCRIPT = "page.js"
INSTALL = "the dashboard needs {}: pip install 'boundby[dashboard]' (or pip install plotly jinja2)"
UNKNOWN_FIELDS = {
    "device_self_s": "device times",
    "flops_self": "FLOPs",
    "bytes_self": "bytes moved",
    "memory_before_bytes": "memory",
    "activation_peak_bytes": "peak memory of a layer",
    "bound": "what limits a layer",
    "share_of_limit": "share of the limit",
    "gain_at_limit_s": "gain at the limit",
    "limits": "limits of the machine",
}
LONGEST_NAME = 160  # characters; of a longer name the middle is left out
UNPRINTABLE = "(unprintable name)"
TOP = 5
MOST_NAMED_OUTLIERS = 8
NO_REASON = "no reason was recorded"
LEAST_LAYERS = 5  # below, two odd layers are a third of all
LEAST_FACTOR = 2.0  # of the time expected; tight data would name layers that differ by nothing that matters
MOST_MADS = 5.19  # 3.5 standard deviations of a normal distribution
MOST_POINTS = 500  # of a larger set as many are taken evenly, so that their pairs stay below 125,000
LONGEST_SHAPES = 200  # characters of all shapes of one layer
REMEDIES: dict[Bound, str] = {"launch": "launch_less", "under_utilised": "double_batch", "memory": "fuse_operators"}
CONCURRENT = "called from another thread; its time is part of no other layer's"


def page(profile: ModelProfile, title: str | None = None) -> str:
    """Return the page; `title` stands at its top in place of the model's name. Writes nothing.

    Raises ImportError with the command to install what is missing: plotly and jinja2 are an extra of the library.
    """
    template = _environment().get_template(TEMPLATE)
    return template.render(
        title=clean(title or profile.model_name) or "a model",
        profile=profile,
        trusted=profile.coverage.status != "not representative",
        clock=_clock(profile),
        answer=answer(profile),
        sections={
            "bottlenecks": bottlenecks(profile),
            "latency": latency(profile),
            "types": types(profile),
            "memory": memory(profile),
            "parameters": parameters(profile),
            "roofline": roofline(profile),
        },
        unknown=_unknown(profile),
        unprintable=UNPRINTABLE,
        data={"total": total(profile), "layers": columns(profile)},
        plotly_js=_plotly_js(),
        script=_script(),
    )


def answer(profile: ModelProfile) -> list[tuple[str, str]]:
    """Return what takes the time, why, and what to do first: a sentence each, with its title; none without times."""
    rows, kinds = blocks(profile), types(profile).detail
    if not rows or not kinds:
        return []
    of = f" of {clean(profile.shape)}" if profile.shape else ""
    run_s = total(profile)["self"]
    what = (
        f"{layer_name(rows[0].path)} is the longest block, {percent(rows[0].share)} of {duration(run_s)} for a run{of};"
        f" by class {kinds[0].name} takes most, {percent(kinds[0].share)}."
    )
    if passes := passes_text(profile):
        what += f" Of a run, {passes}."
    if profile.coverage.status == "not representative":
        return [("What", what), ("Next", "Profile again where nothing else runs: these times are not the model's.")]
    seconds: dict[Bound, float] = defaultdict(float)
    for layer, spent in counted(profile):
        if layer.bound and layer.bound != "inconclusive":
            seconds[layer.bound] += spent
    if not seconds:
        return [("What", what), ("Why", f"Not known: {reason(profile, 'bound')}.")]
    bound = max(seconds, key=lambda kind: seconds[kind])
    why = f"{percent(seconds[bound] / run_s)} of the time is in layers limited by {plain(bound)}."
    has_device = any(layer.device_self_s is not None for layer in profile.layers)
    on_host = None if has_device else OF_CAUSES_ON_HOST.get(bound)  # which has no graph to launch
    fix = str(Fix(on_host or REMEDIES.get(bound, "faster_work")))
    gain = sum(layer.gain_at_limit_s or 0.0 for layer, _ in counted(profile))
    room = f"at the limits of this machine all layers together would save {duration(gain)} at most"
    return [("What", what), ("Why", why), ("Next", f"{fix[0].upper()}{fix[1:]}; {room}.")]


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(INSTALL.format("plotly")) from error
    return str(get_plotlyjs())


def _environment() -> "Environment":
    try:
        made = environment(FOLDER)
    except ImportError as error:
        raise ImportError(INSTALL.format("jinja2")) from error
    for filter_ in (clean, duration, layer_name, percent, whole):
        made.filters[filter_.__name__] = filter_
    return made


def _script() -> str:
    """Return the script in one function, so that none of its names is global."""
    return f'"use strict";\n(() => {{\n{(FOLDER / SCRIPT).read_text(encoding="utf-8")}}})();\n'


def _clock(profile: ModelProfile) -> str:
    """Return which clock the times of the layers are from."""
    timed = [layer for layer in profile.layers if layer.self_s]
    on_device = sum(layer.device_self_s is not None for layer in timed)
    if not on_device:
        return "host time"
    return "device time" if on_device == len(timed) else "device time, and host time where a layer has none"


def _unknown(profile: ModelProfile) -> dict[str, str]:
    """Return what is known of no layer, with the reason."""
    missing = [
        field
        for field in UNKNOWN_FIELDS
        if (profile.limits is None if field == "limits" else all(getattr(row, field) is None for row in profile.layers))
    ]
    reasons = {UNKNOWN_FIELDS[field]: reason(profile, field) for field in missing}
    timed = [layer.self_s for layer in profile.layers if layer.self_s]
    if timed and all(layer.p95 is None for layer in timed):
        reasons["95th percentiles"] = reason(profile, "p95")
    return reasons


class Section(NamedTuple):
    """Why there is no chart, or None; what the chart shows in words; and what only this section has."""

    missing: str | None
    summary: str
    detail: Any = None


class TypeShare(NamedTuple):
    """All layers of one class: how many, their own time, its share of the time of all layers."""

    name: str
    layers: int
    seconds: float
    share: float


def reason(profile: ModelProfile, *fields: str) -> str:
    """Return why the first of the fields with a recorded reason is not known."""
    return next((clean(profile.reasons[field], 400) for field in fields if field in profile.reasons), NO_REASON)


def bottlenecks(profile: ModelProfile) -> Section:
    """Return the section whose detail is the longest blocks."""
    ranked = blocks(profile)
    whole_layers = [row for row in ranked if row.part == "layer"]
    if not whole_layers:
        return Section(reason(profile, "host_inclusive_s", "host_self_s"), "", [])
    top = whole_layers[:TOP]
    around = sum(row.share for row in ranked if row.part == "self")
    summary = (
        f"The longest {len(top)} of {len(whole_layers)} blocks take {percent(sum(row.share for row in top))} "
        f"of the time of all layers together; the layers around the blocks take {percent(around)}."
    )
    return Section(None, summary, top)


def latency(profile: ModelProfile) -> Section:
    """Return the section of all times; its summary is written by the script, for what is switched on."""
    return Section(None if counted(profile) else reason(profile, "host_self_s"), "")


def counted(profile: ModelProfile) -> list[tuple[LayerProfile, float]]:
    """Return the layers whose times add up to the whole model's, each with its own time."""
    return [(layer, layer.self_s.mean) for layer in profile.layers if layer.self_s and not layer.is_concurrent]


def total(profile: ModelProfile) -> dict[str, float]:
    """Return the seconds of all layers together: the sum of their own times, and the root's inclusive time."""
    roots = [layer.inclusive_s.mean for layer, _ in counted(profile) if layer.parent is None and layer.inclusive_s]
    return {"self": sum(seconds for _, seconds in counted(profile)), "inclusive": sum(roots)}


def types(profile: ModelProfile) -> Section:
    """Return the section whose detail is a `TypeShare` per class, by own time."""
    members: dict[str, list[float]] = defaultdict(list)
    for layer, seconds in counted(profile):
        members[layer.type].append(seconds)
    whole = sum(map(sum, members.values())) or 1.0
    shares = [
        TypeShare(clean(name) or UNPRINTABLE, len(times), sum(times), sum(times) / whole)
        for name, times in members.items()
    ]
    shares.sort(key=lambda share: (-share.seconds, share.name))
    if not shares:
        return Section(reason(profile, "host_self_s"), "", [])
    leading = listed([f"{row.name} {percent(row.share)}" for row in shares[:3]])
    return Section(None, f"Own work by class, of the time of all layers: {leading}.", shares)


def memory(profile: ModelProfile) -> Section:
    """Return the section of memory over the order of calls."""
    known = [layer for layer in profile.layers if layer.memory_before_bytes is not None]
    if not known:
        return Section(reason(profile, "memory_before_bytes", "memory_after_bytes", "activation_peak_bytes"), "")
    highest = max(known, key=lambda layer: (_peak(layer), layer.depth))
    lowest = min(layer.memory_before_bytes or 0 for layer in known)
    summary = (
        f"From {size(lowest)} before a layer to {size(_peak(highest))} at most, inside {layer_name(highest.path)}."
    )
    return Section(None, summary)


def _peak(layer: LayerProfile) -> int:
    return (layer.memory_before_bytes or 0) + (layer.activation_peak_bytes or 0)


def parameters(profile: ModelProfile) -> Section:
    """Return the section whose detail is the places of the layers drawn and of the outliers among them."""
    containers = {layer.parent for layer in profile.layers}
    drawn, points = [], []
    for at, layer in enumerate(profile.layers):
        if layer.path not in containers and layer.parameters and layer.self_s and layer.self_s.mean > 0:
            drawn.append(at)
            points.append((layer.parameters, layer.self_s.mean))
    if not drawn:
        return Section("no layer without layers inside has both parameters and a measured time", "")
    outlying = outliers(points)
    named = [
        f"{layer_name(profile.layers[drawn[outlier.at]].path)} ("
        f"{count(points[outlier.at][0])} parameters, {duration(points[outlier.at][1])}, "
        f"{_compared(outlier.factor)})"
        for outlier in outlying[:MOST_NAMED_OUTLIERS]
    ]
    more = f" and {len(outlying) - len(named)} more" if len(outlying) > len(named) else ""
    summary = (
        f"Outliers, against the line through all of them: {', '.join(named)}{more}."
        if outlying
        else "No layer stands out."
    )
    return Section(None, summary, {"drawn": drawn, "outliers": [drawn[row.at] for row in outlying]})


def _compared(factor: float) -> str:
    slower, times = factor > 1, formatting.number(max(factor, 1 / factor), 2)
    return f"{times} times {'as long as' if slower else 'faster than'} expected"


def roofline(profile: ModelProfile) -> Section:
    """Return the section whose detail is the roofs, as FLOP/s and a list of (words, bytes/s), or why there are none."""
    drawn = [layer for layer in profile.layers if layer.flops_self and layer.bytes_self and layer.self_s]
    if not drawn:
        return Section(reason(profile, "flops_self", "bytes_self"), "")
    bounds: dict[str, int] = defaultdict(int)
    for layer in drawn:
        bounds[(layer.bound or "not known").replace("_", " ")] += 1
    counted = listed([f"{name} {number}" for name, number in sorted(bounds.items(), key=lambda pair: -pair[1])])
    summary = f"{len(drawn)} layers with known work; what limits them: {counted}."
    unlimited = (
        "" if profile.limits else f" No limits are drawn: {reason(profile, 'limits', 'share_of_limit', 'bound')}."
    )
    return Section(None, summary + unlimited, _roofs(profile))


def _roofs(profile: ModelProfile) -> dict[str, Any] | None:
    if profile.limits is None:
        return None
    sizes = profile.limits.bytes_per_s
    shown = dict.fromkeys([sizes[-1], sizes[0]])  # main memory, and the smallest cache that was measured
    return {
        "flops": profile.limits.flops_per_s.value,
        "bytes": [(f"{size(rate.value)}/s at {size(of)}", rate.value) for of, rate in shown],
    }


class Outlier(NamedTuple):
    """Its place among the points, and its time over that of the line through all of them."""

    at: int
    factor: float


def outliers(points: Sequence[tuple[float, float]]) -> list[Outlier]:
    """Return the outliers among (parameters, seconds), all above 0; the farthest from the line first.

    The line is Theil's and Sen's on logarithms: the median of the slopes of all pairs, which up to 29 % of odd points
    do not move.
    """
    if len(points) < LEAST_LAYERS:
        return []
    x, y = np.log(np.asarray(points, dtype=np.float64)).T
    taken = np.linspace(0, len(points) - 1, min(len(points), MOST_POINTS)).round().astype(int)
    first, second = np.triu_indices(len(taken), 1)
    across = x[taken][second] - x[taken][first]
    differ = across != 0
    slopes = (y[taken][second] - y[taken][first])[differ] / across[differ]
    rest = y - (float(np.median(slopes)) if slopes.size else 0.0) * x
    rest -= np.median(rest)
    limit = max(MOST_MADS * float(np.median(np.abs(rest))), math.log(LEAST_FACTOR))
    far = [int(at) for at in np.argsort(-np.abs(rest), kind="stable") if abs(rest[at]) > limit]
    return [Outlier(at, math.exp(rest[at])) for at in far]


def columns(profile: ModelProfile) -> dict[str, list[Any]]:
    """Return a list per column, a value per layer; times in seconds, sizes in bytes, None where it is not known."""
    row_of = {layer.path: at for at, layer in enumerate(profile.layers)}
    rows = [_row(layer, row_of) for layer in profile.layers]
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def _row(layer: LayerProfile, row_of: dict[str, int]) -> dict[str, Any]:
    return {
        "path": layer_name(layer.path),
        "name": clean(layer.name) if layer.name != layer.path else None,
        "type": clean(layer.type) or "(unprintable class)",
        "parent": row_of.get(layer.parent, -1) if layer.parent is not None else -1,
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
        "doubts": clean("; ".join(_layer_doubts(layer)), 2 * LONGEST_SHAPES) or None,
    }


def _layer_doubts(layer: LayerProfile) -> tuple[str, ...]:
    return (*layer.doubts, CONCURRENT) if layer.is_concurrent else layer.doubts


def _times(key: str, of: Summary | None) -> dict[str, float | None]:
    return {
        f"{key}Mean": _short(of.mean) if of else None,
        f"{key}P95": _short(of.p95) if of else None,
        f"{key}Max": _short(of.maximum) if of else None,
    }


def _short(value: float | None) -> float | None:
    """Return the value with six significant digits, which keeps 5,000 layers below 2 MB."""
    return None if value is None else float(f"{value:.6g}")


def clean(text: str, longest: int = LONGEST_NAME) -> str:
    """Return a text of the model on one line, its middle left out where it is long."""
    return formatting.clean(text[: 100 * longest], longest)


def layer_name(path: str) -> str:
    """Return the layer's name for people; the root's path is empty."""
    return clean(label(path)) or UNPRINTABLE


def count(number: float) -> str:
    """Return a number of things: 124 M, 2.36 k, 768."""
    return formatting.scaled(number, ((1e9, "G"), (1e6, "M"), (1e4, "k"), (1.0, "")))


def whole(number: float) -> str:
    """Return a count, with a digit behind the point where it is not whole, as a mean over runs can be."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def percent(share: float) -> str:
    """Return a share with a digit behind the point: 17.3 %."""
    return formatting.percent(share, 1)
