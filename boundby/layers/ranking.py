"""Which layers matter: by their own work, and as blocks that do not overlap. Loads no torch.

Blocks are call paths of which none is inside another and which, with the rows "(self)" of the paths above them, make
up the whole time of the root. Every path with a repeated layer below is opened, down to the first repeated layer that
runs operators of its own: `transformer.h.11` adds a residual and is a block, a stage that only calls its layers in turn
is opened. A layer is repeated where numbered containers hold several of its class (containers whose names differ in
numbers alone count as one), or where it is called several times and holds no such member: an ALBERT layer is, and a
decoder that is called for every new token is opened.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from boundby.layers.records import LayerProfile, ModelProfile

ROOT_LABEL = "(model)"
Part = Literal["layer", "self"]  # the whole layer, or what it does beside the layers inside
Row = tuple[LayerProfile, Part, float, float | None]  # with its seconds and its gain


@dataclass(frozen=True)
class Ranked:
    """One row of a ranking. `seconds` is the mean over runs, `share` its part of the sum of all rows.

    By its mean a layer counts that is called in few of the runs, and the means of all rows add up to that of the root.
    """

    path: str
    type: str
    part: Part
    seconds: float
    share: float
    gain_at_limit_s: float | None  # of the end-to-end time; None where a part of it is not known

    @property
    def label(self) -> str:
        """How people call it: the path, with "(self)" for what is left of an opened layer."""
        return label(self.path) + (" (self)" if self.part == "self" else "")


def label(path: str) -> str:
    """Return what to call a call path in a table: the root has an empty one."""
    return path or ROOT_LABEL


def by_self_time(profile: ModelProfile) -> tuple[Ranked, ...]:
    """Return every called layer, that with the longest time of its own first."""
    called = [(layer, layer.self_s.mean) for layer in _called(profile) if layer.self_s]
    return _ranked([(layer, "layer", seconds, _gain([layer])) for layer, seconds in called])


def blocks(profile: ModelProfile) -> tuple[Ranked, ...]:
    """Return blocks and "(self)" rows that together are the whole model, the longest first."""
    layers = _called(profile)
    inside: dict[str, list[LayerProfile]] = defaultdict(list)
    for layer in layers:
        if layer.parent is not None:
            inside[layer.parent].append(layer)
    below = {layer.path: _below(layer, inside) for layer in layers}
    held = Counter((layer.type, name.rpartition(".")[0]) for name, layer in _numbered(layers).items())
    groups = {_pattern(*kind) for kind, count in held.items() if count > 1}
    members = {
        layer.path
        for layer in layers
        if _is_numbered(layer) and _pattern(layer.type, layer.name.rpartition(".")[0]) in groups
    }

    def holds(layer: LayerProfile, paths: set[str]) -> bool:
        return any(inner.path in paths for inner in below[layer.path][1:])

    called_again = (layer for layer in layers if layer.calls > 1 and inside[layer.path])
    repeated = members | {layer.path for layer in called_again if not holds(layer, members)}

    def is_opened(layer: LayerProfile) -> bool:
        only_calls = layer.path not in repeated or layer.bytes_self == 0
        return bool(inside[layer.path]) and (layer.parent is None or (only_calls and holds(layer, repeated)))

    rows: list[Row] = []
    waiting = [layer for layer in layers if layer.parent is None]
    while waiting:
        layer = waiting.pop()
        if is_opened(layer):
            waiting.extend(inside[layer.path])
            rows.append((layer, "self", layer.self_s.mean if layer.self_s else 0.0, _gain([layer])))
        else:
            seconds = layer.inclusive_s.mean if layer.inclusive_s else 0.0
            rows.append((layer, "layer", seconds, _gain(below[layer.path])))
    return _ranked([row for row in rows if row[2] > 0])


def _ranked(rows: Sequence[Row]) -> tuple[Ranked, ...]:
    """Return the rows with their shares, the longest first."""
    total = sum(seconds for _, _, seconds, _ in rows)
    ranked = [
        Ranked(layer.path, layer.type, part, seconds, seconds / total if total > 0 else 0.0, gain)
        for layer, part, seconds, gain in rows
    ]
    return tuple(sorted(ranked, key=lambda row: -row.seconds))


def _below(layer: LayerProfile, inside: Mapping[str, list[LayerProfile]]) -> list[LayerProfile]:
    """Return the layer and all that are called inside."""
    layers = [layer]
    for caller in layers:  # grows while it is read
        layers.extend(inside.get(caller.path, ()))
    return layers


def _called(profile: ModelProfile) -> list[LayerProfile]:
    """Return the layers whose times add up to the root's."""
    return [layer for layer in profile.layers if layer.calls > 0 and not layer.is_concurrent]


def _is_numbered(layer: LayerProfile) -> bool:
    return layer.name.rpartition(".")[2].isdecimal()


def _numbered(layers: list[LayerProfile]) -> dict[str, LayerProfile]:
    """Return the members of numbered containers by name: one that is called from two places is one member."""
    return {layer.name: layer for layer in layers if _is_numbered(layer)}


def _pattern(kind: str, container: str) -> tuple[str, ...]:
    """Return what a class in a container has in common with the same in containers whose numbers differ."""
    return kind, *("#" if part.isdecimal() else part for part in container.split("."))


def _gain(layers: list[LayerProfile]) -> float | None:
    gains = [layer.gain_at_limit_s for layer in layers]
    return None if any(gain is None for gain in gains) else sum(gain for gain in gains if gain is not None)
