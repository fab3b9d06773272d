"""One stage of a plan as a module: the model's own forward, in which the units of other stages do not compute.

A model is cut where the first unit with weights of the next stage is called: the first tensor that this unit takes (the
hidden state) crosses, and nothing else. Every stage gets the model's inputs too, so the model's own code computes masks
and positions wherever they are needed. Units of earlier stages return NaN: what needs more than the hidden state cannot
pass for a right output.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from boundby.machine import is_out_of_memory, release_memory
from boundby.partition.plan import PartitionPlan

NESTED = "is called inside of another unit; units stand in a row"


class CutError(ValueError):
    """The model cannot be run in the stages of the plan with equal outputs."""


@dataclass(frozen=True)
class CutStage:
    """A stage, the shapes of the hidden state that it takes and gives, and the output of the whole model.

    `entering` is None for the first stage. `leaving` is that of the output for the last one. Both are meta tensors.
    """

    module: "StageModule"
    entering: Tensor | None
    leaving: Tensor
    whole: Tensor
    weight_bytes: int


def cut_stage(model: nn.Module, plan: PartitionPlan, index: int, inputs: Any, device: torch.device) -> CutStage:
    """Return stage `index` of the plan on a device; the caller's model stays as it is.

    `inputs` are those of one request: a mapping gives keyword arguments, a tuple positional ones, anything else the
    only one. The whole model is run once with them, on the device where it has room for that. Raises CutError for a
    model whose units are not there, or are not called one after the other.
    """
    stage_of = _stage_by_unit(model, plan)
    _refuse_unfit(model)
    seen = _seen(model, stage_of, inputs, device)
    entries = [_entry(model, stage.layers) for stage in plan.stages]
    _refuse_to_go_back(seen, stage_of, [*filter(None, entries[1:])], model)
    module = StageModule(model, stage_of, index, entries, seen, device)
    return CutStage(
        module=module,
        entering=seen.taken[entries[index]] if index else None,
        leaving=seen.taken[entries[index + 1]] if index + 1 < len(entries) else seen.output.to("meta"),
        whole=seen.output,
        weight_bytes=sum(
            {id(weight): weight.nbytes for weight in _weights(module.model) if not weight.is_meta}.values()
        ),
    )


class StageModule(nn.Module):
    """Computes one stage: `forward(hidden, **inputs)` gives the next hidden state, or the first tensor of the output.

    Without `hidden` for the first stage. Names of positional inputs are their positions: "0", "1".
    """

    def __init__(
        self,
        model: nn.Module,
        stage_of: Mapping[str, int],
        index: int,
        entries: list[str],
        seen: "_Seen",
        device: torch.device,
    ) -> None:
        super().__init__()
        foreign = [
            name for name, stage in stage_of.items() if stage != index and _has_weights(model.get_submodule(name))
        ]
        self.model = _copied(model, foreign, device)
        self._received: Tensor | None = None
        for name, stage in stage_of.items():
            unit = self.model.get_submodule(name)
            if index and name == entries[index]:
                unit.forward = functools.partial(self._enter, unit.forward)
            elif stage > index and name == entries[index + 1]:
                unit.forward = _leave
            elif stage < index and name in foreign:
                unit.forward = functools.partial(_stand_in, seen.returned[name], device)

    def forward(self, *received: Tensor, **inputs: Any) -> Tensor:
        """Return what crosses the next cut, or the model's output."""
        self._received = received[0] if received else None
        args, kwargs = arguments(inputs)
        try:
            with torch.no_grad():
                return first_tensor(self.model(*args, **kwargs)).contiguous()
        except _Leaving as leaving:
            return leaving.hidden.contiguous()

    def _enter(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the first own unit with the received tensor in place of its first tensor argument."""
        leaves, spec = tree_flatten((args, kwargs))
        index = next(position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        leaves[index] = self._received
        args, kwargs = tree_unflatten(leaves, spec)
        return forward(*args, **kwargs)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and keyword arguments."""
    if not isinstance(inputs, Mapping):
        return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
    positions = sorted(filter(str.isdigit, inputs), key=int)
    named = {name: value for name, value in inputs.items() if name not in positions}
    return tuple(inputs[position] for position in positions), named


def named(inputs: Any) -> dict[str, Any]:
    """Return inputs by name; positional ones by their place."""
    args, kwargs = arguments(inputs)
    return {**{str(position): value for position, value in enumerate(args)}, **kwargs}


def first_tensor(value: Any) -> Tensor:
    """Return the first tensor in a structure. Raises CutError where there is none."""
    tensor = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)
    if tensor is None:
        raise CutError(f"a {type(value).__name__} without any tensor is taken or returned where stages are cut")
    return tensor


