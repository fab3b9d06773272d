"""A forward as its operators: recorded once below its modules, and run again as straight as it goes.

The program has the same operators on the same tensors, with each layer's own weights, no Python between them, and
nothing kept longer than it is needed.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from boundby.timing import CHUNK, Work
from boundby.work import OperatorLoad, operators

Marked = Callable[[Callable[[], Any], Callable[[], None]], list[tuple[Any, Any]]]


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

    `outputs` are the slots that it fills, with the place of each in the result. `load` is None for what moves nothing:
    views, queries, bare allocations.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[tuple[tuple[int, ...], Slot], ...]
    key: tuple[Any, ...]
    load: OperatorLoad | None

    @property
    def name(self) -> str:
        """The operator's name as the profiler has it."""
        return str(self.func._schema.name)

    @cached_property
    def changed(self) -> tuple[Slot, ...]:
        """The slots that the operator writes to in place."""
        return tuple(_slots_in(operators.written(self.func, self.args, self.kwargs)))


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
            for path, slot in step.outputs:
                values[slot] = _at(out, path)
            for slot in unneeded:
                values.pop(slot, None)

    @cached_property
    def last_uses(self) -> list[list[Slot]]:
        """The slots that no later step needs, by step."""
        uses: list[list[Slot]] = [[] for _ in self.steps]
        seen: set[Slot] = set()
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            touched = [*_slots_in([step.args, step.kwargs]), *(slot for _, slot in step.outputs)]
            fresh = [slot for slot in dict.fromkeys(touched) if slot.made and slot not in seen]
            seen.update(fresh)
            uses[number] = fresh
        return uses


def record(work: Work) -> Recording:
    """Return the operators of one call of `work`. Raises ValueError where there are none or FLOPs are unknown."""
    recorder = _Recorder()
    with operators.higher_order_refused(), recorder:
        result = work()  # held until the end: what it holds is then no slot that was freed
    del result
    if not recorder.recording.steps:
        raise ValueError("the call ran no operator that torch shows (a captured CUDA graph?); replay the eager model")
    return recorder.recording


class _Recorder(operators.Watching):
    """Writes down every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._slots = WeakTensorKeyDictionary()
        self._made: set[int] = set()
        self._numbers = itertools.count()

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        inputs = list(operators.tensors_in([args, list(kwargs.values())]))
        slots = [self._slot(tensor) for tensor in inputs]
        shapes = operators.shapes_of(inputs)
        key = (str(func), _described(args), _described(kwargs))
        arguments, named = tree_map_only(torch.Tensor, self._slot, (tuple(args), dict(kwargs)))
        before = {operators.storage(tensor) for tensor in inputs}
        out = func(*args, **kwargs)
        load = None
        if operators.does_work(func):
            accesses = operators.Accesses.of(func, args, kwargs, out, before, self._made)
            load = accesses.load(func._schema.name, shapes, operators.flops(func, args, kwargs, out))
        if func.namespace in operators.NOT_ARITHMETIC:
            return out
        self._made |= {operators.storage(tensor) for tensor in operators.tensors_in(out)} - before
        if load is None and inputs and not any(slot.made for slot in slots):  # a view of a weight: it stays the same
            for _, tensor in _tensors_at(out):
                self._leaf(tensor)
            return out
        outputs = tuple((path, self._new(tensor)) for path, tensor in _tensors_at(out))
        self.recording.steps.append(Step(func, arguments, named, outputs, key, load))
        return out

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


def _tensors_at(out: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the tensors of a result with their places in it."""
    if isinstance(out, torch.Tensor):
        yield path, out
    elif isinstance(out, list | tuple):
        for index, element in enumerate(out):
            yield from _tensors_at(element, (*path, index))


def _at(out: Any, path: tuple[int, ...]) -> torch.Tensor:
    for index in path:
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


def _slots_in(value: Any) -> list[Slot]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Slot)]


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


