"""The best assignment where a node does not compute while it receives or sends, so that its load is of three nodes.

The state is that of the solver with the node that comes next. What the solver knows of the rest rules most of it out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from boundby.partition.costs import UNREACHABLE
from boundby.partition.states import END, State, Tables


class _Best(NamedTuple):
    """By number of units done: the least value, the transfers in it, where the last stage begins and after whom."""

    value: np.ndarray
    moved: np.ndarray
    first: np.ndarray
    sender: np.ndarray


@dataclass(frozen=True)
class Exclusive:
    """A pass from the first states to the last: no load above `limit`, and nothing that would take more than `most`.

    `combine` adds up what stages take (the latency), or takes the most of it (the period); `rests` is by state and
    first unit what its last stage and those behind it take at least.
    """

    states: Sequence[State]
    tables: Tables
    combine: Callable[..., np.ndarray]
    rests: np.ndarray
    limit: int
    most: int
    _table: dict[tuple[int, int], _Best] = field(default_factory=dict)  # by state and the next one
    _spent: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)  # dozens of states ask for each

    def best(self) -> list[tuple[int, int, int]] | None:
        """Return class, first unit and end of every stage; None where there is nothing within the limits."""
        for place, state in enumerate(self.states):
            for follower in (*state.after, END):
                self._fill(place, follower)
        ends = [(self._table[key], key[0]) for key in self._table if key[1] == END]
        if not ends:
            return None
        _, place = min(ends, key=lambda each: (each[0].value[-1], self.states[each[1]].stages, each[0].moved[-1]))
        return self._traced(place)

    def _fill(self, place: int, follower: int) -> None:
        """Enter the best by the unit between these states, where the rest keeps within `most`."""
        state, rest = self.states[place], self._rest(place, follower)
        befores = [(each, best) for each in state.before or (END,) if (best := self._before(each, place))]
        least = min((int(best.value.min()) for _, best in befores), default=UNREACHABLE)
        ends = _span(self.combine(rest, least) <= self.most)
        if ends.start == ends.stop:
            return
        ways = [self._way(each, place, follower, best, ends) for each, best in befores]
        values, *columns = (np.concatenate(each, axis=-1) for each in zip(*ways, strict=True))
        chosen = least_in_rows(values, columns[0])
        found = _Best(np.full_like(rest, UNREACHABLE), *np.zeros((3, len(rest)), dtype=np.int64))
        found.value[ends] = values[np.arange(len(chosen)), chosen]
        found.value[self.combine(found.value, rest) > self.most] = UNREACHABLE
        if found.value.min() < UNREACHABLE:
            for filled, column in zip(found[1:], columns, strict=True):
                filled[ends] = column[chosen]
            self._table[place, follower] = found

    def _before(self, sender: int, place: int) -> _Best | None:
        if sender != END:
            return self._table.get((sender, place))
        nothing = np.zeros((4, self.rests.shape[1]), dtype=np.int64)
        nothing[0, 1:] = UNREACHABLE
        return _Best(*nothing)

    def _rest(self, place: int, follower: int) -> np.ndarray:
        """Return what everything behind the state takes at least, by the unit it begins with."""
        if follower == END:
            return np.where(np.arange(self.rests.shape[1]) < self.rests.shape[1] - 1, UNREACHABLE, 0)
        moved = self.tables.transfer[self.states[place].last, self.states[follower].last]
        return self.rests[follower] + moved if self.combine is np.add else self.rests[follower]

    def _way(self, sender: int, place: int, follower: int, best: _Best, ends: slice) -> tuple[np.ndarray, ...]:
        """Return what is reached after this sender, by end and first unit of the stage; transfers, firsts, sender."""
        key = tuple(each if each == END else self.states[each].last for each in (sender, place, follower))
        if key not in self._spent:
            self._spent[key] = self._stages(*key)
        firsts = _span(best.value < UNREACHABLE)
        values = self.combine(best.value[firsts], self._spent[key][ends, firsts])
        moved = best.moved + (0 if sender == END else self.tables.transfer[key[0], key[1]])
        edges = np.arange(len(moved))
        return values, moved[firsts], edges[firsts], np.full(values.shape[1], sender)

    def _stages(self, sender: int, node: int, follower: int) -> np.ndarray:
        """Return [end, first]: what a stage between these classes adds to the value, unless its load is too much."""
        received = 0 if sender == END else self.tables.transfer[sender, node]
        sent = 0 if follower == END else self.tables.transfer[node, follower][:, None]
        load = self.tables.busy[node] + received + sent
        return np.where(
            load > self.limit, UNREACHABLE, self.tables.compute[node] + received if self.combine is np.add else load
        )

    def _traced(self, place: int) -> list[tuple[int, int, int]]:
        stages: list[tuple[int, int, int]] = []
        end, follower = self.rests.shape[1] - 1, END
        while place != END:
            best = self._table[place, follower]
            stages.insert(0, (self.states[place].last, int(best.first[end]), end))
            place, end, follower = int(best.sender[end]), int(best.first[end]), place
        return stages


def least_in_rows(values: np.ndarray, ties: np.ndarray) -> np.ndarray:
    """Return the place of the least value in each row, of equal ones that of the least tie."""
    places = values.argmin(axis=1)
    least = values[np.arange(len(places)), places]
    is_least = values == least[:, None]
    if np.count_nonzero(is_least) == len(places):
        return places
    tied = np.flatnonzero((is_least.sum(axis=1) > 1) & (least < UNREACHABLE))  # few: to do so for all takes longer
    if len(tied):
        ties = np.broadcast_to(ties, values.shape)[tied]
        places[tied] = np.where(values[tied] == least[tied, None], ties, 4 * UNREACHABLE).argmin(axis=1)
    return places


def _span(is_in: np.ndarray) -> slice:
    """Return the range from the first to the last that is in."""
    places = np.flatnonzero(is_in)
    return slice(places[0], places[-1] + 1) if len(places) else slice(0, 0)
