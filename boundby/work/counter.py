"""Count the FLOPs and bytes of a call, operator by operator, while it runs once in eager mode."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from msgspec.structs import replace
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from boundby.work import operators
from boundby.work.roofline import OperatorLoad, Shapes

Owner = TypeVar("Owner", bound=Hashable)


@dataclass(frozen=True)
class Work:
    """What a call did, by operator in the order of their first calls.

    `least_bytes` bounds its traffic from below, as if a cache kept everything in between: what was there before the
    call and is read or changed, and what the call returns, each once.
    """

    operators: tuple[OperatorLoad, ...]
    least_bytes: int

    @property
    def flops(self) -> float:
        """FLOPs of all operators."""
        return sum(operator.flops for operator in self.operators)

    @property
    def bytes(self) -> float:
        """Bytes that all operators read and write."""
        return sum(operator.bytes for operator in self.operators)

    @property
    def calls(self) -> float:
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
) -> tuple[dict[Owner, tuple[OperatorLoad, ...]], int]:
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
    work = {owner: tuple(loads.values()) for owner, loads in counter.loads.items()}
    return work, counter.footprint.bytes(result)


class _Counter(operators.Watching, Generic[Owner]):  # type: ignore[no-untyped-call]
    """Adds up what every operator does."""

    def __init__(self, clock: Callable[[], float] | None, owner: Callable[[], Owner]) -> None:
        super().__init__()
        self.is_used = False
        self.loads: dict[Owner, dict[tuple[str, Shapes], OperatorLoad]] = {}
        self.footprint = _Footprint()
        self._clock, self._owner = clock, owner

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.is_used = True
        inputs = list(operators.tensors_in([args, list(kwargs.values())]))
        if not operators.does_work(func):
            out = func(*args, **kwargs)
            self.footprint.follow(inputs, out)
            return out
        shapes = operators.shapes_of(inputs)  # before the call: one given as `out` may change its shape
        start = self._clock() if self._clock else 0.0
        out = func(*args, **kwargs)
        seconds = self._clock() - start if self._clock else None
        taken = {operators.storage(tensor) for tensor in inputs}
        accesses = operators.Accesses.of(func, args, kwargs, out, taken, self.footprint.made)
        name = func._schema.name
        load = replace(accesses.load(name, shapes, operators.flops(func, args, kwargs, out)), seconds=seconds)
        loads = self.loads.setdefault(self._owner(), {})
        loads[name, shapes] = loads[name, shapes] + load if (name, shapes) in loads else load
        self.footprint.follow(inputs, out)
        self.footprint.touch("read", accesses.read)
        self.footprint.touch("written", accesses.written)
        return out


class _Footprint:
    """The least memory a call must touch: what existed before it, and what it returns."""

    def __init__(self) -> None:
        self.made: set[int] = set()  # storages that operators of the call allocated
        # bytes touched, by view, of each other storage
        self._views: dict[tuple[str, int], dict[tuple[object, ...], int]] = {}
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
                prepacked = operators.is_prepacked(tensor)
                self._sizes[storage] = moved if prepacked else tensor.untyped_storage().nbytes()

    def bytes(self, result: object) -> int:
        """Return the bytes of what was noted, and of the tensors in `result` that the call made."""
        given = sum(min(sum(views.values()), self._sizes[storage]) for (_, storage), views in self._views.items())
        leaves = {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return given + sum(operators.nbytes(leaf) for leaf in leaves.values() if operators.storage(leaf) in self.made)
