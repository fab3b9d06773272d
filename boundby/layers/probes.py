"""Probes on the forward of every module, the notes they leave, and the tree of calls that is made of these.

A probe replaces `module.forward`, where torch looks it up at every call. Hooks that note the same send every call
through the slow half of `Module.__call__` (amid small layers 5.9 us a call against 1.8), make fused paths fall back to
other operators, miss a direct call of `forward`, and do not see a KeyboardInterrupt. Hooks of the user stay.

A probe adds three notes to the list of its thread. Where a thread stands, and which call path a note belongs to,
follows from that list alone. The self time of a path is its time less that of its callees, so the sum of all self
times is the root's inclusive time, exactly.
"""

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from boundby.machine import is_sticky

Clock = Callable[[], int]  # nanoseconds
Run = Callable[[], object]
Forward = Callable[..., Any]
Wrap = Callable[[Forward, int], Forward]  # the forward of module number so-and-so -> what stands in for it
# By thread, for every call: -1 less the index of the module, what was noted at its begin, and what at its end. No note
# is a negative int.
CallLog = dict[int, list[Any]]
COMPILED = "its compiled code would be cut at every layer, and what is measured would be another program"
ELSEWHERE = "(other thread)"
ROOT = "(model)"  # in the path of a model that is called again from inside or from another thread


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

    @property
    def opaque_reasons(self) -> Sequence[str]:
        """Each reason for which modules are left alone, once."""
        return tuple(dict.fromkeys(self.opaque.values()))


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
    return Targets(tuple(modules.values()), tuple(map(tuple, names.values())), opaque)


@contextmanager
def attached(targets: Targets, wrap: Wrap) -> Iterator[None]:
    """Have every target's forward stood in for by `wrap(forward, index)` within the block, and never after it."""
    ways_back: list[Callable[[], None]] = []
    try:
        for index in targets.probed:
            ways_back.append(_replace_forward(targets.modules[index], index, wrap))
        yield
    finally:
        for undo in ways_back:
            undo()


def timing_probe(log: CallLog, now: Clock) -> Wrap:
    """Return what notes when each call begins and ends.

    Appending to a list that was looked up by the thread's identity is what costs least: amid small layers 1.1 us a
    call, 1.3 where a subclass of dict makes what appends, a quarter more with nodes that are looked up and added to.
    """

    def wrap(function: Forward, index: int) -> Forward:
        mark = -1 - index

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                notes = log[get_ident()]
            except KeyError:
                notes = log.setdefault(get_ident(), [])
            notes.append(mark)
            notes.append(now())
            try:
                return function(*args, **kwargs)
            finally:
                notes.append(now())

        return forward

    return wrap


def noting_probe(
    log: CallLog,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda args, kwargs: None,
    leave: Callable[[Any], Any] = lambda result: None,
) -> Wrap:
    """Return what notes `enter(args, kwargs)` and `leave(result)` of each call; the result is None where it raised."""

    def wrap(function: Forward, index: int) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            notes = log.setdefault(get_ident(), [])
            notes += (-1 - index, enter(args, kwargs))
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                if not is_sticky(error):  # a model may go on after others
                    notes.append(leave(None))
                raise
            notes.append(leave(result))
            return result

        return forward

    return wrap


class Call:
    """A module as it is called from one place."""

    __slots__ = ("callees", "caller", "index", "name", "path", "tree")

    def __init__(self, tree: "CallTree", caller: "Call | None", index: int, name: str, path: str) -> None:
        self.tree, self.caller, self.index, self.name, self.path = tree, caller, index, name, path
        self.callees: dict[int, Call] = {}

    def calling(self, index: int) -> "Call":
        """Return the node of module number `index` when it is called from here, made at the first call."""
        return self.callees.get(index) or self.tree.add(self, index)


@dataclass(frozen=True)
class CallTimes:
    """What one run spent in one call path, as the clock saw it."""

    ns: int  # calls inside included
    self_ns: int
    calls: int
    inner_calls: int


