"""The planner against every split of small problems: the optimum, its tie-breaks, and what is missing."""

import dataclasses
import functools
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from boundby.layers.records import Storage
from boundby.partition import Chain, Link, Links, Unit, VirtualNode, solver
from boundby.partition.alternatives import shortfall
from boundby.partition.costs import costs_of
from boundby.partition.solver import Goal, Objective, least, optimum, ordered_states, set_states
from tests import partition_cases as cases
from tests.partition_cases import Case, tables

MAKERS = {"plain": cases.random_case, "shared": cases.shared_case}  # each on its own, or some on one machine
CASES = {"plain": 1020, "shared": 450}
SOME = range(150)
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "requests")


def objective_of(seed):
    return OBJECTIVES[seed % len(OBJECTIVES)]


def planned(case: Case, objective: Objective) -> tuple[int, ...] | None:
    """Return the rank of the planner's split, by the costs of the tests; None where it finds none."""
    split = optimum(tables(case), Goal(objective, case.requests, case.in_order))
    assert split is None or cases.fits(case, split)
    return split and cases.rank(case, objective, split)


@functools.cache
def answer(kind: str, seed: int) -> tuple[int, ...] | None:
    """Return the rank that no split of this problem beats."""
    return cases.best(MAKERS[kind](seed), objective_of(seed))


def mismatches(kind: str, seeds: Sequence[int]) -> Iterator[int]:
    """Yield the problems of which the planner finds no optimum, or one that is none."""
    return (seed for seed in seeds if planned(MAKERS[kind](seed), objective_of(seed)) != answer(kind, seed))


@pytest.mark.parametrize("kind", MAKERS)
def test_no_split_beats_the_plan_of_any_small_problem(kind):
    assert list(mismatches(kind, range(CASES[kind]))) == []


@pytest.mark.truth
@pytest.mark.parametrize("kind", MAKERS)
def test_no_split_beats_the_plan_of_any_of_many_problems(kind):
    wrong = list(mismatches(kind, range(CASES[kind], 30 * CASES[kind])))
    print(f"{29 * CASES[kind]:,} problems, {len(wrong)} mismatches")
    assert wrong == []


def test_the_small_problems_hold_what_makes_planning_hard():
    made = [cases.random_case(seed) for seed in range(450)]
    answers = [cases.best(case, "latency") for case in made]
    tied = [len({held.key for unit in case.chain(case.nodes[0]).units for held in unit.storages}) for case in made]
    held = [sum(len(unit.storages) for unit in case.chain(case.nodes[0]).units) for case in made]
    shares = {
        "infeasible": [answer is None for answer in answers],
        "several stages": [answer is not None and answer[2] > 1 for answer in answers],
        "tied weights": [keys < uses for keys, uses in zip(tied, held, strict=True)],
        "a cache": [any(unit.kv_cache_bytes for unit in case.chain(case.nodes[0]).units) for case in made],
        "a fixed order": [case.in_order for case in made],
        "alike nodes": [len(solver.classes_of(tables(case))) < len(case.nodes) for case in made],
    }
    assert {name: share for name, cases_with in shares.items() if (share := sum(cases_with) / len(made)) < 0.15} == {}


def test_of_equal_splits_the_one_that_moves_least_is_taken():
    ms = 1e-3
    times = {"a": (10, 2, 9, 50), "b": (10, 1, 9, 50), "c": (10, 1, 9, 50)}  # the second unit is slower on a ...
    cuts = (2_000_000, 1_000_000, 1_000_000, 0)  # ... by what is saved by cutting behind it
    weights = (10**7, 10**7, 10**7, 25 * 10**6)
    chains = {}
    for name, spent in times.items():
        units = [Unit(f"h.{n}", ms * spent[n], (Storage(f"w{n}", weights[n], True),), cuts[n]) for n in range(4)]
        chains[name] = Chain(tuple(units))
    rooms = {"a": 0.024, "b": 0.024, "c": 0.03}
    nodes = [VirtualNode(name, name, ram_gb=room, headroom=0) for name, room in rooms.items()]
    split = optimum(costs_of(nodes, chains, Links(default=Link(1e9))), Goal(in_order=True))
    assert split is not None and [piece.end for piece in split] == [2, 3, 4]


