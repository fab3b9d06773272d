"""A plan computed event by event: when each of m requests is finished. Loads no torch.

With overlap a link carries while nodes compute, and queues are not limited; without, a node is taken from the moment
it begins to receive a request until it has sent it on, and a transfer takes both its ends. This knows nothing of the
formulas that plans are chosen by, so it checks them; it says nothing about real devices.
"""

import heapq
from collections import deque
from typing import NamedTuple

from boundby.partition.costs import PS, picoseconds
from boundby.partition.plan import PartitionPlan
from boundby.staged.records import Simulated


def simulate(plan: PartitionPlan, requests: int) -> Simulated:
    """Return when the first and the last of `requests` that are all there at once are finished, and their period.

    Raises ValueError for less than one request.
    """
    if requests < 1:
        raise ValueError(f"requests is {requests}; simulate 1 or more")
    finishes = _finishes(_steps(plan), requests)
    gaps = [after - before for before, after in zip(finishes, finishes[1:], strict=False)]
    last = gaps[-len(plan.stages) :]  # so many must be alike: each stage has been waited for, or has waited
    is_steady = len(last) == len(plan.stages) and len(set(last)) == 1
    return Simulated(
        requests=requests,
        first_finish_s=finishes[0] / PS,
        last_finish_s=finishes[-1] / PS,
        period_s=last[0] / PS if is_steady else None,
        finishes_s=tuple(each / PS for each in finishes),
        basis=plan.basis,
        reason=None if is_steady else f"{requests} requests have no steady time between them; simulate more",
    )


class _Step(NamedTuple):
    """A part of a request's way. What it takes is free again when the step that releases it is over."""

    duration_ps: int
    takes: str | None
    releases: str | None


def _steps(plan: PartitionPlan) -> list[_Step]:
    """Return the computations and transfers of one request in their order."""
    steps, last = [], len(plan.stages) - 1
    for place, stage in enumerate(plan.stages):
        node, compute = f"node {place}", picoseconds(stage.compute_s)
        if plan.overlap:
            steps.append(_Step(compute, node, node))
        else:  # the node is held since it received, and until it has sent
            steps.append(_Step(compute, None if place else node, node if place == last else None))
        if place < last:
            carry = picoseconds(plan.transfers[place].seconds)
            link, follower = f"link {place}", f"node {place + 1}"
            steps.append(_Step(carry, link, link) if plan.overlap else _Step(carry, follower, node))
    return steps


def _finishes(steps: list[_Step], requests: int) -> list[int]:
    """Return when each request is finished, in picoseconds; all are there at 0, and none overtakes another."""
    queues: dict[str, deque[tuple[int, int]]] = {each.takes: deque() for each in steps if each.takes}
    free = dict.fromkeys(queues, True)
    events: list[tuple[int, int, int]] = []  # time, request, step: the end of the step
    finishes = [0] * requests

    def begin_waiting(now: int) -> None:
        for name, queue in queues.items():
            if free[name] and queue:
                free[name] = False
                request, step = queue.popleft()
                heapq.heappush(events, (now + steps[step].duration_ps, request, step))

    def arrive(now: int, request: int, step: int) -> None:
        if (wanted := steps[step].takes) is not None:
            queues[wanted].append((request, step))
        else:
            heapq.heappush(events, (now + steps[step].duration_ps, request, step))

    for request in range(requests):
        arrive(0, request, 0)
    begin_waiting(0)
    while events:
        now, request, step = heapq.heappop(events)
        if (released := steps[step].releases) is not None:
            free[released] = True
        if step + 1 < len(steps):
            arrive(now, request, step + 1)
        else:
            finishes[request] = now
        begin_waiting(now)
    return finishes
