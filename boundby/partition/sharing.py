"""Nodes that share a machine slow one another down: which of them to search together, and what is known of it.

How long a stage of a busy pipeline computes depends on which other nodes the plan uses. So each machine is searched
with all of its nodes, each taken to be slowed, and with each of them alone, not slowed. Every assignment is among
these with exactly what it takes, and never with less, as contention is at least 1: the best of all is the best plan.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from boundby.partition.costs import Costs
from boundby.partition.nodes import VirtualNode
from boundby.partition.states import classes_of

NOT_MEASURED = (
    "{} are on one machine ({}), and how much they slow one another down was not measured: in a busy pipeline they "
    "are taken to be as fast as alone"
)
OTHERS_TOO = (
    "the contention of {} was measured with all {} nodes of {} at work, of which this plan uses {}: list the nodes "
    "alone that it may use"
)


def choices(costs: Costs, *, in_order: bool) -> Iterator[tuple[int, ...]]:
    """Yield sets of nodes that may be used together; one set of all where none slows another down."""
    shared = list(_machines(costs))
    free = set(range(costs.nodes)).difference(*shared)
    ways = [[members, *((node,) for node in _unlike(costs, members, in_order))] for members in shared]
    for chosen in itertools.product(*ways):
        yield tuple(sorted(free.union(*chosen)))


def unknown_contention(used: Sequence[VirtualNode], available: Sequence[VirtualNode]) -> Iterator[str]:
    """Yield why it is not known how much the nodes in use slow one another down; nothing where it is."""
    there = Counter(node.machine_key for node in available)
    for key in dict.fromkeys(node.machine_key for node in used):
        together = [node for node in used if node.machine_key == key]
        if len(together) < 2:
            continue
        names = " and ".join(node.name for node in together)
        if any(node.contention is None for node in together):
            yield NOT_MEASURED.format(names, together[0].machine)
        elif len(together) < there[key]:
            yield OTHERS_TOO.format(names, there[key], together[0].machine, len(together))


def _machines(costs: Costs) -> Iterator[tuple[int, ...]]:
    """Yield the nodes of every machine on which one slows another down."""
    for machine in dict.fromkeys(costs.machines or ()):
        members = tuple(node for node, on in enumerate(costs.machines or ()) if on == machine)
        if len(members) > 1 and any(costs.contention[node] > 1 for node in members):
            yield members


def _unlike(costs: Costs, members: Sequence[int], in_order: bool) -> Iterator[int]:
    """Yield these nodes, of those that can change places the first one."""
    groups = [[node] for node in members] if in_order else classes_of(costs)
    yield from (group[0] for group in groups if group[0] in members)
