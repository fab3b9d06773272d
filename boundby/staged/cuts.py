"""Plans for splits that a caller chooses, such as every cut in two: what a planner's choice is held against."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from boundby.partition.costs import PS, Basis, Costs, Piece, costs_of
from boundby.partition.links import Link, Links
from boundby.partition.nodes import VirtualNode
from boundby.partition.objectives import value_of
from boundby.partition.plan import PartitionPlan, Transfer
from boundby.partition.planner import basis_of, stage_of
from boundby.partition.sharing import unknown_contention
from boundby.partition.units import Chain


def every_cut(
    like: PartitionPlan, chains: Mapping[str, Chain], nodes: Sequence[VirtualNode], links: Links | Link
) -> dict[str, PartitionPlan]:
    """Return the plans of every cut in two, by the name of the unit behind the cut."""
    units = _chain(chains, nodes[0]).units
    return {units[cut].name: plan_at([cut], like, chains, nodes, links) for cut in range(1, len(units))}


def plan_at(
    cuts: Sequence[int],
    like: PartitionPlan,
    chains: Mapping[str, Chain],
    nodes: Sequence[VirtualNode],
    links: Links | Link,
) -> PartitionPlan:
    """Return the plan with these cuts: before which units the model goes to the next node. It was not chosen as best.

    Objective, requests and overlap are those of `like`. `chains` has the units by kind of node, as
    `ExecutionPlanner.chains`. Memory is counted and not checked. Raises ValueError for cuts that are not rising, or
    not one for each node but the first.
    """
    links = Links(default=links) if isinstance(links, Link) else links
    by_node = {node.name: _chain(chains, node) for node in nodes}
    edges = [0, *cuts, len(by_node[nodes[0].name].units)]
    if len(cuts) != len(nodes) - 1 or any(after <= before for before, after in zip(edges, edges[1:], strict=False)):
        raise ValueError(f"cuts {list(cuts)} do not split {edges[-1]} units over {len(nodes)} nodes")
    costs = costs_of(nodes, by_node, links, overlap=like.overlap)
    pieces = tuple(Piece(place, edges[place], edges[place + 1]) for place in range(len(nodes)))
    value = costs.of(pieces)
    placed = zip(pieces, nodes, costs.stages(pieces), strict=True)
    stages = tuple(
        stage_of(piece, node, by_node[node.name], spent, basis_of(node, chains), 1) for piece, node, spent in placed
    )
    transfers = tuple(_transfers(by_node, nodes, links, costs, edges))
    basis: Basis = "measured" if all(each.basis == "measured" for each in (*stages, *transfers)) else "assumed"
    return replace(
        like,
        stages=stages,
        transfers=transfers,
        value_s=value_of(like.objective, value, like.requests) / PS,
        latency_s=value.latency_ps / PS,
        period_s=value.period_ps / PS,
        basis=basis,
        period_basis="assumed" if any(unknown_contention(nodes, nodes)) else basis,
        limits=("the cuts were given, not chosen",),
        gains=(),
        alternatives=(),
        notes=(),
    )


def _chain(chains: Mapping[str, Chain], node: VirtualNode) -> Chain:
    if node.kind not in chains:
        raise ValueError(f"node {node.name!r} is a {node.kind}; there are times of {', '.join(sorted(chains))} alone")
    return chains[node.kind]


def _transfers(
    chains: Mapping[str, Chain], nodes: Sequence[VirtualNode], links: Links, costs: Costs, edges: Sequence[int]
) -> Iterator[Transfer]:
    for place, (source, target) in enumerate(zip(nodes, nodes[1:], strict=False)):
        cut = edges[place + 1]
        yield Transfer(
            source=source.name,
            target=target.name,
            size_bytes=chains[source.name].entering_bytes(cut),
            seconds=int(costs.transfer_ps[place, place + 1, cut]) / PS,
            basis="measured" if links.between(source.name, target.name).is_measured else "assumed",
        )
