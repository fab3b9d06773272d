"""How far a plan's predictions are from what was run, and how far its choice is from the best cut. Loads no torch."""

import math
from collections.abc import Sequence
from statistics import median, stdev

from boundby.partition.plan import PartitionPlan
from boundby.staged.records import Comparison, CutTimes, Error, Measured, Regret

SE_OF_MEDIAN = 1.2533  # over that of the mean, for normal values: sqrt(pi / 2)


def compare(plan: PartitionPlan, measured: Measured) -> Comparison:
    """Return the signed error of every prediction. Raises ValueError where another plan was run.

    The profile that the plan rests on must be of another run than `measured`: what was fitted predicts itself.
    """
    ran = tuple((each.node, each.units) for each in measured.stages)
    if ran != tuple((each.node, each.units) for each in plan.stages):
        raise ValueError(f"this is not the plan that was run: {ran} ran")
    stages = list(zip(plan.stages, measured.stages, strict=True))
    transfers = list(zip(plan.transfers, measured.transfers, strict=True))
    finish = plan.latency_s + (measured.requests - 1) * plan.period_s
    return Comparison(
        stages=tuple(_error(ours.node, ours.compute_s, found.compute.median) for ours, found in stages),
        busy_stages=tuple(_error(ours.node, ours.busy_compute_s, found.busy_compute.median) for ours, found in stages),
        transfers=tuple(
            _error(f"{ours.source} -> {ours.target}", ours.seconds, found.seconds.median) for ours, found in transfers
        ),
        transfer_sizes=tuple(
            _error(f"{ours.source} -> {ours.target}", ours.size_bytes, found.size_bytes, "bytes")
            for ours, found in transfers
        ),
        latency=_error("latency", plan.latency_s, measured.latency.median),
        period=_error("period", plan.period_s, measured.period.median) if measured.period else None,
        last_finish=_error(f"finish of {measured.requests} requests", finish, measured.last_finish_s),
        label=measured.label,
        doubts=measured.doubts,
    )


def regret_of(chosen: CutTimes, cuts: Sequence[CutTimes]) -> Regret:
    """Return how much longer `chosen` took than the best of all cuts that were run, itself among them."""
    best = min((chosen, *cuts), key=lambda each: each.median_s)
    label = "emulated" if any(each.label == "emulated" for each in (chosen, *cuts)) else "measured"
    return Regret(
        chosen=chosen,
        best=best,
        cuts=tuple(cuts),
        regret=chosen.median_s / best.median_s - 1,
        noise=_noise(chosen, best),
        label=label,
    )


def cut_times(name: str, predicted_s: float, rounds_s: Sequence[float], runs: Sequence[Measured]) -> CutTimes:
    """Return what one cut took, from one value and one run for each round."""
    return CutTimes(
        name=name,
        rounds_s=tuple(rounds_s),
        median_s=float(median(rounds_s)),
        predicted_s=predicted_s,
        label="emulated" if any(each.label == "emulated" for each in runs) else "measured",
        doubts=tuple(dict.fromkeys(doubt for each in runs for doubt in each.doubts)),
    )


def _error(name: str, predicted: float, found: float, unit: str = "s") -> Error:
    return Error(name, predicted, found, predicted / found - 1 if found else None, unit)


def _noise(chosen: CutTimes, best: CutTimes) -> float | None:
    if min(len(chosen.rounds_s), len(best.rounds_s)) < 2:
        return None
    squares = [(stdev(each.rounds_s) / best.median_s) ** 2 / len(each.rounds_s) for each in (chosen, best)]
    return SE_OF_MEDIAN * math.sqrt(sum(squares))
