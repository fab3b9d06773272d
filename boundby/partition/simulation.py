"""A plan computed event by event: when each of m requests is finished. Loads no torch.

A link carries while nodes compute, and queues are not limited. A stage computes as fast as alone while no other on its
machine does, and in its busy time while one does. This knows nothing of the formulas that plans are chosen by, so it
checks them; it says nothing about real devices.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

from boundby.partition.costs import PS, Basis, picoseconds
from boundby.partition.plan import PartitionPlan

ROUNDED_PS = 10  # gaps that differ by less are alike: what is left of a stage is whole picoseconds at every event


@dataclass(frozen=True)
class Simulated:
    """A pipeline that was computed event by event; `basis` says what its times rest on."""

    requests: int
    first_finish_s: float
    last_finish_s: float
    period_s: float | None  # None, with the reason, where the finishes are not evenly spaced yet
    finishes_s: tuple[float, ...]
    basis: Basis
    reason: str | None = None


def simulate(plan: PartitionPlan, requests: int) -> Simulated:
    """Return when the first and the last of `requests` that are all there at once are finished, and their period.

    The period is that at the end, or where stages slow one another down, that at the end of the first stage's work:
    from then on fewer compute. Raises ValueError for less than one request.
    """
    if requests < 1:
        raise ValueError(f"requests is {requests}; simulate 1 or more")
    finishes, first_stage_done = _finishes(plan, requests)
    is_contended = any(stage.busy_compute_s > stage.compute_s for stage in plan.stages)
    busy = [finish for finish in finishes if finish <= first_stage_done or not is_contended or len(plan.stages) == 1]
    gaps = [after - before for before, after in itertools.pairwise(busy)]
    last = gaps[-len(plan.stages) :]  # so many must be alike: each stage has been waited for, or has waited
    is_steady = len(last) == len(plan.stages) and max(last) - min(last) <= (ROUNDED_PS if is_contended else 0)
    return Simulated(
        requests=requests,
        first_finish_s=finishes[0] / PS,
        last_finish_s=finishes[-1] / PS,
        period_s=last[-1] / PS if is_steady else None,
        finishes_s=tuple(finish / PS for finish in finishes),
        basis=plan.basis if requests == 1 else plan.period_basis,
        reason=None if is_steady else f"{requests} requests have no steady time between them; simulate more",
    )


@dataclass(eq=False)
class _Step:
    """A stage or a link. `busy_ps` is its time for a request while another step on the same machine is under way.

    `left_ps` is what the request that it is at would still take alone; None while it is idle.
    """

    alone_ps: int
    busy_ps: int
    machine: str | None  # None for a link, which slows nothing
    waiting: int = 0  # requests
    left_ps: int | None = None


def _finishes(plan: PartitionPlan, requests: int) -> tuple[list[int], int]:
    """Return when each request is finished, and when the first stage has computed the last, in picoseconds.

    All requests are there at 0, and none overtakes another.
    """
    steps = _steps(plan)
    steps[0].waiting = requests
    now, first_stage_done, finishes = 0, 0, list[int]()
    while len(finishes) < requests:
        for step in steps:
            if step.left_ps is None and step.waiting:
                step.waiting, step.left_ps = step.waiting - 1, step.alone_ps
        under_way = [(step, step.left_ps) for step in steps if step.left_ps is not None]
        at_work = Counter(step.machine for step, _ in under_way)
        # Picoseconds that pass for so many of the time alone; what is on no machine takes as long when busy.
        rates = [(step.busy_ps, step.alone_ps) if at_work[step.machine] > 1 else (1, 1) for step, _ in under_way]
        elapsed = [_scaled(left, *rate) for (_, left), rate in zip(under_way, rates, strict=True)]
        now += min(elapsed)
        for (step, left), (busy, alone) in zip(under_way, rates, strict=True):
            step.left_ps = max(0, left - _scaled(min(elapsed), alone, busy))
        ended = under_way[elapsed.index(min(elapsed))][0]
        ended.left_ps = None
        if ended is steps[0]:
            first_stage_done = now
        if ended is steps[-1]:
            finishes.append(now)
        else:
            steps[steps.index(ended) + 1].waiting += 1
    return finishes, first_stage_done


def _steps(plan: PartitionPlan) -> list[_Step]:
    """Return the stages and links in the order in which a request meets them."""
    links = [picoseconds(transfer.seconds) for transfer in plan.transfers]
    steps = []
    for stage, link_ps in itertools.zip_longest(plan.stages, links):
        steps.append(_Step(picoseconds(stage.compute_s), picoseconds(stage.busy_compute_s), stage.machine))
        steps += [] if link_ps is None else [_Step(link_ps, link_ps, None)]
    return steps


def _scaled(ps: int, by: int, over: int) -> int:
    """Return ps * by / over, rounded; 0 where there is nothing to scale."""
    return (2 * ps * by + over) // (2 * over) if over else 0
