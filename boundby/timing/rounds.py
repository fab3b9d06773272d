"""Visit several points in rounds until each is known well enough.

A visit is one round at one point and the unit of commit: the caller stores it, and a later call that is given the
stored visits goes on where they end. Round 0 goes upwards, since memory runs out at the large end; later rounds are
shuffled, so that a slow drift of the machine does not settle on one point. Every round visits every point, also those
known well enough, until all are: the last open point visited alone would meet the same disturbance in several rounds,
and its nominal interval would cover the truth in 85 of 100 simulated sweeps instead of 91 (`boundby.timing` widens it).
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from boundby.timing.stats import estimate

Point = int | tuple[int, str]  # a size, or a size and what has it
Status = Literal["ok", "oom", "failed", "skipped_oom"]


@dataclass(frozen=True)
class Outcome:
    """What the rule needs to know of a visit: its status, the seconds it took and its value for the interval."""

    point: Point
    round: int
    status: Status
    seconds: float = 0.0
    value: float | None = None


@dataclass(frozen=True)
class StopRule:
    """A point is done after its least rounds, once its interval is narrow enough or rounds or seconds are used up."""

    half_width: float
    max_seconds: float
    least_rounds: int = 5
    most_rounds: int = 15

    def is_done(self, outcomes: Sequence[Outcome]) -> bool:
        """Tell whether a point with these outcomes needs no further visit for its own sake."""
        return self.is_over(outcomes) or self.is_met(outcomes)

    def is_over(self, outcomes: Sequence[Outcome]) -> bool:
        """Tell whether a point with these outcomes must not be visited again."""
        if any(outcome.status != "ok" for outcome in outcomes):
            return True
        if len(outcomes) < self.least_rounds:
            return False
        return len(outcomes) >= self.most_rounds or sum(outcome.seconds for outcome in outcomes) >= self.max_seconds

    def most_left(self, outcomes: Sequence[Outcome]) -> int:
        """Return how many further visits a point with these outcomes may get at most, at the pace so far."""
        if self.is_done(outcomes):
            return 0
        spent = sum(outcome.seconds for outcome in outcomes)
        affordable = (self.max_seconds - spent) * len(outcomes) / spent if spent > 0 else self.least_rounds
        made = len(outcomes)
        return min(self.most_rounds - made, max(self.least_rounds - made, math.ceil(affordable), 1))

    def is_met(self, outcomes: Sequence[Outcome]) -> bool:
        """Tell whether the interval of a point with these outcomes is narrow enough."""
        values = [outcome.value for outcome in outcomes if outcome.value is not None]
        if len(values) < self.least_rounds:
            return False
        half_width = estimate(values).half_width
        return half_width is not None and half_width <= self.half_width


def sweep(
    points: Iterable[Point],
    visit: Callable[[Any, int], Outcome],
    rule: StopRule,
    *,
    finished: Sequence[Outcome] = (),
    seed: int = 0,
    revised: Callable[[list[Outcome]], list[Outcome]] = list,
) -> list[Outcome]:
    """Return the outcomes of all visits, those in `finished` first, until `rule` holds at every point.

    `visit(point, round)` makes one visit and stores it. Where a point runs out of memory, larger ones of the same are
    not tried: memory grows with the size. `revised` gives the outcomes of a point, after each further visit there,
    the values that they have by all that is known then.
    """
    ascending: list[Any] = sorted(set(points))
    known = {point: [outcome for outcome in finished if outcome.point == point] for point in ascending}
    for number in range(rule.most_rounds):
        if all(rule.is_done(outcomes[:number]) for outcomes in known.values()):
            break
        order = list(ascending)
        if number > 0:
            random.Random(f"{seed}-{number}").shuffle(order)
        for point in order:
            outcomes = known[point]
            if len(outcomes) > number or rule.is_over(outcomes):
                continue
            if any(_ran_out(known[other]) for other in ascending if _is_smaller(other, point)):
                outcomes.append(Outcome(point, number, "skipped_oom"))
            else:
                known[point] = revised([*outcomes, visit(point, number)])
    return [outcome for point in ascending for outcome in known[point]]


def _ran_out(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.status == "oom" for outcome in outcomes)


def _is_smaller(point: Any, other: Any) -> bool:
    """Tell whether a point is a smaller size of the same."""
    if isinstance(point, tuple):
        return bool(point[0] < other[0] and point[1] == other[1])
    return bool(point < other)
