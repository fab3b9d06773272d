"""Take a model apart into the stages of a plan, without changing it.

Every stage runs the model's own forward, from the beginning to its last unit. Units of earlier stages are skipped:
they return what was sent, or tensors that are `Absent` where no later unit needs them. So whatever stands between the
units is computed by the model's own code, and no stage has weights of units other than its own. What units leave on
modules for others to find is refused where it is a tensor; a number left there cannot be seen.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from boundby.partition.plan import PartitionPlan
from boundby.staged.absent import Absent, CutError, absent_like
from boundby.staged.recording import (
    INPUTS,
    Leaf,
    Recording,
    UnitCall,
    Value,
    leaf_of,
    record,
    spec_of,
    structure_of,
)


@dataclass(frozen=True)
class Program:
    """What one stage does: its units, all calls of units in order, and the values that come in and go out."""

    index: int
    node: str
    units: tuple[str, ...]
    calls: tuple[UnitCall, ...]
    stages: tuple[int, ...]  # of each call
    structure: Any  # of the arguments, with numbers in place of what `inputs` has
    inputs: tuple[Any, ...]  # a Leaf for every tensor; other arguments themselves
    arriving: tuple[Value, ...]
    leaving: tuple[Value, ...]
    is_last: bool

    @property
    def input_spec(self) -> TreeSpec:
        """How the arguments are put together."""
        return spec_of(self.structure)

    @property
    def last_call(self) -> int:
        """The place of its last call, behind which it has nothing more to do; -1 where it has none."""
        return max((place for place, stage in enumerate(self.stages) if stage == self.index), default=INPUTS)


@dataclass(frozen=True)
class Stages:
    """A model in stages, and what the whole of it gave for the inputs it was cut with."""

    model: nn.Module
    programs: tuple[Program, ...]
    outputs: Any

    def check_inputs(self, inputs: Any) -> list[torch.Tensor]:
        """Return the tensors in inputs. Raises CutError where their shapes are not those the model was cut with."""
        program = self.programs[0]
        leaves, spec = tree_flatten(arguments(inputs))
        known = [leaf_of(each) if isinstance(each, torch.Tensor) else each for each in leaves]
        if spec != program.input_spec or not _are_alike(known, program.inputs):
            raise CutError("the model was cut for inputs of other shapes or types; cut it again with these")
        return [each for each in leaves if isinstance(each, torch.Tensor)]


def stages_of(model: nn.Module, plan: PartitionPlan, inputs: Any, *, threads: int | None = None) -> Stages:
    """Return the stages of a plan, and the outputs of the whole model. The model is called twice and stays as it is.

    `inputs`: a mapping gives keyword arguments, a tuple positional ones, anything else the only argument. The stages
    take inputs of the same shapes. `threads` are those of the workers, as outputs may depend on them. Raises CutError
    for a model whose outputs would not be equal, or not for sure.
    """
    units = units_in(model, plan)
    _refuse_unfit(model, units)
    args, kwargs = arguments(inputs)
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    with _threads(threads):
        with torch.no_grad():
            outputs = model(*args, **kwargs)
        recording, again = record(lambda: model(*args, **kwargs), units, leaves)
    if not are_equal(outputs, again):
        raise CutError("the model gives different outputs for equal inputs, so no stages of it can be checked")
    known = tuple(leaf_of(each) if isinstance(each, torch.Tensor) else each for each in leaves)
    return Stages(model, tuple(_programs(plan, recording, spec, known)), outputs)


def units_in(model: nn.Module, plan: PartitionPlan) -> dict[str, nn.Module]:
    """Return the modules that the plan's units are, by name. Raises CutError where one is not there."""
    found: dict[str, nn.Module] = {}
    names = dict(model.named_modules(remove_duplicate=False))
    for stage in plan.stages:
        for layer in stage.layers:
            if layer not in names:
                raise CutError(f"{type(model).__name__} has no module {layer!r}, which the plan names as a unit")
            same = next((name for name, module in found.items() if module is names[layer]), None)
            if same is not None:
                raise CutError(f"{same} and {layer} are the same module: it cannot be two units")
            found[layer] = names[layer]
    return found


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def are_equal(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Tell whether two results are the same, tensor by tensor; NaN equals NaN.

    `tolerance` is of the largest number in each tensor, for results of different devices.
    """
    (ours, spec), (theirs, other_spec) = tree_flatten(one), tree_flatten(other)
    if spec != other_spec:
        return False
    return all(_is_equal(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def skeleton(model: nn.Module, programs: Sequence[Program], device: str) -> nn.Module:
    """Return a copy of the model for a worker on `device`, in which all weights and buffers of units are absent."""
    memo: dict[int, Any] = {}
    for program in programs:
        for name, tensor in _weights(model, program.units):
            memo[id(tensor)] = absent_like(tensor, device, f"weight {name}")
    made = copy.deepcopy(model, memo)
    move(made, "cpu")
    return made


def move(skeleton: nn.Module, device: str) -> None:
    """Bring what is there of a skeleton to a device."""
    for module in skeleton.modules():
        for group in (module._parameters, module._buffers):
            for name, tensor in group.items():
                if tensor is not None and not isinstance(tensor, Absent):
                    group[name] = tensor.detach().to(device)


def weights(model: nn.Module, program: Program) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield every parameter and buffer of the stage's units once, with all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _weights(model, program.units):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise CutError(f"{names[key][0]} is no plain tensor ({type(tensor).__name__}, {tensor.layout})")
        yield tuple(names[key]), tensor.detach()


def _weights(model: nn.Module, units: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for unit in units:
        module = model.get_submodule(unit)
        for tensors in (module.named_parameters, module.named_buffers):
            yield from tensors(prefix=unit, remove_duplicate=False)


def _programs(plan: PartitionPlan, recording: Recording, spec: TreeSpec, inputs: tuple[Any, ...]) -> Iterator[Program]:
    place = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    stages = tuple(place[call.unit] for call in recording.calls)
    _refuse_to_go_back(recording, stages, plan)
    last = len(plan.stages) - 1
    given = tuple(Value(INPUTS, leaf) for leaf, each in enumerate(inputs) if isinstance(each, Leaf))
    crossing = [given, *(_crossing(recording, stages, cut, last) for cut in range(1, last + 1)), ()]
    for index, stage in enumerate(plan.stages):
        yield Program(
            index=index,
            node=stage.node,
            units=stage.layers,
            calls=recording.calls,
            stages=stages,
            structure=structure_of(spec),
            inputs=inputs,
            arriving=crossing[index],
            leaving=crossing[index + 1],
            is_last=index == last,
        )


def _crossing(recording: Recording, stages: Sequence[int], cut: int, last: int) -> tuple[Value, ...]:
    """Return the values from before stage `cut` that it or a later one needs."""
    needed = set(recording.decisive) | set(recording.output_needs)
    for call, stage in zip(recording.calls, stages, strict=True):
        if stage >= cut:
            needed |= call.needs
    return tuple(sorted(each for each in needed if each.call == INPUTS or stages[each.call] < cut))


def _refuse_to_go_back(recording: Recording, stages: Sequence[int], plan: PartitionPlan) -> None:
    for place in range(1, len(stages)):
        if stages[place] < stages[place - 1]:
            unit, node = recording.calls[place].unit, plan.stages[stages[place - 1]].node
            raise CutError(f"{unit} is called after units on {node} have begun: a plan of stages cannot go back to it")


def _refuse_unfit(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise CutError(f"{training or 'the model'} is in training mode, with outputs left to chance: call model.eval()")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and (name in units or not name):
            raise CutError(f"{name or 'the model'} is a ScriptModule, whose calls cannot be watched")
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise CutError(f"{name or 'the model'} is compiled: pass the eager one, which stages can cut")


def _is_equal(one: Any, other: Any, tolerance: float) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.cpu(), other.cpu()
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    reach = tolerance * float(other.detach().abs().max()) if tolerance and other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=reach, equal_nan=True)


def _are_alike(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Tell whether two lists of arguments have equal shapes and dtypes, whatever the strides, and equal constants."""

    def plain(value: Any) -> Any:
        return (value.shape, value.dtype) if isinstance(value, Leaf) else value

    return [plain(each) for each in ours] == [plain(each) for each in theirs]


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
