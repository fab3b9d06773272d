"""Compare two runs: faster, slower, the same, or not to be told from these rounds.

Ratios are of B over A and are judged as logarithms, so that A against B gives the mirror image of B against A. The
interval of two independent runs is Welch's t-interval (Welch 1947), that of paired values the t-interval of their
ratios; both are widened, and correlated rounds count as fewer, as in `boundby.timing`. p-values over the rows of one
comparison are adjusted by Holm (1979). A p-value alone would call a difference of 0.1 % slower and a missing one the
same; hence the minimum effect: slower and faster need at least that much, and the same needs the whole interval inside
it (an equivalence test).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from boundby.timing.stats import CONFIDENCE, WIDENING, independent_rounds, reach

Verdict = Literal["faster", "slower", "same", "ambiguous"]

SIGNIFICANCE = 1 - CONFIDENCE
# Chosen, not measured: less is seldom worth acting on, and may come from what no interval of one run sees (another
# boot, another memory layout).
MINIMUM_EFFECT = {"cuda": 0.02, "cpu": 0.03}
FOUND = 0.9  # the chance that a difference is to be found with
SAME_CHANCE = 0.92  # makes 0.9 in all: by chance some rounds seem correlated and then count as fewer
MOST_MORE_ROUNDS = 200  # a longer measurement than this is no advice


@dataclass(frozen=True)
class Contrast:
    """The logarithm of B over A, its standard error and degrees of freedom; those are None, with a reason, if unknown.

    `variances` and `rounds` are those of A and B where the two were measured independently; None where they are paired.
    """

    log_ratio: float
    rounds: tuple[int, int]
    error: float | None = None
    freedom: float | None = None
    variances: tuple[float, float] | None = None
    reason: str | None = None

    @property
    def reach(self) -> float | None:
        """Half the 95 % interval of the logarithm, or None."""
        if self.error is None or self.freedom is None:
            return None
        return float(stdtrit(self.freedom, 0.5 + CONFIDENCE / 2)) * self.error

    @property
    def p(self) -> float | None:
        """The two-sided p-value of no difference, or None."""
        if self.error is None or self.freedom is None:
            return None
        if self.error == 0:
            return float(self.log_ratio == 0)
        return float(2 * stdtr(self.freedom, -abs(self.log_ratio) / self.error))


@dataclass(frozen=True)
class Comparison:
    """B over A with its 95 % interval, and what that means. `more_rounds` in each run would settle an ambiguous row.

    What is None has its `reason`. `p_adjusted` is Holm's over all rows judged together.
    """

    ratio: float
    low: float | None
    high: float | None
    p_adjusted: float | None
    verdict: Verdict
    minimum_effect: float
    rounds_a: int
    rounds_b: int
    more_rounds: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class PairedShares:
    """Shares of successes of A and B over the same `n` trials; the difference is B - A, with its 95 % interval."""

    n: int
    share_a: float
    share_b: float
    difference: float
    low: float
    high: float
    only_a: int
    only_b: int


def independent(a: Sequence[float], b: Sequence[float]) -> Contrast:
    """Return the contrast of two runs from one positive value per round of each. Raises ValueError on other values."""
    logs_a, logs_b = _logs(a), _logs(b)
    log_ratio, rounds = float(logs_b.mean() - logs_a.mean()), (logs_a.size, logs_b.size)
    if min(rounds) < 2:
        return Contrast(log_ratio, rounds, reason="one round gives no interval")
    effective = independent_rounds(logs_a), independent_rounds(logs_b)
    variances = float(logs_a.var(ddof=1)), float(logs_b.var(ddof=1))
    error, freedom = _welch(variances, effective)
    # With so much more variance the same number of independent rounds would say the same.
    widened = variances[0] * rounds[0] / effective[0], variances[1] * rounds[1] / effective[1]
    return Contrast(log_ratio, rounds, error, freedom, widened)


def paired(a: Sequence[float], b: Sequence[float]) -> Contrast:
    """Return the contrast of two runs that measured the same parts, in the same order, one positive value for each.

    Raises ValueError on other values, or when the numbers of parts differ.
    """
    logs_a, logs_b = _logs(a), _logs(b)
    if logs_a.size != logs_b.size:
        raise ValueError(f"paired values need the same parts; A has {logs_a.size} and B has {logs_b.size}")
    logs = logs_b - logs_a
    rounds = (logs.size, logs.size)
    if logs.size < 2:
        return Contrast(float(logs.mean()), rounds, reason="one part gives no interval")
    effective = independent_rounds(logs)
    error = WIDENING * float(logs.std(ddof=1)) / math.sqrt(effective)
    return Contrast(float(logs.mean()), rounds, error, effective - 1)


def judge(contrasts: Sequence[Contrast], minimum_effect: float) -> list[Comparison]:
    """Return the verdict on each contrast; `minimum_effect` is a share, such as 0.02, of the faster run's time.

    Raises ValueError when the minimum effect is not positive.
    """
    if not 0 < minimum_effect < math.inf:
        raise ValueError(f"the minimum effect is a positive share such as 0.02, got {minimum_effect}")
    known = [contrast.p for contrast in contrasts if contrast.p is not None]
    adjusted = iter(holm(known))
    return [
        _judged(contrast, None if contrast.p is None else next(adjusted), len(known), minimum_effect)
        for contrast in contrasts
    ]


def spread_for_same(rounds: int, minimum_effect: float) -> float:
    """Return how much rounds may vary for two runs of the same work to be `same` in nine of ten after so many each.

    It is the standard deviation of the logarithm of a round. `rounds` are 2 or more.
    """
    error, freedom = _welch((1.0, 1.0), (rounds, rounds))
    unlucky = float(ndtri(0.5 + SAME_CHANCE / 2)) * error / WIDENING
    return math.log1p(minimum_effect) / (unlucky + float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error)


def rounds_for_same(spread: float, minimum_effect: float) -> int | None:
    """Return the rounds that suffice in each of two runs whose rounds vary by `spread`; see `spread_for_same`.

    None where `MOST_MORE_ROUNDS` are not enough.
    """
    enough = (rounds for rounds in range(2, MOST_MORE_ROUNDS + 1) if spread_for_same(rounds, minimum_effect) >= spread)
    return next(enough, None)


def rounds_to_find(spread: float, effect: float, minimum_effect: float, tests: int = 1) -> int | None:
    """Return the rounds that suffice in each of two runs to call one `slower` that takes `effect` longer, in 9 of 10.

    `spread` is the standard deviation of the logarithm of a round, and `tests` the rows that are judged together. None
    where `MOST_MORE_ROUNDS` are not enough, as for an effect that hardly exceeds the minimum effect: then one in two
    estimates lies below that, whatever is measured.
    """
    true, least = math.log1p(effect), math.log1p(minimum_effect)
    for rounds in range(2, MOST_MORE_ROUNDS + 1):
        error, freedom = _welch((spread**2, spread**2), (rounds, rounds))
        unlucky = float(ndtri(FOUND)) * error / WIDENING
        if true - unlucky >= max(least, float(stdtrit(freedom, 1 - SIGNIFICANCE / tests / 2)) * error):
            return rounds
    return None


def half_width_for_same(minimum_effect: float) -> float:
    """Return half the interval, as a share, of a run of 20 rounds that vary by what `spread_for_same` allows."""
    return reach(spread_for_same(20, minimum_effect), 20)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's step-down method (Holm 1979), in the given order."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def paired_shares(a: Sequence[bool] | np.ndarray, b: Sequence[bool] | np.ndarray) -> PairedShares:
    """Return how two runs differ on the same trials, with the adjusted Wald interval for matched pairs.

    Half a trial is added to each cell of the two-by-two table (Agresti & Min 2005), which keeps the coverage near
    95 % where hardly any trial differs. Raises ValueError on no trials or different numbers of them.
    """
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    if first.size == 0 or first.shape != second.shape:
        raise ValueError(f"paired shares need the same trials, at least one; got {first.size} and {second.size}")
    n, only_a, only_b = first.size, int((first & ~second).sum()), int((second & ~first).sum())
    centre = (only_b - only_a) / (n + 2)
    reach = float(ndtri(0.5 + CONFIDENCE / 2)) * math.sqrt(((only_a + only_b + 1) / (n + 2) - centre**2) / (n + 2))
    return PairedShares(
        n=n,
        share_a=float(first.mean()),
        share_b=float(second.mean()),
        difference=(only_b - only_a) / n,
        low=max(-1.0, centre - reach),
        high=min(1.0, centre + reach),
        only_a=only_a,
        only_b=only_b,
    )


def _logs(rounds: Sequence[float]) -> np.ndarray:
    values = np.asarray(rounds, dtype=np.float64)
    if values.size == 0 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"each round needs one positive value, got {list(rounds)}")
    return np.log(values)


def _welch(variances: tuple[float, float], rounds: tuple[float, float]) -> tuple[float, float]:
    """Return the widened standard error and the degrees of freedom (Welch 1947) of the difference of two means."""
    parts = [variance / n for variance, n in zip(variances, rounds, strict=True)]
    total = sum(parts)
    if total == 0:
        return 0.0, float(sum(rounds) - 2)
    freedom = total**2 / sum(part**2 / (n - 1) for part, n in zip(parts, rounds, strict=True))
    return WIDENING * math.sqrt(total), freedom


def _judged(contrast: Contrast, p_adjusted: float | None, tests: int, minimum_effect: float) -> Comparison:
    least, reach = math.log1p(minimum_effect), contrast.reach
    verdict: Verdict = "ambiguous"
    more_rounds, reason = None, contrast.reason
    if p_adjusted is not None and reach is not None:
        if p_adjusted < SIGNIFICANCE and abs(contrast.log_ratio) >= least:
            verdict = "slower" if contrast.log_ratio > 0 else "faster"
        elif abs(contrast.log_ratio) + reach <= least:
            verdict = "same"
        else:
            more_rounds, reason = _more_rounds(contrast, SIGNIFICANCE / tests, least)
    return Comparison(
        ratio=math.exp(contrast.log_ratio),
        low=None if reach is None else math.exp(contrast.log_ratio - reach),
        high=None if reach is None else math.exp(contrast.log_ratio + reach),
        p_adjusted=p_adjusted,
        verdict=verdict,
        minimum_effect=minimum_effect,
        rounds_a=contrast.rounds[0],
        rounds_b=contrast.rounds[1],
        more_rounds=more_rounds,
        reason=reason,
    )


def _more_rounds(contrast: Contrast, level: float, least: float) -> tuple[int | None, str | None]:
    """Return the rounds to add to each run until the present ratio and variances give a verdict, or why none is known.

    With exactly that many the chance of a verdict is about one half, since the ratio itself will move.
    """
    if contrast.variances is None:
        return None, "the interval over the parts that both have is too wide"
    effect = abs(contrast.log_ratio)
    for more in range(1, MOST_MORE_ROUNDS + 1):
        rounds = contrast.rounds[0] + more, contrast.rounds[1] + more
        error, freedom = _welch(contrast.variances, rounds)
        future = Contrast(contrast.log_ratio, rounds, error, freedom)
        if effect >= least and (future.p or 0.0) < level:
            return more, None
        if effect + (future.reach or 0.0) <= least:
            return more, None
    return None, (
        f"{MOST_MORE_ROUNDS} more rounds would not settle it: they vary too much, or the difference lies too close to "
        "the minimum effect"
    )
