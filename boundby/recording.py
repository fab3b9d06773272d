"""A forward as its operators: recorded once below its modules, and run again as straight code.

The program has the same operators on the same tensors, with each layer's own weights, no Python between them, and
nothing kept longer than it is needed.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from boundby.timer import Work
from boundby.work import operators
from boundby.work.operators import Cost

Marked = Callable[[Callable[[], Any]], list[tuple[Any, Any]]]


@dataclass(frozen=True)
class Slot:
    """A tensor in a program: what an operator made (`made` True) or what was there before."""

    number: int
    made: bool

    @property
    def name(self) -> str:
        """The variable that holds it."""
        return f"{'v' if self.made else 'g'}{self.number}"


@dataclass(frozen=True)
class Step:
    """One call of an operator; in `args` and `kwargs` slots stand for tensors.

    `outputs` are the slots that it fills, with the place of each in the result. `cost` is None for what moves nothing:
    views, queries, bare allocations.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[tuple[tuple[int, ...], Slot], ...]
    key: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    cost: Cost | None

    @property
    def name(self) -> str:
        """The operator's name as the profiler has it."""
        return str(self.func._schema.name)

    @cached_property
    def changed(self) -> tuple[Slot, ...]:
        """The slots that the operator writes to in place."""
        named = dict(zip((argument.name for argument in self.func._schema.arguments), self.args, strict=False))
        named.update(self.kwargs)
        writes = [
            argument.name
            for argument in self.func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return tuple(slot for name in writes if name in named for slot in _slots_in(named[name]))


@dataclass
class Recording:
    """The operators of one forward, and the tensors that were there before it, by slot."""

    steps: list[Step] = field(default_factory=list)
    leaves: dict[Slot, torch.Tensor] = field(default_factory=dict)

    @property
    def leaf_bytes(self) -> float:
        """The bytes of everything that was there before."""
        storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in self.leaves.values()}
        return float(sum(storages.values()))

    def walk(self) -> Iterator[tuple[Step, tuple[Any, ...], dict[str, Any]]]:
        """Run the forward; before each step yield it, with its arguments."""
        values = dict(self.leaves)
        for step, unneeded in zip(self.steps, self.last_uses, strict=True):
            args = tuple(_filled(value, values) for value in step.args)
            kwargs = {name: _filled(value, values) for name, value in step.kwargs.items()}
            yield step, args, kwargs
            out = step.func(*args, **kwargs)
            for place, slot in step.outputs:
                values[slot] = _at(out, place)
            for slot in unneeded:
                values.pop(slot, None)

    @cached_property
    def last_uses(self) -> list[list[Slot]]:
        """The slots that no later step needs, by step."""
        uses: list[list[Slot]] = [[] for _ in self.steps]
        seen: set[Slot] = set()
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            touched = [*_slots_in([step.args, list(step.kwargs.values())]), *(slot for _, slot in step.outputs)]
            fresh = [slot for slot in dict.fromkeys(touched) if slot.made and slot not in seen]
            seen.update(fresh)
            uses[number] = fresh
        return uses


def record(work: Work) -> Recording:
    """Return the operators of one call of `work`. Raises ValueError where there are none or FLOPs are unknown."""
    recorder = _Recorder()
    with recorder:
        result = work()  # held until the end: what it holds is then no slot that was freed
    del result
    if not recorder.recording.steps:
        raise ValueError("the call ran no operator that torch shows (a captured CUDA graph?); replay the eager model")
    return recorder.recording


