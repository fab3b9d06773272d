"""The units of a model: the pieces in a row that a plan does not split, each with what it costs.

A unit is a block of a `ModuleList` or `Sequential` (so residual connections lie inside it), or a module before, between
or after the blocks. A profile names the tensors that a unit is given and gives; what else crosses a cut it cannot see.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from boundby.layers import LayerProfile, ModelProfile, Storage

NUMBERED = re.compile(r"(?:(.*)\.)?(\d+)")
SHAPE = re.compile(r"(?:torch\.)?([a-z]+)(\d*)\w*\[([\d, ]*)\]")
BITS = {"bool": 8, "bfloat": 16}  # where the name does not say it, or not all of it
LEAST_SHARE = 0.05  # of the model's time outside of all units, below which it is not worth a doubt
PLACED = "{:.0f} % of the time is spent between the units, in {}; it counts towards the first unit there"
CROSSING = (
    "the tensors that cross a cut are inferred from the dtypes and shapes of the inputs and outputs of units. A tensor "
    "that only later units use may be missing: give its size as extra_live_bytes, or 0 if there is none"
)
OTHER_BATCH = (
    "memory and transfers are for a batch of {}, times for the profiled batch of {}: profile the batch that you plan "
    "to know its times"
)
NO_ACTIVATIONS = "the activation peak of {} of {} units is unknown ({}): only their outputs are counted, a lower bound"
NO_OUTPUTS = "the output of {} of {} units is unknown ({} first): a cut behind it counts only what the next unit takes"


@dataclass(frozen=True)
class Unit:
    """A piece of the model that stays whole. `seconds` is one forward of it, where it was measured."""

    name: str
    seconds: float
    storages: tuple[Storage, ...] = ()  # every one once; a key that another unit has too is a tied weight
    cut_bytes: int = 0  # all tensors alive after it, which must travel when the next unit is elsewhere
    activation_peak_bytes: int = 0  # above what was there when it began
    kv_cache_bytes: int = 0
    layers: tuple[str, ...] = ()  # paths of the layers it is made of, the outermost ones
    is_block: bool = False


@dataclass(frozen=True)
class Chain:
    """The units of a model in their order, and the bytes of its input.

    Times that are not representative may order plans, and count as assumed.
    """

    units: tuple[Unit, ...]
    input_bytes: int = 0
    doubts: tuple[str, ...] = ()
    is_representative: bool = True
    batch_size: int | None = None  # that sizes are of; None where it is not known
    is_of_its_batch: bool = True  # whether times are of that batch too; else they count as assumed

    def entering_bytes(self, first: int) -> int:
        """Return the bytes that must be there before unit `first` can begin."""
        return self.units[first - 1].cut_bytes if first else self.input_bytes


def units_of(
    profile: ModelProfile,
    *,
    kv_cache_bytes: int | Mapping[str, int] = 0,
    extra_live_bytes: int | Mapping[str, int] | None = None,
    kv_cache_tokens: int = 0,
    batch_size: int | None = None,
) -> Chain:
    """Return the units of a profiled model.

    `kv_cache_bytes`: of every unit out of a list of modules, or by name of the unit, for all requests that are served
    at the same time.
    `kv_cache_tokens`: instead of these, how many tokens of each text the caches hold; what one takes is known from the
    cache that the profiled run gave back, a layer of it for each block.
    `batch_size`: activations, inputs and these caches grow with it; times do not, and count as assumed for another
    batch than the profiled one. The batch is the first dimension of what the model is given first.
    `extra_live_bytes`: what crosses every cut, or the cut behind the unit of that name, beyond what a profile sees.
    Raises ValueError where the profile has no layer with a time, and for a size of units that are not there.
    """
    if profile.passes:
        raise ValueError(
            f"profile {profile.profile_name!r} is of text that was generated, in passes of two kinds; plan with the "
            "profile of one forward, and give the KV cache of its blocks"
        )
    reading = _Reading(profile)
    if not reading.layers:
        raise ValueError(f"profile {profile.profile_name!r} holds no layer that was called; profile a forward first")
    extra = extra_live_bytes or 0
    _check_names({"kv_cache_bytes": kv_cache_bytes, "extra_live_bytes": extra}, reading.layers)
    if kv_cache_bytes and not isinstance(kv_cache_bytes, Mapping) and not any(map(reading.is_block, reading.layers)):
        raise ValueError("the model has no list of blocks to have a KV cache each; give kv_cache_bytes by name of unit")
    given = profile.layers[0].input_shapes
    profiled, tokens = _batch_and_tokens(given)
    batch = profiled if batch_size is None else batch_size
    if batch_size is not None and (batch_size < 1 or not profiled):
        raise ValueError(f"batch_size is {batch_size}, and that of the profile {profiled}: sizes cannot be told")
    factor = batch / profiled if batch and profiled else 1.0
    caches = kv_cache_bytes
    if kv_cache_tokens:
        if kv_cache_bytes:
            raise ValueError("kv_cache_bytes and kv_cache_tokens are both given; give one")
        blocks = [layer.path for layer in reading.layers if reading.is_block(layer)]
        caches = _caches(blocks, profile.kv_cache_bytes, kv_cache_tokens * factor / tokens if tokens else None)
    units, cuts = [], reading.cut_bytes()
    for index, layer in enumerate(reading.layers):
        is_block, peak = reading.is_block(layer), layer.activation_peak_bytes
        units.append(
            Unit(
                name=layer.path or layer.name or profile.model_name,
                seconds=reading.seconds[index],
                storages=reading.storages[index],
                cut_bytes=round((cuts[index] + _of(extra, layer, True)) * factor),
                activation_peak_bytes=round((_given_bytes(layer) if peak is None else peak) * factor),
                kv_cache_bytes=_of(caches, layer, is_block),
                layers=(layer.path,),
                is_block=is_block,
            )
        )
    doubts = [*reading.doubts(), *([CROSSING] if extra_live_bytes is None else [])]
    return Chain(
        units=tuple(units),
        input_bytes=round((_bytes(given) or 0) * factor),
        doubts=(*doubts, *([] if factor == 1 else [OTHER_BATCH.format(batch, profiled)])),
        is_representative=profile.coverage.status != "not representative",
        batch_size=batch,
        is_of_its_batch=factor == 1,
    )


def _caches(blocks: Sequence[str], cache_bytes: Sequence[int], times: float | None) -> dict[str, int]:
    """Return for each block a layer of the profiled cache, so many times as large."""
    if times is None or not cache_bytes or len(cache_bytes) != len(blocks):
        raise ValueError(
            f"the profile holds the KV cache of {len(cache_bytes)} layers, and the model has {len(blocks)} blocks: "
            "profile a forward that gives back its cache (use_cache), or give the bytes of each block"
        )
    return {path: round(size * times) for path, size in zip(blocks, cache_bytes, strict=True)}


def _batch_and_tokens(shapes: Sequence[str]) -> tuple[int | None, int | None]:
    """Return the first two dimensions of the first tensor, which of tokens are texts and their length."""
    match = SHAPE.fullmatch(shapes[0].strip()) if shapes else None
    sizes = [int(size) for size in match[3].replace(" ", "").split(",") if size] if match else []
    return (sizes[0] if sizes else None), (sizes[1] if len(sizes) > 1 else None)


class _Reading:
    """A profile as a tree of calls, and the layers of it that are units."""

    def __init__(self, profile: ModelProfile) -> None:
        self._profile = profile
        self._inside: dict[str, list[LayerProfile]] = {}
        for layer in sorted(profile.layers, key=lambda child: child.order):
            if layer.parent is not None and layer.calls > 0 and not layer.is_concurrent:
                self._inside.setdefault(layer.parent, []).append(layer)
        self._blocks = {layer.path for siblings in self._inside.values() for layer in _numbered(siblings)}
        self._opened: list[LayerProfile] = []  # taken apart into units
        self._first_in: dict[str, int] = {}  # of these: the place of the first unit inside
        self.layers: list[LayerProfile] = []
        self._take_apart(profile.layers[0])
        self.seconds = self._seconds()
        self.storages = self._storages()

    def is_block(self, layer: LayerProfile) -> bool:
        return layer.path in self._blocks

    def cut_bytes(self) -> list[int]:
        """Return the bytes alive behind each unit: its output, tensors kept for later units, other input of the next.

        Tensors are told apart by dtype and shape: what a unit gives waits until one takes a tensor that looks like it.
        """
        cuts: list[int] = []
        waiting: list[str] = []
        for index, layer in enumerate(self.layers):
            taken = self.layers[index + 1].input_shapes if index + 1 < len(self.layers) else ()
            elsewhere = Counter(taken) - Counter([*waiting, *layer.output_shapes])
            cuts.append(_given_bytes(layer) + sum(_bytes(shapes) or 0 for shapes in (waiting, elsewhere.elements())))
            waiting = [shape for shape in (*waiting, *layer.output_shapes) if shape not in taken]
        return cuts

    def doubts(self) -> Iterator[str]:
        yield from self._profile.doubts
        whole = sum(self.seconds)
        between = {layer.path or "the model itself": _seconds(layer.self_s) for layer in self._opened}
        if whole and sum(between.values()) > LEAST_SHARE * whole:
            main = max(between, key=lambda path: between[path])
            yield PLACED.format(100 * sum(between.values()) / whole, main)
        unknown = [unit for unit in self.layers if unit.activation_peak_bytes is None]
        if unknown:
            reason = self._profile.reasons.get("activation_peak_bytes", "no reason was recorded")
            yield NO_ACTIVATIONS.format(len(unknown), len(self.layers), reason)
        silent = [unit.path for unit in self.layers if unit.output_bytes is None and _bytes(unit.output_shapes) is None]
        if silent:
            yield NO_OUTPUTS.format(len(silent), len(self.layers), silent[0])
        for unit in (unit for unit in self.layers if unit.calls > 1 and unit.parent is not None):
            yield f"{unit.path} is called {unit.calls:g} times per run: it counts where it is called first"

    def _take_apart(self, layer: LayerProfile) -> None:
        inside = self._inside.get(layer.path, [])
        if inside and self._is_opened(layer):
            self._opened.append(layer)
            self._first_in[layer.path] = len(self.layers)
            for child in inside:
                self._take_apart(child)
        elif layer.inclusive_s:
            self.layers.append(layer)

    def _is_opened(self, layer: LayerProfile) -> bool:
        only_calls = not self.is_block(layer) or layer.bytes_self == 0  # without an operator it adds no residual
        return layer.parent is None or (self._holds_blocks(layer) and only_calls)

    def _holds_blocks(self, layer: LayerProfile) -> bool:
        inside = self._inside.get(layer.path, [])
        return any(self.is_block(child) or self._holds_blocks(child) for child in inside)

    def _below(self, layer: LayerProfile) -> Iterator[LayerProfile]:
        yield layer
        for child in self._inside.get(layer.path, []):
            yield from self._below(child)

    def _seconds(self) -> list[float]:
        """Return the time of each unit with everything inside; the longer one of device and host."""
        seconds = [max(_seconds(unit.device_inclusive_s), _seconds(unit.host_inclusive_s)) for unit in self.layers]
        for opened in self._opened if seconds else ():
            seconds[self._first_in[opened.path]] += _seconds(opened.self_s)
        return seconds

    def _storages(self) -> list[tuple[Storage, ...]]:
        """Return the memory of each unit; layers in no unit count for the unit nearest by name."""
        by_unit: list[dict[str, Storage]] = [{} for _ in self.layers]
        owner = {below.path: index for index, unit in enumerate(self.layers) for below in self._below(unit)}
        for layer in self._profile.layers if self.layers else ():
            unit_index = owner.get(layer.path, self._first_in.get(layer.path))
            if unit_index is None:
                unit_index = self._nearest(layer.name)
            by_unit[unit_index] |= {storage.key: storage for storage in layer.storages}
        return [tuple(storages.values()) for storages in by_unit]

    def _nearest(self, name: str) -> int:
        """Return the unit that a never-called module lies in by its name, else the first one."""
        matching = [index for index, unit in enumerate(self.layers) if f"{name}.".startswith(f"{unit.name}.")]
        return max(matching, key=lambda index: len(self.layers[index].name), default=0)


def _numbered(siblings: Sequence[LayerProfile]) -> Iterator[LayerProfile]:
    """Yield the members of every list of modules: siblings whose names differ in a final number alone."""
    by_list: dict[str | None, list[LayerProfile]] = {}
    for layer in siblings:
        if match := NUMBERED.fullmatch(layer.name):
            by_list.setdefault(match[1], []).append(layer)
    yield from itertools.chain.from_iterable(members for members in by_list.values() if len(members) > 1)


def _seconds(summary: object) -> float:
    return float(getattr(summary, "median", 0.0))


def _given_bytes(layer: LayerProfile) -> int:
    return layer.output_bytes if layer.output_bytes is not None else _bytes(layer.output_shapes) or 0


def _of(given: int | Mapping[str, int], layer: LayerProfile, is_meant: bool) -> int:
    """Return this layer's entry of a mapping by name; a single number holds for all layers meant."""
    if isinstance(given, Mapping):
        return given.get(layer.path, given.get(layer.name, 0))
    return given if is_meant else 0


def _check_names(given: Mapping[str, int | Mapping[str, int]], layers: Sequence[LayerProfile]) -> None:
    known = {name for layer in layers for name in (layer.path, layer.name)}
    for what, sizes in given.items():
        for name, size in sizes.items() if isinstance(sizes, Mapping) else [("every unit", sizes)]:
            if isinstance(sizes, Mapping) and name not in known:
                raise ValueError(f"{what} names {name!r}, which is no unit; the units are {', '.join(sorted(known))}")
            if size < 0:
                raise ValueError(f"{what} of {name} is {size}; a size is 0 or more")


def _bytes(shapes: Iterable[str]) -> int | None:
    """Return the bytes of tensors written as `float32[1, 128, 768]`; None where there is none that can be read."""
    total = None
    for shape in shapes:
        if match := SHAPE.fullmatch(shape.strip()):
            bits = BITS.get(match[1], 0) or int(match[2] or 0)
            count = 1
            for size in filter(None, match[3].replace(" ", "").split(",")):
                count *= int(size)
            total = (total or 0) + count * bits // 8
    return total
