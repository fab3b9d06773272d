"""From samples to a summary that claims no more than its samples support.

Percentiles: with n samples the largest one exceeds the true p-quantile with probability 1 - p**n, so a percentile is
given only where that is at least 95 % (n >= ln(0.05) / ln(p): 29 for p90, 59 for p95, 299 for p99). It is the same
rule as MLPerf LoadGen's early stopping with one sample above the quantile.
Intervals: consecutive timings are not independent (Kalibera & Jones 2013), so an interval comes from independent
rounds: a t-interval on the logarithms of one value per round. A sweep that stops when an interval happens to be
narrow, and a machine whose disturbances last as long as a round, make that interval too short: the nominal 95 % cover
the truth in 91 to 95 of 100 sweeps. With a standard error `WIDENING` times as large they cover it in 93 to 97
(tests/library/test_stats.py); there is no exact interval for a sequential rule of this kind.
A machine that changes its speed for part of the rounds leaves them correlated: they then count as fewer
(`independent_rounds`), without which such intervals held the truth in 66 of 100 simulated sweeps and with it in 92.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
WIDENING = 1.1  # of the standard error over rounds, see the text above
LEAST_CORRELATED = 8  # rounds; fewer cannot tell correlation from chance
BY_CHANCE = 1.64  # over the root of the rounds: one in twenty sweeps of independent rounds seems more correlated
MOST_CORRELATED = 0.85
OUTLIER_MADS = 14.826  # ten standard deviations of a normal distribution, hyperfine's limit
SPREAD_LIMIT = 0.25  # interquartile range over median; torch.utils.benchmark warns at the same share


@dataclass(frozen=True)
class Summary:
    """A summary of `n` samples, in their unit. A percentile that n does not support is None."""

    n: int
    mean: float
    median: float
    minimum: float
    maximum: float
    q1: float
    q3: float
    std: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    outliers: int
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its 95 % interval; the ends are None, with a reason, where the rounds give none."""

    value: float
    low: float | None
    high: float | None
    rounds: int
    reason: str | None = None

    @property
    def half_width(self) -> float | None:
        """Half of the interval as a share of the value, or None."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / (2 * self.value)


def least_samples(p: float, confidence: float = CONFIDENCE) -> int:
    """Return how many samples a claim about the p-quantile needs."""
    return math.ceil(math.log(1 - confidence) / math.log(p) - 1e-12)


def summarize(samples: Sequence[float]) -> Summary:
    """Return the summary of one or more finite samples. Raises ValueError on none, or on NaN and infinity."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("there are no samples to summarize")
    if not np.isfinite(values).all():
        raise ValueError(f"sample {int(np.argmin(np.isfinite(values)))} of {values.size} is not finite")
    q1, median, q3 = (float(quartile) for quartile in np.quantile(values, [0.25, 0.5, 0.75]))
    outliers = _count_outliers(values, median)
    return Summary(
        n=int(values.size),
        mean=float(values.mean()),
        median=median,
        minimum=float(values.min()),
        maximum=float(values.max()),
        q1=q1,
        q3=q3,
        std=float(values.std(ddof=1)) if values.size > 1 else None,
        p90=percentile(values, 0.90),
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        outliers=outliers,
        doubts=_doubts(outliers, int(values.size), q1, median, q3),
    )


def percentile(samples: Sequence[float] | np.ndarray, p: float) -> float | None:
    """Return the p-quantile, or None where the number of samples does not support it."""
    return float(np.quantile(samples, p)) if len(samples) >= least_samples(p) else None


def estimate(rounds: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the geometric mean of one positive value per round, with its widened t-interval on the logarithms.

    Raises ValueError when there is no round or a value is not positive.
    """
    values = np.asarray(rounds, dtype=np.float64)
    if values.size == 0 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"each round needs one positive value, got {list(rounds)}")
    logs = np.log(values)
    centre = float(logs.mean())
    if values.size == 1:
        return Estimate(math.exp(centre), None, None, 1, "one round gives no interval")
    half = reach(float(logs.std(ddof=1)), independent_rounds(logs), confidence)
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half), int(values.size))


def independent_rounds(logs: np.ndarray) -> float:
    """Return as how many independent rounds these count, one value each in their order in time: n (1 - r) / (1 + r).

    That is the effective size of a sample with the correlation r of neighbours (Bayley & Hammersley 1946), where r is
    more than chance makes it; it is estimated too small by about 1.5 / n (Marriott & Pope 1954).
    """
    deviations = logs - logs.mean()
    total = float(deviations @ deviations)
    if logs.size < LEAST_CORRELATED or total == 0:
        return float(logs.size)
    neighbours = float(deviations[1:] @ deviations[:-1]) / total
    if neighbours <= BY_CHANCE / math.sqrt(logs.size):
        return float(logs.size)
    correlation = min(neighbours + 1.5 / logs.size, MOST_CORRELATED)
    return max(2.5, logs.size * (1 - correlation) / (1 + correlation))


def reach(spread: float, rounds: float, confidence: float = CONFIDENCE) -> float:
    """Return half the widened t-interval of so many independent rounds whose logarithms have this standard deviation.

    Raises ValueError below two rounds.
    """
    if rounds < 2:
        raise ValueError("one round gives no interval")
    return WIDENING * float(stdtrit(rounds - 1, 0.5 + confidence / 2)) * spread / math.sqrt(rounds)


def drift(rounds: Sequence[float]) -> float | None:
    """Return how much longer the last third of the values is than the first, as a share; None below six values."""
    third = len(rounds) // 3
    if third < 2:
        return None
    return float(np.median(rounds[-third:]) / np.median(rounds[:third])) - 1


def wilson_interval(successes: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the ends of Wilson's interval for the share `successes / n` (Wilson 1927). Raises ValueError if n < 1."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes of {n} are not a share")
    z = float(ndtri(0.5 + confidence / 2))
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _count_outliers(values: np.ndarray, median: float) -> int:
    deviations = np.abs(values - median)
    mad = float(np.median(deviations))
    return int((deviations > OUTLIER_MADS * mad).sum()) if mad > 0 else 0


def _doubts(outliers: int, n: int, q1: float, median: float, q3: float) -> tuple[str, ...]:
    doubts = []
    if outliers:
        doubts.append(f"{outliers} of {n} samples lie more than ten standard deviations from the median")
    if median > 0 and (q3 - q1) / median > SPREAD_LIMIT:
        doubts.append(f"the middle half of the samples spreads over {100 * (q3 - q1) / median:.0f} % of the median")
    return tuple(doubts)
