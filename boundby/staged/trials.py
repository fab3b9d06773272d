"""Trials on this machine: how fast workers hand tensors to one another, and what every one of several cuts takes."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from boundby.partition.links import Link
from boundby.partition.nodes import VirtualNode
from boundby.partition.objectives import Objective
from boundby.partition.plan import PartitionPlan
from boundby.partition.planner import ExecutionPlanner
from boundby.partition.units import Chain, Unit
from boundby.staged.comparison import cut_times, regret_of
from boundby.staged.cuts import plan_at
from boundby.staged.pipeline import Pipeline
from boundby.staged.places import Workers
from boundby.staged.records import Measured, Regret
from boundby.staged.running import REQUESTS, measured

SMALL, LARGE = 4 * 1024, 4 * 1024 * 1024  # bytes: what latency is read from, and what the rate is
LINK_RUNS = 200


def measured_link(workers: Workers | None = None, runs: int = LINK_RUNS) -> Link:
    """Return the link between two workers of this machine: from the end of a computation to the next one's begin.

    Two sizes are sent; a straight line lies between their medians.
    """
    times = {size: _transfer_s(size, workers, runs) for size in (SMALL, LARGE)}
    rate = (LARGE - SMALL) / max(times[LARGE] - times[SMALL], 1e-9)
    return Link(bytes_per_s=rate, latency_s=max(0.0, times[SMALL] - SMALL / rate), is_measured=True)


def regret(
    model: nn.Module,
    inputs: Any,
    cuts: Mapping[str, PartitionPlan],
    chosen: str,
    *,
    rounds: int = 3,
    workers: Workers | None = None,
) -> Regret:
    """Return how much longer the chosen plan takes than the best of `cuts`, by its objective.

    All are run once in each round, forwards and backwards in turns, so that a change of the machine meets all alike.
    Plans for a number of requests are run with as many. Raises ValueError where `chosen` is not among them.
    """
    if chosen not in cuts or rounds < 1:
        raise ValueError(f"{chosen!r} is none of the cuts {list(cuts)}, or {rounds} rounds are less than 1")
    objective = cuts[chosen].objective
    many = cuts[chosen].requests if objective == "requests" else REQUESTS
    found: dict[str, list[Measured]] = {name: [] for name in cuts}
    for turn in range(rounds):
        for name in list(cuts) if turn % 2 == 0 else list(cuts)[::-1]:
            with Pipeline(model, cuts[name], inputs, workers) as pipeline:
                found[name].append(measured(pipeline, many))
    times = {
        name: cut_times(name, cuts[name].value_s, [_value(each, objective) for each in runs], runs)
        for name, runs in found.items()
    }
    return regret_of(times[chosen], list(times.values()))


def _value(found: Measured, objective: Objective) -> float:
    if objective == "latency":
        return found.latency.median
    if objective == "requests":
        return found.last_finish_s
    if found.period is None:
        raise ValueError(
            f"{found.requests} requests are too few for {len(found.stages)} stages: there is no time between two"
        )
    return found.period.median


def _transfer_s(size_bytes: int, workers: Workers | None, runs: int) -> float:
    chain = Chain(tuple(Unit(name, 0.0, cut_bytes=size_bytes, layers=(name,)) for name in ("0", "1")))
    nodes = [VirtualNode(name, "cpu", ram_gb=1) for name in ("source", "target")]
    plan = ExecutionPlanner(chain, kind="cpu").generate_plan(nodes)
    plan = plan_at([1], plan, {"cpu": chain}, nodes, Link(math.inf))
    model = nn.Sequential(_Copy(), _Copy()).eval()
    with Pipeline(model, plan, torch.zeros(size_bytes, dtype=torch.uint8), workers) as two:
        two.one_at_a_time(max(1, runs // 10))
        before, after = two.one_at_a_time(runs)
    gaps = [begin - end for end, begin in zip(before.end, after.begin, strict=True)]
    return median(gaps) * 1e-9


class _Copy(nn.Module):
    """Gives a tensor of its own, as a layer does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()