@dataclass
class _Seen:
    """One forward of the whole model: units in the order of their calls, what they returned, took first, and gave."""

    calls: list[str] = field(default_factory=list)
    returned: dict[str, Any] = field(default_factory=dict)  # meta tensors
    taken: dict[str, Tensor] = field(default_factory=dict)  # meta tensors
    output: Tensor = field(default_factory=lambda: torch.empty(0))


class _Leaving(BaseException):
    """The hidden state has come to the next stage; no `except Exception` of a model may stop it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _Leaving(first_tensor((args, kwargs)))


def _stand_in(returned: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    def made(meta: Tensor) -> Tensor:
        value = float("nan") if meta.dtype.is_floating_point else 0
        return torch.full_like(meta, value, device=device)

    return tree_map_only(Tensor, made, returned)


def _stage_by_unit(model: nn.Module, plan: PartitionPlan) -> dict[str, int]:
    names = dict(model.named_modules(remove_duplicate=False))
    stage_of: dict[str, int] = {}
    modules: dict[int, str] = {}
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            if layer not in names:
                raise CutError(f"{type(model).__name__} has no module {layer!r}, which the plan names as a unit")
            same = modules.setdefault(id(names[layer]), layer)
            if same != layer:
                raise CutError(f"{same} and {layer} are the same module: it cannot be two units")
            outer = next((name for name in stage_of if layer.startswith(f"{name}.")), None)
            if outer is not None:
                raise CutError(f"{layer} {NESTED} ({outer})")
            stage_of[layer] = index
    return stage_of


def _refuse_unfit(model: nn.Module) -> None:
    for name, module in model.named_modules():
        called = name or "the model"
        if module.training:
            raise CutError(f"{called} is in training mode, with outputs left to chance: call model.eval()")
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise CutError(f"{called} is compiled: pass the eager one, which stages can cut")
        if isinstance(module, torch.jit.ScriptModule):
            raise CutError(f"{called} is a ScriptModule, whose calls cannot be watched")


def _seen(model: nn.Module, units: Mapping[str, int], inputs: Any, device: torch.device) -> _Seen:
    """Run the whole model once; on its own device where there is no room on the other."""
    try:
        return _watched(_copied(model, [], device), units, inputs, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_memory(device)
    return _watched(model, units, inputs, next((parameter.device for parameter in model.parameters()), device))


def _watched(model: nn.Module, units: Mapping[str, int], inputs: Any, device: torch.device) -> _Seen:
    seen = _Seen()

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.calls.append(name)
        if name not in seen.taken and any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            seen.taken[name] = torch.empty_like(first_tensor((args, kwargs)), device="meta")

    def after(name: str, module: nn.Module, args: Any, returned: Any) -> None:
        seen.returned[name] = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), returned)

    handles = []
    try:
        for name in units:
            unit = model.get_submodule(name)
            handles.append(unit.register_forward_pre_hook(functools.partial(before, name), with_kwargs=True))
            handles.append(unit.register_forward_hook(functools.partial(after, name)))
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), arguments(inputs))
        with torch.no_grad():
            seen.output = first_tensor(model(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _entry(model: nn.Module, layers: tuple[str, ...]) -> str:
    """Return the unit at which a stage begins: whatever precedes it has no weights and runs anywhere."""
    return next((name for name in layers if _has_weights(model.get_submodule(name))), layers[0])


def _refuse_to_go_back(seen: _Seen, stage_of: Mapping[str, int], entries: list[str], model: nn.Module) -> None:
    for entry in entries:
        if seen.calls.count(entry) != 1:
            raise CutError(f"{entry} is called {seen.calls.count(entry)} times in a forward: no stage can begin there")
        if entry not in seen.taken:
            raise CutError(f"{entry} takes no tensor: no stage can begin there")
    weighty = [name for name in seen.calls if name in entries or _has_weights(model.get_submodule(name))]
    for before, after in zip(weighty, weighty[1:], strict=False):
        if stage_of[after] < stage_of[before]:
            raise CutError(f"{after} is called after {before}, which is in a later stage: a plan cannot go back")


def _copied(model: nn.Module, foreign: list[str], device: torch.device) -> nn.Module:
    """Return a copy on a device; tensors that are there already are shared, those of foreign units have no memory."""
    memo: dict[int, Any] = {}
    for name in foreign:
        for tensor in _weights(model.get_submodule(name)):
            memo[id(tensor)] = _placed(tensor, torch.device("meta"))
    for name, module in model.named_modules():
        if not any(f"{name}.".startswith(f"{unit}.") for unit in foreign):  # a tied weight is kept where one is its own
            memo |= {id(tensor): _placed(tensor, device) for tensor in _weights(module, recurse=False)}
    return copy.deepcopy(model, memo)


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def _weights(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
