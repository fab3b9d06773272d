"""The shape pass: the tensors that go into and come out of every call. No tensor outlives the call it is seen in."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from boundby.layers.attachment import Targets, attached, visiting_probe
from boundby.layers.calls import Call, CallTree
from boundby.layers.timing import Run

MOST_SHAPES = 32  # of one call; a list of hundreds of tensors (a cache) is cut, with the number left out
MOST_NESTING = 4  # of dataclasses and mappings that torch does not take apart by itself


@dataclass(frozen=True)
class CallShapes:
    """What the first call of a path took and gave, and what all its calls in a run gave, in bytes.

    `varies`: a later call took or gave other shapes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_bytes: int
    varies: bool


def see_shapes(run: Run, tree: CallTree, targets: Targets) -> dict[Call, CallShapes]:
    """Return the shapes of every call path in one run."""
    visitor = _Shapes()
    tree.enter_root()
    with attached(targets, visiting_probe(tree, visitor)):
        run()
    return visitor.found


def tensors_in(value: object, nesting: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument or a result, out of lists, mappings and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif nesting < MOST_NESTING and isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()), nesting + 1)
        elif nesting < MOST_NESTING and dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [getattr(leaf, each.name, None) for each in dataclasses.fields(leaf)]
            yield from tensors_in(fields, nesting + 1)


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape, "float32[1, 128, 768]" style."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return f"{dtype}[nested]"
    return f"{dtype}{list(tensor.shape)}"


class _Shapes:
    def __init__(self) -> None:
        self.found: dict[Call, CallShapes] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _described(list(tensors_in((args, kwargs))))

    def leave(self, call: Call, token: Any, result: Any) -> None:
        tensors = list({id(each): each for each in tensors_in(result)}.values())
        outputs, moved = _described(tensors), sum(_nbytes(each) for each in tensors)
        first = self.found.get(call)
        if first is None:
            self.found[call] = CallShapes(token, outputs, moved, varies=False)
        else:
            varies = first.varies or (first.inputs, first.outputs) != (token, outputs)
            self.found[call] = dataclasses.replace(first, output_bytes=first.output_bytes + moved, varies=varies)


def _described(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    shown = [describe(each) for each in tensors[:MOST_SHAPES]]
    left = len(tensors) - len(shown)
    return (*shown, f"and {left} more") if left else tuple(shown)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return sum(_nbytes(each) for each in _parts(tensor))
    return tensor.numel() * tensor.element_size()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a nested or a sparse one is made of."""
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else []
