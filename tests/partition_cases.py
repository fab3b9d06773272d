"""Small random splitting problems, and the answers found by trying every split with costs written down a second time.

Nothing here uses the tables or the solver: sizes and times come from the units and nodes, one stage after the other.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from boundby.layers.records import Storage
from boundby.partition import Chain, ExecutionPlanner, Link, Links, PartitionPlan, Unit, VirtualNode
from boundby.partition.costs import Costs, costs_of

Split = tuple[tuple[int, int, int], ...]  # node, first unit, end


@dataclass(frozen=True)
class Case:
    """A problem as a caller states it."""

    nodes: tuple[VirtualNode, ...]
    chains: dict[str, Chain]  # by kind
    links: Links
    requests: int
    in_order: bool
    inputs_in_flight: int

    def chain(self, node: VirtualNode) -> Chain:
        return self.chains[node.kind]

    @property
    def units(self) -> int:
        return len(next(iter(self.chains.values())).units)


def every_split(case: Case) -> Iterator[Split]:
    """Yield every way to cut the units into stages and put these on different nodes."""
    indices = range(len(case.nodes))
    for stages in range(1, min(len(case.nodes), case.units) + 1):
        orders = list(
            itertools.combinations(indices, stages) if case.in_order else itertools.permutations(indices, stages)
        )
        for cuts in itertools.combinations(range(1, case.units), stages - 1):
            edges = [0, *cuts, case.units]
            for order in orders:
                yield tuple((node, edges[index], edges[index + 1]) for index, node in enumerate(order))


def needed_bytes(case: Case, node: VirtualNode, first: int, end: int) -> int:
    """Return what a stage holds: tied weights once."""
    chain = case.chain(node)
    inside = chain.units[first:end]
    weights = {}
    for unit in inside:
        for storage in unit.storages:
            weights[storage.key] = storage.bytes
    entering = chain.input_bytes if first == 0 else chain.units[first - 1].cut_bytes
    peak = sorted(unit.activation_peak_bytes for unit in inside)[-1]
    cache = sum(unit.kv_cache_bytes for unit in inside)
    return sum(weights.values()) + cache + peak + case.inputs_in_flight * entering


def room_bytes(node: VirtualNode, extra: int = 0) -> int:
    """Return what a stage on this node may hold."""
    memory = round((node.vram_gb or node.ram_gb) * 1e9) + extra
    return int(memory * (1 - node.headroom)) - round(node.reserve_gb * 1e9)


def fits(case: Case, split: Split) -> bool:
    return all(needed_bytes(case, case.nodes[n], a, b) <= room_bytes(case.nodes[n]) for n, a, b in split)


def parts(case: Case, split: Split) -> tuple[list[int], list[int]]:
    """Return the picoseconds of every stage and of every transfer between two."""
    stages = []
    for index, first, end in split:
        node = case.nodes[index]
        stages.append(
            sum(round(unit.seconds / (node.speed or 1.0) * 1e12) for unit in case.chain(node).units[first:end])
        )
    carried = []
    for (before, _, cut), (after, _, _) in itertools.pairwise(split):
        source, target = case.nodes[before], case.nodes[after]
        known = case.links.pairs
        link = known.get((source.name, target.name)) or known.get((target.name, source.name)) or case.links.default
        size = case.chain(source).units[cut - 1].cut_bytes
        carried.append(round((link.latency_s + size / link.bytes_per_s) * 1e12))
    return stages, carried


def slowed(case: Case, split: Split, stages: Sequence[int]) -> list[int]:
    """Return the picoseconds of every stage while those of the split that are on the same machine compute too."""
    nodes = [case.nodes[index] for index, _, _ in split]
    machines = [node.machine for node in nodes]
    factors = [(node.contention or 1.0) if node.machine and machines.count(node.machine) > 1 else 1.0 for node in nodes]
    return [round(spent * factor) for spent, factor in zip(stages, factors, strict=True)]


def taken(case: Case, split: Split) -> tuple[int, int, int]:
    """Return the latency, the period and the transfers of a split in picoseconds."""
    stages, carried = parts(case, split)
    return sum(stages) + sum(carried), max(slowed(case, split, stages) + carried), sum(carried)


def best(case: Case, objective: str) -> tuple[int, ...] | None:
    """Return the rank that no split beats; None where none fits."""
    return min((rank(case, objective, split) for split in every_split(case) if fits(case, split)), default=None)


def rank(case: Case, objective: str, split: Split) -> tuple[int, ...]:
    """Return what splits are compared by: the objective, the other one, the stages, the transfers."""
    latency, period, carried = taken(case, split)
    is_one = objective == "latency" or (objective == "requests" and case.requests == 1)
    many = latency + (case.requests - 1) * period
    value = {"latency": latency, "throughput": period, "requests": many}[objective]
    return value, period if is_one else latency, len(split), carried


def least_extra(case: Case, node: int) -> int:
    """Return the fewest bytes that this node must gain so that a split fits."""
    needs = []
    for split in every_split(case):
        others = [piece for piece in split if piece[0] != node]
        mine = [piece for piece in split if piece[0] == node]
        if mine and fits(case, tuple(others)):
            needs.append(needed_bytes(case, case.nodes[node], *mine[0][1:]))
    low, high = 0, 4 * 10**9
    while low < high:
        middle = (low + high) // 2
        if room_bytes(case.nodes[node], middle) >= min(needs):
            high = middle
        else:
            low = middle + 1
    return low


def tables(case: Case) -> Costs:
    """Return the planner's tables of a problem."""
    chains = {node.name: case.chain(node) for node in case.nodes}
    return costs_of(case.nodes, chains, case.links, inputs_in_flight=case.inputs_in_flight)


