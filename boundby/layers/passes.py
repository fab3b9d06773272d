"""What is seen of the layers beside their times: the program, shapes, memory and work, each in runs of its own.

The names of its operators tell one program from another. Their inputs tell more: a cache that grows,
which no layer shows, leaves the names as they are.
"""

import dataclasses
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from boundby.layers.probes import Call, CallLog, CallTree, Run, Targets, attached, noting_probe
from boundby.machine import Allocator, raise_if_lost
from boundby.work import OperatorLoad, UnknownWorkError, count_by

MOST_NAMED = 5
MOST_TENSORS = 8  # of one operator; longer lists are told apart by these and their length
MOST_SHAPES = 32  # of one call; a list of hundreds of tensors (a cache) is cut, with the number left out
MOST_NESTING = 4  # of dataclasses and mappings that torch does not take apart by itself
MEMORY_RUNS = 3  # the first may still fill the allocator's or a library's own caches
CACHED = ("keys", "values")  # of a layer of a cache
TIMED_COUNTS = 3  # where operators are timed; the quickest was disturbed least
OTHER_OPERATORS = "the model runs other operators from run to run ({})"
OTHER_INPUTS = (
    "inputs change from run to run: {} was given {} before the timing and {} after it (operators that differ so: {}), "
    "and times are of all sizes between. Does a cache grow? Give inputs that every run leaves as they are"
)
Operators = tuple[OperatorLoad, ...]


class ChangedProgramError(ValueError):
    """The model runs different operators when its layers are watched."""


@dataclass(frozen=True)
class Program:
    """The operators of one run: how often each was called, by name and by what it was given."""

    calls: Counter[str] = field(default_factory=Counter)
    given: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)


def check_same_program(run: Run, tree: CallTree, targets: Targets, plain: Counter[str]) -> tuple[str, ...]:
    """Return doubts about the comparison with `plain`, a run without probes; all call paths are known afterwards.

    Raises ChangedProgramError where the operators differ though they do not from run to run without probes.
    """
    log = CallLog()
    with attached(targets, noting_probe(log)):
        probed = see_program(run).calls
    tree.learn(log)
    if probed == plain:
        return ()
    again = see_program(run).calls
    if again != plain:
        return (OTHER_OPERATORS.format(_difference(plain, again)),)
    raise ChangedProgramError(
        f"with its layers watched the model runs other operators ({_difference(plain, probed)}), so their times would "
        "be those of another program; profile one of its layers by itself, or trace the model with torch.profiler"
    )


def drift(first: Program, last: Program) -> tuple[str, ...]:
    """Return a doubt where the last run was of another program than the first, or gave operators other shapes."""
    if first.calls != last.calls:
        return (OTHER_OPERATORS.format(_difference(first.calls, last.calls)),)
    gone, new = first.given - last.given, last.given - first.given
    if not gone:
        return ()
    name, before = next(iter(gone))
    after = next(given for other, given in new if other == name)  # it is called as often in both
    shown = [", ".join(given) or "no tensor" for given in (before, after)]
    return (OTHER_INPUTS.format(name, *shown, len({other for other, _ in gone})),)


def see_program(run: Callable[[], object]) -> Program:
    """Return the operators of one run."""
    seeing = _Seeing()
    with seeing:
        run()
    return seeing.program


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name()
        tensors = list(tensors_in((args, kwargs)))
        given = [describe(tensor) for tensor in tensors[:MOST_TENSORS]]
        more = [f"{len(tensors) - MOST_TENSORS} more"] if len(tensors) > MOST_TENSORS else []
        self.program.calls[name] += 1
        self.program.given[name, (*given, *more)] += 1
        return func(*args, **(kwargs or {}))


