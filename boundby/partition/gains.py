"""What limits a plan, and what a better node or link could gain at most: each by planning again without the limit."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from boundby.partition.costs import UNREACHABLE, Assignment, Costs
from boundby.partition.nodes import VirtualNode
from boundby.partition.objectives import Objective, least, value_of
from boundby.partition.plan import Gain
from boundby.partition.solver import classes_of

LEAST_GAIN = 1.02  # below, a change is not worth a word


def limits_of(costs: Costs, assignment: Assignment, names: Sequence[str], objective: Objective) -> tuple[str, ...]:
    """Return what the objective is made of, the largest part first: stages and transfers with their shares."""
    computing = [each.alone_ps if objective == "latency" else each.busy_ps for each in costs.stages(assignment)]
    parts = [(ps, f"computing on {names[each.node]}") for ps, each in zip(computing, assignment, strict=True)]
    for source, target in zip(assignment, assignment[1:], strict=False):
        spent = int(costs.transfer_ps[source.node, target.node, target.first])
        parts.append((spent, f"the link from {names[source.node]} to {names[target.node]}"))
    value = costs.of(assignment)
    whole, of_what = (value.latency_ps, "the latency") if objective == "latency" else (value.period_ps, "the period")
    parts.sort(key=lambda each: -each[0])
    return tuple(f"{text}, {100 * spent / whole if whole else 0:.0f} % of {of_what}" for spent, text in parts)


def gains_of(
    costs: Costs,
    assignment: Assignment,
    nodes: Sequence[VirtualNode],
    objective: Objective,
    requests: int,
    *,
    in_order: bool = False,
) -> tuple[Gain, ...]:
    """Return the changes that shorten the objective, the best first; of nodes that are alike one is named."""
    before = value_of(objective, costs.of(assignment), requests)

    def gain(changed: Costs) -> float:
        same = value_of(objective, changed.of(assignment), requests)  # what this very assignment takes then
        worth = min(same, int(before / LEAST_GAIN) + 1)  # to look for no more than is worth a word is many times faster
        after = least(changed, objective, requests, in_order=in_order, below=worth)
        after = same if after is None else after
        return before / after if after else 1.0

    found = [Gain(change, gain(changed)) for change, changed in _faster_nodes(costs, assignment, nodes)]
    if any(each > 1 for each in costs.contention):
        separate = dataclasses.replace(costs, contention=(1.0,) * costs.nodes)
        found.append(Gain("a machine of its own for each node", gain(separate)))
    unlimited = dataclasses.replace(costs, usable_bytes=np.full_like(costs.usable_bytes, UNREACHABLE))
    if gain(unlimited) >= LEAST_GAIN:
        found += [Gain(change, gain(changed)) for change, changed in _larger_nodes(costs, nodes)]
    unlinked = dataclasses.replace(costs, transfer_ps=np.zeros_like(costs.transfer_ps))
    if gain(unlinked) >= LEAST_GAIN:
        found += [Gain(change, gain(changed)) for change, changed in _faster_links(costs, assignment, nodes)]
    return tuple(sorted((each for each in found if each.at_most >= LEAST_GAIN), key=lambda each: -each.at_most))


def _faster_nodes(costs: Costs, assignment: Assignment, nodes: Sequence[VirtualNode]) -> Iterator[tuple[str, Costs]]:
    for node in sorted({each.node for each in assignment}):
        compute = costs.compute_ps.copy()
        compute[node] //= 2
        yield f"{nodes[node].name} twice as fast", dataclasses.replace(costs, compute_ps=compute)


def _larger_nodes(costs: Costs, nodes: Sequence[VirtualNode]) -> Iterator[tuple[str, Costs]]:
    for node, *_ in classes_of(costs):
        usable = costs.usable_bytes.copy()
        usable[node] = UNREACHABLE
        yield f"more memory on {nodes[node].name}", dataclasses.replace(costs, usable_bytes=usable)


def _faster_links(costs: Costs, assignment: Assignment, nodes: Sequence[VirtualNode]) -> Iterator[tuple[str, Costs]]:
    for source, target in zip(assignment, assignment[1:], strict=False):
        transfer = costs.transfer_ps.copy()
        transfer[source.node, target.node] = transfer[target.node, source.node] = 0
        change = f"a faster link between {nodes[source.node].name} and {nodes[target.node].name}"
        yield change, dataclasses.replace(costs, transfer_ps=transfer)
