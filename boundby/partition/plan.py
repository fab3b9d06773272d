"""A plan: frozen records of who computes what, what it is predicted to take, and what it rests on."""

from collections.abc import Iterator
from dataclasses import dataclass

from boundby.partition.costs import Basis, StageMemory
from boundby.partition.objectives import MEANING, Objective

ORDER_ONLY = "the times are assumed: they may order plans, and no throughput is claimed from them"
TOGETHER_ASSUMED = (
    "what nodes of one machine take while all of them compute is assumed: no throughput is claimed from it"
)


@dataclass(frozen=True)
class Stage:
    """A range of units on one node. `compute_s` is one request; what may be used is `usable_bytes` of the memory.

    `busy_compute_s` is one request too, while the other stages on the same machine compute; alone there it is equal.
    """

    node: str
    kind: str
    first_unit: int
    end_unit: int  # the first one that is not in it any more
    units: tuple[str, ...]
    layers: tuple[str, ...]
    compute_s: float
    busy_compute_s: float
    machine: str | None
    basis: Basis  # of `compute_s`
    memory: StageMemory
    usable_bytes: int
    node_memory_bytes: int
    on_gpu: bool = False

    @property
    def free_bytes(self) -> int:
        """What is left of the usable memory."""
        return self.usable_bytes - self.memory.total


@dataclass(frozen=True)
class Transfer:
    """What one request brings from a stage to the next one."""

    source: str
    target: str
    size_bytes: int
    seconds: float
    basis: Basis


@dataclass(frozen=True)
class Alternative:
    """Another split: units by node, and the same predictions; None where it does not fit, and `reason` says why."""

    name: str
    units: tuple[tuple[str, int], ...]
    value_s: float | None
    latency_s: float | None
    period_s: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Gain:
    """A change of the nodes or links, and how many times shorter the objective would be with the best plan for it."""

    change: str
    at_most: float


@dataclass(frozen=True)
class PartitionPlan:
    """The best split for an objective. All times are predictions in seconds; `basis` says what they rest on.

    `latency_s` is one request, `period_s` the time between two of many; `value_s` is what was made least. The period
    is made of what stages take while those on the same machine compute too: `period_basis` says what it rests on.
    """

    objective: Objective
    requests: int
    overlap: bool
    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    value_s: float
    latency_s: float
    period_s: float
    basis: Basis
    period_basis: Basis
    limits: tuple[str, ...]  # the strongest first
    gains: tuple[Gain, ...]
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def requests_per_s(self) -> float | None:
        """Return the steady throughput; None where any time in it is assumed, or takes no time."""
        return 1 / self.period_s if self.period_basis == "measured" and self.period_s > 0 else None

    @property
    def requests_per_s_reason(self) -> str | None:
        """Return why no throughput is claimed; None where one is."""
        if self.basis == "assumed":
            return ORDER_ONLY
        if self.period_basis == "assumed":
            return TOGETHER_ASSUMED
        return None if self.period_s > 0 else "the plan takes no time"

    @property
    def value_basis(self) -> Basis:
        """Return what `value_s` rests on."""
        return self.basis if self.objective == "latency" else self.period_basis

    @property
    def meaning(self) -> str:
        """Return what was made least, in words."""
        return MEANING[self.objective].format(self.requests)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        stages = "1 stage" if len(self.stages) == 1 else f"{len(self.stages)} stages"
        yield f"PartitionPlan: {stages}, {self.meaning}: {1e3 * self.value_s:.3f} ms ({self.value_basis})"
        for place, stage in enumerate(self.stages):
            places = f"units {stage.first_unit} to {stage.end_unit - 1}"
            yield (
                f"  {stage.node} ({stage.kind}): {places}, {span(stage.units)}: "
                f"{1e3 * stage.compute_s:.3f} ms ({stage.basis}{_busy(stage)}), "
                f"{stage.memory.total / 1e6:,.1f} of {stage.usable_bytes / 1e6:,.1f} MB"
            )
            for transfer in self.transfers[place : place + 1]:
                yield (
                    f"    -> {transfer.target}: {transfer.size_bytes / 1e6:,.3f} MB, {1e3 * transfer.seconds:.3f} ms "
                    f"({transfer.basis})"
                )
        yield f"  limited by: {self.limits[0]}"
        yield from (f"  note: {note}" for note in self.notes)
        yield from (f"  doubt: {doubt}" for doubt in self.doubts)


def _busy(stage: Stage) -> str:
    if stage.busy_compute_s == stage.compute_s:
        return ""
    return f"; {1e3 * stage.busy_compute_s:.3f} ms while others on {stage.machine} compute"


def span(units: tuple[str, ...]) -> str:
    """Return the first and last name of a range."""
    return units[0] if len(units) == 1 else f"{units[0]} ... {units[-1]}"