def random_case(seed: int, most_units: int = 6) -> Case:
    """Return a problem: some with tied weights, caches, alike nodes, a fixed order, scarce memory, equal times."""
    chance = random.Random(seed)
    count = chance.randint(1, most_units)
    kinds = ["gpu", "cpu"][: chance.randint(1, 2)]
    coarse = chance.random() < 0.5  # few different times, so that many splits are equally good
    first = _chain(chance, count, coarse)
    chains = {kinds[0]: first}
    for kind in kinds[1:]:
        slower = [_seconds(chance, coarse) for _ in range(count)]
        units = tuple(replace(unit, seconds=seconds) for unit, seconds in zip(first.units, slower, strict=True))
        chains[kind] = replace(first, units=units)
    nodes = _nodes(chance, kinds, first)
    return Case(
        nodes=nodes,
        chains=chains,
        links=_links(chance, nodes, coarse),
        requests=chance.choice([1, 2, 3, 7, 40]),
        in_order=chance.random() < 0.25,
        inputs_in_flight=chance.choice([1, 1, 2]),
    )


def shared_case(seed: int) -> Case:
    """Return a random problem of two nodes or more, of which some share a machine and slow one another down."""
    chance = random.Random(-1 - seed)
    case = next(made for made in map(random_case, itertools.count(10**6 + 100 * seed)) if len(made.nodes) > 1)
    factors = chance.choice([[1.25], [1.0, 1.1, 2.5], [None, 1.5, 1.7]])
    nodes = []
    for node in case.nodes:
        machine = chance.choice(["x", "x", "x", "y", None])
        nodes.append(replace(node, machine=machine, contention=None if machine is None else chance.choice(factors)))
    return replace(case, nodes=tuple(nodes))


def _chain(chance: random.Random, count: int, coarse: bool) -> Chain:
    own = [[Storage(f"w{unit}", _size(chance), True)] for unit in range(count)]
    for tie in range(chance.choice([0, 0, 1, 2])):
        shared = Storage(f"tied{tie}", _size(chance), True)
        for unit in chance.sample(range(count), min(count, 2)):
            own[unit].append(shared)
    has_cache = chance.random() < 0.4
    units = tuple(
        Unit(
            name=f"h.{index}",
            seconds=_seconds(chance, coarse),
            storages=tuple(storages),
            cut_bytes=_size(chance) // 10,
            activation_peak_bytes=_size(chance) // 3,
            kv_cache_bytes=_size(chance) // 2 if has_cache else 0,
            layers=(f"h.{index}",),
        )
        for index, storages in enumerate(own)
    )
    return Chain(units, input_bytes=_size(chance) // 10)


def _nodes(chance: random.Random, kinds: Sequence[str], chain: Chain) -> tuple[VirtualNode, ...]:
    whole = sum(storage.bytes for unit in chain.units for storage in unit.storages) / 1e9
    nodes: list[VirtualNode] = []
    for index in range(chance.choice([1, 2, 3, 3, 4])):
        if nodes and chance.random() < 0.4:
            nodes.append(replace(nodes[-1], name=f"n{index}"))
            continue
        kind = chance.choice(kinds)
        memory = round(whole * chance.choice([0.4, 0.7, 1.0, 2.0, 5.0]), 9)
        nodes.append(
            VirtualNode(
                f"n{index}",
                kind,
                vram_gb=memory if kind == "gpu" else None,
                ram_gb=memory if kind == "cpu" else None,
                speed=chance.choice([None, None, 0.5, 3.0]),
                reserve_gb=chance.choice([0.0, 0.0, round(whole * 0.05, 9)]),
                headroom=chance.choice([0.0, 0.1, 0.25]),
            )
        )
    return tuple(nodes)


def _links(chance: random.Random, nodes: Sequence[VirtualNode], coarse: bool) -> Links:
    def link() -> Link:
        rates = [1e8, float("inf"), float("inf")] if coarse else [chance.uniform(1e7, 1e10)]
        return Link(chance.choice(rates), chance.choice([0.0, 1e-3]))

    names = [node.name for node in nodes]
    chosen = [pair for pair in itertools.permutations(names, 2) if chance.random() < 0.2]
    return Links(default=link(), pairs={pair: link() for pair in chosen})


def _size(chance: random.Random) -> int:
    return chance.choice([10**6, chance.randint(1, 5 * 10**6), 4 * 10**6])


def _seconds(chance: random.Random, coarse: bool) -> float:
    return chance.randint(0, 3) / 1000 if coarse else chance.uniform(1e-5, 1e-2)


UNITS = {  # of the small models in tests/layer_models.py
    "gpt2": [f"transformer.{name}" for name in ("wte", "wpe", "drop", "h.0", "h.1", "ln_f")] + ["lm_head"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "dropout", "classifier"],
    "qwen2": [f"model.{name}" for name in ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")] + ["lm_head"],
    "resnet": ["resnet.embedder", "resnet.encoder.stages.0", "resnet.encoder.stages.1", "resnet.pooler", "classifier"],
    "encoder": ["layers.0", "layers.1"],
}


def plan_of(units: Sequence[str], *cuts: int, seconds: Sequence[float] = (), **options: Any) -> PartitionPlan:
    """Return a plan with a CPU for every part between the cuts; links cost nothing unless `links` says so."""
    given = zip(units, seconds or [1e-3] * len(units), strict=True)
    chain = Chain(tuple(Unit(name, spent, cut_bytes=100, layers=(name,)) for name, spent in given))
    nodes = [VirtualNode(f"node_{index}", "cpu", ram_gb=1) for index in range(len(cuts) + 1)]
    links = options.pop("links", Link(float("inf")))
    return ExecutionPlanner(chain, kind="cpu").plan_at(cuts, nodes, "throughput", links, **options)
