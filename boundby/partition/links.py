"""What it takes to bring tensors from one node to another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


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