def _difference(plain: Counter[str], other: Counter[str]) -> str:
    names = sorted(name for name in plain | other if plain[name] != other[name])
    shown = [f"{name}: {plain[name]} and {other[name]} times" for name in names[:MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


@dataclass(frozen=True)
class CallShapes:
    """What the first call of a path took and gave, and what all its calls in a run gave, in bytes.

    `varies`: a later call took or gave other shapes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_bytes: int | None  # None where no call was seen
    varies: bool


def see_shapes(run: Run, tree: CallTree, targets: Targets) -> tuple[dict[Call, CallShapes], tuple[int, ...]]:
    """Return the shapes of every call path in one run, and the bytes of the KV cache that it gave back, by layer.

    No tensor outlives the call it is seen in.
    """
    log = CallLog()
    with attached(targets, noting_probe(log, lambda *given: _described(list(tensors_in(given))), _given_back)):
        cache = getattr(run(), "past_key_values", None)  # as models of transformers give it
    layers = getattr(cache, "layers", None)
    held = [vars(layer) for layer in (layers if isinstance(layers, list) else ())]
    kept = [tensors_in([parts[name] for name in CACHED if name in parts]) for parts in held]
    cache_bytes = tuple(sum(map(_nbytes, tensors)) for tensors in kept)
    shapes: dict[Call, CallShapes] = {}
    for call, inputs, (outputs, moved) in tree.ended(log):
        first = shapes.get(call)
        if first is None:
            shapes[call] = CallShapes(inputs, outputs, moved, varies=False)
        else:
            varies = first.varies or (first.inputs, first.outputs) != (inputs, outputs)
            shapes[call] = dataclasses.replace(first, output_bytes=(first.output_bytes or 0) + moved, varies=varies)
    return shapes, cache_bytes


def tensors_in(value: object, nesting: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument or a result, out of lists, mappings and dataclasses."""
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif nesting < MOST_NESTING and isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()), nesting + 1)
        elif nesting < MOST_NESTING and dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values = [getattr(leaf, part.name, None) for part in dataclasses.fields(leaf)]
            yield from tensors_in(values, nesting + 1)


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape, "float32[1, 128, 768]" style."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[nested]" if tensor.is_nested else f"{dtype}{list(tensor.shape)}"


def _described(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    shown = tuple(describe(tensor) for tensor in tensors[:MOST_SHAPES])
    left = len(tensors) - len(shown)
    return (*shown, f"and {left} more") if left else shown


def _given_back(result: Any) -> tuple[tuple[str, ...], int]:
    """Return the shapes of a result, each tensor once, and its bytes."""
    tensors = list({id(tensor): tensor for tensor in tensors_in(result)}.values())
    return _described(tensors), sum(_nbytes(tensor) for tensor in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_nested:
        return sum(_nbytes(part) for part in tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return _nbytes(tensor._indices()) + _nbytes(tensor._values())
    return tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0


@dataclass(frozen=True)
class CallMemory:
    """Bytes of the device around one call path: over several calls the first, the highest and the last."""

    before_bytes: int
    peak_above_bytes: int  # above what was there when the call was entered
    after_bytes: int


def measure_memory(run: Run, tree: CallTree, targets: Targets, allocator: Allocator) -> dict[Call, CallMemory]:
    """Return the memory of every call path, from the last of a few runs.

    The allocator knows one peak at a time. So it is read and set back at every begin and end, and carried outwards.
    """

    def read(*_: Any) -> tuple[int, int]:
        reading = allocator.peak_allocated, allocator.allocated
        allocator.reset_peaks()
        return reading

    log = CallLog()
    for _ in range(MEMORY_RUNS):
        log.clear()
        with attached(targets, noting_probe(log, read, read)):
            run()
    memory: dict[Call, CallMemory] = {}
    inside: dict[Call | None, int] = {}  # the highest peak up to now in the call that is open there
    for call, (peak_outside, before), (peak, after) in tree.ended(log):
        peak = max(peak, inside.pop(call, 0))
        inside[call.caller] = max(inside.get(call.caller, 0), peak_outside, peak)
        earlier = memory.get(call)
        memory[call] = CallMemory(
            before_bytes=earlier.before_bytes if earlier else before,
            peak_above_bytes=max(peak - before, earlier.peak_above_bytes if earlier else 0),
            after_bytes=after,
        )
    return memory


@dataclass(frozen=True)
class LayerWork:
    """The operators of each call path in one run, and the least bytes that the whole run must move."""

    operators: Mapping[Call, Operators] | None
    least_bytes: int = 0
    reason: str | None = None  # why the operators are None

    def of(self, call: Call) -> Operators | None:
        """Return the operators of one call path; () where it runs none."""
        return None if self.operators is None else self.operators.get(call, ())


def count_work(run: Run, tree: CallTree, targets: Targets, clock: Callable[[], float] | None) -> LayerWork:
    """Return the work of one run by call path; with a clock in seconds operators are timed, as on a CPU.

    An error of the model passes through; one of an operator that fails only while it is watched is the reason.
    """
    counts = []
    for _ in range(TIMED_COUNTS if clock else 1):
        log = CallLog()
        try:
            with attached(targets, noting_probe(log)):
                counts.append(count_by(run, tree.here(log), clock=clock))
        except UnknownWorkError as error:
            return LayerWork(None, reason=str(error))
        except RuntimeError as error:
            raise_if_lost(error)
            if "__torch_dispatch__" not in {frame.name for frame in traceback.extract_tb(error.__traceback__)}:
                raise
            return LayerWork(None, reason=str(error))
    operators, least_bytes = min(counts, key=lambda count: _seconds(count[0]))
    return LayerWork(operators, least_bytes)


def _seconds(operators: Mapping[Call, Operators]) -> float:
    return sum(operator.seconds or 0.0 for own in operators.values() for operator in own)
