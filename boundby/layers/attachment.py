"""Put a probe around the forward of every module, and take it away again.

A probe stands in for `module.forward`, where torch looks it up at every call. Hooks that note the same send every call
through the slow half of `Module.__call__` (amid small layers 5.9 us a call against 1.8), make fused paths such as that
of `nn.TransformerEncoderLayer` fall back to other operators, miss a direct call of `forward`, and are not told of a
KeyboardInterrupt. No hook of the user is touched; what it takes counts to the caller.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn

from boundby.layers.calls import Call, CallLog, CallTree

Clock = Callable[[], int]  # nanoseconds
Forward = Callable[..., Any]
Wrap = Callable[[Forward, int], Forward]  # the forward of module number so-and-so -> what stands in for it
COMPILED = "its compiled code would be cut at every layer, and what is measured would be another program"


class Visitor(Protocol):
    """Is told of every call; what `enter` returns comes back to `leave`, with None as result where forward raised."""

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note that the call begins."""
        ...

    def leave(self, call: Call, token: Any, result: Any) -> None:
        """Note that the call has ended."""
        ...


@dataclass(frozen=True)
class Targets:
    """The modules of a model, each once with all its names, and those that no probe can enter, with the reason."""

    modules: tuple[nn.Module, ...]
    names: tuple[tuple[str, ...], ...]
    opaque: dict[int, str]  # index of the module: why

    @property
    def probed(self) -> list[int]:
        """The indices of the modules that get a probe."""
        return [index for index in range(len(self.modules)) if index not in self.opaque]


def find_targets(model: nn.Module) -> Targets:
    """Return what to put probes on. Raises ValueError where the model is compiled or scripted as a whole."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        _refuse_compiled(name, module)
        modules.setdefault(id(module), module)
        names.setdefault(id(module), []).append(name)
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("the model is a ScriptModule, which has no layers in Python; profile the module it comes from")
    positions = {identity: index for index, identity in enumerate(modules)}
    opaque: dict[int, str] = {}
    for name, module in model.named_modules():
        reason = _opaque_inside(module)
        for inner in module.modules() if reason else ():
            is_itself = inner is module and not isinstance(module, torch.jit.ScriptModule)
            if not is_itself:
                opaque[positions[id(inner)]] = f"{name or 'the model'} {reason}"
    return Targets(tuple(modules.values()), tuple(tuple(each) for each in names.values()), opaque)


@contextmanager
def attached(targets: Targets, wrap: Wrap) -> Iterator[None]:
    """Have every target's forward stood in for by `wrap(forward, index)` within the block, and never after it."""
    undo: list[Callable[[], None]] = []
    try:
        for index in targets.probed:
            undo.append(_replace_forward(targets.modules[index], index, wrap))
        yield
    finally:
        for each in undo:
            each()


def timing_probe(log: CallLog, now: Clock) -> Wrap:
    """Return what logs when each call begins and ends.

    Appending to a list that was looked up by the thread's identity is what costs least: amid small layers 1.1 us a
    call, 1.3 where a subclass of dict makes what appends, a quarter more with nodes that are looked up and added to.
    """

    def wrap(function: Forward, index: int) -> Forward:
        mark = -1 - index

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                numbers = log[get_ident()]
            except KeyError:
                numbers = log.setdefault(get_ident(), [])
            numbers.append(mark)
            numbers.append(now())
            try:
                return function(*args, **kwargs)
            finally:
                numbers.append(now())

        return forward

    return wrap


def visiting_probe(tree: CallTree, visitor: Visitor) -> Wrap:
    """Return what tells the visitor of each call."""

    def wrap(function: Forward, index: int) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            lane = tree.lane()
            caller = lane[0]
            lane[0] = call = caller.calling(index)
            result = None
            token = visitor.enter(call, args, kwargs)
            try:
                result = function(*args, **kwargs)
                return result
            finally:
                lane[0] = caller
                visitor.leave(call, token, result)

        return forward

    return wrap


def _stand_in(probe: Forward, original: Forward) -> Forward:
    """Return what stands at `module.forward`. In a copy of the module it is the forward of the copy, without a probe.

    A method around a function does that too, and a call of it, which packs `self` anew, takes a quarter longer; a
    subclass of partial has no vectorcall in Python 3.11.
    """
    found = functools.update_wrapper(functools.partial(probe), original)
    found.__deepcopy__ = lambda memo: copy.deepcopy(original, memo)  # type: ignore[attr-defined]
    return found


def _replace_forward(module: nn.Module, index: int, wrap: Wrap) -> Callable[[], None]:
    """Put the stand-in where `module.forward` is looked up; return what takes it away."""
    original = module.forward
    previous = module.__dict__.get("forward")  # such as accelerate puts there
    stand_in = _stand_in(wrap(original, index), original)
    module.__dict__["forward"] = stand_in

    def undo() -> None:
        if module.__dict__.get("forward") is not stand_in:
            return  # replaced meanwhile by something that keeps its own way back
        if previous is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = previous

    return undo


def _refuse_compiled(name: str, module: nn.Module) -> None:
    forward = getattr(module, "forward", None)
    is_decorated = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    is_compiled = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    if is_compiled or is_decorated:
        what = f"layer {name!r}" if name else "the model"
        raise ValueError(f"{what} is compiled by torch.compile: {COMPILED}; profile the model before compiling it")


def _opaque_inside(module: nn.Module) -> str | None:
    """Return why the modules inside must be left alone; None where they need not."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, which runs outside of Python: its time counts to its caller"
    if isinstance(module, nn.DataParallel):
        return "copies its layers to other devices at every call: all time counts to itself"
    return None


def opaque_reasons(targets: Targets) -> Sequence[str]:
    """Return each reason for which modules are left alone, once."""
    return tuple(dict.fromkeys(targets.opaque.values()))