Arguments = Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class _Call:
    """One step, ready to run: the operator, what takes its arguments out of all values, and where results go."""

    operator: Callable[..., Any]
    arguments: Arguments
    result: int | None  # of an operator that returns one tensor
    results: tuple[tuple[tuple[int, ...], int], ...]  # of any other: places in what it returns
    unneeded: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A recording that runs without a look at anything: all values in one list, which each step reads and fills."""

    values: list[Any]  # what was there before, and constants; None for what is made
    calls: tuple[_Call, ...]

    def run(self, begin: Callable[[], None] = lambda: None) -> None:
        """Do all steps; call `begin` before each chunk of them."""
        values = self.values.copy()
        for first in range(0, len(self.calls), CHUNK):
            begin()
            for call in self.calls[first : first + CHUNK]:
                _do(call, values)

    def marked(self, mark: Callable[[], Any], begin: Callable[[], None] = lambda: None) -> list[tuple[Any, Any]]:
        """Do all steps; return a pair of marks around each. `begin` is called before chunks that marks make shorter."""
        values, marks = self.values.copy(), []
        for number, call in enumerate(self.calls):
            if number % (CHUNK // 2) == 0:
                begin()
            start = mark()
            _do(call, values)
            marks.append((start, mark()))
        return marks


def _do(call: _Call, values: list[Any]) -> None:
    out = call.operator(*call.arguments(values))
    if call.result is not None:
        values[call.result] = out
    else:
        for path, index in call.results:
            values[index] = _at(out, path)
    del out
    for index in call.unneeded:
        values[index] = None


def program(recording: Recording, dtype: torch.dtype | None = None) -> Program:
    """Return the recording as a program; with `dtype` in place of the floating dtype that most of its inputs have."""
    cast = _cast(recording, dtype)
    values: list[Any] = []
    indices: dict[Slot, int] = {}

    def index_of(slot: Slot) -> int:
        if slot not in indices:
            indices[slot] = len(values)
            values.append(None if slot.made else cast(recording.leaves[slot]))
        return indices[slot]

    def constant(value: Any) -> int:
        values.append(cast(value))
        return len(values) - 1

    calls = []
    for step, unneeded in zip(recording.steps, recording.last_uses, strict=True):
        results = tuple((path, index_of(slot)) for path, slot in step.outputs)
        call = _Call(
            *_bound(step, index_of, constant, cast),
            result=results[0][1] if len(results) == 1 and not results[0][0] else None,
            results=results,
            unneeded=tuple(index_of(slot) for slot in unneeded),
        )
        calls.append(call)
    return Program(values, tuple(calls))


def _bound(
    step: Step, index_of: Callable[[Slot], int], constant: Callable[[Any], int], cast: Callable[[Any], Any]
) -> tuple[Callable[..., Any], Arguments]:
    """Return the operator with its constant arguments by name, and what takes the others out of the values."""
    nested = [value for value in (*step.args, *step.kwargs.values()) if not isinstance(value, Slot)]
    if _slots_in(nested) or _slots_in(step.kwargs):
        slots = dict.fromkeys(_slots_in([step.args, step.kwargs]))
        given = {slot: index_of(slot) for slot in slots}
        args, kwargs = (
            tuple(cast(value) for value in step.args),
            {name: cast(value) for name, value in step.kwargs.items()},
        )

        def filled(*tensors: torch.Tensor) -> Any:  # lists of tensors, as of `cat`
            known = dict(zip(given, tensors, strict=True))
            return step.func._op(*_filled(args, known), **{name: _filled(kwargs[name], known) for name in kwargs})

        return filled, _taker(tuple(given.values()))
    indices = tuple(index_of(value) if isinstance(value, Slot) else constant(value) for value in step.args)
    named = {name: cast(value) for name, value in step.kwargs.items()}
    return (partial(step.func._op, **named) if named else step.func._op), _taker(indices)


def _taker(indices: tuple[int, ...]) -> Arguments:
    """Return what takes these indices out of a list, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else (lambda _: ())


def _cast(recording: Recording, dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """Return what puts `dtype` in the place of the recording's own, in tensors and in arguments."""
    floating = [leaf for leaf in recording.leaves.values() if leaf.is_floating_point()]
    if dtype is None or not floating:
        return lambda value: value
    own = max(floating, key=lambda leaf: leaf.nbytes).dtype

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype == own else value
        return dtype if isinstance(value, torch.dtype) and value == own else value

    return cast
