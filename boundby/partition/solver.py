"""The best assignment of units to nodes, exactly: dynamic programming over units done and nodes used.

Nodes that cannot be told apart form a class, of which only the number in use matters. The state is (units done, nodes
used of each class, class of the last one); with a fixed order of nodes it is (units done, stages, last node). For n
units and S states a pass costs O(S n^2), a few operations on n x n tables for each state.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from boundby.partition.costs import UNREACHABLE, Assignment, Costs, Piece

MOST_STATES = 25_000  # about 12 nodes of which no two are alike: some seconds a pass for 128 units
END = -1  # in place of the class that comes next

Measure = Literal["latency", "period"]


@dataclass(frozen=True)
class State:
    """Some nodes in use, the last of them of class `last`. It follows the states `before`; classes `after` may come."""

    last: int
    stages: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class _Best(NamedTuple):
    """By number of units done: the least value, the transfers in it, where the last stage begins and after whom."""

    value: np.ndarray
    moved: np.ndarray
    first: np.ndarray
    source: np.ndarray


class Solver:
    """Finds optimal assignments over these tables. Raises ValueError where there are too many states."""

    def __init__(self, costs: Costs, *, in_order: bool = False) -> None:
        self.classes = [[node] for node in range(costs.nodes)] if in_order else classes_of(costs)
        sizes = [len(members) for members in self.classes]
        self.states = ordered_states(len(sizes)) if in_order else set_states(sizes)
        heads, tails = ([members[place] for members in self.classes] for place in (0, -1))
        fits = costs.memory_bytes[heads] <= costs.usable_bytes[heads, None, None]
        is_stage = np.tri(costs.units + 1, k=-1, dtype=bool)
        self._compute = np.where(fits & is_stage, costs.compute_ps[heads], UNREACHABLE)
        self._transfer = costs.transfer_ps[np.ix_(heads, tails)]
        self._overlap = costs.overlap

    def best(self, measure: Measure = "latency", most_period_ps: int | None = None) -> Assignment | None:
        """Return an assignment of least latency, or of least period; None where none fits.

        With `most_period_ps` its period is no longer than that. Of those of least latency it has the fewest stages,
        of these the least transfers, of these the nodes that come first.
        """
        limit = UNREACHABLE - 1 if most_period_ps is None else most_period_ps
        if self._overlap or (measure == "latency" and most_period_ps is None):
            table = self._pass_overlapping(measure, limit)
        else:
            table = self._pass_exclusive(measure, limit)
        ends = [table[place, END] for place in range(len(self.states))]
        order = [
            (int(each.value[-1]), state.stages, int(each.moved[-1]))
            for each, state in zip(ends, self.states, strict=True)
        ]
        place = min(range(len(order)), key=order.__getitem__)
        return None if order[place][0] >= UNREACHABLE else self._traced(table, place)

    def _pass_overlapping(self, measure: Measure, limit: int) -> dict[tuple[int, int], _Best]:
        """Fill the table where nothing a stage takes depends on its neighbours."""
        combine = np.add if measure == "latency" else np.maximum
        compute = np.where(self._compute <= limit, self._compute, UNREACHABLE)
        transfer = np.where(self._transfer <= limit, self._transfer, UNREACHABLE)
        rows = np.arange(compute.shape[1])
        table: dict[tuple[int, int], _Best] = {}
        for place, state in enumerate(self.states):
            value, moved, _, source = self._nothing()
            if state.before:
                links = transfer[[self.states[each].last for each in state.before], state.last]
                found = [table[each, END] for each in state.before]
                values = combine(np.stack([each.value for each in found]), links).T
                moves = (np.stack([each.moved for each in found]) + links).T
                chosen = _least(values, moves)
                value, moved, source = values[rows, chosen], moves[rows, chosen], np.array(state.before)[chosen]
            table[place, END] = _chosen(combine(value, compute[state.last]), moved, source)
        return table

    def _pass_exclusive(self, measure: Measure, limit: int) -> dict[tuple[int, int], _Best]:
        """Fill the table where a stage also takes what it receives and sends, so that it depends on both neighbours."""
        combine = np.add if measure == "latency" else np.maximum
        table: dict[tuple[int, int], _Best] = {}
        known: dict[tuple[int, int, int], np.ndarray] = {}  # each is asked for by dozens of states
        for place, state in enumerate(self.states):
            for follower in (*state.after, END):
                candidates = []
                for each in state.before or (END,):
                    best = self._nothing() if each == END else table[each, state.last]
                    sender = END if each == END else self.states[each].last
                    if (sender, state.last, follower) not in known:
                        known[sender, state.last, follower] = self._spent(sender, state.last, follower, measure, limit)
                    reached = np.flatnonzero(best.value < UNREACHABLE)
                    firsts = slice(reached[0], reached[-1] + 1) if len(reached) else slice(0, 1)
                    spent = combine(best.value[firsts], known[sender, state.last, follower][:, firsts])
                    moved = best.moved if each == END else best.moved + self._transfer[sender, state.last]
                    candidates.append(_chosen(spent, moved, np.full(len(moved), each), firsts.start))
                table[place, follower] = _merged(candidates)
        return table

    def _spent(self, sender: int, node: int, follower: int, measure: Measure, limit: int) -> np.ndarray:
        """Return [end, first]: what a stage between these nodes adds to the measure, unless it takes too long."""
        rows = slice(-1, None) if follower == END else slice(None)  # the last stage ends with the last unit
        received = self._compute[node, rows] + (0 if sender == END else self._transfer[sender, node])
        load = received + (0 if follower == END else self._transfer[node, follower][:, None])
        return np.where(load > limit, UNREACHABLE, load if measure == "period" else received)

    def _nothing(self) -> _Best:
        """Return what is there before any unit is done."""
        count = self._compute.shape[1]
        value = np.full(count, UNREACHABLE, dtype=np.int64)
        value[0] = 0
        return _Best(value, np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.full(count, END))

    def _traced(self, table: dict[tuple[int, int], _Best], place: int) -> Assignment:
        """Return the assignment that led to all units being done in this state."""
        stages: list[tuple[int, int, int]] = []
        end, follower = self._compute.shape[1] - 1, END
        while place != END:
            best = table.get((place, follower)) or table[place, END]
            at = -1 if follower == END else end  # what ends with the last unit may be all there is
            last, first = self.states[place].last, int(best.first[at])
            stages.insert(0, (last, first, end))
            place, end, follower = int(best.source[at]), first, last
        free = [iter(members) for members in self.classes]
        return tuple(Piece(next(free[last]), first, end) for last, first, end in stages)


def classes_of(costs: Costs) -> list[list[int]]:
    """Return the nodes grouped into those that can change places without changing any cost."""
    classes: list[list[int]] = []
    for node in range(costs.nodes):
        group = next((each for each in classes if _are_alike(costs, each[0], node)), None)
        if group is None:
            classes.append([node])
        else:
            group.append(node)
    return classes


def set_states(sizes: Sequence[int]) -> list[State]:
    """Return the states where nodes may come in any order; `sizes` are those of the classes."""
    vectors = math.prod(size + 1 for size in sizes)
    count = sum(vectors // (size + 1) * size for size in sizes)
    if count > MOST_STATES:
        raise ValueError(
            f"{sum(sizes)} nodes of which {len(sizes)} are not alike make {count:,} states, {MOST_STATES:,} are the "
            "most to be searched: leave out nodes, make some alike, or fix their order (in_order=True)"
        )
    classes = range(len(sizes) - 1, -1, -1)
    states: list[State] = []
    places: dict[tuple[tuple[int, ...], int], int] = {}
    # Of equally good states the first one is taken: that of the nodes named first, in the order they are named.
    for used in sorted(itertools.product(*(range(size, -1, -1) for size in sizes)), key=sum):
        after = tuple(each for each, size in enumerate(sizes) if used[each] < size)
        for last in (each for each in classes if used[each]):
            rest = tuple(number - (each == last) for each, number in enumerate(used))
            before = tuple(places[rest, each] for each in classes if (rest, each) in places)
            places[used, last] = len(states)
            states.append(State(last, sum(used), before, after))
    return states


def ordered_states(nodes: int) -> list[State]:
    """Return the states where nodes may be left out but keep their order."""
    states: list[State] = []
    places: dict[tuple[int, int], int] = {}
    for stages in range(1, nodes + 1):
        for last in range(stages - 1, nodes):
            before = tuple(places[stages - 1, each] for each in range(last) if (stages - 1, each) in places)
            places[stages, last] = len(states)
            states.append(State(last, stages, before, tuple(range(last + 1, nodes))))
    return states


def _are_alike(costs: Costs, a: int, b: int) -> bool:
    others = [each for each in range(costs.nodes) if each not in (a, b)]
    return (
        costs.usable_bytes[a] == costs.usable_bytes[b]
        and np.array_equal(costs.compute_ps[a], costs.compute_ps[b])
        and np.array_equal(costs.memory_bytes[a], costs.memory_bytes[b])
        and np.array_equal(costs.transfer_ps[a, b], costs.transfer_ps[b, a])
        and np.array_equal(costs.transfer_ps[a, others], costs.transfer_ps[b, others])
        and np.array_equal(costs.transfer_ps[others, a], costs.transfer_ps[others, b])
    )


def _least(values: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Return the place of the least value in each row, of equal ones that with the least transfers."""
    places = values.argmin(axis=1)
    least = values[np.arange(len(places)), places]
    is_least = values == least[:, None]
    if np.count_nonzero(is_least) == len(places):
        return places
    tied = np.flatnonzero((is_least.sum(axis=1) > 1) & (least < UNREACHABLE))  # few: to do so for all takes longer
    if len(tied):
        moves = np.broadcast_to(moves, values.shape)[tied]
        places[tied] = np.where(values[tied] == least[tied, None], moves, 4 * UNREACHABLE).argmin(axis=1)
    return places


def _chosen(values: np.ndarray, moved: np.ndarray, source: np.ndarray, start: int = 0) -> _Best:
    """Return the best for each end; `values` by end and first from `start` on, `moved` and `source` by all firsts."""
    column = _least(values, moved[start : start + values.shape[1]])
    value = np.minimum(values[np.arange(len(column)), column], UNREACHABLE)
    first = start + column
    return _Best(value, np.minimum(moved[first], UNREACHABLE), first, source[first])


def _merged(candidates: Sequence[_Best]) -> _Best:
    """Return the best of several for each end."""
    if len(candidates) == 1:
        return candidates[0]
    stacked = [np.stack(column, axis=1) for column in zip(*candidates, strict=True)]
    rows, chosen = np.arange(len(stacked[0])), _least(stacked[0], stacked[1])
    return _Best(*(each[rows, chosen] for each in stacked))