class CallTree:
    """All call paths of a model. `names` are the qualified names of each module: a shared one has several."""

    def __init__(self, names: Sequence[tuple[str, ...]]) -> None:
        self._names = names
        self._paths: set[str] = set()
        self._lock = threading.Lock()
        self.top = Call(self, None, -1, "", "")
        self.elsewhere = Call(self, None, -1, "", ELSEWHERE)

    def add(self, caller: Call, index: int) -> Call:
        """Return a new node below `caller`, or that which another thread has just made.

        Its path is the module's name below that of the caller, as long as it has one there and the path is free;
        else the caller's path, ">", and its first name.
        """
        with self._lock:
            if index in caller.callees:
                return caller.callees[index]
            name, path = self._named(caller, index)
            self._paths.add(path)
            call = caller.callees[index] = Call(self, caller, index, name, path)
            return call

    def ended(self, log: CallLog) -> Iterator[tuple[Call, Any, Any]]:
        """Yield each call that has ended, callees first, with what was noted at its begin and at its end.

        This thread is the one that ran the model.
        """
        for thread, notes in log.copy().items():
            yield from _Reader(self.top if thread == get_ident() else self.elsewhere, notes.copy()).ended()

    def learn(self, log: CallLog) -> None:
        """Make the nodes of all calls in the log, from whichever thread they came; this thread ran the model."""
        for _ in self.ended(log):
            pass

    def times(self, log: CallLog) -> dict[Call, CallTimes]:
        """Return the times of every call path by the calls that have ended; this thread ran the model."""
        ns: Counter[Call] = Counter()
        calls: Counter[Call] = Counter()
        for call, began, ended in self.ended(log):
            ns[call] += ended - began
            calls[call] += 1
        return {
            call: CallTimes(
                ns=ns[call],
                self_ns=ns[call] - sum(ns[callee] for callee in call.callees.values()),
                calls=calls[call],
                inner_calls=sum(calls[callee] for callee in call.callees.values()),
            )
            for call in self.walk()
        }

    def here(self, log: CallLog) -> Callable[[], Call]:
        """Return a function that tells which call the asking thread is in; the present thread runs the model."""
        home = get_ident()
        readers: dict[int, _Reader] = {}

        def tell() -> Call:
            thread = get_ident()
            if thread not in readers:
                readers[thread] = _Reader(self.top if thread == home else self.elsewhere, log.setdefault(thread, []))
            for _ in readers[thread].ended():
                pass
            return readers[thread].here

        return tell

    def walk(self) -> Iterator[Call]:
        """Yield every call path, callers before callees in the order of first calls; those elsewhere come last."""
        for top in (self.top, self.elsewhere):
            waiting = list(reversed(top.callees.values()))
            while waiting:
                call = waiting.pop()
                yield call
                waiting.extend(reversed(call.callees.values()))

    def is_elsewhere(self, call: Call) -> bool:
        """Tell whether the call came from another thread than the one that runs the model."""
        while call.caller is not None:
            call = call.caller
        return call is self.elsewhere

    def _named(self, caller: Call, index: int) -> tuple[str, str]:
        names = self._names[index]
        if caller is self.top:
            return names[0], names[0]
        if caller is not self.elsewhere:
            prefix = f"{caller.name}." if caller.name else ""
            inside = [name for name in names if name and name.startswith(prefix)]
            if inside:
                name = min(inside, key=lambda name: name.count("."))  # that nearest to the caller
                path = ".".join(part for part in (caller.path, name.removeprefix(prefix)) if part)
                if path not in self._paths:
                    return name, path
        return names[0], f"{caller.path}>{names[0] or ROOT}"


class _Reader:
    """Reads the notes of one thread as they come; `here` is the call that it is in after those read."""

    def __init__(self, top: Call, notes: list[Any]) -> None:
        self.here = top
        self._notes = notes
        self._read = 0
        self._begins: list[Any] = []

    def ended(self) -> Iterator[tuple[Call, Any, Any]]:
        """Read on, and yield the calls that have ended."""
        while self._read < len(self._notes):
            note = self._notes[self._read]
            self._read += 1
            if isinstance(note, int) and note < 0:
                self.here = self.here.calling(-1 - note)
                self._begins += self._notes[self._read : self._read + 1]  # nothing, in a thread that stands just there
                self._read += 1
            elif self.here.caller is not None:
                call, self.here = self.here, self.here.caller
                yield call, self._begins.pop(), note


def _stand_in(probe: Forward, original: Forward) -> Forward:
    """Return what stands at `module.forward`. In a copy of the module it is the forward of the copy, without a probe.

    A method around a function does that too, and a call of it, which packs `self` anew, takes a quarter longer; a
    subclass of partial has no vectorcall in Python 3.11.
    """
    partial = functools.update_wrapper(functools.partial(probe), original)
    partial.__deepcopy__ = lambda memo: copy.deepcopy(original, memo)  # type: ignore[attr-defined]
    return partial


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
