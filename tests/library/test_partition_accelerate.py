"""The planner against the device map that accelerate itself makes of the same model, by the costs of the tests.

Compared are models in a row without tied weights, each unit one module with parameters of its size on the meta device.
accelerate is given what a stage may hold of every node as `max_memory`, GPUs by number and one CPU, and knows neither
times nor links, activations, caches or inputs; its map counts where it leaves nothing to the disk and all of that fits.
"""

from dataclasses import replace

import pytest

from boundby.partition.alternatives import baselines
from boundby.partition.costs import costs_of
from boundby.partition.solver import Objective, optimum
from tests import partition_cases as cases
from tests.partition_cases import Case, Split

torch = pytest.importorskip("torch", reason="a device map is made of modules of torch")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (setup/requirements-training.txt)")

SEEDS = 420
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "requests")


class Block(torch.nn.Module):
    """Holds parameters of a size, 1 byte each."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        weight = torch.empty(size_bytes, dtype=torch.int8, device="meta")
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


def untied_case(seed: int) -> Case:
    """Return a problem without tied weights and in no fixed order, with one CPU at most."""
    case = cases.random_case(seed, most_units=16)
    chains = {
        kind: replace(chain, units=tuple(replace(unit, storages=unit.storages[:1]) for unit in chain.units))
        for kind, chain in case.chains.items()
    }
    cpus = [node for node in case.nodes if node.kind == "cpu"]
    return replace(case, chains=chains, nodes=tuple(n for n in case.nodes if n not in cpus[1:]), in_order=False)


def mapped(case: Case) -> Split | None:
    """Return the split of accelerate; None where it leaves units to the disk."""
    units = case.chain(case.nodes[0]).units
    model = torch.nn.Sequential(*(Block(unit.storages[0].bytes) for unit in units))
    gpus = [node for node in case.nodes if node.kind == "gpu"]
    keys = {node: "cpu" if node.kind == "cpu" else gpus.index(node) for node in case.nodes}
    room = {"cpu": 0} | {key: cases.room_bytes(node) for node, key in keys.items()}
    found = accelerate.infer_auto_device_map(model, max_memory=room, no_split_module_classes=["Block"])
    if "disk" in found.values():
        return None
    places = [found.get("", found.get(str(place))) for place in range(len(units))]
    order = list(dict.fromkeys(places))
    assert places == sorted(places, key=order.index), "a device has units that do not follow one another"
    nodes = {key: case.nodes.index(node) for node, key in keys.items()}
    return tuple((nodes[key], places.index(key), places.index(key) + places.count(key)) for key in order)


def test_the_plan_is_never_worse_than_the_map_of_accelerate():
    compared = better = split = 0
    for seed in range(SEEDS):
        case, objective = untied_case(seed), OBJECTIVES[seed % len(OBJECTIVES)]
        theirs = mapped(case)
        chains = {node.name: case.chain(node) for node in case.nodes}
        stand_in = dict(baselines(case.nodes, chains))["greedy by bytes"]
        assert theirs == stand_in, f"seed {seed}: what plans are shown beside is not what accelerate does"
        if theirs is None or not cases.fits(case, theirs):
            continue
        costs = costs_of(case.nodes, chains, case.links, overlap=case.overlap, inputs_in_flight=case.inputs_in_flight)
        mine = optimum(costs, objective, case.requests)
        assert mine is not None and cases.fits(case, mine), seed
        my_rank, their_rank = cases.rank(case, objective, mine), cases.rank(case, objective, theirs)
        assert my_rank <= their_rank, seed
        compared, better, split = compared + 1, better + (my_rank[0] < their_rank[0]), split + (len(theirs) > 1)
    assert compared > 200 and better > 100 and split > 30, (compared, better, split)
