"""Splits as others make them, without measured times: what a plan is held against.

`equal` gives every node as many units as the others, `by memory` units in proportion to its memory (as exo does), and
`greedy by bytes` fills one node after the other (as the device map of accelerate does: GPUs before CPUs, weights alone,
room kept free on the first GPU and on a CPU for the largest unit still to come). `one node` is the whole model on the
best one.
"""

from collections.abc import Iterator, Mapping, Sequence

from boundby.partition.costs import Assignment, Piece
from boundby.partition.nodes import VirtualNode
from boundby.partition.units import Chain


def baselines(
    nodes: Sequence[VirtualNode], chains: Mapping[str, Chain], *, in_order: bool = False
) -> Iterator[tuple[str, Assignment | None]]:
    """Yield name and assignment of every split, None where its rule places no unit; it may not fit into the nodes.

    `chains` has the units by name of node.
    """
    count = len(chains[nodes[0].name].units)
    yield "equal split", _pieces([count / len(nodes)] * len(nodes), count)
    memory = [node.memory_bytes for node in nodes]
    yield "split by memory", _pieces([count * each / sum(memory) for each in memory], count)
    yield "greedy by bytes", _greedy(nodes, chains, in_order)
    for place, node in enumerate(nodes):
        yield f"{node.name} alone", (Piece(place, 0, count),)


def _pieces(shares: Sequence[float], count: int) -> Assignment:
    """Return whole numbers of units in these proportions, the largest remainders rounded up; nodes may get none."""
    numbers = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda each: numbers[each] - shares[each])
    for place in by_remainder[: count - sum(numbers)]:
        numbers[place] += 1
    pieces, first = [], 0
    for place, number in enumerate(numbers):
        if number:
            pieces.append(Piece(place, first, first + number))
            first += number
    return tuple(pieces)


def _greedy(nodes: Sequence[VirtualNode], chains: Mapping[str, Chain], in_order: bool) -> Assignment | None:
    order = list(range(len(nodes)))
    if not in_order:
        order.sort(key=lambda place: nodes[place].vram_gb is None)
    first_gpu = next((place for place in order if nodes[place].vram_gb is not None), None)
    pieces, first = [], 0
    for place in order:
        units = chains[nodes[place].name].units
        sizes = [sum(each.bytes for each in unit.storages) for unit in units]
        is_main = place == first_gpu or nodes[place].vram_gb is None
        end, held = first, {}
        while end < len(units):
            held |= {each.key: each.bytes for each in units[end].storages}
            kept_free = max(sizes[end + 1 :], default=0) if is_main else 0
            if sum(held.values()) + kept_free > nodes[place].usable_bytes:
                break
            end += 1
        if end > first:
            pieces.append(Piece(place, first, end))
            first = end
    return tuple(pieces) if first == len(units) else None
