"""Whether the model does the same work with probes as without: the operators of one run each, counted by name."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from boundby.layers.attachment import Targets, attached, visiting_probe
from boundby.layers.calls import Call, CallTree
from boundby.layers.timing import Run

MOST_NAMED = 5


class ChangedProgramError(ValueError):
    """The model runs other operators when its layers are watched."""


def check_same_program(run: Run, tree: CallTree, targets: Targets) -> tuple[str, ...]:
    """Return doubts about the comparison; all call paths are known afterwards.

    Raises ChangedProgramError where the operators differ though they do not from run to run without probes.
    """
    plain = count_operators(run)
    tree.enter_root()
    with attached(targets, visiting_probe(tree, Nothing())):
        probed = count_operators(run)
    if probed == plain:
        return ()
    again = count_operators(run)
    if again != plain:
        return (f"the model runs other operators from run to run ({_difference(plain, again)})",)
    raise ChangedProgramError(
        f"with its layers watched the model runs other operators ({_difference(plain, probed)}), so their times would "
        "be those of another program; profile one of its layers by itself, or trace the model with torch.profiler"
    )


def count_operators(run: Callable[[], object]) -> Counter[str]:
    """Return how often one run calls each operator."""
    counting = _Counting()
    with counting:
        run()
    return counting.calls


class Nothing:
    """A visitor that lets every call pass; the tree still knows where each thread stands."""

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note nothing."""

    def leave(self, call: Call, token: Any, result: Any) -> None:
        """Note nothing."""


class _Counting(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _difference(plain: Counter[str], other: Counter[str]) -> str:
    names = sorted(name for name in plain | other if plain[name] != other[name])
    shown = [f"{name}: {plain[name]} and {other[name]} times" for name in names[:MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
