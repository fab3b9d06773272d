"""The share of the time that a stage takes: over the whole run, and whether it stays the same all along.

Neighbouring steps are alike (a queue that runs empty, a machine that throttles), so an interval comes from windows of
consecutive steps, as in `boundby.stats` from rounds; that of a share is on the share itself, which may be zero.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from boundby.stats import CONFIDENCE, WIDENING
from boundby.verdict import Bound

LEAST_WINDOW = 5  # steps
MOST_WINDOWS = 20
STEADY = 0.1  # interquartile range of a share over the windows, as a part of the step


@dataclass(frozen=True)
class Share:
    """The share of the time of all steps that a stage takes, or all stages of one bound together.

    `low` and `high` are the ends of its 95 % interval, `median` and `iqr` those of its windows; None where there are
    too few windows. `drift` is how much larger the share is in the last third of the windows than in the first.
    """

    name: str
    bound: Bound  # what its time counts for; `inconclusive` where that is not known
    step_s: float  # in each step, on average
    share: float
    low: float | None = None
    high: float | None = None
    median: float | None = None
    iqr: float | None = None
    drift: float | None = None

    @property
    def is_stable(self) -> bool:
        """Tell whether the share stays about the same; False where that is not known."""
        return self.iqr is not None and self.iqr <= STEADY and abs(self.drift or 0.0) <= STEADY

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, the share itself where there is none."""
        return (
            self.share if self.low is None else self.low,
            self.share if self.high is None else self.high,
        )


def windows(num_steps: int) -> list[np.ndarray]:
    """Return the places of consecutive steps, in windows of about the same size."""
    count = max(1, min(MOST_WINDOWS, num_steps // LEAST_WINDOW))
    return np.array_split(np.arange(num_steps), count)


def share_of(name: str, bound: Bound, spent_s: np.ndarray, whole_s: np.ndarray) -> Share:
    """Return the share of the time of some steps that was spent so."""
    total = float(whole_s.sum())
    share = float(spent_s.sum()) / total if total else 0.0
    found = Share(name, bound, float(spent_s.mean()), share)
    sums = [(float(spent_s[each].sum()), float(whole_s[each].sum())) for each in windows(len(whole_s))]
    parts = np.array([spent / whole for spent, whole in sums if whole])
    if len(parts) < 2:
        return found
    reach = WIDENING * float(stdtrit(len(parts) - 1, 0.5 + CONFIDENCE / 2) * parts.std(ddof=1)) / math.sqrt(len(parts))
    first, median, third = (float(each) for each in np.quantile(parts, [0.25, 0.5, 0.75]))
    return Share(
        name=name,
        bound=bound,
        step_s=found.step_s,
        share=share,
        low=max(0.0, share - reach),
        high=min(1.0, share + reach),
        median=median,
        iqr=third - first,
        drift=_drift(parts),
    )


def _drift(parts: np.ndarray) -> float | None:
    """Return the median share of the last third of the windows less that of the first; None below six windows.

    It is 0 where the shares differ as much within these thirds: what comes and goes is no drift.
    """
    third = len(parts) // 3
    if third < 2:
        return None
    quartiles = [np.quantile(each, [0.25, 0.5, 0.75]) for each in (parts[:third], parts[-third:])]
    drift = float(quartiles[1][1] - quartiles[0][1])
    return drift if abs(drift) > max(float(each[2] - each[0]) for each in quartiles) else 0.0