def test_the_memory_that_is_missing_is_exact_on_every_node():
    seen = [case for case in map(cases.random_case, SOME) if cases.best(case, "latency") is None]
    assert len(seen) > 20
    for case in seen:
        missing = shortfall(tables(case), case.chain(case.nodes[0]), case.nodes, in_order=case.in_order)
        assert missing.extra_by_node == {node.name: cases.least_extra(case, n) for n, node in enumerate(case.nodes)}
        assert missing.extra_bytes == min(missing.extra_by_node.values()) == missing.extra_by_node[missing.node]
        index = next(n for n, node in enumerate(case.nodes) if node.name == missing.node)
        assert planned(with_memory(case, index, missing.extra_bytes), "latency") is not None
        assert planned(with_memory(case, index, missing.extra_bytes - 1), "latency") is None


def with_memory(case: Case, index: int, extra_bytes: int) -> Case:
    """Return the problem with more memory on one node."""
    node = case.nodes[index]
    memory = (node.memory_bytes + extra_bytes) / 1e9
    larger = dataclasses.replace(node, **{"vram_gb" if node.kind == "gpu" else "ram_gb": memory})
    return dataclasses.replace(case, nodes=(*case.nodes[:index], larger, *case.nodes[index + 1 :]))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_alike_nodes_without_transfers_are_the_linear_partition_problem(count):
    times = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    chain = Chain(tuple(Unit(f"h.{n}", ms / 1000) for n, ms in enumerate(times)))
    names = [f"n{n}" for n in range(count)]
    nodes = [VirtualNode(name, "cpu", ram_gb=1) for name in names]
    made = costs_of(nodes, dict.fromkeys(names, chain), Links(default=Link(float("inf"))))
    assert least(made, Goal("throughput")) == linear_partition(tuple(times), count) * 10**9


def linear_partition(times: tuple[int, ...], parts: int) -> int:
    """Return the least largest sum of so many consecutive parts."""
    if parts == 1 or len(times) <= 1:
        return sum(times)
    return min(max(sum(times[cut:]), linear_partition(times[:cut], parts - 1)) for cut in range(1, len(times) + 1))


@pytest.mark.parametrize(("sizes", "count"), [([1] * 6, 192), ([6], 6), ([3, 3], 24), ([1, 5], 16), ([1] * 8, 1024)])
def test_alike_nodes_cost_few_states(sizes, count):
    assert len(set_states(tuple(sizes))) == count


@pytest.mark.truth
def test_128_units_on_6_unlike_nodes_are_planned_within_a_second():
    chance = random.Random(0)
    nodes = [VirtualNode(f"n{n}", f"n{n}", ram_gb=1.5 + 0.2 * n) for n in range(6)]
    weights = [(Storage(f"w{n}", chance.randint(1, 10**8), True),) for n in range(128)]
    chains = {}
    for node in nodes:
        units = [
            Unit(f"h.{n}", chance.uniform(1e-3, 1e-2), held, chance.randint(1, 10**7)) for n, held in enumerate(weights)
        ]
        chains[node.name] = Chain(tuple(units))
    asked = [("latency", 1), ("throughput", 1), *(("requests", count) for count in (2, 3, 4, 16, 128))]
    for objective, requests in asked:
        took = []
        for _ in range(3):
            begun = time.perf_counter()
            split = optimum(costs_of(nodes, chains, Links()), Goal(objective, requests))
            took.append(time.perf_counter() - begun)
        assert split is not None
        print(f"{objective} {requests}: {', '.join(f'{took_s:.3f}' for took_s in took)} s")
        assert min(took) < 1


def test_very_many_requests_are_planned_as_a_busy_pipeline_is():
    compared = 0
    for seed in SOME:
        case = cases.random_case(seed)
        steady = optimum(tables(case), Goal("throughput", in_order=case.in_order))
        if steady is not None:
            compared += 1
            many = optimum(tables(case), Goal("requests", 10**12, case.in_order))
            assert many is not None and tables(case).of(many) == tables(case).of(steady)
    assert compared > 100


@pytest.mark.parametrize("kind", MAKERS)
def test_the_least_value_is_that_of_the_best_split_and_what_is_not_below_a_bound_is_not_looked_for(kind):
    for seed in range(75):
        case, objective = MAKERS[kind](seed), objective_of(seed)
        best = answer(kind, seed)
        goal = Goal(objective, case.requests, case.in_order)
        taken = least(tables(case), goal)
        assert taken == (best and best[0])
        for below in () if taken is None else (taken, taken + 1, taken + 10**6):
            again = least(tables(case), goal, below)
            assert again == (taken if taken < below else None)


def test_too_many_unlike_nodes_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="fix their order"):
        set_states((1,) * 13)
    assert len(ordered_states(13)) == 13
