"""Count the FLOPs and bytes of a call, operator by operator, while it runs once in eager mode."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boundby.work import operators

Shapes = tuple[tuple[int, ...], ...]
Owner = TypeVar("Owner", bound=Hashable)


@dataclass(frozen=True)
class OperatorWork:
    """What all calls of one operator with the same shapes of its input tensors did. Without a clock no seconds."""

    name: str  # "aten::addmm", as the profiler calls it
    shapes: Shapes  # of every tensor argument in order, those in lists too
    calls: int
    flops: int
    bytes: int  # read and written
    given_bytes: int  # of those, read from what was there before the call: parameters, buffers, inputs
    new_bytes: int  # of those, written to memory that the operator allocated
    seconds: float | None


@dataclass(frozen=True)
class Work:
    """What a call did, by operator in the order of their first calls.

    `least_bytes` bounds its traffic from below, as if a cache kept everything in between: what was there before the
    call and is read or changed, and what the call returns, each once.
    """

    operators: tuple[OperatorWork, ...]
    least_bytes: int

    @property
    def flops(self) -> int:
        """FLOPs of all operators."""
        return sum(operator.flops for operator in self.operators)

    @property
    def bytes(self) -> int:
        """Bytes that all operators read and write."""
        return sum(operator.bytes for operator in self.operators)

    @property
    def calls(self) -> int:
        """Calls of operators that do work: views, queries and bare allocations are none."""
        return sum(operator.calls for operator in self.operators)


def count(call: Callable[[], object], *, clock: Callable[[], float] | None = None) -> Work:
    """Run `call` once without gradients and return the work it does, operator by operator.

    With a `clock` in seconds each operator is timed, which says something only where operators are synchronous: on a
    CPU. A module of torch.compile is counted as the eager code it was made from, which torch runs while it is watched.
    Raises UnknownWorkError where FLOPs are not known or no operator is seen; an error of `call` passes through.
    """
    by_owner, least_bytes = count_by(call, lambda: None, clock=clock)
    return Work(by_owner.get(None, ()), least_bytes)


def count_by(
    call: Callable[[], object], owner: Callable[[], Owner], *, clock: Callable[[], float] | None = None
) -> tuple[dict[Owner, tuple[OperatorWork, ...]], int]:
    """Count as `count` does, separately for each owner; return each one's operators and the call's `least_bytes`.

    `owner` is asked at every operator whose work it is: the module that is running, for example.
    """
    counter = _Counter(clock, owner)
    with torch.no_grad(), operators.higher_order_refused(), counter:
        result = call()
    if not counter.is_used:
        raise operators.UnknownWorkError(
            "the call ran no operator that torch shows (a captured CUDA graph?); count the eager model"
        )
    return counter.work(), counter.least_bytes(result)


@dataclass
class _Tally:
    calls: int = 0
    flops: int = 0
    bytes: int = 0
    given_bytes: int = 0
    new_bytes: int = 0
    seconds: float = 0.0


class _Counter(TorchDispatchMode, Generic[Owner]):  # type: ignore[no-untyped-call]
    """Sees every operator that torch dispatches while it is entered."""

    supports_higher_order_operators = True  # so that they come here and are refused by name

    def __init__(self, clock: Callable[[], float] | None, owner: Callable[[], Owner]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_used = False
        self._clock, self._owner = clock, owner
        self._tallies: dict[Owner, dict[tuple[str, Shapes], _Tally]] = {}
        self._footprint = _Footprint()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.is_used = True
        if isinstance(func, HigherOrderOperator):
            name = func.name()  # type: ignore[no-untyped-call]
            text = f"the work of {name} is not known; count a model whose attention is sdpa or eager"
            raise operators.UnknownWorkError(text)
        if any(kind is not torch.Tensor for kind in types):  # a plain one is named where gradients are recorded
            return NotImplemented  # a subclass of Tensor takes the operator apart, and the parts come here
        if operators.is_composite(func):  # in inference mode they come whole
            with self:
                return operators.run_parts(func, args, kwargs)
        return self._run(func, args, kwargs)

    def work(self) -> dict[Owner, tuple[OperatorWork, ...]]:
        """Return what was counted, by owner."""
        return {
            owner: tuple(self._entry(name, shapes, tally) for (name, shapes), tally in tallies.items())
            for owner, tallies in self._tallies.items()
        }

    def least_bytes(self, result: object) -> int:
        """Return the least bytes that the call must touch; `result` is what it returned."""
        return self._footprint.bytes(result)

    def _entry(self, name: str, shapes: Shapes, tally: _Tally) -> OperatorWork:
        values = (tally.calls, tally.flops, tally.bytes, tally.given_bytes, tally.new_bytes)
        return OperatorWork(name, shapes, *values, tally.seconds if self._clock else None)

    def _run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        inputs = list(operators.tensors_in([args, list(kwargs.values())]))
        if not operators.does_work(func):
            out = func(*args, **kwargs)
            self._footprint.follow(inputs, out)
            return out
        shapes = tuple(
            tuple(tensor.shape) for tensor in inputs
        )  # before the call: one given as `out` may change its shape
        start = self._clock() if self._clock else 0.0
        out = func(*args, **kwargs)
        seconds = self._clock() - start if self._clock else 0.0
        reads, writes = operators.reads(func, args, kwargs, out), operators.writes(func, args, kwargs, out)
        taken = {operators.storage(tensor) for tensor in inputs}
        flops = operators.flops(func, args, kwargs, out)
        cost = operators.cost(flops, reads, writes, taken, self._footprint.made)
        tallies = self._tallies.setdefault(self._owner(), {})
        tally = tallies.setdefault((func._schema.name, shapes), _Tally())
        tally.calls += 1
        tally.flops += cost.flops
        tally.bytes += cost.bytes
        tally.given_bytes += cost.given_bytes
        tally.new_bytes += cost.new_bytes
        tally.seconds += seconds
        self._footprint.follow(inputs, out)
        self._footprint.touch("read", reads)
        self._footprint.touch("written", writes)
        return out


class _Footprint:
    """The least memory a call must touch: what existed before it, and what it returns."""

    def __init__(self) -> None:
        self.made: set[int] = set()  # storages that operators of the call allocated
        self._views: dict[
            tuple[str, int], dict[tuple[object, ...], int]
        ] = {}  # bytes touched, by view, of each other storage
        self._sizes: dict[int, int] = {}  # bytes of those storages

    def follow(self, inputs: Sequence[torch.Tensor], out: Any) -> None:
        """Note the storages that the operator allocated."""
        known = {operators.storage(tensor) for tensor in inputs}
        self.made |= {operators.storage(tensor) for tensor in operators.tensors_in(out)} - known

    def touch(self, how: str, accesses: Sequence[operators.Access]) -> None:
        """Note the bytes read or written of memory that existed before; each byte counts once."""
        for tensor, moved in accesses:
            storage = operators.storage(tensor)
            if storage not in self.made:
                view = (tensor.storage_offset(), tensor.shape, tensor.stride())
                views = self._views.setdefault((how, storage), {})
                views[view] = max(moved, views.get(view, 0))
                prepared = operators.is_prepared(tensor)
                self._sizes[storage] = moved if prepared else tensor.untyped_storage().nbytes()

    def bytes(self, result: object) -> int:
        """Return the bytes of what was noted, and of the tensors in `result` that the call made."""
        given = sum(min(sum(views.values()), self._sizes[storage]) for (_, storage), views in self._views.items())
        leaves = {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return given + sum(operators.nbytes(leaf) for leaf in leaves.values() if operators.storage(leaf) in self.made)
