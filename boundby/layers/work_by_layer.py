"""The work pass: the operators that each call path runs itself, with their FLOPs and bytes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from boundby.layers.attachment import Targets, attached, visiting_probe
from boundby.layers.calls import Call, CallTree
from boundby.layers.program import Nothing
from boundby.layers.timing import Run
from boundby.work import OperatorWork, count_by

TIMED_COUNTS = 3  # where operators are timed; the quickest was disturbed least
Operators = tuple[OperatorWork, ...]


@dataclass(frozen=True)
class LayerWork:
    """The operators of each call path in one run, and the bytes that the whole run cannot help moving."""

    operators: Mapping[Call, Operators] | None
    least_bytes: int = 0
    reason: str | None = None  # why the operators are None

    def of(self, call: Call) -> Operators | None:
        """Return the operators of one call path; () where it runs none."""
        return None if self.operators is None else self.operators.get(call, ())


def count_work(run: Run, tree: CallTree, targets: Targets, clock: Callable[[], float] | None) -> LayerWork:
    """Return the work of one run by call path; with a clock in seconds operators are timed, as on a CPU."""
    found = []
    for _ in range(TIMED_COUNTS if clock else 1):
        tree.enter_root()
        try:
            with attached(targets, visiting_probe(tree, Nothing())):
                found.append(count_by(run, tree.here, clock=clock))
        except (ValueError, RuntimeError) as error:  # the run itself went well before
            return LayerWork(None, reason=str(error))
    operators, least_bytes = min(found, key=lambda each: _seconds(each[0]))
    return LayerWork(operators, least_bytes)


def _seconds(operators: Mapping[Call, Operators]) -> float:
    return sum(each.seconds or 0.0 for own in operators.values() for each in own)
