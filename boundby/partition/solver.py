"""The best assignment of units to nodes, exactly: dynamic programming over units done and nodes used.

Nodes that cannot be told apart form a class, of which only the number in use matters. A state is (nodes used of each
class, class of the last one); with a fixed order of nodes it is (stages, last node). One pass, from the last states to
the first, finds the least that the last node of a state and those behind it can take from every unit on: for n units
and S states O(S n^2), a few operations on a table of n stages by their length for some states at once.

Without overlap what a stage takes depends on both its neighbours, and this pass counts the least that any two would
add. So it finds a lower bound, and the optimum where the assignment that reaches it keeps to the limit after all. Where
that one does not, the pass of `Exclusive` has the next node in its states too, and leaves out what the bound rules out.

What a plan is to be best at, each brought back to assignments of least latency under a limit on the period.

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

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from boundby.partition.costs import UNREACHABLE, Assignment, Costs, Integers, Piece, Value

TOGETHER = 16  # states: their tables stay in the cache of a processor
END = -1  # in place of a state: no stage comes before, or none comes next
MOST_STATES = 25_000  # about 12 nodes of which no two are alike: some seconds a pass for 128 units
NEAR = 128  # the least there can be, divided by this: how far from it to look first
ANY = UNREACHABLE - 1  # picoseconds: no limit
PROBES = 6  # halvings of the range of periods, in search of a good assignment to begin with

Measure = Literal["latency", "period"]
Objective = Literal["latency", "throughput", "requests"]
MEANING: dict[Objective, str] = {
    "latency": "latency of one request",
    "throughput": "time between two requests of many",
    "requests": "time until the last of {} requests is done",
}


@dataclass(frozen=True)
class State:
    """Some nodes in use, the last of them of class `last`. It follows the states `before`; those `after` follow it."""

    last: int
    stages: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class Tables(NamedTuple):
    """Picoseconds by class: of a stage by end and first unit, alone and busy, and by source, target and cut."""

    compute: Integers  # as in `busy` UNREACHABLE where it does not fit
    busy: Integers
    transfer: Integers

    @classmethod
    def of(cls, costs: Costs, classes: list[list[int]]) -> "Tables":
        """Return the tables of classes of nodes."""
        heads, tails = ([members[place] for members in classes] for place in (0, -1))
        fits = costs.memory_bytes[heads] <= costs.usable_bytes[heads, None, None]
        is_stage = fits & np.tri(costs.units + 1, k=-1, dtype=bool)
        compute, busy = (np.where(is_stage, ps[heads], UNREACHABLE) for ps in (costs.compute_ps, costs.busy_ps))
        return cls(compute, busy, costs.transfer_ps[np.ix_(heads, tails)])


class Group(NamedTuple):
    """States that are reckoned together: their class, their places, those of the states after each, their classes."""

    last: int
    places: Integers
    after: Integers  # by state; where there are fewer, the place behind the last state
    classes: Integers


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
    """Return the states where nodes may come in any order; `sizes` are those of the classes."""
    most = math.prod(size + 1 for size in sizes)
    count = sum(most // (size + 1) * size for size in sizes)
    if count > MOST_STATES:
        raise ValueError(
            f"{sum(sizes)} nodes of which {len(sizes)} are not alike make {count:,} states, {MOST_STATES:,} are the "
            "most to be searched: leave out nodes, make some alike, or fix their order (in_order=True)"
        )
    # Of equally good states the first one is taken: that of the nodes named first, in the order they are named.
    vectors = sorted(itertools.product(*(range(size, -1, -1) for size in sizes)), key=sum)
    keys = [(used, last) for used in vectors for last in range(len(sizes) - 1, -1, -1) if used[last]]

    def changed(used: tuple[int, ...], which: int, by: int) -> tuple[int, ...]:
        return tuple(number + by * (place == which) for place, number in enumerate(used))

    places = {key: place for place, key in enumerate(keys)}
    states = []
    for used, last in keys:
        rest = changed(used, last, -1)
        before = [(rest, kind) for kind in range(len(sizes) - 1, -1, -1)]
        after = [(changed(used, kind, 1), kind) for kind in range(len(sizes))]
        known = (tuple(places[key] for key in keys if key in places) for keys in (before, after))
        states.append(State(last, sum(used), *known))
    return tuple(states)


@functools.lru_cache(maxsize=1)
def ordered_states(nodes: int) -> tuple[State, ...]:
    """Return the states where nodes may be left out but keep their order."""
    keys = [(stages, last) for stages in range(1, nodes + 1) for last in range(stages - 1, nodes)]
    places = {key: place for place, key in enumerate(keys)}
    return tuple(
        State(
            last,
            stages,
            tuple(places[stages - 1, node] for node in range(last) if (stages - 1, node) in places),
            tuple(places[stages + 1, node] for node in range(last + 1, nodes)),
        )
        for stages, last in keys
    )


@functools.lru_cache(maxsize=1)
def groups_of(states: tuple[State, ...]) -> list[Group]:
    """Return the states in groups, from the last ones on."""
    alike: dict[tuple[int, int], list[int]] = {}
    for place, state in enumerate(states):
        alike.setdefault((state.stages, state.last), []).append(place)
    groups = []
    for (_, last), members in reversed(alike.items()):
        for begin in range(0, len(members), TOGETHER):
            places = members[begin : begin + TOGETHER]
            most = max(1, *(len(states[place].after) for place in places))
            after = np.array([(*states[place].after, *[len(states)] * most)[:most] for place in places])
            classes = np.array([states[place].last if place < len(states) else 0 for place in after.flat])
            groups.append(Group(last, np.array(places), after, classes.reshape(after.shape)))
    return groups


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


class _Best(NamedTuple):
    """By number of units done: the least value, the transfers in it, where the last stage begins and after whom."""

    value: Integers
    moved: Integers
    first: Integers
    sender: Integers


@dataclass(frozen=True)
class Exclusive:
    """A pass from the first states to the last: no load above `limit`, and nothing that would take more than `most`.

    `combine` adds up what stages take (the latency), or takes the most of it (the period); `rests` is by state and
    first unit what its last stage and those behind it take at least.
    """

    states: Sequence[State]
    tables: Tables
    combine: Callable[..., Integers]
    rests: Integers
    limit: int
    most: int
    _table: dict[tuple[int, int], _Best] = field(default_factory=dict)  # by state and the next one
    _spent: dict[tuple[int, int, int], Integers] = field(default_factory=dict)  # dozens of states ask for each

    def best(self) -> list[tuple[int, int, int]] | None:
        """Return class, first unit and end of every stage; None where there is nothing within the limits."""
        for place, state in enumerate(self.states):
            for follower in (*state.after, END):
                self._fill(place, follower)
        ends = [(self._table[key], key[0]) for key in self._table if key[1] == END]
        if not ends:
            return None
        _, place = min(ends, key=lambda entry: (entry[0].value[-1], self.states[entry[1]].stages, entry[0].moved[-1]))
        return self._traced(place)

    def _fill(self, place: int, follower: int) -> None:
        """Enter the best by the unit between these states, where the rest keeps within `most`."""
        state, rest = self.states[place], self.rest(place, follower)
        befores = [(sender, best) for sender in state.before or (END,) if (best := self._before(sender, place))]
        least = min((int(best.value.min()) for _, best in befores), default=UNREACHABLE)
        ends = _span(self.combine(rest, least) <= self.most)
        if ends.start == ends.stop:
            return
        ways = [self._way(sender, place, follower, best, ends) for sender, best in befores]
        values, *columns = (np.concatenate(parts, axis=-1) for parts in zip(*ways, strict=True))
        chosen = least_in_rows(values, columns[0])
        best_by_unit = _Best(np.full_like(rest, UNREACHABLE), *np.zeros((3, len(rest)), dtype=np.int64))
        best_by_unit.value[ends] = values[np.arange(len(chosen)), chosen]
        best_by_unit.value[self.combine(best_by_unit.value, rest) > self.most] = UNREACHABLE
        if best_by_unit.value.min() < UNREACHABLE:
            for filled, column in zip(best_by_unit[1:], columns, strict=True):
                filled[ends] = column[chosen]
            self._table[place, follower] = best_by_unit

    def _before(self, sender: int, place: int) -> _Best | None:
        if sender != END:
            return self._table.get((sender, place))
        nothing = np.zeros((4, self.rests.shape[1]), dtype=np.int64)
        nothing[0, 1:] = UNREACHABLE
        return _Best(*nothing)

    def rest(self, place: int, follower: int) -> Integers:
        """Return what everything behind the state takes at least, by the unit it begins with."""
        if follower == END:
            return np.where(np.arange(self.rests.shape[1]) < self.rests.shape[1] - 1, UNREACHABLE, 0)
        rest: Integers = self.rests[follower]
        moved: Integers = self.tables.transfer[self.states[place].last, self.states[follower].last]
        return rest + moved if self.combine is np.add else rest

    def _way(self, sender: int, place: int, follower: int, best: _Best, ends: slice) -> tuple[Integers, ...]:
        """Return what is reached after this sender, by end and first unit of the stage; transfers, firsts, sender."""
        before, last, after = (
            state if state == END else self.states[state].last for state in (sender, place, follower)
        )
        key = (before, last, after)
        if key not in self._spent:
            self._spent[key] = self._stages(*key)
        firsts = _span(best.value < UNREACHABLE)
        values = self.combine(best.value[firsts], self._spent[key][ends, firsts])
        moved = best.moved + (0 if sender == END else self.tables.transfer[key[0], key[1]])
        edges = np.arange(len(moved))
        return values, moved[firsts], edges[firsts], np.full(values.shape[1], sender)

    def _stages(self, sender: int, node: int, follower: int) -> Integers:
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


def least_in_rows(values: Integers, ties: Integers) -> Integers:
    """Return the place of the least value in each row, of equal ones that of the least tie."""
    places: Integers = values.argmin(axis=1)
    least = values[np.arange(len(places)), places]
    is_least = values == least[:, None]
    if np.count_nonzero(is_least) == len(places):
        return places
    tied = np.flatnonzero((is_least.sum(axis=1) > 1) & (least < UNREACHABLE))  # few: to do so for all takes longer
    if len(tied):
        ties = np.broadcast_to(ties, values.shape)[tied]
        places[tied] = np.where(values[tied] == least[tied, None], ties, 4 * UNREACHABLE).argmin(axis=1)
    return places


def _span(is_in: NDArray[np.bool_]) -> slice:
    """Return the range from the first to the last that is in."""
    places = np.flatnonzero(is_in)
    return slice(places[0], places[-1] + 1) if len(places) else slice(0, 0)


class Found(NamedTuple):
    """An assignment and what it takes."""

    assignment: Assignment
    value: Value


class _Bounds(NamedTuple):
    """By state: what its last stage and those behind it take at least, by first unit, and those behind it, by end.

    Of each also what ranks equal ones: stages, then transfers; all alike unless that was asked for.
    """

    value: Integers
    rest: Integers
    tie: Integers
    rest_tie: Integers


class Solver:
    """Finds optimal assignments over these tables. Raises ValueError where there are too many states."""

    def __init__(self, costs: Costs, *, in_order: bool = False) -> None:
        self.classes = [[node] for node in range(costs.nodes)] if in_order else classes_of(costs)
        sizes = tuple(len(members) for members in self.classes)
        self.states = ordered_states(len(sizes)) if in_order else set_states(sizes)
        self._starts = [place for place, state in enumerate(self.states) if not state.before]
        self._costs = costs
        self.tables = tables = Tables.of(costs, self.classes)
        self._load = tables.busy if costs.overlap else tables.busy + self.least_moved()
        self._compute_by_length, self._load_by_length = map(_by_length, (tables.compute, self._load))
        self._stage_tie = costs.nodes * int(tables.transfer.max()) + 1  # one stage outweighs all transfers

    def fastest(self, most_period_ps: int = ANY, most_ps: float = ANY, *, ranked: bool = False) -> Found | None:
        """Return an assignment of least latency within these limits on period and latency; None where none fits.

        If `ranked` it has of equal ones the fewest stages, of these the least transfers.
        """
        bounds = self._bounds("latency", most_period_ps, ranked)
        candidate = self._from_start(bounds, "latency", most_period_ps)
        if candidate is None or candidate.value.latency_ps > most_ps:
            return None
        if candidate.value.period_ps <= most_period_ps:
            return candidate
        return self.exclusive("latency", bounds, most_period_ps, most_ps)

    def steadiest(self, most_ps: float = ANY) -> Found | None:
        """Return an assignment of least period within this limit; None where none fits."""
        bounds = self._bounds("period", ANY)
        candidate, least = self._from_start(bounds, "period", ANY), bounds.value[self._starts, 0].min()
        if candidate is None or least > most_ps:
            return None
        if candidate.value.period_ps == least:
            return candidate
        most_period_ps = int(min(most_ps, candidate.value.period_ps))
        return self.exclusive("period", bounds, most_period_ps, most_period_ps)

    def relaxed(self, most_period_ps: int) -> Found | None:
        """Return an assignment at least as fast as any whose period is within this; its own period may be longer."""
        return self._from_start(self._bounds("latency", most_period_ps), "latency", most_period_ps)

    def least_period(self) -> int:
        """Return a lower bound of the period, in picoseconds."""
        return int(self._bounds("period", ANY).value[self._starts, 0].min())

    def least_moved(self) -> Integers:
        """Return the least a stage can receive and send, by class, end and first unit."""
        transfer = self.tables.transfer
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
                moved = tie[after] + self.tables.transfer[last, classes]
                rest_tie[places] = np.where(ways == ways.min(axis=1, keepdims=True), moved, 2 * UNREACHABLE).min(axis=1)
                rest_tie[places, -1] = 0
                ties = _windows(rest_tie[places], length).reshape(-1, length)
                ties = np.where(spent == least[:, None], ties, UNREACHABLE).min(axis=1) + self._stage_tie
                tie[places] = np.minimum(ties, UNREACHABLE).reshape(-1, edges)
        return _Bounds(value, rest, tie, rest_tie)

    def _links(self, measure: Measure, limit: int) -> Integers:
        """Return what a transfer itself adds to the measure; without overlap the period has it in what stages take."""
        transfer = self.tables.transfer
        if self._costs.overlap:
            return np.where(transfer <= limit, transfer, UNREACHABLE)
        return transfer if measure == "latency" else np.zeros_like(transfer)

    def _from_start(self, bounds: _Bounds, measure: Measure, limit: int) -> Found | None:
        """Return the assignment that the bounds are made of; None where there is none."""
        combine = np.add if measure == "latency" else np.maximum
        links, spent = self._links(measure, limit), self._load if measure == "period" else self.tables.compute
        place = min(self._starts, key=lambda place: (bounds.value[place, 0], bounds.tie[place, 0]))
        if bounds.value[place, 0] >= UNREACHABLE:
            return None
        stages: list[tuple[int, int, int]] = []
        end = 0
        while True:
            last, first, after = self.states[place].last, end, list(self.states[place].after)
            stage = np.where(self._load[last, :, first] <= limit, spent[last, :, first], UNREACHABLE)
            end = first_least(combine(stage, bounds.rest[place]), bounds.rest_tie[place])
            stages.append((last, first, end))
            if end == self._costs.units:
                return self._valued(stages)
            classes = [self.states[place].last for place in after]
            ties = bounds.tie[after, end] + self.tables.transfer[last, classes, end]
            place = after[first_least(combine(links[last, classes, end], bounds.value[after, end]), ties)]

    def exclusive(self, measure: Measure, bounds: _Bounds, limit: int, most: float) -> Found | None:
        """Return the best assignment within both limits, by actual transfers; None where there is none."""
        combine = np.add if measure == "latency" else np.maximum
        least, most = int(bounds.value[self._starts, 0].min()), int(min(most, ANY))
        nearly, stages = least, None
        while stages is None and nearly <= most:  # what is near the bound is found faster, and there it mostly is
            nearly += 3 * (nearly - least) + least // NEAR + 1
            stages = Exclusive(self.states, self.tables, combine, bounds.value, limit, min(nearly, most)).best()
        return None if stages is None else self._valued(stages)

    def _valued(self, stages: list[tuple[int, int, int]]) -> Found:
        """Return stages of classes as an assignment to nodes, with what it takes."""
        free = [iter(members) for members in self.classes]
        assignment = tuple(Piece(next(free[last]), first, end) for last, first, end in stages)
        return Found(assignment, self._costs.of(assignment))

    def best(self, objective: Objective, requests: int, below: float = math.inf) -> Found | None:
        """Return one of the best assignments; None where none takes less than `below`."""
        if objective == "throughput":
            return self.steadiest(below - 1)
        fastest = self.fastest(most_ps=below - 1)
        is_one = objective == "latency" or requests == 1
        return fastest if fastest is None or is_one else self.soonest(fastest, requests, below)

    def at_most(self, known: Found) -> Found:
        """Return the assignment of least latency whose period is at most that of a known one."""
        known_best = self.fastest(known.value.period_ps, known.value.latency_ps, ranked=True)
        assert known_best is not None, f"no assignment is as good as {known.value}, where one was found"
        return known_best

    def steadiest_of_the(self, fastest: Found) -> Found:
        """Return the assignment of least period among those that are as fast for one request."""
        best, impossible = fastest, -1
        ask = best.value.period_ps - 1  # in most cases no other is as fast, and this says so
        while impossible < ask:
            faster = self.fastest(ask, best.value.latency_ps)
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
        least_period, is_known = self.least_period(), False
        self._probe(tried, least_period)
        limit = min(fastest.value.period_ps - 1, tried.useful(fastest))
        while limit >= least_period and (candidate := self.relaxed(limit)):
            tried.candidates.append(candidate)
            if candidate.value.period_ps > limit and tried.useful(candidate) >= limit:
                steadiest = None if is_known else self.steadiest()
                if steadiest is not None:
                    tried.candidates.append(self.at_most(steadiest))
                    least_period, is_known = tried.candidates[-1].value.period_ps, True
                candidate = self.fastest(limit, tried.least() - tried.last * least_period)
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
            candidate = self.relaxed(middle)
            if candidate:
                tried.candidates.append(candidate)
            if candidate is None or tried.useful(upper) - middle > tried.useful(candidate) - low:
                low = middle
            else:
                high, upper = middle, candidate


def _by_length(stages: Integers) -> Integers:
    """Return a table by class, end and first unit by class, first unit and number of units, from 1 on."""
    first = np.arange(stages.shape[1])[:, None]
    end = first + np.arange(1, len(first))
    inside = np.minimum(end, len(first) - 1)
    return np.where(end == inside, stages[:, inside, first], UNREACHABLE)


def _windows(by_end: Integers, length: int) -> Integers:
    """Return by row and first unit what is there for each end of a stage; there is nothing behind the last unit."""
    padded = np.pad(by_end[:, 1:], ((0, 0), (0, length)), constant_values=UNREACHABLE)
    return sliding_window_view(padded, length, axis=1)


def first_least(values: Integers, ties: Integers) -> int:
    """Return the place of the least value, of equal ones that of the least tie."""
    return int(np.where(values == values.min(), ties, 4 * UNREACHABLE).argmin())


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
            best = search.at_most(search.steadiest_of_the(best) if is_one else best)
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


def _searches(costs: Costs, in_order: bool) -> Iterator[tuple[tuple[int, ...], Solver]]:
    """Yield a search for every choice of nodes, with these nodes."""
    for nodes in choices(costs, in_order=in_order):
        yield nodes, Solver(costs.only(nodes), in_order=in_order)


def choices(costs: Costs, *, in_order: bool) -> Iterator[tuple[int, ...]]:
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
