"""One forward of the whole model, watched between its units: which values every unit needs from which others.

A value is a tensor that the model is given or that a unit returns. What lies between the units (additions, masks) is
followed operator by operator, so that a stage is sent the values that its part of it needs, and no others.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from boundby.staged.absent import CutError

INPUTS = -1  # the call that gives the model's own inputs
PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device, torch.Size)


class Value(NamedTuple):
    """Tensor `leaf` of what unit call number `call` returns."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Leaf:
    """Shape, dtype and strides of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]


@dataclass(frozen=True)
class UnitCall:
    """A call of a unit: what it returned, and the values that it needs, in itself or in what led to its arguments.

    `structure` is what it returned with a number in place of every tensor.
    """

    unit: str
    structure: Any
    leaves: tuple[Leaf | None, ...]  # None stands for None
    needs: frozenset[Value]

    @property
    def spec(self) -> TreeSpec:
        """How what it returned is put together; it cannot be sent to another process, its structure can."""
        return spec_of(self.structure)


@dataclass(frozen=True)
class Recording:
    """All calls of units in their order. `decisive` values were looked at by the model's own code between units."""

    calls: tuple[UnitCall, ...]
    output_needs: frozenset[Value]
    decisive: frozenset[Value]


def leaf_of(tensor: torch.Tensor) -> Leaf:
    """Return what is known of a tensor without its values."""
    return Leaf(tuple(tensor.shape), tensor.dtype, tensor.stride())


def structure_of(spec: TreeSpec) -> Any:
    """Return something put together in this way, of numbers."""
    return tree_unflatten(list(range(spec.num_leaves)), spec)


def spec_of(structure: Any) -> TreeSpec:
    """Return how something is put together."""
    return tree_flatten(structure)[1]


def record(
    call: Callable[[], object], units: Mapping[str, nn.Module], inputs: Sequence[Any]
) -> tuple[Recording, object]:
    """Return what `call` does with the units, and what it returns. `inputs` are the leaves that it is given.

    Raises CutError where a value passes from unit to unit in a way that cannot be followed.
    """
    watch = _Watch()
    for place, tensor in enumerate(inputs):
        if isinstance(tensor, torch.Tensor):
            watch.found(tensor, Value(INPUTS, place))
    with _wrapped(units, watch.call), torch.no_grad(), watch:
        result = call()
    needs = watch.needs(tree_flatten(result)[0], "the model's output")
    return Recording(tuple(watch.calls), needs, frozenset(watch.decisive)), result


@contextlib.contextmanager
def _wrapped(units: Mapping[str, nn.Module], called: Callable[..., object]) -> Iterator[None]:
    """Have `called` called in place of every unit's forward, and take it off again.

    A hook would switch off the fused paths of some modules, and miss calls of `forward` itself.
    """
    before = {name: vars(module).get("forward") for name, module in units.items()}
    try:
        for name, module in units.items():
            module.forward = functools.partial(called, name, module.forward)
        yield
    finally:
        for name, module in units.items():
            vars(module).pop("forward", None)
            if before[name] is not None:
                module.forward = before[name]


@dataclass
class _Seen:
    """A piece of memory, known for as long as it lives, and the values that it was computed from."""

    storage: StorageWeakRef
    needs: frozenset[Value] = frozenset()
    inside: str | None = None  # the unit within which it was made, and which has not returned it
    is_value: bool = False


