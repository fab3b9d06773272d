"""A plan: frozen records of who computes what, what it is predicted to take, and what it took when it was run.

Loads no torch; times are seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from boundby.partition.costs import Basis, StageMemory
from boundby.partition.nodes import Link
from boundby.partition.solver import MEANING, Objective
from boundby.timing import Summary

ORDER_ONLY = "the times are assumed: use them to rank plans; no throughput is claimed"
TOGETHER_ASSUMED = (
    "how much the nodes of one machine slow one another down is assumed, not measured: no throughput is claimed"
)


class Stage(msgspec.Struct, frozen=True):
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
    memory_bytes: StageMemory
    usable_bytes: int
    node_memory_bytes: int
    on_gpu: bool = False


class Transfer(msgspec.Struct, frozen=True):
    """What one request brings from a stage to the next one."""

    source: str
    target: str
    size_bytes: int
    seconds: float
    basis: Basis


class Alternative(msgspec.Struct, frozen=True):
    """Another split: units by node, and the same predictions; None where it does not fit, and `reason` says why."""

    name: str
    units: tuple[tuple[str, int], ...]
    value_s: float | None
    latency_s: float | None
    period_s: float | None
    reason: str | None = None


class Gain(msgspec.Struct, frozen=True):
    """A change of the nodes or links, and how many times shorter the objective would be with the best plan for it."""

    change: str
    at_most: float


class PartitionPlan(msgspec.Struct, frozen=True):
    """The best split for an objective. All times are predictions in seconds; `basis` says what they rest on.

    `latency_s` is one request, `period_s` the time between two of many; `value_s` is what was made least. The period
    is made of what stages take while those on the same machine compute too: `period_basis` says what it rests on.
    `requests_per_s` is the steady throughput; None, with the reason, where any time in it is assumed.
    `largest_batch` is the largest whose activations, caches and inputs fit beside the weights, taken to grow with it;
    None where the batch of the plan is not known, or takes no memory.
    """

    objective: Objective
    requests: int
    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    value_s: float
    latency_s: float
    period_s: float
    basis: Basis
    period_basis: Basis
    requests_per_s: float | None
    requests_per_s_reason: str | None
    limits: tuple[str, ...]  # the strongest first
    notes: tuple[str, ...]
    doubts: tuple[str, ...]
    gains: tuple[Gain, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    batch_size: int | None = None  # that memory and transfers are of; None where it is not known
    largest_batch: int | None = None

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
        for index, stage in enumerate(self.stages):
            busy = f"; {1e3 * stage.busy_compute_s:.3f} ms while others on {stage.machine} compute"
            busy = busy if stage.busy_compute_s > stage.compute_s else ""
            span_of_units = f"units {stage.first_unit} to {stage.end_unit - 1}"
            yield (
                f"  {stage.node} ({stage.kind}): {span_of_units}, {span(stage.units)}: "
                f"{1e3 * stage.compute_s:.3f} ms ({stage.basis}{busy}), "
                f"{stage.memory_bytes.total / 1e6:,.1f} of {stage.usable_bytes / 1e6:,.1f} MB"
            )
            for transfer in self.transfers[index : index + 1]:
                yield (
                    f"    -> {transfer.target}: {transfer.size_bytes / 1e6:,.3f} MB, {1e3 * transfer.seconds:.3f} ms "
                    f"({transfer.basis})"
                )
        yield f"  limited by: {self.limits[0]}"
        yield from (f"  note: {note}" for note in self.notes)
        yield from (f"  doubt: {doubt}" for doubt in self.doubts)


def no_throughput(basis: Basis, period_basis: Basis, period_s: float) -> str | None:
    """Return why no throughput is claimed; None where one is."""
    if basis == "assumed":
        return ORDER_ONLY
    if period_basis == "assumed":
        return TOGETHER_ASSUMED
    return None if period_s > 0 else "the plan takes no time"


def largest_batch(stages: Sequence[Stage], batch_size: int | None) -> int | None:
    """Return the largest batch that fits beside the weights of these stages, which hold one of `batch_size`."""
    largest = []
    for stage in stages:
        of_batch = stage.memory_bytes.total - stage.memory_bytes.weights
        if batch_size and of_batch:
            largest.append((stage.usable_bytes - stage.memory_bytes.weights) * batch_size // of_batch)
    return min(largest, default=None)


def span(units: tuple[str, ...]) -> str:
    """Return the first and last name of a range."""
    return units[0] if len(units) == 1 else f"{units[0]} ... {units[-1]}"


@dataclass(frozen=True)
class StageTimes:
    """What one stage computed: with one request in the whole pipeline, and busy, with many of them."""

    node: str
    device: str
    machine: str  # equal for stages on the same one
    threads: int
    cores: tuple[int, ...]  # that it was bound to; empty where it was not
    units: tuple[str, ...]
    weight_bytes: int  # each storage once
    compute: Summary
    busy_compute: Summary

    @property
    def slowdown(self) -> float:
        """Return how many times as long a busy pipeline computes: the `contention` of a node beside these stages."""
        return max(1.0, self.busy_compute.median / self.compute.median) if self.compute.median else 1.0


@dataclass(frozen=True)
class TransferTimes:
    """From the end of one stage's computation to the beginning of the next one's, with one request in the pipeline.

    `link` is what two sizes of messages say of the way between them, in the same manner.
    """

    source: str
    target: str
    size_bytes: int
    seconds: Summary
    link: Link


@dataclass(frozen=True)
class Measured:
    """A pipeline that was run: requests one at a time (`latency`), then `requests` that are all there at once.

    The latency begins when the first stage computes and ends when the last one has; `last_finish_s` is that of the
    last of many. `period` is the time between two finishes once every stage is at work; None for too few requests.
    `difference` is the largest one between the outputs of the stages and those of the whole model, and `tolerance` what
    their dtype and size allow.
    """

    stages: tuple[StageTimes, ...]
    transfers: tuple[TransferTimes, ...]
    latency: Summary
    requests: int
    last_finish_s: float
    period: Summary | None
    difference: float
    tolerance: float
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Error:
    """One prediction beside what was measured; `signed` is predicted over measured, minus one."""

    name: str
    predicted: float
    measured: float
    signed: float | None  # None where nothing was measured to divide by


@dataclass(frozen=True)
class Comparison:
    """A plan beside its run. `stages`, `busy_stages` and `transfers` are in the order of the plan."""

    stages: tuple[Error, ...]
    busy_stages: tuple[Error, ...]
    transfers: tuple[Error, ...]
    transfer_sizes: tuple[Error, ...]  # bytes
    latency: Error
    period: Error | None
    last_finish: Error


def compare(plan: PartitionPlan, measured: Measured) -> Comparison:
    """Return the signed error of every prediction. Raises ValueError where another plan was run.

    The profile that the plan rests on must be of another run than `measured`: what was fitted predicts itself.
    """
    ran = tuple((stage.node, stage.units) for stage in measured.stages)
    if ran != tuple((stage.node, stage.units) for stage in plan.stages):
        raise ValueError(f"this is not the plan that was run: {ran} ran")
    stages = list(zip(plan.stages, measured.stages, strict=True))
    transfers = [
        (f"{ours.source} -> {ours.target}", ours, theirs)
        for ours, theirs in zip(plan.transfers, measured.transfers, strict=True)
    ]
    finish = plan.latency_s + (measured.requests - 1) * plan.period_s
    return Comparison(
        stages=tuple(_error(ours.node, ours.compute_s, theirs.compute.median) for ours, theirs in stages),
        busy_stages=tuple(
            _error(ours.node, ours.busy_compute_s, theirs.busy_compute.median) for ours, theirs in stages
        ),
        transfers=tuple(_error(name, ours.seconds, theirs.seconds.median) for name, ours, theirs in transfers),
        transfer_sizes=tuple(_error(name, ours.size_bytes, theirs.size_bytes) for name, ours, theirs in transfers),
        latency=_error("latency", plan.latency_s, measured.latency.median),
        period=_error("period", plan.period_s, measured.period.median) if measured.period else None,
        last_finish=_error(f"finish of {measured.requests} requests", finish, measured.last_finish_s),
    )


def _error(name: str, predicted: float, measured: float) -> Error:
    return Error(name, predicted, measured, predicted / measured - 1 if measured else None)
