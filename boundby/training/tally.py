"""Summaries of streams that are too long to keep: exact counts, sums and extremes; quantiles of a uniform sample."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boundby.stats import percentile

SAMPLE = 1024  # values: p99 needs 299


@dataclass(frozen=True)
class Statistics:
    """What a stream of `n` values says, in the unit of the values; the quantiles rest on `sampled` of them.

    A quantile that the sample does not support is None, as everything but the counts is when there is no value.
    """

    n: int
    total: float
    mean: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    median: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    sampled: int = 0


class Tally:
    """Takes in one value after the other; its size does not grow beyond `SAMPLE` values.

    The sample is uniform over the whole stream (Li's algorithm L, 1994, which draws only when it takes a value) and
    its generator is its own, so that the random numbers of the program stay as they are.
    """

    __slots__ = ("_draw", "_sample", "_take_at", "_weight", "least", "most", "n", "total")

    def __init__(self) -> None:
        self.n = 0
        self.total: float = 0
        self.least = math.inf
        self.most = -math.inf
        self._sample: list[float] = []
        self._draw = random.Random(0).random
        self._weight = 1.0
        self._take_at = 1  # the number of the next value to keep

    def add(self, value: float) -> None:
        """Take in a finite value."""
        self.n += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value
        if self.n == self._take_at:
            self._keep(value)

    def _keep(self, value: float) -> None:
        if len(self._sample) < SAMPLE:
            self._sample.append(value)
        else:
            self._sample[int(self._draw() * SAMPLE)] = value
        self._take_at += 1
        if len(self._sample) == SAMPLE:
            self._weight *= math.exp(math.log(1 - self._draw()) / SAMPLE)
            self._take_at += int(math.log(1 - self._draw()) / math.log1p(-self._weight))

    def statistics(self, unit: float = 1) -> Statistics:
        """Return the summary in units of `unit`."""
        return _statistics(self.n, (self.total, self.least, self.most), list(self._sample), unit)


def statistics_of(values: Sequence[float] | np.ndarray) -> Statistics:
    """Return the summary of values that are all at hand."""
    if not len(values):
        return Statistics(0, 0.0)
    array = np.asarray(values, dtype=np.float64)
    return _statistics(len(array), (float(array.sum()), float(array.min()), float(array.max())), array, 1)


def joined(earlier: Statistics, later: Statistics, sample: Sequence[float] | np.ndarray) -> Statistics:
    """Return the summary of two streams one after the other, with the quantiles of `sample`."""
    parts = [each for each in (earlier, later) if each.n]
    if len(parts) < 2:
        return parts[0] if parts else earlier
    least = min(each.minimum for each in parts if each.minimum is not None)
    most = max(each.maximum for each in parts if each.maximum is not None)
    total = earlier.total + later.total
    return _statistics(earlier.n + later.n, (total, least, most), sample, 1)


def _statistics(
    n: int, moments: tuple[float, float, float], sample: Sequence[float] | np.ndarray, unit: float
) -> Statistics:
    if not n:
        return Statistics(0, 0.0)
    total, least, most = (each / unit for each in moments)
    values = np.asarray(sample, dtype=np.float64) / unit
    return Statistics(
        n=n,
        total=total,
        mean=total / n,
        minimum=least,
        maximum=most,
        median=float(np.median(values)) if len(values) else None,
        p90=percentile(values, 0.90),
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        sampled=len(values),
    )
