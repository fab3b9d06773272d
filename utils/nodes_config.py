"""The settings of `configs/nodes.yaml`: nodes, the links between them, and what is to be served."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from boundby.partition import Link, Links, VirtualNode
from utils.config import Name, Section
from utils.errors import InputError
from utils.yaml_settings import load

GB, MB = 1e9, 1e6


class Node(Section):
    """One device."""

    name: Name
    kind: Name
    vram_gb: PositiveFloat | None = None
    ram_gb: PositiveFloat | None = None
    speed: PositiveFloat | None = None
    reserve_gb: NonNegativeFloat = 0
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    machine: Name | None = None
    contention: Annotated[float, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _is_a_node(self) -> Self:
        self.virtual()
        return self

    def virtual(self) -> VirtualNode:
        """Return it as the planner takes it. Raises ValueError for memory or contention that it cannot have."""
        return VirtualNode(**self.model_dump())


class LinkCost(Section):
    """What a link takes."""

    gb_per_s: PositiveFloat
    latency_us: NonNegativeFloat = 0
    measured: bool = False

    def link(self) -> Link:
        """Return it as the planner takes it."""
        return Link(self.gb_per_s * GB, self.latency_us / 1e6, self.measured)


class Pair(LinkCost):
    """The link between two nodes."""

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]


class LinkSettings(Section):
    """The links."""

    default: LinkCost = LinkCost(gb_per_s=1.25, latency_us=50)
    pairs: list[Pair] = []


class Workload(Section):
    """What a stage holds beside weights and activations."""

    inputs_in_flight: PositiveInt = 1
    kv_cache_mb_per_block: NonNegativeFloat = 0
    extra_live_mb: NonNegativeFloat | None = None


class NodesConfig(Section):
    """All of it."""

    nodes: Annotated[list[Node], Field(min_length=1)]
    links: LinkSettings = LinkSettings()
    overlap: bool = True
    in_order: bool = False
    workload: Workload = Workload()

    @model_validator(mode="after")
    def _names_are_clear(self) -> Self:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"node {twice[0]!r} is listed twice; give each a name of its own")
        for pair in self.links.pairs:
            unknown = [name for name in pair.between if name not in names]
            if unknown:
                raise ValueError(f"links.pairs names {unknown[0]!r}, which is no node; known are {', '.join(names)}")
            if pair.between[0] == pair.between[1]:
                raise ValueError(f"links.pairs has a link from {pair.between[0]!r} to itself")
        ways = [tuple(pair.between) for pair in self.links.pairs]
        if len(set(ways)) < len(ways):
            again = next(way for way in ways if ways.count(way) > 1)
            raise ValueError(f"links.pairs gives {again[0]} to {again[1]} twice")
        return self

    def link_table(self) -> Links:
        """Return the links as the planner takes them."""
        pairs = {(pair.between[0], pair.between[1]): pair.link() for pair in self.links.pairs}
        return Links(self.links.default.link(), pairs)


def read(path: Path) -> NodesConfig:
    """Return the settings in the file. Raises InputError that lists every mistake with its place."""
    if not path.is_file():
        raise InputError(f"{path}: no such file of nodes; copy configs/nodes.yaml and state your own")
    return load(NodesConfig, path)
