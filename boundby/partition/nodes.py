"""The nodes a model can be split over and the links between them: what each can hold, and whose times hold for it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

GB = 10**9
MOST_CONTENTION = 1000.0  # what is slowed down more was not measured
SLOWER = f"a factor from 1 to {MOST_CONTENTION:g}: how many times as long it computes while its neighbours compute"
SHARED = "give machine, the same name for all nodes that slow one another down"
NOT_MEASURED = (
    "{} share a machine ({}), and their contention was not measured: the plan assumes that each computes as fast as "
    "alone"
)
OTHERS_TOO = (
    "the contention of {} was measured with all {} nodes of {} busy, and this plan uses {}: list only the nodes that "
    "it may use"
)
HEADROOM = 0.1  # of the memory: allocators round up and fragment; an assumption, not a measurement


@dataclass(frozen=True)
class VirtualNode:
    """One device. `kind` says whose profile holds for it: "cpu", "gpu", or a name of your own such as "h100".

    Give `vram_gb` for a GPU and `ram_gb` for a CPU, 10**9 bytes each. `reserve_gb` is what the runtime itself takes
    (a CUDA context, cuBLAS workspaces), `headroom` the share of the memory that stays free. `speed` makes the times of
    the profile in use shorter by this factor, and turns them from measured into assumed ones.

    `machine` names the machine that it is on, without it one of its own. `contention` is how many times as long it
    computes while all other nodes of its machine do: the `slowdown` of a run. Unknown (None): no throughput.
    """

    name: str
    kind: str
    vram_gb: float | None = None
    ram_gb: float | None = None
    speed: float | None = None
    reserve_gb: float = 0.0
    headroom: float = HEADROOM
    machine: str | None = None
    contention: float | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.kind:
            raise ValueError(f"a node needs a name and a kind, here {self.name!r} and {self.kind!r}")
        fitting = {"gpu": "vram_gb", "cpu": "ram_gb"}.get(self.kind)
        given = [key for key in ("vram_gb", "ram_gb") if getattr(self, key) is not None]
        if len(given) != 1 or (fitting and given != [fitting]):
            wanted = fitting or "either vram_gb or ram_gb"
            raise ValueError(
                f"node {self.name!r} is a {self.kind}: give {wanted}, here {' and '.join(given) or 'none'}"
            )
        speed, contention = (1.0 if factor is None else factor for factor in (self.speed, self.contention))
        for key, is_sound, wanted in (
            (given[0], 0 < getattr(self, given[0]) < math.inf, "a size above 0"),
            ("reserve_gb", 0 <= self.reserve_gb < math.inf, "a size of 0 or more"),
            ("headroom", 0 <= self.headroom < 1, "a share from 0 to below 1"),
            ("speed", 0 < speed < math.inf, "a factor above 0"),
            ("contention", 1 <= contention <= MOST_CONTENTION, SLOWER),
        ):
            if not is_sound:
                raise ValueError(f"node {self.name!r}: {key} is {getattr(self, key)}, not {wanted}")
        if self.machine == "":
            raise ValueError(f"node {self.name!r}: machine is empty; name it, or leave it out for one of its own")
        if self.contention is not None and self.machine is None:
            raise ValueError(f"node {self.name!r}: contention is {self.contention}, but no machine is named; {SHARED}")

    @property
    def machine_key(self) -> str:
        """What is equal for nodes that are on one machine."""
        return f"machine {self.machine}" if self.machine is not None else f"node {self.name}"

    @property
    def memory_bytes(self) -> int:
        """All of its memory."""
        return round((self.vram_gb if self.vram_gb is not None else self.ram_gb or 0.0) * GB)

    @property
    def reserve_bytes(self) -> int:
        """What the runtime takes of it."""
        return round(self.reserve_gb * GB)

    @property
    def usable_bytes(self) -> int:
        """What a stage may take: without head-room and reserve; below 0 where these are more than there is."""
        return self._usable(self.memory_bytes)

    def extra_for(self, needed_bytes: int) -> int:
        """Return the fewest bytes to add to its memory so that a stage of this many bytes fits; 0 where it does."""
        estimate = math.ceil((needed_bytes + self.reserve_bytes) / (1 - self.headroom))
        while self._usable(estimate) < needed_bytes:  # the division rounds
            estimate += 1
        while self._usable(estimate - 1) >= needed_bytes:
            estimate -= 1
        return max(0, estimate - self.memory_bytes)

    def _usable(self, memory_bytes: int) -> int:
        return math.floor(memory_bytes * (1 - self.headroom)) - self.reserve_bytes


@dataclass(frozen=True)
class Link:
    """A way from one node to another: so many bytes take `latency_s` + bytes / `bytes_per_s`."""

    bytes_per_s: float
    latency_s: float = 0.0
    is_measured: bool = False

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:  # infinity is a link that costs nothing
            raise ValueError(f"a link of {self.bytes_per_s} bytes/s carries nothing; give a number above 0")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"a link cannot have a latency of {self.latency_s} s; give 0 or more")

    def seconds(self, size_bytes: int) -> float:
        """Return how long this many bytes take."""
        return self.latency_s + size_bytes / self.bytes_per_s


ETHERNET = Link(bytes_per_s=1.25e9, latency_s=50e-6)  # 10 Gbit/s; an assumption, for want of anything better


@dataclass(frozen=True)
class Links:
    """The link of every pair of nodes: the pair's own one, else that of the way back, else `default`."""

    default: Link = ETHERNET
    pairs: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    def between(self, source: str, target: str) -> Link:
        """Return the link that tensors take from node `source` to node `target`."""
        return self.pairs.get((source, target)) or self.pairs.get((target, source)) or self.default


def check_names(nodes: Sequence[VirtualNode], links: Links) -> None:
    """Raise ValueError where two nodes have one name, or a link is not between two of them."""
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise ValueError(f"node {next(name for name in names if names.count(name) > 1)!r} is given twice")
    for source, target in links.pairs:
        unknown = [name for name in (source, target) if name not in names]
        if unknown:
            raise ValueError(f"the link {source} - {target} names {unknown[0]!r}; the nodes are {', '.join(names)}")
        if source == target:
            raise ValueError(f"a link leads from {source!r} to itself")


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
