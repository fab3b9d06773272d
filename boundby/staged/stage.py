"""One stage at work: the model's own forward, with the units of other stages skipped."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from boundby.staged.absent import Absent, CutError
from boundby.staged.cutting import Program, move
from boundby.staged.recording import INPUTS, Leaf, Value, leaf_of

Values = Mapping[Value, torch.Tensor]


class StageModel:
    """A stage with its weights. `skeleton` is a copy of the model without weights of units; it is changed for good."""

    def __init__(self, skeleton: nn.Module, program: Program, device: str) -> None:
        self._model, self._program, self._device = skeleton, program, device
        self._place = 0
        self._arrived: Values = {}
        self._leaving: dict[Value, tuple[torch.Tensor, int]] = {}
        self._wanted = frozenset(program.leaving)
        move(skeleton, device)
        for unit in dict.fromkeys(call.unit for call in program.calls):
            module = skeleton.get_submodule(unit)
            module.forward = functools.partial(self._called, unit, module.forward)

    def load(self, names: Iterable[str], tensor: torch.Tensor) -> None:
        """Put a weight in its places."""
        tensor = tensor.to(self._device)
        for name in names:
            owner, _, last = name.rpartition(".")
            module = self._model.get_submodule(owner)
            group = module._parameters if last in module._parameters else module._buffers
            group[last] = tensor

    def run(self, arrived: Values) -> tuple[dict[Value, torch.Tensor], Any]:
        """Return the values for later stages, and the model's output, which the last stage alone has.

        Raises CutError where these inputs lead another way through the model than those it was cut with.
        """
        self._place, self._arrived, self._leaving = 0, arrived, {}
        program = self._program
        output = self._forward() if program.is_last or program.last_call >= 0 else None
        leaving = {value: arrived[value] for value in program.leaving if value in arrived}
        for value, (tensor, version) in self._leaving.items():
            if tensor._version != version:
                raise CutError(f"what {program.calls[value.call].unit} returns is changed in place before it is sent")
            leaving[value] = tensor
        self._arrived, self._leaving = {}, {}
        return leaving, output

    def _forward(self) -> Any:
        """Run the model up to the last unit of this stage; return its output where that is the last one of all."""
        program = self._program
        args, kwargs = tree_unflatten([self._input(n) for n in range(len(program.inputs))], program.input_spec)
        try:
            with torch.no_grad():
                output = self._model(*args, **kwargs)
        except _Done:
            return None
        self._check_end(output)
        return output

    def _input(self, leaf: int) -> Any:
        known = self._program.inputs[leaf]
        if not isinstance(known, Leaf):
            return known
        arrived = self._arrived.get(Value(INPUTS, leaf))
        return self._absent(known, f"input {leaf}") if arrived is None else arrived

    def _absent(self, leaf: Leaf, origin: str) -> Absent:
        return Absent(leaf.shape, leaf.dtype, self._device, origin, leaf.strides)

    def _called(self, unit: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place, program = self._place, self._program
        if place >= len(program.calls) or program.calls[place].unit != unit:
            raise CutError(f"{unit} is called in another order than for the inputs the model was cut with")
        self._place += 1
        if program.stages[place] < program.index:
            return self._skipped(place)
        if program.stages[place] > program.index:
            raise _Done
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Absent):
                raise CutError(f"{unit} needs values of {each.origin}, which is in another stage")
        result = forward(*args, **kwargs)
        self._keep(place, result)
        if place == program.last_call and not program.is_last:
            raise _Done
        return result

    def _skipped(self, place: int) -> Any:
        call = self._program.calls[place]
        leaves: list[Any] = []
        for leaf, known in enumerate(call.leaves):
            arrived = self._arrived.get(Value(place, leaf))
            leaves.append(arrived if known is None or arrived is not None else self._absent(known, call.unit))
        return tree_unflatten(leaves, call.spec)

    def _keep(self, place: int, result: Any) -> None:
        call = self._program.calls[place]
        leaves, spec = tree_flatten(result)
        found = [leaf_of(each) if isinstance(each, torch.Tensor) else each for each in leaves]
        if spec != call.spec or [_plain(each) for each in found] != [_plain(each) for each in call.leaves]:
            raise CutError(f"{call.unit} returns other shapes than for the inputs the model was cut with")
        for leaf, tensor in enumerate(leaves):
            if Value(place, leaf) in self._wanted:
                self._leaving[Value(place, leaf)] = tensor, tensor._version

    def _check_end(self, output: Any) -> None:
        if self._place != len(self._program.calls):
            missing = self._program.calls[self._place].unit
            raise CutError(f"{missing} is not called, as it was for the inputs the model was cut with")
        for each in tree_leaves(output):
            if isinstance(each, Absent):
                raise CutError(f"the model's output holds values of {each.origin}, which are in another stage")


class _Done(BaseException):
    """This stage has nothing more to do in this forward; no `except Exception` of a model may stop it."""


def _plain(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Leaf) else value
