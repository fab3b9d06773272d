"""What a plan is compared with: splits by rules of thumb, and plans with better nodes and links, or with more memory.

`baselines` are splits made without measured times: `equal` by number of units, `by memory` in proportion to the memory
of nodes (as exo does), `greedy by bytes` one node after the other (as the device map of accelerate: GPUs before CPUs,
weights alone, room kept free on the first GPU and on a CPU for the largest unit still to come), and each node alone.
`gains_of` plans again without each limit, `shortfall` says why nothing fits and the least memory that would change it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from boundby.partition.costs import UNREACHABLE, Assignment, Costs, Piece
from boundby.partition.nodes import VirtualNode
from boundby.partition.plan import Gain
from boundby.partition.solver import Goal, Solver, classes_of, least
from boundby.partition.units import Chain

LEAST_GAIN = 1.02  # below, a change is not worth a word


class Infeasible(Exception):
    """No split fits into the nodes. With `extra_bytes` more memory on `node`, and no fewer on any one node, one does.

    `unit` is the first that does not fit into the stage which `node` would have then, `short_bytes` what the stage
    lacks; `extra_by_node` says for every node what it alone would need. The reserve and head-room of a node come off
    what is added to it.
    """

    def __init__(self, node: str, unit: str, short_bytes: int, extra_by_node: dict[str, int]) -> None:
        self.node, self.unit = node, unit
        self.short_bytes, self.extra_bytes = short_bytes, extra_by_node[node]
        self.extra_by_node = extra_by_node
        super().__init__(
            f"no split of the model fits these nodes. The smallest fix is {_gb(self.extra_bytes)} more memory on "
            f"{node}: its stage needs {_gb(short_bytes)} more than is free there, and unit {unit} is the first that "
            "does not fit. Add memory or a node, use a smaller dtype, or keep fewer requests in flight"
        )


def baselines(
    nodes: Sequence[VirtualNode], chains: Mapping[str, Chain], *, in_order: bool = False
) -> Iterator[tuple[str, Assignment | None]]:
    """Yield name and assignment of every split; None where its rule places no unit. It may not fit the nodes.

    `chains` has the units by name of node.
    """
    count = len(chains[nodes[0].name].units)
    yield "equal split", _pieces([count / len(nodes)] * len(nodes), count)
    memory = [node.memory_bytes for node in nodes]
    yield "split by memory", _pieces([count * size / sum(memory) for size in memory], count)
    yield "greedy by bytes", _greedy(nodes, chains, in_order)
    for index, node in enumerate(nodes):
        yield f"{node.name} alone", (Piece(index, 0, count),)


def _pieces(shares: Sequence[float], count: int) -> Assignment:
    """Return whole numbers of units in these proportions, the largest remainders rounded up; nodes may get none."""
    numbers = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda node: numbers[node] - shares[node])
    for node in by_remainder[: count - sum(numbers)]:
        numbers[node] += 1
    pieces, first = [], 0
    for node, number in enumerate(numbers):
        if number:
            pieces.append(Piece(node, first, first + number))
            first += number
    return tuple(pieces)


def _greedy(nodes: Sequence[VirtualNode], chains: Mapping[str, Chain], in_order: bool) -> Assignment | None:
    order = list(range(len(nodes)))
    if not in_order:
        order.sort(key=lambda index: nodes[index].vram_gb is None)
    first_gpu = next((index for index in order if nodes[index].vram_gb is not None), None)
    pieces, first = [], 0
    for index in order:
        units = chains[nodes[index].name].units
        sizes = [sum(storage.bytes for storage in unit.storages) for unit in units]
        is_main = index == first_gpu or nodes[index].vram_gb is None
        end = first
        held: dict[str, int] = {}
        while end < len(units):
            held |= {storage.key: storage.bytes for storage in units[end].storages}
            kept_free = max(sizes[end + 1 :], default=0) if is_main else 0
            if sum(held.values()) + kept_free > nodes[index].usable_bytes:
                break
            end += 1
        if end > first:
            pieces.append(Piece(index, first, end))
            first = end
    return tuple(pieces) if first == len(units) else None


def limits_of(costs: Costs, assignment: Assignment, names: Sequence[str], goal: Goal) -> tuple[str, ...]:
    """Return what the objective is made of, the largest part first: stages and transfers with their shares."""
    is_latency = goal.objective == "latency"
    computing = [stage.alone_ps if is_latency else stage.busy_ps for stage in costs.stages(assignment)]
    parts = [(ps, f"computing on {names[piece.node]}") for ps, piece in zip(computing, assignment, strict=True)]
    for source, target in zip(assignment, assignment[1:], strict=False):
        spent = int(costs.transfer_ps[source.node, target.node, target.first])
        parts.append((spent, f"the link from {names[source.node]} to {names[target.node]}"))
    value = costs.of(assignment)
    whole, of_what = (value.latency_ps, "the latency") if is_latency else (value.period_ps, "the period")
    parts.sort(key=lambda part: -part[0])
    return tuple(f"{text}, {100 * spent / whole if whole else 0:.0f} % of {of_what}" for spent, text in parts)


def gains_of(costs: Costs, assignment: Assignment, nodes: Sequence[VirtualNode], goal: Goal) -> tuple[Gain, ...]:
    """Return the changes that shorten the objective, the best first; of nodes that are alike one is named."""
    before = goal.of(costs.of(assignment))

    def gain(changed: Costs) -> float:
        same = goal.of(changed.of(assignment))  # what this very assignment takes then
        worth = min(same, int(before / LEAST_GAIN) + 1)  # to look for no more than is worth a word is many times faster
        after = least(changed, goal, worth)
        after = same if after is None else after
        return before / after if after else 1.0

    changes = [*_faster_nodes(costs, assignment, nodes)]
    if any(factor > 1 for factor in costs.contention):
        separate = dataclasses.replace(costs, contention=(1.0,) * costs.nodes)
        changes.append(("a machine of its own for each node", separate))
    if gain(dataclasses.replace(costs, usable_bytes=np.full_like(costs.usable_bytes, UNREACHABLE))) >= LEAST_GAIN:
        changes += _larger_nodes(costs, nodes)
    if gain(dataclasses.replace(costs, transfer_ps=np.zeros_like(costs.transfer_ps))) >= LEAST_GAIN:
        changes += _faster_links(costs, assignment, nodes)
    gains = [Gain(change, factor) for change, changed in changes if (factor := gain(changed)) >= LEAST_GAIN]
    return tuple(sorted(gains, key=lambda option: -option.at_most))


def _faster_nodes(costs: Costs, assignment: Assignment, nodes: Sequence[VirtualNode]) -> Iterator[tuple[str, Costs]]:
    for node in sorted({piece.node for piece in assignment}):
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


def shortfall(costs: Costs, chain: Chain, nodes: Sequence[VirtualNode], in_order: bool = False) -> Infeasible:
    """Return what is missing for a split, given that none fits."""
    needs = [_least_on(costs, node, in_order) for node in range(len(nodes))]
    extra = [nodes[index].extra_for(need) for index, (_, need) in enumerate(needs)]
    cheapest = min(range(len(nodes)), key=lambda node: (extra[node], node))
    unit, need = needs[cheapest]
    return Infeasible(
        node=nodes[cheapest].name,
        unit=chain.units[unit].name,
        short_bytes=need - nodes[cheapest].usable_bytes,
        extra_by_node={node.name: more for node, more in zip(nodes, extra, strict=True)},
    )


def _least_on(costs: Costs, node: int, in_order: bool) -> tuple[int, int]:
    """Return the first unit that `node` lacks room for and the bytes it needs, where all others stay as they are.

    With what a stage lacks on `node` in place of time, and nothing for all other stages, the fastest plan is the one
    that lacks the fewest bytes there.
    """
    lacking = np.zeros_like(costs.compute_ps)
    lacking[node] = np.maximum(0, costs.memory_bytes[node] - costs.usable_bytes[node])
    memory = costs.memory_bytes.copy()
    memory[node] = 0
    usable = costs.usable_bytes.copy()
    usable[node] = 0
    asked = dataclasses.replace(
        costs,
        compute_ps=lacking,
        memory_bytes=memory,
        usable_bytes=usable,
        transfer_ps=np.zeros_like(costs.transfer_ps),
    )
    fastest = Solver(asked, in_order).fastest()
    assert fastest is not None, "with enough memory one node holds the whole model"
    piece = next(piece for piece in fastest.assignment if piece.node == node)
    needs = costs.memory_bytes[node, piece.first + 1 : piece.end + 1, piece.first]
    too_much = int(np.argmax(needs > costs.usable_bytes[node]))
    return piece.first + too_much, int(needs[-1])


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3f} GB" if size_bytes >= 1e6 else f"{size_bytes} bytes"