class _Recorder(TorchDispatchMode):
    """Writes down every operator that torch dispatches while it is entered."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._slots = WeakTensorKeyDictionary()
        self._made: set[int] = set()
        self._numbers = itertools.count()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            name = func.name()  # type: ignore[no-untyped-call]
            raise ValueError(f"{name} cannot be replayed; use a model whose attention is sdpa or eager")
        if types:
            return NotImplemented
        if operators.is_composite(func):
            with self:
                return operators.run_parts(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        inputs = list(operators.tensors_in([args, list(kwargs.values())]))
        slots = [self._slot(tensor) for tensor in inputs]
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        key = (str(func), _described(args), _described(kwargs))
        dtype = next((dtype_name(tensor.dtype) for tensor in inputs if tensor.is_floating_point()), "")
        arguments = tuple(self._argument(value) for value in args)
        named = {name: self._argument(value) for name, value in kwargs.items()}
        before = {operators.storage(tensor) for tensor in inputs}
        out = func(*args, **kwargs)
        is_working = operators.does_work(func)
        cost = self._cost(func, args, kwargs, out, before) if is_working else None
        if func.namespace in operators.NOT_ARITHMETIC:
            return out
        self._made |= {operators.storage(tensor) for tensor in operators.tensors_in(out)} - before
        if not is_working and inputs and not any(slot.made for slot in slots):  # a view of a weight: it stays the same
            for _, tensor in _places(out):
                self._leaf(tensor)
            return out
        outputs = tuple((place, self._new(tensor)) for place, tensor in _places(out))
        self.recording.steps.append(Step(func, arguments, named, outputs, key, shapes, dtype, cost))
        return out

    def _cost(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, taken: set[int]
    ) -> Cost:
        reads, writes = operators.reads(func, args, kwargs, out), operators.writes(func, args, kwargs, out)
        return operators.cost(operators.flops(func, args, kwargs, out), reads, writes, taken, self._made)

    def _slot(self, tensor: torch.Tensor) -> Slot:
        slot: Slot | None = self._slots.get(tensor)  # type: ignore[no-untyped-call]
        return slot or self._leaf(tensor)

    def _leaf(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(next(self._numbers), made=False)
        self._slots[tensor] = slot
        self.recording.leaves[slot] = tensor
        return slot

    def _new(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(next(self._numbers), made=True)
        self._slots[tensor] = slot
        return slot

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._slot(value)
        if isinstance(value, list | tuple):
            return type(value)(self._argument(element) for element in value)
        return value


def _places(out: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the tensors of a result with their places in it."""
    if isinstance(out, torch.Tensor):
        yield place, out
    elif isinstance(out, list | tuple):
        for index, element in enumerate(out):
            yield from _places(element, (*place, index))


def _at(out: Any, place: tuple[int, ...]) -> torch.Tensor:
    for index in place:
        out = out[index]
    assert isinstance(out, torch.Tensor)
    return out


def _filled(value: Any, values: Mapping[Slot, torch.Tensor]) -> Any:
    """Return an argument with tensors in the place of slots."""
    if isinstance(value, Slot):
        return values[value]
    if isinstance(value, list | tuple):
        return type(value)(_filled(element, values) for element in value)
    return value


def _slots_in(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _slots_in(element)


def _described(value: Any) -> Any:
    """Return what tells two calls of an operator apart: of tensors shape, strides and dtype, else the value."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_described(element) for element in value)
    if isinstance(value, Mapping):
        return tuple((name, _described(element)) for name, element in value.items())
    return repr(value)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as `torch.<name>` has it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Program:
    """A recording as a function: `run()` does all steps, `marked(mark)` returns a pair of marks around each."""

    run: Work
    marked: Marked


def program(recording: Recording, dtype: torch.dtype | None = None) -> Program:
    """Return the recording as straight code; with `dtype` in place of the floating dtype that most weights have."""
    cast = _cast(recording, dtype)
    values: dict[str, Any] = {slot.name: cast(leaf) for slot, leaf in recording.leaves.items()}
    plain, marked = ["def run():"], ["def marked(mark):", "    marks = []", "    note = marks.append"]
    for number, (step, unneeded) in enumerate(zip(recording.steps, recording.last_uses, strict=True)):
        values[f"f{number}"] = step.func._op
        constants = itertools.count()

        def constant(value: Any, number: int = number, constants: Iterator[int] = constants) -> str:
            name = f"k{number}_{next(constants)}"
            values[name] = cast(value)
            return name

        given = [_source(value, constant) for value in step.args]
        given += [f"{name}={_source(value, constant)}" for name, value in step.kwargs.items()]
        call = f"r = f{number}({', '.join(given)})"
        after = [f"{slot.name} = r{''.join(f'[{index}]' for index in place)}" for place, slot in step.outputs]
        after.append("; ".join(["r = None", *(f"{slot.name} = None" for slot in unneeded)]))
        plain += [f"    {line}" for line in (call, *after)]
        marked += [f"    {line}" for line in ("a = mark()", call, *after, "note((a, mark()))")]
    marked.append("    return marks")
    exec("\n".join([*plain, *marked]), values)  # noqa: S102  (straight code: a loop over steps costs as much as a view)
    return Program(values["run"], values["marked"])


def _source(value: Any, constant: Callable[[Any], str]) -> str:
    if isinstance(value, Slot):
        return value.name
    if isinstance(value, list) and next(_slots_in(value), None):
        return f"[{', '.join(_source(element, constant) for element in value)}]"
    if isinstance(value, tuple) and next(_slots_in(value), None):
        return f"({', '.join(_source(element, constant) for element in value)},)"
    return repr(value) if value is None or isinstance(value, bool | int) else constant(value)


def _cast(recording: Recording, dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """Return what puts `dtype` in the place of the recording's own, in tensors and in arguments."""
    floating = [leaf for leaf in recording.leaves.values() if leaf.is_floating_point()]
    if dtype is None or not floating:
        return lambda value: value
    own = max(floating, key=lambda leaf: leaf.nbytes).dtype

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype == own else value
        return dtype if value == own else value

    return cast
