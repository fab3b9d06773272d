"""Whether the work of a step grows with what is in its batch: if it does not, larger batches cost next to nothing."""

import math
from dataclasses import dataclass

import numpy as np

from boundby.compare import independent
from boundby.training.records import StageTimes
from boundby.training.shares import windows

QUANTITIES = ("tokens", "samples")  # metrics that tell how much is in a batch
LEAST_GROUP = 3  # steps
LEAST_CONTRAST = 1.3  # of larger batches over smaller ones


@dataclass(frozen=True)
class BatchEffect:
    """How the work of steps depends on their batches.

    `fixed` is the part of the work of the larger batches that does not grow with them, `fixed_low` the lower end of
    its 95 % interval; `larger` and `smaller` are the means of the two groups of steps.
    """

    quantity: str
    smaller: float
    larger: float
    steps: int
    fixed: float
    fixed_low: float


def batch_effect(times: StageTimes, numbers: np.ndarray, work_s: np.ndarray) -> BatchEffect | None:
    """Return how the work of the steps of these numbers depends on their `tokens` or `samples`; None if unknown.

    The steps are split at the middle of the sizes. It takes sizes that differ: the last batch of an epoch may be
    enough.
    """
    for quantity in QUANTITIES:
        size = _sizes(times, quantity, numbers)
        is_known = np.isfinite(size) & (size > 0) & (work_s > 0)
        size, work = size[is_known], work_s[is_known]
        if not len(size):
            continue
        is_large = size > math.sqrt(float(size.min()) * float(size.max()))
        if min(is_large.sum(), (~is_large).sum()) < LEAST_GROUP:
            continue
        smaller, larger = float(size[~is_large].mean()), float(size[is_large].mean())
        if larger < LEAST_CONTRAST * smaller:
            continue
        contrast = independent(_calm(work[~is_large]), _calm(work[is_large]))
        growth = contrast.log_ratio, contrast.log_ratio + (contrast.reach or 0.0)
        fixed, fixed_low = (_fixed(math.exp(each), larger / smaller) for each in growth)
        return BatchEffect(quantity, smaller, larger, len(size), fixed, fixed_low)
    return None


def _calm(work_s: np.ndarray) -> list[float]:
    """Return the lower quartile of each window, since disturbances only add time; each value, where they are few."""
    parts = windows(len(work_s))
    return [float(np.quantile(work_s[each], 0.25)) for each in parts] if len(parts) > 1 else work_s.tolist()


def _sizes(times: StageTimes, quantity: str, numbers: np.ndarray) -> np.ndarray:
    """Return the sum of a metric over each step, NaN where it has none."""
    if quantity not in times.metric_names:
        return np.full(len(numbers), np.nan)
    rows = times.metric_rows[times.metric_rows["metric"] == times.metric_names.index(quantity)]
    steps, place = np.unique(rows["step"], return_inverse=True)
    sums = dict(zip(steps.tolist(), np.bincount(place, weights=rows["value"]).tolist(), strict=True))
    return np.array([sums.get(number, math.nan) for number in numbers.tolist()])


def _fixed(time_ratio: float, size_ratio: float) -> float:
    """Return the fixed part of a larger batch's time, where time is a fixed part and one in proportion to the size."""
    growing = (1 - 1 / time_ratio) * size_ratio / (size_ratio - 1)
    return min(1.0, max(0.0, 1 - growing))