@dataclass(eq=False)
class _Watch(TorchDispatchMode):
    """Follows values through the operators between the units."""

    calls: list[UnitCall] = field(default_factory=list)
    decisive: set[Value] = field(default_factory=set)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _within: str | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def found(self, tensor: torch.Tensor, value: Value) -> None:
        """Note that this tensor is a value from now on."""
        before = self._of(tensor)
        needs = frozenset({value}) | (before.needs if before and before.is_value else frozenset())
        self._note(tensor, needs, is_value=True)

    def needs(self, leaves: Iterable[Any], what: str) -> frozenset[Value]:
        """Return the values that these arguments need. Raises CutError for what cannot be followed."""
        found: frozenset[Value] = frozenset()
        for each in leaves:
            if isinstance(each, torch.Tensor):
                found |= self._needs_of(each, what)
            elif not isinstance(each, PLAIN):
                raise CutError(
                    f"{what} holds a {type(each).__name__}, which may carry values past a cut unseen"
                    + ("; call the model with use_cache=False" if "Cache" in type(each).__name__ else "")
                )
        return found

    def call(self, unit: str, forward: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        """Run a unit, and note what it takes and gives."""
        if self._within is not None:
            raise CutError(f"{unit} is called inside of {self._within}: they cannot be units of one plan")
        given, _ = tree_flatten((args, kwargs))
        needs = self.needs(given, f"what {unit} is given")
        versions = [each._version if isinstance(each, torch.Tensor) else None for each in given]
        self._within = unit
        try:
            result = forward(*args, **kwargs)
        finally:
            self._within = None
        after, _ = tree_flatten((args, kwargs))
        if len(after) != len(given) or any(a is not b for a, b in zip(after, given, strict=True)):
            raise CutError(f"{unit} changes a list or mapping that it is given; its changes would not cross a cut")
        if versions != [each._version if isinstance(each, torch.Tensor) else None for each in given]:
            raise CutError(f"{unit} changes a tensor in place that it is given (an inplace=True?): set it to False")
        self._note_call(unit, needs, result)
        return result

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._within is not None:
            result = func(*args, **named)
            before = {each.untyped_storage()._cdata for each in _tensors((args, named))}
            for each in _tensors(result):
                if self._of(each) is None and each.untyped_storage()._cdata not in before:
                    self._note(each, frozenset(), inside=self._within)
            return result
        given = list(_tensors((args, named)))
        needs = frozenset().union(*(self._needs_of(each, str(func)) for each in given))
        self._refuse_changed_values(func, args, named)
        result = func(*args, **named)
        if _is_decisive(func, result):
            self.decisive |= needs
        for each in _tensors(result):
            seen = self._of(each)
            self._note(each, needs | (seen.needs if seen else frozenset()), is_value=bool(seen and seen.is_value))
        return result

    def _note_call(self, unit: str, needs: frozenset[Value], result: object) -> None:
        leaves, spec = tree_flatten(result)
        for place, each in enumerate(leaves):
            if isinstance(each, torch.Tensor):
                self.found(each, Value(len(self.calls), place))
            elif each is not None:
                raise CutError(f"{unit} returns a {type(each).__name__}: only tensors and None can cross a cut")
        known = tuple(None if each is None else leaf_of(each) for each in leaves)
        self.calls.append(UnitCall(unit, structure_of(spec), known, needs))

    def _needs_of(self, tensor: torch.Tensor, what: str) -> frozenset[Value]:
        seen = self._of(tensor)
        if seen is None:
            return frozenset()
        if seen.inside is not None:
            raise CutError(
                f"{what} takes a tensor that {seen.inside} made and did not return; it would not cross a cut"
            )
        return seen.needs

    def _refuse_changed_values(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for each in _tensors(args[place] if place < len(args) else named.get(argument.name)):
                seen = self._of(each)
                if seen is not None and seen.is_value:
                    raise CutError(f"{func} changes what a unit returned, or the model was given, in place")
                if seen is not None:  # what is written into it comes from all arguments
                    seen.needs |= frozenset().union(*(self._needs_of(x, str(func)) for x in _tensors((args, named))))

    def _of(self, tensor: torch.Tensor) -> _Seen | None:
        seen = self._seen.get(tensor.untyped_storage()._cdata)
        return None if seen is None or seen.storage.expired() else seen

    def _note(
        self, tensor: torch.Tensor, needs: frozenset[Value], inside: str | None = None, is_value: bool = False
    ) -> None:
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = _Seen(StorageWeakRef(storage), needs, inside, is_value)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor))


def _is_decisive(func: Any, result: object) -> bool:
    """Tell whether an operator hands values to Python: as a number, or as the shape of its result."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    gives_plain = any(not isinstance(each, torch.Tensor | None) for each in tree_flatten(result)[0])
    return bool(tags & set(func.tags)) or gives_plain
