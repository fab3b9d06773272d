"""Whether the model does the same work with probes as without, and in the last run as in the first: its operators.

By name they tell one program from another. What they are given tells more: a cache that grows, which no layer shows,
leaves the names as they are.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from boundby.layers.attachment import Targets, attached, visiting_probe
from boundby.layers.calls import Call, CallTree
from boundby.layers.shapes import describe, tensors_in
from boundby.layers.timing import Run

MOST_NAMED = 5
MOST_TENSORS = 8  # of one operator; longer lists are told apart by these and their length
OTHER_OPERATORS = "the model runs other operators from run to run ({})"
OTHER_INPUTS = (
    "inputs change from run to run: {} was given {} before the timing and {} after it (operators that differ so: {}), "
    "and times are of all sizes between. Does a cache grow? Give inputs that every run leaves as they are"
)


class ChangedProgramError(ValueError):
    """The model runs other operators when its layers are watched."""


@dataclass(frozen=True)
class Program:
    """The operators of one run: how often each was called, by name and by what it was given."""

    calls: Counter[str] = field(default_factory=Counter)
    given: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)


def check_same_program(run: Run, tree: CallTree, targets: Targets, plain: Counter[str]) -> tuple[str, ...]:
    """Return doubts about the comparison with `plain`, a run without probes; all call paths are known afterwards.

    Raises ChangedProgramError where the operators differ though they do not from run to run without probes.
    """
    tree.enter_root()
    with attached(targets, visiting_probe(tree, Nothing())):
        probed = count_operators(run)
    if probed == plain:
        return ()
    again = count_operators(run)
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
    return (OTHER_INPUTS.format(name, _listed(before), _listed(after), len({other for other, _ in gone})),)


def count_operators(run: Callable[[], object]) -> Counter[str]:
    """Return how often one run calls each operator."""
    return see_program(run).calls


def see_program(run: Callable[[], object]) -> Program:
    """Return the operators of one run."""
    seeing = _Seeing()
    with seeing:
        run()
    return seeing.program


class Nothing:
    """A visitor that lets every call pass; the tree still knows where each thread stands."""

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note nothing."""

    def leave(self, call: Call, token: Any, result: Any) -> None:
        """Note nothing."""


class _Seeing(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.program = Program()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name()
        tensors = list(tensors_in((args, kwargs)))
        given = [describe(each) for each in tensors[:MOST_TENSORS]]
        more = [f"{len(tensors) - MOST_TENSORS} more"] if len(tensors) > MOST_TENSORS else []
        self.program.calls[name] += 1
        self.program.given[name, (*given, *more)] += 1
        return func(*args, **(kwargs or {}))


def _listed(given: Sequence[str]) -> str:
    return ", ".join(given) or "no tensor"


def _difference(plain: Counter[str], other: Counter[str]) -> str:
    names = sorted(name for name in plain | other if plain[name] != other[name])
    shown = [f"{name}: {plain[name]} and {other[name]} times" for name in names[:MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
