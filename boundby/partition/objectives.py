"""What a plan is to be best at, each brought back to assignments of least latency under a limit on the period.

    latency     the time of one request
    throughput  the least time between two of many requests
    requests    the time until the last of m requests is done: latency + (m - 1) * period

Nodes of one machine slow one another down in the period, not in the latency of one request (`costs`). How long a stage
of a busy pipeline computes depends on which other nodes the plan uses. So each machine is searched with all of its
nodes, each taken to be slowed, and with each of them alone, not slowed. Every assignment is among these with exactly
what it takes, and never with less, as contention is at least 1: the best of all is the best plan.

Of equal plans the one that is better in the other respect is taken (period for the latency of one request, else
latency), then the fewest stages, then the least transfers.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from boundby.partition.costs import Assignment, Costs, Value
from boundby.partition.solver import Found, Solver, classes_of

PROBES = 6  # halvings of the range of periods, in search of a good assignment to begin with

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
    is_one = objective == "latency" or (objective == "requests" and requests == 1)

    def rank(assignment: Assignment) -> tuple[int, ...]:
        value = costs.of(assignment)
        other = value.period_ps if is_one else value.latency_ps
        return value_of(objective, value, requests), other, len(assignment), value.transfer_ps

    assignments = []
    for nodes, search in _searches(costs, in_order):
        best = search.best(objective, requests)
        if best is not None:
            best = search.at_most(search.steadiest(best) if is_one else best)
            assignments.append(tuple(piece._replace(node=nodes[piece.node]) for piece in best.assignment))
    return min(assignments, key=rank, default=None)


def least(
    costs: Costs, objective: Objective, requests: int = 1, *, in_order: bool = False, below: float = math.inf
) -> int | None:
    """Return what the best assignment takes for this objective, in picoseconds; None where none is `below` that."""
    value = None
    for _, search in _searches(costs, in_order):
        best = search.best(objective, requests, below)
        if best is not None:
            value = below = value_of(objective, best.value, requests)
    return value


def _searches(costs: Costs, in_order: bool) -> Iterator[tuple[tuple[int, ...], "Search"]]:
    """Yield a search for every choice of nodes, with these nodes."""
    for nodes in choices(costs, in_order=in_order):
        yield nodes, Search(costs.only(nodes), in_order)


def choices(costs: Costs, *, in_order: bool) -> Iterator[tuple[int, ...]]:
    """Yield sets of nodes that may be used together; one set of all where none slows another down."""
    shared = list(_machines(costs))
    free = set(range(costs.nodes)).difference(*shared)
    ways = [[members, *((node,) for node in _unlike(costs, members, in_order))] for members in shared]
    for chosen in itertools.product(*ways):
        yield tuple(sorted(free.union(*chosen)))


def _machines(costs: Costs) -> Iterator[tuple[int, ...]]:
    """Yield the nodes of every machine on which one slows another down."""
    for machine in dict.fromkeys(costs.machines or ()):
        members = tuple(node for node, on in enumerate(costs.machines or ()) if on == machine)
        if len(members) > 1 and any(costs.contention[node] > 1 for node in members):
            yield members


def _unlike(costs: Costs, members: Sequence[int], in_order: bool) -> Iterator[int]:
    """Yield these nodes, of interchangeable ones only the first."""
    groups = [[node] for node in members] if in_order else classes_of(costs)
    yield from (group[0] for group in groups if group[0] in members)


class Search:
    """Asks the solver for assignments under a limit on the period."""

    def __init__(self, costs: Costs, in_order: bool) -> None:
        self._solver = Solver(costs, in_order=in_order)

    def best(self, objective: Objective, requests: int, below: float = math.inf) -> Found | None:
        """Return one of the best assignments; None where none takes less than `below`."""
        if objective == "throughput":
            return self._solver.steadiest(below - 1)
        fastest = self._solver.fastest(most_ps=below - 1)
        is_one = objective == "latency" or requests == 1
        return fastest if fastest is None or is_one else self.soonest(fastest, requests, below)

    def at_most(self, known: Found) -> Found:
        """Return the assignment of least latency whose period is at most that of a known one."""
        known_best = self._solver.fastest(known.value.period_ps, known.value.latency_ps, ranked=True)
        assert known_best is not None, f"no assignment is as good as {known.value}, where one was found"
        return known_best

    def steadiest(self, fastest: Found) -> Found:
        """Return the assignment of least period among those that are as fast for one request."""
        best, impossible = fastest, -1
        ask = best.value.period_ps - 1  # in most cases no other is as fast, and this says so
        while impossible < ask:
            faster = self._solver.fastest(ask, best.value.latency_ps)
            if faster:
                best = faster
            else:
                impossible = ask
            ask = (impossible + best.value.period_ps) // 2
        return best

    def soonest(self, fastest: Found, requests: int, below: float) -> Found | None:
        """Return the assignment with which the last of all requests is done first; None where none is before `below`.

        Goes down from the fastest one, each time to the longest period with which a latency no less than the last one
        could still be as good as the best so far. Bounds do for that, until they lead no further down.
        """
        tried = _Tried([fastest], requests - 1, below)
        least_period, is_known = self._solver.least_period(), False
        self._probe(tried, least_period)
        limit = min(fastest.value.period_ps - 1, tried.useful(fastest))
        while limit >= least_period and (candidate := self._solver.relaxed(limit)):
            tried.candidates.append(candidate)
            if candidate.value.period_ps > limit and tried.useful(candidate) >= limit:
                steadiest = None if is_known else self._solver.steadiest()
                if steadiest is not None:
                    tried.candidates.append(self.at_most(steadiest))
                    least_period, is_known = tried.candidates[-1].value.period_ps, True
                candidate = self._solver.fastest(limit, tried.least() - tried.last * least_period)
                if candidate is None:
                    break
                tried.candidates.append(candidate)
            limit = min(candidate.value.period_ps - 1, tried.useful(candidate))
        best = tried.best()
        return best if tried.done(best) < below else None

    def _probe(self, tried: "_Tried", low: int) -> None:
        """Try some periods from this one on: the better the best assignment so far, the less there is to search."""
        upper = tried.candidates[0]
        high = upper.value.period_ps
        for _ in range(PROBES):
            middle = (low + high) // 2
            candidate = self._solver.relaxed(middle)
            if candidate:
                tried.candidates.append(candidate)
            if candidate is None or tried.useful(upper) - middle > tried.useful(candidate) - low:
                low = middle
            else:
                high, upper = middle, candidate


@dataclass
class _Tried:
    """The assignments tried for some requests; one that is not done before `below` is of no use."""

    candidates: list[Found]
    last: int  # how many requests wait for the first one
    below: float

    def done(self, candidate: Found) -> int:
        return candidate.value.latency_ps + self.last * candidate.value.period_ps

    def best(self) -> Found:
        return min(self.candidates, key=lambda candidate: (self.done(candidate), candidate.value.latency_ps))

    def least(self) -> int:
        return int(min(self.below, self.done(self.best())))

    def useful(self, candidate: Found) -> int:
        """Return the longest period with which something no faster than this may still be as good as the best."""
        return (self.least() - candidate.value.latency_ps) // self.last
