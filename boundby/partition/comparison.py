"""What a plan was predicted to take beside what it took when it was run. Loads no torch; times are seconds."""

from dataclasses import dataclass

from boundby.partition.nodes import Link
from boundby.partition.plan import PartitionPlan
from boundby.stats import Summary


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
    their number format and size allow.
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
