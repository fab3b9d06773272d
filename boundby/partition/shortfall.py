"""Why no plan fits, and the least memory that would change it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from boundby.partition.costs import Costs
from boundby.partition.nodes import VirtualNode
from boundby.partition.solver import Solver
from boundby.partition.units import Chain


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
            f"no split of the model fits into these nodes. The least that would help: {_gb(self.extra_bytes)} more on "
            f"{node}, whose stage is then {_gb(short_bytes)} larger than what is free there; unit {unit} is the first "
            "that does not fit. Add memory or a node, take a smaller dtype or fewer requests at a time"
        )


def shortfall(costs: Costs, chain: Chain, nodes: Sequence[VirtualNode], *, in_order: bool = False) -> Infeasible:
    """Return what is missing for a split, given that none fits."""
    found = [_least_on(costs, node, in_order) for node in range(len(nodes))]
    extra = [nodes[place].extra_for(need) for place, (_, need) in enumerate(found)]
    place = min(range(len(nodes)), key=lambda each: (extra[each], each))
    unit, need = found[place]
    return Infeasible(
        node=nodes[place].name,
        unit=chain.units[unit].name,
        short_bytes=need - nodes[place].usable_bytes,
        extra_by_node={node.name: each for node, each in zip(nodes, extra, strict=True)},
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
    found = Solver(asked, in_order=in_order).fastest()
    assert found is not None, "with enough memory one node holds the whole model"
    piece = next(each for each in found.assignment if each.node == node)
    needs = costs.memory_bytes[node, piece.first + 1 : piece.end + 1, piece.first]
    too_much = int(np.argmax(needs > costs.usable_bytes[node]))
    return piece.first + too_much, int(needs[-1])


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3f} GB" if size_bytes >= 1e6 else f"{size_bytes} bytes"
