"""The best assignment of units to nodes, exactly: dynamic programming over units done and nodes used.

Nodes that cannot be told apart form a class, of which only the number in use matters. A state is the nodes used of each
class and the class of the last one; with a fixed order of nodes it is the last node. One pass, from the last states to
the first, finds the least that the last node of a state and those behind it can take from every unit on: for n units
and S states O(S n^2).

    latency     the time of one request
    throughput  the least time between two of many requests
    requests    the time until the last of m requests is done: latency + (m - 1) * period

Each is brought back to assignments of least latency under a limit on the period. Of equal plans the one that is better
in the other respect is taken (period for the latency of one request, else latency), then the fewest stages, then the
least transfers.

Nodes of one machine slow one another down in the period, as far as a plan uses them. So each machine is searched with
all of its nodes, each slowed, and with each of them alone, not slowed. Every assignment is among these with exactly
what it takes, and never with less, as contention is at least 1: the best of all is the best plan.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from boundby.partition.costs import UNREACHABLE, Assignment, Costs, Integers, Piece, Value

MOST_STATES = 25_000  # about 12 nodes of which no two are alike: some seconds a pass for 128 units
NO_LIMIT = UNREACHABLE - 1  # picoseconds

Objective = Literal["latency", "throughput", "requests"]
MEANING: dict[Objective, str] = {
    "latency": "latency of one request",
    "throughput": "time between two requests of many",
    "requests": "time until the last of {} requests is done",
}


class Goal(NamedTuple):
    """What a plan is to be best at, with how many requests, and whether nodes keep their order."""

    objective: Objective = "latency"
    requests: int = 1
    in_order: bool = False

    @property
    def is_latency(self) -> bool:
        """Whether the time of one request is what counts."""
        return self.objective == "latency" or (self.objective == "requests" and self.requests == 1)

    def of(self, value: Value) -> int:
        """Return what is made least, in picoseconds."""
        if self.objective == "throughput":
            return value.period_ps
        return value.latency_ps + (0 if self.is_latency else (self.requests - 1) * value.period_ps)


class State(NamedTuple):
    """Some nodes in use, the last of them of class `last`; the states `after` have one more in use."""

    last: int
    after: list[int]


def classes_of(costs: Costs) -> list[list[int]]:
    """Return the nodes in groups whose members can be swapped without changing any cost."""
    classes: list[list[int]] = []
    for node in range(costs.nodes):
        group = next((members for members in classes if are_alike(costs, members[0], node)), None)
        if group is None:
            classes.append([node])
        else:
            group.append(node)
    return classes


@functools.lru_cache(maxsize=1)  # a plan asks for the same ones dozens of times
def set_states(sizes: tuple[int, ...]) -> tuple[State, ...]:
    """Return the states where nodes may come in any order, those with one node first; `sizes` are of the classes.

    Raises ValueError where there are too many.
    """
    most = math.prod(size + 1 for size in sizes)
    count = sum(most // (size + 1) * size for size in sizes)
    if count > MOST_STATES:
        raise ValueError(
            f"{sum(sizes)} nodes of which {len(sizes)} are not alike make {count:,} states, {MOST_STATES:,} are the "
            "most to be searched: leave out nodes, make some alike, or fix their order (in_order=True)"
        )
    # Of equally good states the first one is taken: that of the nodes named first.
    used_counts = sorted(itertools.product(*(range(size, -1, -1) for size in sizes)), key=sum)
    keys = [(used, last) for used in used_counts for last, number in enumerate(used) if number]
    index = {key: state for state, key in enumerate(keys)}

    def with_one_more(used: tuple[int, ...], kind: int) -> tuple[tuple[int, ...], int]:
        return (*used[:kind], used[kind] + 1, *used[kind + 1 :]), kind

    following = ([with_one_more(used, kind) for kind in range(len(sizes))] for used, _ in keys)
    return tuple(
        State(last, [index[key] for key in after if key in index])
        for (_, last), after in zip(keys, following, strict=True)
    )


def ordered_states(nodes: int) -> tuple[State, ...]:
    """Return the states where nodes may be left out but keep their order."""
    return tuple(State(node, list(range(node + 1, nodes))) for node in range(nodes))


def are_alike(costs: Costs, a: int, b: int) -> bool:
    """Tell whether two nodes can be swapped without changing any cost."""
    others = [node for node in range(costs.nodes) if node not in (a, b)]
    return (
        costs.usable_bytes[a] == costs.usable_bytes[b]
        and np.array_equal(costs.compute_ps[a], costs.compute_ps[b])
        and np.array_equal(costs.memory_bytes[a], costs.memory_bytes[b])
        and np.array_equal(costs.transfer_ps[a, b], costs.transfer_ps[b, a])
        and np.array_equal(costs.transfer_ps[a, others], costs.transfer_ps[b, others])
        and np.array_equal(costs.transfer_ps[others, a], costs.transfer_ps[others, b])
        and costs.contend_alike(a, b)
    )


class Valued(NamedTuple):
    """An assignment and what it takes."""

    assignment: Assignment
    value: Value


class _Least(NamedTuple):
    """The least that stages can take: by state and first unit with its last stage, by state and end without it.

    `tie` and `rest_tie` rank equal ones in the same manner: by stages, then by transfers. Zero unless asked for.
    """

    value: Integers
    rest: Integers
    tie: Integers
    rest_tie: Integers


class Solver:
    """Finds optimal assignments over these tables. Raises ValueError where there are too many states."""

    def __init__(self, costs: Costs, in_order: bool) -> None:
        self.classes = [[node] for node in range(costs.nodes)] if in_order else classes_of(costs)
        self.states = ordered_states(costs.nodes) if in_order else set_states(tuple(map(len, self.classes)))
        self._starts = range(costs.nodes if in_order else len(self.classes))
        self._costs = costs
        heads, tails = ([members[end] for members in self.classes] for end in (0, -1))
        fits = costs.memory_bytes[heads] <= costs.usable_bytes[heads, None, None]
        is_stage = fits & np.tri(costs.units + 1, k=-1, dtype=bool)
        self._compute, self._busy = (
            np.where(is_stage, ps[heads], UNREACHABLE) for ps in (costs.compute_ps, costs.busy_ps)
        )
        self._transfer = costs.transfer_ps[np.ix_(heads, tails)]
        self._stage_tie = costs.nodes * int(self._transfer.max()) + 1  # one stage outweighs all transfers

    def best(self, goal: Goal, below: float = math.inf) -> Valued | None:
        """Return one of the best assignments; None where none fits. What is not `below` may be given or left out."""
        if goal.objective == "throughput":
            return self.steadiest()
        fastest = self.fastest()
        return fastest if fastest is None or goal.is_latency else self.soonest(fastest, goal, below)

    def fastest(self, most_period_ps: int = NO_LIMIT, *, ranked: bool = False) -> Valued | None:
        """Return an assignment of least latency within this limit on the period; None where none fits.

        If `ranked` it has of equal ones the fewest stages, of these the least transfers.
        """
        stages = np.where(self._busy <= most_period_ps, self._compute, UNREACHABLE)
        links = np.where(self._transfer <= most_period_ps, self._transfer, UNREACHABLE)
        return self._least(np.add, stages, links, ranked)

    def steadiest(self) -> Valued | None:
        """Return an assignment of least period; None where none fits."""
        return self._least(np.maximum, self._busy, self._transfer)

    def soonest(self, fastest: Valued, goal: Goal, below: float) -> Valued:
        """Return the assignment with which the last of all requests is done first, of equal ones that of least latency.

        Goes down from the fastest one, each time to the longest period with which a latency no less than the last one
        could still be as good as the best so far, and as `below`.
        """

        def rank(known: Valued) -> tuple[int, int]:
            return goal.of(known.value), known.value.latency_ps

        steadiest = self.steadiest()
        assert steadiest is not None, f"{fastest} fits"
        steadiest = self.at_most(steadiest)
        best, slower = min(fastest, steadiest, key=rank), fastest
        while True:
            useful_ps = (min(rank(best)[0], below) - slower.value.latency_ps) // (goal.requests - 1)
            limit_ps = int(min(slower.value.period_ps - 1, useful_ps))
            candidate = self.fastest(limit_ps) if limit_ps >= steadiest.value.period_ps else None
            if candidate is None:
                return best
            best, slower = min(best, candidate, key=rank), candidate

    def at_most(self, known: Valued) -> Valued:
        """Return the assignment of least latency whose period is at most that of a known one."""
        known_best = self.fastest(known.value.period_ps, ranked=True)
        assert known_best is not None, f"no assignment is as good as {known.value}, where one was found"
        return known_best

    def steadiest_of_the(self, fastest: Valued) -> Valued:
        """Return the assignment of least period among those that are as fast for one request."""
        best, impossible = fastest, -1
        limit_ps = best.value.period_ps - 1  # in most cases no other is as fast, and this says so
        while impossible < limit_ps:
            steadier = self.fastest(limit_ps)
            if steadier and steadier.value.latency_ps == best.value.latency_ps:
                best = steadier
            else:
                impossible = limit_ps
            limit_ps = (impossible + best.value.period_ps) // 2
        return best

    def _least(
        self, combine: Callable[..., Integers], stages: Integers, links: Integers, ranked: bool = False
    ) -> Valued | None:
        """Return an assignment whose stages and transfers, added up or the longest of them, take least."""
        least = self._reckoned(combine, stages, links, ranked)
        state = min(self._starts, key=lambda state: (least.value[state, 0], least.tie[state, 0]))
        if least.value[state, 0] >= UNREACHABLE:
            return None
        free = [iter(members) for members in self.classes]
        pieces: list[Piece] = []
        first = 0
        while True:
            last, after = self.states[state]
            end = _first_least(combine(stages[last, :, first], least.rest[state]), least.rest_tie[state])
            pieces.append(Piece(next(free[last]), first, end))
            if end == self._costs.units:
                assignment = tuple(pieces)
                return Valued(assignment, self._costs.of(assignment))
            kinds = [self.states[following].last for following in after]
            ties = least.tie[after, end] + self._transfer[last, kinds, end]
            state = after[_first_least(combine(links[last, kinds, end], least.value[after, end]), ties)]
            first = end

    def _reckoned(self, combine: Callable[..., Integers], stages: Integers, links: Integers, ranked: bool) -> _Least:
        """Return what the stages from each state on take at least, from the last states to the first."""
        shape = len(self.states), self._costs.units + 1
        value, rest = (np.full(shape, UNREACHABLE, dtype=np.int64) for _ in range(2))
        tie, rest_tie = (np.zeros(shape, dtype=np.int64) for _ in range(2))
        for state in reversed(range(len(self.states))):
            last, after = self.states[state]
            kinds = [self.states[following].last for following in after]
            ways = combine(links[last, kinds], value[after])
            rest[state] = ways.min(axis=0, initial=UNREACHABLE)
            rest[state, -1] = 0
            spent = combine(stages[last], rest[state][:, None])
            value[state] = spent.min(axis=0, initial=UNREACHABLE)
            if ranked:
                ties = np.where(ways == rest[state], self._transfer[last, kinds] + tie[after], UNREACHABLE)
                rest_tie[state] = ties.min(axis=0, initial=UNREACHABLE)
                rest_tie[state, -1] = 0
                ties = np.where(spent == value[state], rest_tie[state][:, None] + self._stage_tie, UNREACHABLE)
                tie[state] = ties.min(axis=0, initial=UNREACHABLE)
        return _Least(value, rest, tie, rest_tie)


def _first_least(values: Integers, ties: Integers) -> int:
    """Return the index of the least value, of equal ones that of the least tie."""
    return int(np.where(values == values.min(), ties, 4 * UNREACHABLE).argmin())


def optimum(costs: Costs, goal: Goal) -> Assignment | None:
    """Return the best assignment; None where none fits. Raises ValueError where there are too many states."""

    def rank(assignment: Assignment) -> tuple[int, ...]:
        value = costs.of(assignment)
        other = value.period_ps if goal.is_latency else value.latency_ps
        return goal.of(value), other, len(assignment), value.transfer_ps

    assignments = []
    for nodes, search in _searches(costs, goal.in_order):
        best = search.best(goal)
        if best is not None:
            best = search.at_most(search.steadiest_of_the(best) if goal.is_latency else best)
            assignments.append(tuple(piece._replace(node=nodes[piece.node]) for piece in best.assignment))
    return min(assignments, key=rank, default=None)


def least(costs: Costs, goal: Goal, below: float = math.inf) -> int | None:
    """Return what the best assignment takes for this goal, in picoseconds; None where none is `below` that."""
    value = None
    for _, search in _searches(costs, goal.in_order):
        best = search.best(goal, below)
        if best is not None and goal.of(best.value) < below:
            value = below = goal.of(best.value)
    return value


def _searches(costs: Costs, in_order: bool) -> Iterator[tuple[tuple[int, ...], Solver]]:
    """Yield a search for every choice of nodes, with these nodes."""
    for nodes in choices(costs, in_order):
        yield nodes, Solver(costs.only(nodes), in_order)


def choices(costs: Costs, in_order: bool) -> Iterator[tuple[int, ...]]:
    """Yield sets of nodes that may be used together: all of each machine whose nodes slow one another down, or one.

    Of interchangeable nodes that one is the first.
    """
    first_alike = range(costs.nodes) if in_order else [group[0] for group in classes_of(costs)]
    free, ways = set(range(costs.nodes)), []
    for machine in dict.fromkeys(costs.machines or ()):
        members = tuple(node for node, on in enumerate(costs.machines or ()) if on == machine)
        if len(members) > 1 and any(costs.contention[node] > 1 for node in members):
            free.difference_update(members)
            ways.append([members, *((node,) for node in members if node in first_alike)])
    for chosen in itertools.product(*ways):
        yield tuple(sorted(free.union(*chosen)))
