"""What each section of the page says in words, for those who do not see its chart, and where there is none."""

from collections import defaultdict
from typing import Any, NamedTuple

from boundby.dashboard import wording
from boundby.dashboard.outliers import outliers
from boundby.layers.ranking import Ranked, blocks
from boundby.layers.records import LayerProfile, ModelProfile

TOP = 5
MOST_NAMED_OUTLIERS = 8
NO_REASON = "no reason was recorded"


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
    return next((wording.clean(profile.reasons[each], 400) for each in fields if each in profile.reasons), NO_REASON)


def bottlenecks(profile: ModelProfile) -> Section:
    """Return the section whose detail is the longest blocks."""
    found = blocks(profile)
    whole_layers = [each for each in found if each.part == "layer"]
    if not whole_layers:
        return Section(reason(profile, "host_inclusive_s", "host_self_s"), "", [])
    top = whole_layers[:TOP]
    around = sum(each.share for each in found if each.part == "self")
    summary = (
        f"The longest {len(top)} of {len(whole_layers)} blocks take {wording.percent(sum(each.share for each in top))} "
        f"of the time of all layers together; the layers around the blocks take {wording.percent(around)}."
    )
    return Section(None, summary, [_shown(each) for each in top])


def latency(profile: ModelProfile) -> Section:
    """Return the section of all times; its summary is written by the script, for what is switched on."""
    return Section(None if counted(profile) else reason(profile, "host_self_s"), "")


def counted(profile: ModelProfile) -> list[tuple[LayerProfile, float]]:
    """Return the layers whose times add up to the whole model's, each with its own time."""
    return [(each, each.self_s.median) for each in profile.layers if each.self_s and not each.is_concurrent]


def total(profile: ModelProfile) -> dict[str, float]:
    """Return the seconds of all layers together: the sum of their own times, and the root's inclusive time."""
    roots = [each.inclusive_s.median for each, _ in counted(profile) if each.parent is None and each.inclusive_s]
    return {"self": sum(seconds for _, seconds in counted(profile)), "inclusive": sum(roots)}


def types(profile: ModelProfile) -> Section:
    """Return the section whose detail is a `TypeShare` per class, by own time."""
    members: dict[str, list[float]] = defaultdict(list)
    for each, seconds in counted(profile):
        members[each.type].append(seconds)
    whole = sum(map(sum, members.values())) or 1.0
    found = [
        TypeShare(wording.clean(name) or wording.UNPRINTABLE, len(times), sum(times), sum(times) / whole)
        for name, times in members.items()
    ]
    found.sort(key=lambda each: (-each.seconds, each.name))
    if not found:
        return Section(reason(profile, "host_self_s"), "", [])
    leading = wording.listed([f"{each.name} {wording.percent(each.share)}" for each in found[:3]])
    return Section(None, f"Own work by class, of the time of all layers: {leading}.", found)


def memory(profile: ModelProfile) -> Section:
    """Return the section of memory over the order of calls."""
    known = [each for each in profile.layers if each.memory_before_bytes is not None]
    if not known:
        return Section(reason(profile, "memory_before_bytes", "memory_after_bytes", "activation_peak_bytes"), "")
    highest = max(known, key=lambda each: (_peak(each), each.depth))
    lowest = min(each.memory_before_bytes or 0 for each in known)
    summary = (
        f"From {wording.size(lowest)} before a layer to {wording.size(_peak(highest))} at most, "
        f"inside {wording.layer_name(highest.path)}."
    )
    return Section(None, summary)


def _peak(layer: LayerProfile) -> int:
    return (layer.memory_before_bytes or 0) + (layer.activation_peak_bytes or 0)


def parameters(profile: ModelProfile) -> Section:
    """Return the section whose detail is the places of the layers drawn and of the outliers among them."""
    containers = {each.parent for each in profile.layers}
    drawn, points = [], []
    for at, each in enumerate(profile.layers):
        if each.path not in containers and each.parameters and each.self_s and each.self_s.median > 0:
            drawn.append(at)
            points.append((each.parameters, each.self_s.median))
    if not drawn:
        return Section("no layer without layers inside has both parameters and a measured time", "")
    found = outliers(points)
    named = [
        f"{wording.layer_name(profile.layers[drawn[each.at]].path)} ({wording.count(points[each.at][0])} parameters, "
        f"{wording.duration(points[each.at][1])}, {_compared(each.factor)})"
        for each in found[:MOST_NAMED_OUTLIERS]
    ]
    more = f" and {len(found) - len(named)} more" if len(found) > len(named) else ""
    summary = (
        f"Outliers, against the line through all of them: {', '.join(named)}{more}."
        if found
        else "No layer stands out."
    )
    return Section(None, summary, {"drawn": drawn, "outliers": [drawn[each.at] for each in found]})


def _compared(factor: float) -> str:
    slower, times = factor > 1, wording.digits(max(factor, 1 / factor), 2)
    return f"{times} times {'as long as' if slower else 'faster than'} expected"


def roofline(profile: ModelProfile) -> Section:
    """Return the section whose detail is the roofs, as FLOP/s and a list of (words, bytes/s), or why there are none."""
    drawn = [each for each in profile.layers if each.flops_self and each.bytes_self and each.self_s]
    if not drawn:
        return Section(reason(profile, "flops_self", "bytes_self"), "")
    bounds: dict[str, int] = defaultdict(int)
    for each in drawn:
        bounds[(each.bound or "not known").replace("_", " ")] += 1
    counted = wording.listed([f"{name} {number}" for name, number in sorted(bounds.items(), key=lambda each: -each[1])])
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
        "bytes": [(f"{wording.size(rate.value)}/s at {wording.size(of)}", rate.value) for of, rate in shown],
    }


def _shown(block: Ranked) -> dict[str, str | None]:
    return {
        "name": wording.layer_name(block.path),
        "type": wording.clean(block.type) or wording.UNPRINTABLE,
        "time": wording.duration(block.seconds),
        "share": wording.percent(block.share),
        "gain": None if block.gain_at_limit_s is None else wording.duration(block.gain_at_limit_s),
    }
