"""What a search for a partition goes through: which nodes are in use and the last of them, and the tables of these."""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from boundby.partition.costs import UNREACHABLE, Costs

TOGETHER = 16  # states: their tables stay in the cache of a processor
END = -1  # in place of a state: no stage comes before, or none comes next
MOST_STATES = 25_000  # about 12 nodes of which no two are alike: some seconds a pass for 128 units


@dataclass(frozen=True)
class State:
    """Some nodes in use, the last of them of class `last`. It follows the states `before`; those `after` follow it."""

    last: int
    stages: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class Tables(NamedTuple):
    """Picoseconds by class: of a stage by end and first unit, alone and busy, and by source, target and cut."""

    compute: np.ndarray  # as in `busy` UNREACHABLE where it does not fit
    busy: np.ndarray
    transfer: np.ndarray

    @classmethod
    def of(cls, costs: Costs, classes: list[list[int]]) -> "Tables":
        """Return the tables of classes of nodes."""
        heads, tails = ([members[place] for members in classes] for place in (0, -1))
        fits = costs.memory_bytes[heads] <= costs.usable_bytes[heads, None, None]
        is_stage = fits & np.tri(costs.units + 1, k=-1, dtype=bool)
        compute, busy = (np.where(is_stage, each[heads], UNREACHABLE) for each in (costs.compute_ps, costs.busy_ps))
        return cls(compute, busy, costs.transfer_ps[np.ix_(heads, tails)])


class Group(NamedTuple):
    """States that are reckoned together: their class, their places, those of the states after each, their classes."""

    last: int
    places: np.ndarray
    after: np.ndarray  # by state; where there are fewer, the place behind the last state
    classes: np.ndarray


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
        return tuple(number + by * (each == which) for each, number in enumerate(used))

    places = {key: place for place, key in enumerate(keys)}
    states = []
    for used, last in keys:
        rest = changed(used, last, -1)
        before = [(rest, each) for each in range(len(sizes) - 1, -1, -1)]
        after = [(changed(used, each, 1), each) for each in range(len(sizes))]
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
            tuple(places[stages - 1, each] for each in range(last) if (stages - 1, each) in places),
            tuple(places[stages + 1, each] for each in range(last + 1, nodes)),
        )
        for stages, last in keys
    )


@functools.lru_cache(maxsize=1)
def groups_of(states: tuple[State, ...]) -> list[Group]:
    """Return the states in groups, from the last ones on."""
    found: dict[tuple[int, int], list[int]] = {}
    for place, state in enumerate(states):
        found.setdefault((state.stages, state.last), []).append(place)
    groups = []
    for (_, last), members in reversed(found.items()):
        for begin in range(0, len(members), TOGETHER):
            places = members[begin : begin + TOGETHER]
            most = max(1, *(len(states[each].after) for each in places))
            after = np.array([(*states[each].after, *[len(states)] * most)[:most] for each in places])
            classes = np.array([states[each].last if each < len(states) else 0 for each in after.flat])
            groups.append(Group(last, np.array(places), after, classes.reshape(after.shape)))
    return groups


def _are_alike(costs: Costs, a: int, b: int) -> bool:
    others = [each for each in range(costs.nodes) if each not in (a, b)]
    return (
        costs.usable_bytes[a] == costs.usable_bytes[b]
        and np.array_equal(costs.compute_ps[a], costs.compute_ps[b])
        and np.array_equal(costs.memory_bytes[a], costs.memory_bytes[b])
        and np.array_equal(costs.transfer_ps[a, b], costs.transfer_ps[b, a])
        and np.array_equal(costs.transfer_ps[a, others], costs.transfer_ps[b, others])
        and np.array_equal(costs.transfer_ps[others, a], costs.transfer_ps[others, b])
        and costs.contend_alike(a, b)
    )
