"""A plan computed event by event: when each of m requests is finished. Loads no torch.

With overlap a link carries while nodes compute, and queues are not limited; without, a node is taken from the moment
it begins to receive a request until it has sent it on, and a transfer takes both its ends. A stage computes as fast as
alone while no other on its machine does, and in its busy time while one does. This knows nothing of the formulas that
plans are chosen by, so it checks them; it says nothing about real devices.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

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
    gaps = [after - before for before, after in zip(busy, busy[1:], strict=False)]
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


class _Step(NamedTuple):
    """A part of a request's way. What it takes is free again when the step that releases it is over.

    `busy_ps` is its duration while another step on the same machine is under way; a transfer is on none.
    """

    alone_ps: int
    busy_ps: int
    machine: str | None
    takes: str | None
    releases: str | None


def _finishes(plan: PartitionPlan, requests: int) -> tuple[list[int], int]:
    """Return when each request is finished, and when the first stage has computed the last, in picoseconds.

    Nodes and links stand in a row, with their queues; all requests are there at 0, and none overtakes another.
    """
    steps = _steps(plan)
    queues: dict[str, deque[tuple[int, int]]] = {step.takes: deque() for step in steps if step.takes}
    free, under_way = set(queues), list[list[int]]()  # what a step would take from now on alone, its request and place
    now, first_stage_done, finishes = 0, 0, [0] * requests

    def arrive(request: int, place: int) -> None:
        if (wanted := steps[place].takes) is not None:
            queues[wanted].append((request, place))
        else:
            under_way.append([steps[place].alone_ps, request, place])

    def begin_waiting() -> None:
        for name, queue in queues.items():
            if queue and name in free:
                free.remove(name)
                request, place = queue.popleft()
                under_way.append([steps[place].alone_ps, request, place])

    for request in range(requests):
        arrive(request, 0)
    begin_waiting()
    while under_way:
        working = [steps[place] for _, _, place in under_way]
        machines = [step.machine for step in working]
        rates = [
            (step.busy_ps, step.alone_ps) if step.machine is not None and machines.count(step.machine) > 1 else (1, 1)
            for step in working
        ]
        remaining = [_scaled(work[0], *rate) for work, rate in zip(under_way, rates, strict=True)]
        elapsed, request, place, at = min(
            (left, *work[1:], at) for at, (left, work) in enumerate(zip(remaining, under_way, strict=True))
        )
        now += elapsed
        for work, (busy, alone) in zip(under_way, rates, strict=True):
            work[0] = max(0, work[0] - _scaled(elapsed, alone, busy))
        del under_way[at]
        if (released := steps[place].releases) is not None:
            free.add(released)
        if place == 0:
            first_stage_done = now
        if place + 1 < len(steps):
            arrive(request, place + 1)
        else:
            finishes[request] = now
        begin_waiting()
    return finishes, first_stage_done


def _steps(plan: PartitionPlan) -> list[_Step]:
    """Return the computations and transfers of one request in their order."""
    steps, last = [], len(plan.stages) - 1
    for place, stage in enumerate(plan.stages):
        node = f"node {place}"
        computing = picoseconds(stage.compute_s), picoseconds(stage.busy_compute_s), stage.machine
        if plan.overlap:
            steps.append(_Step(*computing, node, node))
        else:  # the node is held since it received, and until it has sent
            steps.append(_Step(*computing, None if place else node, node if place == last else None))
        if place < last:
            carry = picoseconds(plan.transfers[place].seconds)
            link, follower = f"link {place}", f"node {place + 1}"
            taken = (link, link) if plan.overlap else (follower, node)
            steps.append(_Step(carry, carry, None, *taken))
    return steps


def _scaled(ps: int, by: int, over: int) -> int:
    """Return ps * by / over, rounded; 0 where there is nothing to scale."""
    return (2 * ps * by + over) // (2 * over) if over else 0
