"""Tables of what every possible stage costs on every node: integers, so that sums and ties are exact.

A stage is a range of units [first, end) on one node. It needs
    unique parameters and buffers + KV cache + the largest activation peak + inputs in flight  <=  usable memory,
where a tied weight counts once in each stage that uses it. Times are picoseconds.

`compute_ps` is a stage while no other computes, `busy_ps` while the other nodes of its machine compute too; their
ratio, the contention of the node, is the same for all units. Latency is made of the first, the period of the second.
The period is an upper bound: where a stage waits, the others have the machine to themselves. m requests are taken to
meet the latency once and the period m - 1 times. So a stage costs what its node and units cost, and an optimum can be
found exactly; `simulation` has neither simplification.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from boundby.partition.nodes import Links, VirtualNode
from boundby.partition.units import Chain

PS = 10**12  # per second
UNREACHABLE = 1 << 60  # picoseconds or bytes: more than anything, and four of them still fit in 64 bits

Basis = Literal["measured", "assumed"]
Integers: TypeAlias = NDArray[np.int64]


class Piece(NamedTuple):
    """One stage of an assignment: units `first` to `end` - 1 on the node at this place."""

    node: int
    first: int
    end: int


Assignment = tuple[Piece, ...]


class Value(NamedTuple):
    """What an assignment takes, in picoseconds: one request, the time between two of many, and its transfers."""

    latency_ps: int
    period_ps: int
    transfer_ps: int


class StageCosts(NamedTuple):
    """What a stage of an assignment computes, in picoseconds: with one request in the pipeline, and with many."""

    alone_ps: int
    busy_ps: int


class StageMemory(msgspec.Struct, frozen=True):
    """What a stage holds, in bytes, and what is then free of what it may use; below 0 where it does not fit."""

    weights: int  # parameters and buffers, each storage once
    kv_cache: int
    activations: int
    inputs_in_flight: int
    total: int
    free: int


@dataclass(frozen=True)
class Costs:
    """The tables. `compute_ps` and `memory_bytes` by node, end and first unit; `transfer_ps` by source, target, cut.

    `contention` says for each node how many times as long it computes while other nodes of its machine do, and
    `machines` which nodes are on one; with None every node is slowed, whichever others an assignment uses.
    """

    compute_ps: Integers
    memory_bytes: Integers
    usable_bytes: Integers
    transfer_ps: Integers
    contention: tuple[float, ...]
    machines: tuple[str, ...] | None

    @property
    def units(self) -> int:
        """How many units there are."""
        return int(self.compute_ps.shape[1]) - 1

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return int(self.compute_ps.shape[0])

    @cached_property
    def busy_ps(self) -> Integers:
        """Return `compute_ps` while every node that has others on its machine is slowed by them."""
        return _slowed(self.compute_ps, np.array(self._contention_among(range(self.nodes)))[:, None, None])

    def only(self, nodes: Sequence[int]) -> "Costs":
        """Return the tables of these nodes, as if there were no others, and as if all of them were used."""
        kept = list(nodes)
        return dataclasses.replace(
            self,
            compute_ps=self.compute_ps[kept],
            memory_bytes=self.memory_bytes[kept],
            usable_bytes=self.usable_bytes[kept],
            transfer_ps=self.transfer_ps[np.ix_(kept, kept)],
            contention=self._contention_among(kept),
            machines=None,
        )

    def contend_alike(self, a: int, b: int) -> bool:
        """Tell whether two nodes can be swapped without changing which nodes slow which."""
        if self.contention[a] != self.contention[b]:
            return False
        return self.contention[a] == 1 or self.machines is None or self.machines[a] == self.machines[b]

    def shortage(self, piece: Piece) -> int:
        """Return the bytes that the node lacks to hold these units, 0 where they fit."""
        missing = self.memory_bytes[piece.node, piece.end, piece.first] - self.usable_bytes[piece.node]
        return max(0, int(missing))

    def of(self, assignment: Assignment) -> Value:
        """Return what an assignment takes, whether it fits or not."""
        stages = self.stages(assignment)
        carried = [
            int(self.transfer_ps[source.node, target.node, target.first])
            for source, target in zip(assignment, assignment[1:], strict=False)
        ]
        period = max(*(stage.busy_ps for stage in stages), *carried, 0)
        return Value(sum(stage.alone_ps for stage in stages) + sum(carried), period, sum(carried))

    def stages(self, assignment: Assignment) -> list[StageCosts]:
        """Return what each stage of an assignment computes; nodes that it does not use slow no other one down."""
        contention = self._contention_among([piece.node for piece in assignment])
        alone = [int(self.compute_ps[piece.node, piece.end, piece.first]) for piece in assignment]
        busy = _slowed(np.array(alone), np.array(contention))
        return [StageCosts(ps, int(slowed)) for ps, slowed in zip(alone, busy, strict=True)]

    def _contention_among(self, nodes: Sequence[int]) -> tuple[float, ...]:
        """Return how many times as long each of these nodes computes while the others of them do."""
        if self.machines is None:
            return tuple(self.contention[node] for node in nodes)
        used = Counter(self.machines[node] for node in nodes)
        return tuple(self.contention[node] if used[self.machines[node]] > 1 else 1.0 for node in nodes)


def costs_of(
    nodes: Sequence[VirtualNode],
    chains: Mapping[str, Chain],
    links: Links,
    *,
    inputs_in_flight: int = 1,
) -> Costs:
    """Return the tables for these nodes; `chains` has the units by name of node, equally many for each."""
    memory = {name: memory_table(chain, inputs_in_flight) for name, chain in chains.items()}
    machines = [node.machine_key for node in nodes]
    return Costs(
        compute_ps=np.stack([_compute(chains[node.name], node.speed or 1.0) for node in nodes]),
        memory_bytes=np.stack([memory[node.name] for node in nodes]),
        usable_bytes=np.array([node.usable_bytes for node in nodes], dtype=np.int64),
        transfer_ps=np.stack([[_transfers(chains[a.name], links, a.name, b.name) for b in nodes] for a in nodes]),
        contention=tuple(node.contention or 1.0 if machines.count(node.machine_key) > 1 else 1.0 for node in nodes),
        machines=tuple(machines),
    )


def stage_memory(chain: Chain, piece: Piece, usable_bytes: int, inputs_in_flight: int) -> StageMemory:
    """Return what the units of a piece need on one node."""
    units = chain.units[piece.first : piece.end]
    parts = (
        sum({storage.key: storage.bytes for unit in units for storage in unit.storages}.values()),
        sum(unit.kv_cache_bytes for unit in units),
        max(unit.activation_peak_bytes for unit in units),
        inputs_in_flight * chain.entering_bytes(piece.first),
    )
    return StageMemory(*parts, total=sum(parts), free=usable_bytes - sum(parts))


def memory_table(chain: Chain, inputs_in_flight: int) -> Integers:
    """Return the bytes that the units [first, end) need at [end, first]; 0 where end <= first."""
    count = len(chain.units)
    table = np.zeros((count + 1, count + 1), dtype=np.int64)
    last_user: dict[str, int] = {}
    for index, unit in enumerate(chain.units):
        for storage in unit.storages:  # new to every stage that begins behind the unit that used it before
            begin = last_user.get(storage.key, -1) + 1
            table[index + 1, begin : index + 1] += storage.bytes
            last_user[storage.key] = index
        table[index + 1, : index + 1] += unit.kv_cache_bytes
    table = np.cumsum(table, axis=0)
    peaks = np.zeros_like(table)
    for end in range(1, count + 1):
        peaks[end, :end] = np.maximum(peaks[end - 1, :end], chain.units[end - 1].activation_peak_bytes)
    entering = np.array([chain.entering_bytes(first) for first in range(count)] + [0], dtype=np.int64)
    return np.tril(table + peaks + inputs_in_flight * entering, -1)


def picoseconds(seconds: float) -> int:
    """Return a time as the integer that the tables hold. Raises ValueError where it is none."""
    if not 0 <= seconds < UNREACHABLE / PS / 1e3:
        raise ValueError(f"{seconds} s is no time that can be planned with")
    return round(seconds * PS)


def _slowed(ps: Integers, contention: NDArray[np.float64]) -> Integers:
    slowed: Integers = np.minimum(np.rint(ps * contention), UNREACHABLE).astype(np.int64)
    return slowed


def _compute(chain: Chain, speed: float) -> Integers:
    spent = np.array([picoseconds(unit.seconds / speed) for unit in chain.units], dtype=np.int64)
    until = np.concatenate([[0], np.cumsum(spent)])
    return np.tril(until[:, None] - until[None, :], -1)


def _transfers(chain: Chain, links: Links, source: str, target: str) -> Integers:
    """Return what the cut before each unit takes from `source` to `target`; there is none before the first unit."""
    if source == target:
        return np.zeros(len(chain.units) + 1, dtype=np.int64)
    link = links.between(source, target)
    carried = [picoseconds(link.seconds(chain.entering_bytes(cut))) for cut in range(1, len(chain.units))]
    return np.array([0, *carried, 0], dtype=np.int64)
