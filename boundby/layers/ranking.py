"""Which layers matter: by their own work, and as blocks that do not overlap. Loads no torch.

Blocks are an antichain of call paths that, with the rows "(self)" of the paths above them, make up the whole time of
the root. The root is opened, and every path that has a repeated layer below it, down to the first repeated layer that
runs operators of its own: `transformer.h.11` adds a residual and is a block, a stage that only calls its layers in
turn is opened. A layer is repeated where a numbered container holds several of its class, its own container or one
whose name differs in numbers alone, or where it has layers inside, none of which is such a member, and is called
several times: an ALBERT layer is, and a decoder that is called for every new token is opened.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from boundby.layers.records import LayerProfile, ModelProfile

ROOT_LABEL = "(model)"


@dataclass(frozen=True)
class Ranked:
    """One row of a ranking. `seconds` is the mean over runs, `share` its part of the sum of all rows.

    By its mean a layer counts that is called in few of the runs, and the means of all rows add up to that of the root.
    """

    path: str
    type: str
    part: Literal["layer", "self"]  # the whole layer, or what it does beside the layers inside
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
    layers = [layer for layer in _called(profile) if layer.self_s is not None]
    total = sum(layer.self_s.mean for layer in layers if layer.self_s)
    rows = [
        Ranked(layer.path, layer.type, "layer", layer.self_s.mean, _share(layer.self_s.mean, total), _gain([layer]))
        for layer in layers
        if layer.self_s
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def blocks(profile: ModelProfile) -> tuple[Ranked, ...]:
    """Return blocks and "(self)" rows that together are the whole model, the longest first."""
    tree = _Tree(profile)
    rows = [row for row in tree.rows() if row.seconds > 0]
    total = sum(row.seconds for row in rows)
    shared = [
        Ranked(row.path, row.type, row.part, row.seconds, _share(row.seconds, total), row.gain_at_limit_s)
        for row in rows
    ]
    return tuple(sorted(shared, key=lambda row: -row.seconds))


class _Tree:
    """The called layers by caller, and which of them are repeated."""

    def __init__(self, profile: ModelProfile) -> None:
        self._layers = _called(profile)
        self._inside: dict[str, list[LayerProfile]] = defaultdict(list)
        for layer in self._layers:
            if layer.parent is not None:
                self._inside[layer.parent].append(layer)
        held = Counter((layer.type, name.rpartition(".")[0]) for name, layer in _numbered(self._layers).items())
        groups = {_pattern(*place) for place, count in held.items() if count > 1}
        members = {
            layer.path
            for layer in self._layers
            if _is_numbered(layer) and _pattern(layer.type, layer.name.rpartition(".")[0]) in groups
        }
        self._repeated = members | {
            layer.path
            for layer in self._layers
            if layer.calls > 1
            and self._inside.get(layer.path)
            and not any(inner.path in members for inner in self._below(layer)[1:])
        }
        self._holds_repeated = {
            layer.path
            for layer in self._layers
            if any(inner.path in self._repeated for inner in self._below(layer)[1:])
        }

    def rows(self) -> Iterator[Ranked]:
        """Yield the rows, callers before callees, with no share yet."""
        waiting = [layer for layer in self._layers if layer.parent is None]
        while waiting:
            layer = waiting.pop()
            if self._is_opened(layer):
                waiting.extend(self._inside[layer.path])
                if layer.self_s:
                    yield Ranked(layer.path, layer.type, "self", layer.self_s.mean, 0.0, _gain([layer]))
            elif layer.inclusive_s:
                gain = _gain(self._below(layer))
                yield Ranked(layer.path, layer.type, "layer", layer.inclusive_s.mean, 0.0, gain)

    def _is_opened(self, layer: LayerProfile) -> bool:
        if not self._inside[layer.path]:
            return False
        if layer.parent is None:
            return True
        only_calls = layer.path not in self._repeated or layer.bytes_self == 0
        return layer.path in self._holds_repeated and only_calls

    def _below(self, layer: LayerProfile) -> list[LayerProfile]:
        """Return the layer and all that are called inside."""
        layers = [layer]
        for caller in layers:  # grows while it is read
            layers.extend(self._inside.get(caller.path, ()))
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


def _share(seconds: float, total: float) -> float:
    return seconds / total if total > 0 else 0.0


def _gain(layers: list[LayerProfile]) -> float | None:
    gains = [layer.gain_at_limit_s for layer in layers]
    return None if any(gain is None for gain in gains) else sum(gain for gain in gains if gain is not None)
