"""Layers that take far more or less time than others with as many parameters."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_LAYERS = 5  # below, two odd layers are a third of all
LEAST_FACTOR = 2.0  # of the time expected; tight data would name layers that differ by nothing that matters
MOST_MADS = 5.19  # 3.5 standard deviations of a normal distribution
MOST_POINTS = 500  # of a larger set as many are taken evenly, so that their pairs stay below 125,000


class Outlier(NamedTuple):
    """Its place among the points, and its time over that of the line through all of them."""

    at: int
    factor: float


def outliers(points: Sequence[tuple[float, float]]) -> list[Outlier]:
    """Return the outliers among (parameters, seconds), all above 0; the farthest from the line first.

    The line is Theil's and Sen's on logarithms: the median of the slopes of all pairs, which up to 29 % of odd points
    do not move.
    """
    if len(points) < LEAST_LAYERS:
        return []
    x, y = np.log(np.asarray(points, dtype=np.float64)).T
    taken = np.linspace(0, len(points) - 1, min(len(points), MOST_POINTS)).round().astype(int)
    first, second = np.triu_indices(len(taken), 1)
    across = x[taken][second] - x[taken][first]
    differ = across != 0
    slopes = (y[taken][second] - y[taken][first])[differ] / across[differ]
    rest = y - (float(np.median(slopes)) if slopes.size else 0.0) * x
    rest -= np.median(rest)
    limit = max(MOST_MADS * float(np.median(np.abs(rest))), math.log(LEAST_FACTOR))
    far = [int(at) for at in np.argsort(-np.abs(rest), kind="stable") if abs(rest[at]) > limit]
    return [Outlier(at, math.exp(rest[at])) for at in far]
