"""`ExecutionPlanner`: profiles and nodes in, the best plan out, with what it was chosen from and what it rests on."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from boundby.partition.baselines import baselines
from boundby.partition.costs import PS, Assignment, Basis, Costs, Piece, StageCosts, costs_of, stage_memory
from boundby.partition.gains import gains_of, limits_of
from boundby.partition.links import Link, Links
from boundby.partition.nodes import VirtualNode
from boundby.partition.objectives import MEANING, Objective, optimum, value_of
from boundby.partition.plan import ORDER_ONLY, TOGETHER_ASSUMED, Alternative, PartitionPlan, Stage, Transfer
from boundby.partition.sharing import unknown_contention
from boundby.partition.shortfall import shortfall
from boundby.partition.units import Chain, units_of

if TYPE_CHECKING:  # the records load no torch, but the package around them may
    from boundby.layers.records import ModelProfile
    from boundby.layers.report import Report

ONE_NODE = (
    "for a single request one node is best here: its stages would only wait for one another, so more nodes help by "
    "their memory alone"
)
ENDS = "bringing a request to the first stage, and the result of the last one back, is not counted"
OVERLAP = "a link carries one request while nodes compute on others (overlap); its queue is taken to be long enough"
CONTENTION = (
    "nodes of one machine slow one another down: the latency of one request is of times alone, the period of times "
    "while all of them compute. It is the longest there can be: who waits slows nobody down"
)
EXCLUSIVE = "a node does not compute while it receives or sends (no overlap)"


class ExecutionPlanner:
    """Plans with the times and sizes of `metrics`: one profile or chain of units, or one for each kind of node.

    A profile is a `ModelProfile`, or the `Report` that an engine returns. A single one is of kind "cpu" or "gpu" by its
    device, unless `kind` says otherwise; for a single `Chain` `kind` is needed. A node whose kind has no profile is
    planned with the first one, and its times are called assumed; so are those of a profile that is not representative.
    `kv_cache_bytes` and `extra_live_bytes` are those of `units_of`; `inputs_in_flight` are the requests for which a
    stage holds the input at the same time.
    """

    def __init__(
        self,
        metrics: "ModelProfile | Report | Chain | Mapping[str, ModelProfile | Report | Chain]",
        *,
        kind: str | None = None,
        kv_cache_bytes: int | Mapping[str, int] = 0,
        extra_live_bytes: int | Mapping[str, int] | None = None,
        inputs_in_flight: int = 1,
    ) -> None:
        given = metrics if isinstance(metrics, Mapping) else {kind or kind_of(metrics): metrics}
        if not given:
            raise ValueError("a plan needs at least one profile")
        if inputs_in_flight < 1:
            raise ValueError(f"inputs_in_flight is {inputs_in_flight}; a stage holds the input of 1 request or more")
        self._inputs = inputs_in_flight
        self.chains = {
            kind: each
            if isinstance(each, Chain)
            else units_of(_profile(each), kv_cache_bytes=kv_cache_bytes, extra_live_bytes=extra_live_bytes)
            for kind, each in given.items()
        }
        _check_alike(self.chains)

    def generate_plan(
        self,
        available_nodes: Sequence[VirtualNode],
        objective: Objective = "latency",
        links: Links | Link | None = None,
        *,
        requests: int = 1,
        overlap: bool = True,
        in_order: bool = False,
    ) -> PartitionPlan:
        """Return the best plan for an objective: "latency", "throughput", or "requests" with their number.

        `links` is one for all pairs of nodes, or those of each pair. With `overlap` links carry while nodes compute.
        `in_order` keeps the order of `available_nodes`; any may be left out. Raises Infeasible where no split fits,
        ValueError for what cannot be planned.
        """
        nodes = tuple(available_nodes)
        _check(nodes, objective, requests)
        if not in_order:  # of equal plans that of the first nodes is taken: those whose times are known come first
            nodes = tuple(sorted(nodes, key=lambda node: basis_of(node, self.chains) == "assumed"))
        links = Links(default=links) if isinstance(links, Link) else links or Links()
        _check_links(links, nodes)
        chains = {node.name: self._chain(node) for node in nodes}
        costs = costs_of(nodes, chains, links, overlap=overlap, inputs_in_flight=self._inputs)
        assignment = optimum(costs, objective, requests, in_order=in_order)
        if assignment is None:
            raise shortfall(costs, chains[nodes[0].name], nodes, in_order=in_order)
        made = _Making(nodes, chains, links, costs, assignment, objective, requests, self._inputs, in_order)
        return made.plan(self.chains)

    def _chain(self, node: VirtualNode) -> Chain:
        return self.chains.get(node.kind) or next(iter(self.chains.values()))


def stage_of(
    piece: Piece, node: VirtualNode, chain: Chain, spent: StageCosts, basis: Basis, inputs_in_flight: int
) -> Stage:
    """Return a piece of the model on its node, with the time and the memory that it takes there."""
    units = chain.units[piece.first : piece.end]
    return Stage(
        node=node.name,
        kind=node.kind,
        first_unit=piece.first,
        end_unit=piece.end,
        units=tuple(unit.name for unit in units),
        layers=tuple(layer for unit in units for layer in unit.layers),
        compute_s=spent.alone_ps / PS,
        busy_compute_s=spent.busy_ps / PS,
        machine=node.machine,
        basis=basis,
        memory=stage_memory(chain, piece.first, piece.end, inputs_in_flight),
        usable_bytes=node.usable_bytes,
        node_memory_bytes=node.memory_bytes,
    )


def basis_of(node: VirtualNode, chains: Mapping[str, Chain]) -> Basis:
    """Return what the times of a node rest on; `chains` has the units by kind of node."""
    is_measured = node.kind in chains and chains[node.kind].is_representative and node.speed is None
    return "measured" if is_measured else "assumed"


def kind_of(metrics: "ModelProfile | Report | Chain") -> str:
    """Return the kind of node that a profile was made on. Raises ValueError for a chain, of which nothing says it."""
    if isinstance(metrics, Chain):
        raise ValueError("say on which kind of node these units were measured: kind='cpu', or a mapping by kind")
    return "cpu" if _profile(metrics).device.startswith("cpu") else "gpu"


def _profile(metrics: "ModelProfile | Report") -> "ModelProfile":
    """Return the profile itself, or that which a report is on."""
    return getattr(metrics, "profile", metrics)


@dataclasses.dataclass(frozen=True)
class _Making:
    """A solved problem on its way to a plan."""

    nodes: tuple[VirtualNode, ...]
    chains: Mapping[str, Chain]  # by name of node
    links: Links
    costs: Costs
    assignment: Assignment
    objective: Objective
    requests: int
    inputs_in_flight: int
    in_order: bool

    def plan(self, by_kind: Mapping[str, Chain]) -> PartitionPlan:
        value = self.costs.of(self.assignment)
        stages, transfers = tuple(self._stages(by_kind)), tuple(self._transfers())
        bases = {each.basis for each in (*stages, *transfers)}
        basis: Basis = "assumed" if "assumed" in bases else "measured"
        period_basis: Basis = "assumed" if any(self._unknown_contention()) else basis
        names = [node.name for node in self.nodes]
        return PartitionPlan(
            objective=self.objective,
            requests=self.requests,
            overlap=self.costs.overlap,
            stages=stages,
            transfers=transfers,
            value_s=value_of(self.objective, value, self.requests) / PS,
            latency_s=value.latency_ps / PS,
            period_s=value.period_ps / PS,
            basis=basis,
            period_basis=period_basis,
            limits=limits_of(self.costs, self.assignment, names, self.objective),
            gains=gains_of(
                self.costs, self.assignment, self.nodes, self.objective, self.requests, in_order=self.in_order
            ),
            alternatives=tuple(self._alternatives()),
            notes=tuple(self._notes(basis, stages)),
            doubts=tuple(self._doubts(by_kind)),
        )

    def _stages(self, by_kind: Mapping[str, Chain]) -> Iterator[Stage]:
        for piece, spent in zip(self.assignment, self.costs.stages(self.assignment), strict=True):
            node = self.nodes[piece.node]
            yield stage_of(piece, node, self.chains[node.name], spent, basis_of(node, by_kind), self.inputs_in_flight)

    def _transfers(self) -> Iterator[Transfer]:
        for before, after in zip(self.assignment, self.assignment[1:], strict=False):
            source, target = self.nodes[before.node].name, self.nodes[after.node].name
            yield Transfer(
                source=source,
                target=target,
                size_bytes=self.chains[source].entering_bytes(after.first),
                seconds=int(self.costs.transfer_ps[before.node, after.node, after.first]) / PS,
                basis="measured" if self.links.between(source, target).is_measured else "assumed",
            )

    def _alternatives(self) -> Iterator[Alternative]:
        for name, assignment in baselines(self.nodes, self.chains, in_order=self.in_order):
            if assignment is None:
                yield Alternative(name, (), None, None, None, "its rule finds no room for all units")
                continue
            units = tuple((self.nodes[each.node].name, each.end - each.first) for each in assignment)
            lacking = [each for each in assignment if not self.costs.fits(each)]
            if lacking:
                short = ", ".join(
                    f"{self.nodes[each.node].name} lacks {self.costs.shortage(each):,} bytes" for each in lacking
                )
                yield Alternative(name, units, None, None, None, f"does not fit: {short}")
                continue
            value = self.costs.of(assignment)
            spent = value_of(self.objective, value, self.requests)
            yield Alternative(name, units, spent / PS, value.latency_ps / PS, value.period_ps / PS)

    def _unknown_contention(self) -> Iterator[str]:
        return unknown_contention([self.nodes[each.node] for each in self.assignment], self.nodes)

    def _notes(self, basis: Basis, stages: Sequence[Stage]) -> Iterator[str]:
        if len(self.nodes) > 1 and len(self.assignment) == 1 and self.objective == "latency":
            yield ONE_NODE
        if len(self.assignment) > 1:
            yield OVERLAP if self.costs.overlap else EXCLUSIVE
            yield ENDS
        if any(each.busy_compute_s > each.compute_s for each in stages):
            yield CONTENTION
        if basis == "assumed":
            yield ORDER_ONLY
        elif any(self._unknown_contention()):
            yield TOGETHER_ASSUMED

    def _doubts(self, by_kind: Mapping[str, Chain]) -> Iterator[str]:
        used = [self.nodes[each.node] for each in self.assignment]
        for node in used:
            if node.kind not in by_kind:
                yield f"there is no profile of a {node.kind}: {node.name} is planned with the times of another kind"
            elif not by_kind[node.kind].is_representative:
                yield f"the profile of a {node.kind} is not representative: the times of {node.name} count as assumed"
            if node.speed is not None:
                yield f"{node.name} is assumed to be {node.speed:g} times as fast as its profile, whatever the layer"
        if any(each.basis == "assumed" for each in self._transfers()):
            yield "the links were stated, not measured"
        yield from self._unknown_contention()
        yield from dict.fromkeys(doubt for node in used for doubt in self.chains[node.name].doubts)


def _check(nodes: Sequence[VirtualNode], objective: str, requests: int) -> None:
    names = [node.name for node in nodes]
    if not names:
        raise ValueError("there is no node to plan for")
    if len(set(names)) < len(names):
        raise ValueError(f"node {next(name for name in names if names.count(name) > 1)!r} is given twice")
    if objective not in MEANING:
        raise ValueError(f"{objective!r} is no objective; choose {', '.join(MEANING)}")
    if requests < 1:
        raise ValueError(f"requests is {requests}; plan for 1 or more")


def _check_links(links: Links, nodes: Sequence[VirtualNode]) -> None:
    known = {node.name for node in nodes}
    for pair in links.pairs:
        if not set(pair) <= known:
            raise ValueError(
                f"the link {pair[0]} - {pair[1]} is of a node that is not there; the nodes are {sorted(known)}"
            )


def _check_alike(chains: Mapping[str, Chain]) -> None:
    (first, expected), *others = ((kind, [unit.name for unit in each.units]) for kind, each in chains.items())
    for kind, found in others:
        if found != expected:
            differing = next((pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]), ("", ""))
            raise ValueError(
                f"the profiles of {first} and {kind} are not of the same model: {len(expected)} and {len(found)} units"
                + (f", {differing[0]!r} against {differing[1]!r}" if differing[0] else "")
            )
