"""Plan, measure how much the stages of that plan slow one another down, and plan again. Loads no torch.

Contention depends on the work, and a plan says what work each node has. So it is measured with the stages of a plan,
and a plan that is made with it has to be the same one, or is measured in its turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from boundby.partition.nodes import VirtualNode
from boundby.partition.plan import PartitionPlan
from boundby.staged.records import Contention

MOST_TURNS = 3
NOT_SETTLED = "contention was measured with other stages than these: the plan still changed after measuring {} times"


@dataclass(frozen=True)
class Turn:
    """A plan, and the contention of its own stages."""

    plan: PartitionPlan
    contention: tuple[Contention, ...]


@dataclass(frozen=True)
class Settled:
    """A plan with measured contention, its nodes, and how it came to be.

    What is doubtful about the contention measured last is among the doubts of the plan, and whether it did not settle.
    """

    plan: PartitionPlan
    nodes: tuple[VirtualNode, ...]
    turns: tuple[Turn, ...]
    is_settled: bool


def settle(
    plan: Callable[[Sequence[VirtualNode]], PartitionPlan],
    measure: Callable[[PartitionPlan], Sequence[Contention]],
    nodes: Sequence[VirtualNode],
    most_turns: int = MOST_TURNS,
) -> Settled:
    """Return the plan that stays the same when the contention of its own stages is known.

    `plan` gives the plan for nodes, such as `ExecutionPlanner.generate_plan`; `measure` the contention of a plan, such
    as `contention_of`. A plan of which no two stages are on one machine has none. What was emulated is not taken.
    """
    made, known, turns = plan(nodes), tuple(nodes), []
    is_settled = not _shares_a_machine(made)
    while not is_settled and len(turns) < most_turns:
        turns.append(Turn(made, tuple(measure(made))))
        known = with_contention(known, turns[-1].contention)
        before, made = made, plan(known)
        is_settled = not _shares_a_machine(made) or _split(made) == _split(before)
    doubts = [doubt for turn in turns[-1:] for each in turn.contention for doubt in each.doubts]
    if not is_settled:
        doubts.append(NOT_SETTLED.format(most_turns))
    made = replace(made, doubts=tuple(dict.fromkeys((*made.doubts, *doubts))))
    return Settled(made, known, tuple(turns), is_settled)


def with_contention(nodes: Sequence[VirtualNode], found: Sequence[Contention]) -> tuple[VirtualNode, ...]:
    """Return the nodes with the contention that was measured; the others as they are."""
    factors = {each.node: each.factor for each in found if each.label == "measured"}
    return tuple(replace(node, contention=factors.get(node.name, node.contention)) for node in nodes)


def _shares_a_machine(plan: PartitionPlan) -> bool:
    machines = [each.machine for each in plan.stages if each.machine is not None]
    return len(set(machines)) < len(machines)


def _split(plan: PartitionPlan) -> list[tuple[str, int, int]]:
    return [(each.node, each.first_unit, each.end_unit) for each in plan.stages]
