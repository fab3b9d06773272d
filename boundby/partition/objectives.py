"""What a plan is to be best at, each brought back to assignments of least latency under a limit on the period.

    latency     the time of one request
    throughput  the least time between two of many requests
    requests    the time until the last of m requests is done: latency + (m - 1) * period

Of equal plans the one that is better in the other respect is taken (period for the latency of one request, else
latency), then the fewest stages, then the least transfers.
"""

from typing import Literal, NamedTuple

from boundby.partition.costs import Assignment, Costs, Value
from boundby.partition.solver import Solver

Objective = Literal["latency", "throughput", "requests"]
MEANING: dict[Objective, str] = {
    "latency": "latency of one request",
    "throughput": "time between two requests of many",
    "requests": "time until the last of {} requests is done",
}


def value_of(objective: Objective, value: Value, requests: int) -> int:
    """Return what the objective makes least, in picoseconds."""
    if objective == "throughput":
        return value.period_ps
    return value.latency_ps + ((requests - 1) * value.period_ps if objective == "requests" else 0)


def optimum(costs: Costs, objective: Objective, requests: int = 1, *, in_order: bool = False) -> Assignment | None:
    """Return the best assignment; None where none fits. Raises ValueError where there are too many states."""
    search = _Search(costs, in_order)
    found = search.best(objective, requests)
    if found is None:
        return None
    if objective == "latency" or (objective == "requests" and requests == 1):
        found = search.steadiest(found)
    return search.at_most(found.value.period_ps).assignment


def least(costs: Costs, objective: Objective, requests: int = 1, *, in_order: bool = False) -> int | None:
    """Return what the best assignment takes for this objective, in picoseconds; None where none fits."""
    found = _Search(costs, in_order).best(objective, requests)
    return None if found is None else value_of(objective, found.value, requests)


class _Found(NamedTuple):
    """An assignment and what it takes."""

    assignment: Assignment
    value: Value


class _Search:
    """Asks the solver for assignments under a limit on the period."""

    def __init__(self, costs: Costs, in_order: bool) -> None:
        self._costs = costs
        self._solver = Solver(costs, in_order=in_order)

    def best(self, objective: Objective, requests: int) -> _Found | None:
        """Return one of the best assignments; None where none fits."""
        if objective == "throughput":
            return self._valued(self._solver.best("period"))
        fastest = self._valued(self._solver.best("latency"))
        is_one = objective == "latency" or requests == 1
        return fastest if fastest is None or is_one else self._soonest(fastest, requests)

    def at_most(self, period_ps: int) -> _Found:
        """Return the assignment of least latency whose period is at most one that is known to be possible."""
        found = self._within(period_ps)
        assert found is not None, f"no assignment has a period of {period_ps} ps, where one was found before"
        return found

    def steadiest(self, fastest: _Found) -> _Found:
        """Return the assignment of least period among those that are as fast for one request."""
        best, impossible = fastest, -1
        ask = best.value.period_ps - 1  # in most cases no other is as fast, and this says so
        while impossible < ask:
            found = self._within(ask)
            if found and found.value.latency_ps == best.value.latency_ps:
                best = found
            else:
                impossible = ask
            ask = (impossible + best.value.period_ps) // 2
        return best

    def _within(self, period_ps: int) -> _Found | None:
        found = self._valued(self._solver.best("latency", period_ps))
        assert found is None or found.value.period_ps <= period_ps, f"{found} takes longer than {period_ps} ps"
        return found

    def _soonest(self, fastest: _Found, requests: int) -> _Found:
        """Return the assignment with which the last of all requests is done first.

        Goes down from the fastest one, each time to the longest period with which a latency no less than the last one
        could still be as good as the best so far.
        """
        shortest = self._valued(self._solver.best("period"))
        assert shortest is not None, "no assignment fits, where one was found before"
        last = requests - 1

        def done(found: _Found) -> tuple[int, int]:
            return found.value.latency_ps + last * found.value.period_ps, found.value.latency_ps

        reached = fastest
        best = min(fastest, self.at_most(shortest.value.period_ps), key=done)
        while True:
            useful = (done(best)[0] - reached.value.latency_ps) // last
            limit = min(reached.value.period_ps - 1, useful)
            if limit < shortest.value.period_ps:
                return best
            reached = self.at_most(limit)
            best = min(best, reached, key=done)

    def _valued(self, assignment: Assignment | None) -> _Found | None:
        return None if assignment is None else _Found(assignment, self._costs.of(assignment))
