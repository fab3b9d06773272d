"""The best assignment of units to nodes, exactly: dynamic programming over units done and nodes used.

Nodes that cannot be told apart form a class, of which only the number in use matters. A state is (nodes used of each
class, class of the last one); with a fixed order of nodes it is (stages, last node). One pass, from the last states to
the first, finds the least that the last node of a state and those behind it can take from every unit on: for n units
and S states O(S n^2), a few operations on a table of n stages by their length for some states at once.

Without overlap what a stage takes depends on both its neighbours, and this pass counts the least that any two would
add. So it finds a lower bound, and the optimum where the assignment that reaches it keeps to the limit after all. Where
that one does not, the pass of `exclusive` has the next node in its states too, and leaves out what the bound rules out.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from boundby.partition.costs import UNREACHABLE, Assignment, Costs, Piece, Value
from boundby.partition.exclusive import Exclusive
from boundby.partition.states import Tables, classes_of, groups_of, ordered_states, set_states

NEAR = 128  # the least there can be, divided by this: how far from it to look first
ANY = UNREACHABLE - 1  # picoseconds: no limit

Measure = Literal["latency", "period"]


class Found(NamedTuple):
    """An assignment and what it takes."""

    assignment: Assignment
    value: Value


class _Bounds(NamedTuple):
    """By state: what its last stage and those behind it take at least, by first unit, and those behind it, by end.

    Of each also what ranks equal ones: stages, then transfers; all alike unless that was asked for.
    """

    value: np.ndarray
    rest: np.ndarray
    tie: np.ndarray
    rest_tie: np.ndarray


class Solver:
    """Finds optimal assignments over these tables. Raises ValueError where there are too many states."""

    def __init__(self, costs: Costs, *, in_order: bool = False) -> None:
        self.classes = [[node] for node in range(costs.nodes)] if in_order else classes_of(costs)
        sizes = tuple(len(members) for members in self.classes)
        self.states = ordered_states(len(sizes)) if in_order else set_states(sizes)
        self._starts = [place for place, state in enumerate(self.states) if not state.before]
        self._costs = costs
        self._tables = tables = Tables.of(costs, self.classes)
        self._load = tables.busy if costs.overlap else tables.busy + self._least_moved()
        self._compute_by_length, self._load_by_length = map(_by_length, (tables.compute, self._load))
        self._stage_tie = costs.nodes * int(tables.transfer.max()) + 1  # one stage outweighs all transfers

    def fastest(self, most_period_ps: int = ANY, most_ps: float = ANY, *, ranked: bool = False) -> Found | None:
        """Return an assignment of least latency with no longer a period and latency than these; None where none fits.

        If `ranked` it has of equal ones the fewest stages, of these the least transfers.
        """
        bounds = self._bounds("latency", most_period_ps, ranked)
        found = self._from_start(bounds, "latency", most_period_ps)
        if found is None or found.value.latency_ps > most_ps:
            return None
        if found.value.period_ps <= most_period_ps:
            return found
        return self._exclusive("latency", bounds, most_period_ps, most_ps)

    def steadiest(self, most_ps: float = ANY) -> Found | None:
        """Return an assignment of least period, if that is no longer than this; None where none fits."""
        bounds = self._bounds("period", ANY)
        found, least = self._from_start(bounds, "period", ANY), bounds.value[self._starts, 0].min()
        if found is None or least > most_ps:
            return None
        if found.value.period_ps == least:
            return found
        most_period_ps = int(min(most_ps, found.value.period_ps))
        return self._exclusive("period", bounds, most_period_ps, most_period_ps)

    def relaxed(self, most_period_ps: int) -> Found | None:
        """Return an assignment than which none with no longer a period than this is faster; its own may be longer."""
        return self._from_start(self._bounds("latency", most_period_ps), "latency", most_period_ps)

    def least_period(self) -> int:
        """Return a period, in picoseconds, than which none is shorter."""
        return int(self._bounds("period", ANY).value[self._starts, 0].min())

    def _least_moved(self) -> np.ndarray:
        """Return by class, end and first unit of a stage the least it can receive and send."""
        transfer = self._tables.transfer
        received, sent = np.full((2, len(self.classes), transfer.shape[2]), UNREACHABLE, dtype=np.int64)
        received[:, 0] = sent[:, -1] = 0
        for source, target in {(self.states[a].last, state.last) for state in self.states for a in state.before}:
            received[target] = np.minimum(received[target], transfer[source, target])
            sent[source] = np.minimum(sent[source], transfer[source, target])
        return received[:, None, :] + sent[:, :, None]

    def _bounds(self, measure: Measure, limit: int, ranked: bool = False) -> _Bounds:
        """Return what the stages from each state on take at least, with no load above the limit."""
        combine = np.add if measure == "latency" else np.maximum
        is_short = self._load_by_length <= limit
        length = int(np.flatnonzero(is_short.any(axis=(0, 1))).max(initial=0)) + 1
        spent = self._load_by_length if measure == "period" else self._compute_by_length
        stages = np.where(is_short, spent, UNREACHABLE)[..., :length]
        links, edges = self._links(measure, limit), self._costs.units + 1
        shape = (4, len(self.states) + 1, edges)  # the last one is in place of states that are not there
        value, rest, tie, rest_tie = np.full(shape, UNREACHABLE, dtype=np.int64)
        for last, places, after, classes in groups_of(self.states):
            ways = combine(value[after], links[last, classes])
            rest[places] = ways.min(axis=1)
            rest[places, -1] = 0
            spent = combine(stages[last], _windows(rest[places], length)).reshape(-1, length)
            least = spent[np.arange(len(spent)), spent.argmin(axis=1)]
            value[places] = np.minimum(least, UNREACHABLE).reshape(-1, edges)
            if ranked:
                moved = tie[after] + self._tables.transfer[last, classes]
                rest_tie[places] = np.where(ways == ways.min(axis=1, keepdims=True), moved, 2 * UNREACHABLE).min(axis=1)
                rest_tie[places, -1] = 0
                ties = _windows(rest_tie[places], length).reshape(-1, length)
                ties = np.where(spent == least[:, None], ties, UNREACHABLE).min(axis=1) + self._stage_tie
                tie[places] = np.minimum(ties, UNREACHABLE).reshape(-1, edges)
        return _Bounds(value, rest, tie, rest_tie)

    def _links(self, measure: Measure, limit: int) -> np.ndarray:
        """Return what a transfer itself adds to the measure; without overlap the period has it in what stages take."""
        transfer = self._tables.transfer
        if self._costs.overlap:
            return np.where(transfer <= limit, transfer, UNREACHABLE)
        return transfer if measure == "latency" else np.zeros_like(transfer)

    def _from_start(self, bounds: _Bounds, measure: Measure, limit: int) -> Found | None:
        """Return the assignment that the bounds are made of; None where there is none."""
        combine = np.add if measure == "latency" else np.maximum
        links, spent = self._links(measure, limit), self._load if measure == "period" else self._tables.compute
        place = min(self._starts, key=lambda each: (bounds.value[each, 0], bounds.tie[each, 0]))
        if bounds.value[place, 0] >= UNREACHABLE:
            return None
        stages: list[tuple[int, int, int]] = []
        end = 0
        while True:
            last, first, after = self.states[place].last, end, list(self.states[place].after)
            stage = np.where(self._load[last, :, first] <= limit, spent[last, :, first], UNREACHABLE)
            end = _least(combine(stage, bounds.rest[place]), bounds.rest_tie[place])
            stages.append((last, first, end))
            if end == self._costs.units:
                return self._valued(stages)
            classes = [self.states[each].last for each in after]
            ties = bounds.tie[after, end] + self._tables.transfer[last, classes, end]
            place = after[_least(combine(links[last, classes, end], bounds.value[after, end]), ties)]

    def _exclusive(self, measure: Measure, bounds: _Bounds, limit: int, most: float) -> Found | None:
        """Return the best assignment within both limits, by what stages do receive and send; None where none is."""
        combine = np.add if measure == "latency" else np.maximum
        least, most = int(bounds.value[self._starts, 0].min()), int(min(most, ANY))
        nearly, stages = least, None
        while stages is None and nearly <= most:  # what is near the bound is found faster, and there it mostly is
            nearly += 3 * (nearly - least) + least // NEAR + 1
            stages = Exclusive(self.states, self._tables, combine, bounds.value, limit, min(nearly, most)).best()
        return None if stages is None else self._valued(stages)

    def _valued(self, stages: list[tuple[int, int, int]]) -> Found:
        """Return stages of classes as an assignment to nodes, with what it takes."""
        free = [iter(members) for members in self.classes]
        assignment = tuple(Piece(next(free[last]), first, end) for last, first, end in stages)
        return Found(assignment, self._costs.of(assignment))


def _by_length(stages: np.ndarray) -> np.ndarray:
    """Return a table by class, end and first unit by class, first unit and number of units, from 1 on."""
    first = np.arange(stages.shape[1])[:, None]
    end = first + np.arange(1, len(first))
    inside = np.minimum(end, len(first) - 1)
    return np.where(end == inside, stages[:, inside, first], UNREACHABLE)


def _windows(by_end: np.ndarray, length: int) -> np.ndarray:
    """Return by row and first unit what is there for each end of a stage; there is nothing behind the last unit."""
    padded = np.pad(by_end[:, 1:], ((0, 0), (0, length)), constant_values=UNREACHABLE)
    return sliding_window_view(padded, length, axis=1)


def _least(values: np.ndarray, ties: np.ndarray) -> int:
    """Return the place of the least value, of equal ones that of the least tie."""
    return int(np.where(values == values.min(), ties, 4 * UNREACHABLE).argmin())
