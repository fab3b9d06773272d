"""`ExecutionPlanner`: profiles and nodes in, the best plan out, with what it was chosen from and what it rests on."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from boundby.layers import ModelProfile, Report
from boundby.partition.alternatives import baselines, gains_of, limits_of, shortfall
from boundby.partition.costs import PS, Assignment, Basis, Costs, Piece, costs_of, stage_memory
from boundby.partition.nodes import Link, Links, VirtualNode, check_names, unknown_contention
from boundby.partition.plan import (
    ORDER_ONLY,
    TOGETHER_ASSUMED,
    Alternative,
    PartitionPlan,
    Stage,
    Transfer,
    largest_batch,
    no_throughput,
)
from boundby.partition.solver import MEANING, Goal, Objective, optimum
from boundby.partition.units import Chain, units_of

ONE_NODE = (
    "one node is fastest for a single request: stages on several nodes would only wait for one another. More nodes "
    "help only with their memory"
)
ENDS = "sending a request to the first stage and the result back from the last one is not counted"
OVERLAP = "links transfer while nodes compute, and their queues are assumed to be long enough"
CONTENTION = (
    "nodes of one machine slow one another down. The latency of one request is made of times alone, the period of "
    "times while all of them compute. The period is an upper bound: a stage that waits slows nobody down"
)


class ExecutionPlanner:
    """Plans with the times and sizes of `metrics`: a profile, report or chain of units, or one for each kind of node.

    A single profile is of kind "cpu" or "gpu" by its device unless `kind` says otherwise; a `Chain` needs `kind`. Nodes
    whose kind has no profile are planned with the first one, and their times are assumed, as those of a profile that is
    not representative. A stage holds the inputs of `inputs_in_flight` requests; other arguments are as in `units_of`.
    """

    def __init__(
        self,
        metrics: ModelProfile | Report | Chain | Mapping[str, ModelProfile | Report | Chain],
        *,
        kind: str | None = None,
        kv_cache_bytes: int | Mapping[str, int] = 0,
        extra_live_bytes: int | Mapping[str, int] | None = None,
        inputs_in_flight: int = 1,
        kv_cache_tokens: int = 0,
        batch_size: int | None = None,
    ) -> None:
        given = metrics if isinstance(metrics, Mapping) else {kind or kind_of(metrics): metrics}
        if not given:
            raise ValueError("a plan needs at least one profile")
        if inputs_in_flight < 1:
            raise ValueError(f"inputs_in_flight is {inputs_in_flight}; a stage holds the input of 1 request or more")
        self._inputs = inputs_in_flight
        self.chains = {
            kind: source
            if isinstance(source, Chain)
            else units_of(
                _profile(source),
                kv_cache_bytes=kv_cache_bytes,
                extra_live_bytes=extra_live_bytes,
                kv_cache_tokens=kv_cache_tokens,
                batch_size=batch_size,
            )
            for kind, source in given.items()
        }
        _check_alike(self.chains)

    def generate_plan(
        self,
        available_nodes: Sequence[VirtualNode],
        objective: Objective = "latency",
        links: Links | Link | None = None,
        *,
        requests: int = 1,
        in_order: bool = False,
    ) -> PartitionPlan:
        """Return the best plan for an objective: "latency", "throughput", or "requests" with their number.

        `links` is one for all pairs of nodes, or those of each pair. With `in_order` stages follow `available_nodes`,
        of which any may be left out. Raises Infeasible where no split fits, ValueError for what cannot be planned.
        """
        nodes = tuple(available_nodes)
        goal = _goal(objective, requests, in_order)
        if not in_order:  # of equal plans that of the first nodes is taken: those whose times are known come first
            nodes = tuple(sorted(nodes, key=lambda node: basis_of(node, self.chains) == "assumed"))
        problem = self._problem(nodes, links, goal)
        assignment = optimum(problem.costs, goal)
        if assignment is None:
            raise shortfall(problem.costs, problem.chains[nodes[0].name], nodes, in_order)
        gains = gains_of(problem.costs, assignment, nodes, goal)
        alternatives = tuple(problem.alternatives())
        return msgspec.structs.replace(problem.plan(assignment), gains=gains, alternatives=alternatives)

    def plan_at(
        self,
        cuts: Sequence[int],
        nodes: Sequence[VirtualNode],
        objective: Objective = "latency",
        links: Links | Link | None = None,
        *,
        requests: int = 1,
    ) -> PartitionPlan:
        """Return the plan that moves on to the next of all `nodes` before each of these units.

        It was not chosen as best, and says no gains and alternatives. Memory is counted and not checked. Raises
        ValueError for cuts that are not rising, or not one for each node but the first.
        """
        problem = self._problem(tuple(nodes), links, _goal(objective, requests, in_order=True))
        edges = [0, *cuts, problem.costs.units]
        if len(cuts) != len(nodes) - 1 or any(after <= before for before, after in itertools.pairwise(edges)):
            raise ValueError(f"cuts {list(cuts)} do not split {edges[-1]} units over {len(nodes)} nodes")
        return problem.plan(tuple(Piece(index, *edge) for index, edge in enumerate(itertools.pairwise(edges))))

    def _problem(self, nodes: tuple[VirtualNode, ...], links: Links | Link | None, goal: Goal) -> "_Problem":
        if not nodes:
            raise ValueError("there is no node to plan for")
        links = Links(default=links) if isinstance(links, Link) else links or Links()
        check_names(nodes, links)
        chains = {node.name: self.chains.get(node.kind) or next(iter(self.chains.values())) for node in nodes}
        costs = costs_of(nodes, chains, links, inputs_in_flight=self._inputs)
        return _Problem(nodes, self.chains, chains, links, costs, goal, self._inputs)


def basis_of(node: VirtualNode, chains: Mapping[str, Chain]) -> Basis:
    """Return what the times of a node rest on; `chains` has the units by kind of node."""
    chain = chains.get(node.kind)
    is_measured = chain is not None and chain.is_representative and chain.is_of_its_batch and node.speed is None
    return "measured" if is_measured else "assumed"


def kind_of(metrics: ModelProfile | Report | Chain) -> str:
    """Return the kind of node that a profile was made on. Raises ValueError for a chain, of which nothing says it."""
    if isinstance(metrics, Chain):
        raise ValueError("say on which kind of node these units were measured: kind='cpu', or a mapping by kind")
    return "cpu" if _profile(metrics).device.startswith("cpu") else "gpu"


def _profile(metrics: ModelProfile | Report) -> ModelProfile:
    """Return the profile itself, or the one in a report. Raises TypeError for anything else, such as a path."""
    if not isinstance(metrics, ModelProfile | Report):
        raise TypeError(
            f"a plan needs a ModelProfile, a Report or a Chain, {metrics!r} is of type {type(metrics).__name__}; "
            "boundby.layers.report.read_profile reads a *_summary.json"
        )
    return metrics.profile if isinstance(metrics, Report) else metrics


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What is to be planned, and the plan that an assignment is."""

    nodes: tuple[VirtualNode, ...]
    by_kind: Mapping[str, Chain]
    chains: Mapping[str, Chain]  # by name of node
    links: Links
    costs: Costs
    goal: Goal
    inputs_in_flight: int

    def plan(self, assignment: Assignment) -> PartitionPlan:
        """Return the plan, without gains and alternatives."""
        value = self.costs.of(assignment)
        used = [self.nodes[piece.node] for piece in assignment]
        stages, transfers = tuple(self._stages(assignment)), tuple(self._transfers(assignment))
        bases: set[Basis] = {stage.basis for stage in stages} | {transfer.basis for transfer in transfers}
        basis: Basis = "assumed" if "assumed" in bases else "measured"
        unknown = list(unknown_contention(used, self.nodes))
        period_basis: Basis = "assumed" if unknown else basis
        period_s, batch_size = value.period_ps / PS, self.chains[used[0].name].batch_size
        reason = no_throughput(basis, period_basis, period_s)
        of_profiles = [doubt for node in used for doubt in self.chains[node.name].doubts]
        return PartitionPlan(
            objective=self.goal.objective,
            requests=self.goal.requests,
            stages=stages,
            transfers=transfers,
            value_s=self.goal.of(value) / PS,
            latency_s=value.latency_ps / PS,
            period_s=period_s,
            basis=basis,
            period_basis=period_basis,
            requests_per_s=None if reason else 1 / period_s,
            requests_per_s_reason=reason,
            limits=limits_of(self.costs, assignment, [node.name for node in self.nodes], self.goal),
            notes=tuple(self._notes(basis, stages, is_known=not unknown)),
            doubts=(*self._plan_doubts(used, transfers), *unknown, *dict.fromkeys(of_profiles)),
            batch_size=batch_size,
            largest_batch=largest_batch(stages, batch_size),
        )

    def alternatives(self) -> Iterator[Alternative]:
        """Yield what the splits of others would take."""
        for name, assignment in baselines(self.nodes, self.chains, in_order=self.goal.in_order):
            if assignment is None:
                yield Alternative(name, (), None, None, None, "its rule finds no room for all units")
                continue
            units = tuple((self.nodes[piece.node].name, piece.end - piece.first) for piece in assignment)
            lacking = [(self.nodes[piece.node].name, self.costs.shortage(piece)) for piece in assignment]
            short = ", ".join(f"{node} lacks {missing:,} bytes" for node, missing in lacking if missing)
            if short:
                yield Alternative(name, units, None, None, None, f"does not fit: {short}")
                continue
            value = self.costs.of(assignment)
            yield Alternative(name, units, self.goal.of(value) / PS, value.latency_ps / PS, value.period_ps / PS)

    def _stages(self, assignment: Assignment) -> Iterator[Stage]:
        for piece, spent in zip(assignment, self.costs.stages(assignment), strict=True):
            node = self.nodes[piece.node]
            chain = self.chains[node.name]
            units = chain.units[piece.first : piece.end]
            yield Stage(
                node=node.name,
                kind=node.kind,
                first_unit=piece.first,
                end_unit=piece.end,
                units=tuple(unit.name for unit in units),
                layers=tuple(layer for unit in units for layer in unit.layers),
                compute_s=spent.alone_ps / PS,
                busy_compute_s=spent.busy_ps / PS,
                machine=node.machine,
                basis=basis_of(node, self.by_kind),
                memory_bytes=stage_memory(chain, piece, node.usable_bytes, self.inputs_in_flight),
                usable_bytes=node.usable_bytes,
                node_memory_bytes=node.memory_bytes,
                on_gpu=node.vram_gb is not None,
            )

    def _transfers(self, assignment: Assignment) -> Iterator[Transfer]:
        for before, after in itertools.pairwise(assignment):
            source, target = self.nodes[before.node].name, self.nodes[after.node].name
            yield Transfer(
                source=source,
                target=target,
                size_bytes=self.chains[source].entering_bytes(after.first),
                seconds=int(self.costs.transfer_ps[before.node, after.node, after.first]) / PS,
                basis="measured" if self.links.between(source, target).is_measured else "assumed",
            )

    def _notes(self, basis: Basis, stages: Sequence[Stage], *, is_known: bool) -> Iterator[str]:
        if len(self.nodes) > 1 and len(stages) == 1 and self.goal.objective == "latency":
            yield ONE_NODE
        if len(stages) > 1:
            yield OVERLAP
            yield ENDS
        if any(stage.busy_compute_s > stage.compute_s for stage in stages):
            yield CONTENTION
        if basis == "assumed":
            yield ORDER_ONLY
        elif not is_known:
            yield TOGETHER_ASSUMED

    def _plan_doubts(self, used: Sequence[VirtualNode], transfers: Sequence[Transfer]) -> Iterator[str]:
        for node in used:
            if node.kind not in self.by_kind:
                yield f"there is no profile of a {node.kind}: {node.name} is planned with the times of another kind"
            elif not self.by_kind[node.kind].is_representative:
                yield f"the profile of a {node.kind} is not representative: the times of {node.name} count as assumed"
            if node.speed is not None:
                yield f"{node.name} is assumed to be {node.speed:g} times as fast as its profile, whatever the layer"
        if any(transfer.basis == "assumed" for transfer in transfers):
            yield "the links were stated, not measured"


def _goal(objective: Objective, requests: int, in_order: bool) -> Goal:
    """Return the goal. Raises ValueError for one that is none."""
    if objective not in MEANING:
        raise ValueError(f"{objective!r} is no objective; choose {', '.join(MEANING)}")
    if requests < 1:
        raise ValueError(f"requests is {requests}; plan for 1 or more")
    return Goal(objective, requests, in_order)


def _check_alike(chains: Mapping[str, Chain]) -> None:
    (first, expected), *others = ((kind, [unit.name for unit in chain.units]) for kind, chain in chains.items())
    for kind, names in others:
        if names != expected:
            differing = next((pair for pair in zip(expected, names, strict=False) if pair[0] != pair[1]), ("", ""))
            raise ValueError(
                f"the profiles of {first} and {kind} are not of the same model: {len(expected)} and {len(names)} units"
                + (f", {differing[0]!r} against {differing[1]!r}" if differing[0] else "")
            )
