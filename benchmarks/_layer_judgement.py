"""What the attempts of `layer_overhead.py` amount to: plain numbers in, plain sentences out.

An attempt without a value is None. A limit is broken where the whole interval over the attempts lies beyond it, kept
where all of it lies within, and else not settled: on a model of 50 ms one percent of noise is microseconds per call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from boundby.stats import Estimate, estimate

MOST_US_PER_CALL = 2.5
LEAST_COVERAGE, MOST_COVERAGE = 0.97, 1.03
LEAST_PLAIN_S = 0.020  # below, the cost of the probes themselves decides about the coverage

Values = Sequence[float | None]


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval; the ends are None where the attempts give none."""

    value: float
    low: float | None
    high: float | None

    def is_above(self, limit: float) -> bool:
        """Tell whether all of it lies above the limit."""
        return self.low is not None and self.low > limit

    def is_within(self, least: float, most: float) -> bool:
        """Tell whether all of it lies between the two."""
        return self.low is not None and self.high is not None and least <= self.low and self.high <= most


@dataclass(frozen=True)
class Watched:
    """One model with our probes, an entry per attempt: seconds without, the ratio with over without, the coverage."""

    model: str
    calls: int  # of modules in a forward
    plain_s: Values
    ratios: Values
    coverages: Values

    @property
    def us_per_call(self) -> Interval | None:
        """Microseconds that the probes add to each call of a module."""
        found = interval(self.ratios)
        if found is None or not self.calls:
            return None
        scale = 1e6 * median(known(self.plain_s)) / self.calls
        low, high = (None if end is None else scale * (end - 1) for end in (found.low, found.high))
        return Interval(scale * (found.value - 1), low, high)

    @property
    def coverage(self) -> Interval | None:
        """The share of the plain time that the layers account for."""
        found = interval(self.coverages)
        return None if found is None else Interval(found.value, found.low, found.high)

    @property
    def is_coverage_judged(self) -> bool:
        """Whether the model is long enough for its coverage to be held against the limits."""
        return bool(known(self.plain_s)) and median(known(self.plain_s)) >= LEAST_PLAIN_S


def known(values: Values) -> list[float]:
    """Return the values of the attempts that have one."""
    return [value for value in values if value is not None]


def interval(values: Values) -> Estimate | None:
    """Return the geometric mean of the attempts with its interval; None where no attempt has a value."""
    return estimate(known(values)) if known(values) else None


def failures(models: Sequence[Watched]) -> list[str]:
    """Return what falls short, one sentence each; [] where nothing surely does."""
    found = []
    for each in models:
        if missing := sum(value is None for value in each.ratios):
            found.append(f"{each.model}: ours gave no value in {missing} of {len(each.ratios)} attempts")
        cost, coverage = each.us_per_call, each.coverage
        if cost and cost.is_above(MOST_US_PER_CALL):
            found.append(f"{each.model}: a probe costs {cost.value:.2f} µs per call, {MOST_US_PER_CALL} at most")
        if coverage and each.is_coverage_judged and _is_outside(coverage):
            allowed = f"{100 * LEAST_COVERAGE:.0f} to {100 * MOST_COVERAGE:.0f} %"
            found.append(
                f"{each.model}: the layers account for {100 * coverage.value:.1f} % of its time, not {allowed}"
            )
    return found


def unsettled(models: Sequence[Watched]) -> list[str]:
    """Return what the attempts do not decide, a few words each."""
    found = []
    for each in models:
        cost, coverage = each.us_per_call, each.coverage
        if cost is None or not (cost.is_above(MOST_US_PER_CALL) or _is_cheap(cost)):
            found.append(f"the cost of a probe on {each.model}")
        if each.is_coverage_judged and coverage and not _is_outside(coverage) and not _is_covered(coverage):
            found.append(f"the coverage on {each.model}")
    return found


def _is_cheap(cost: Interval) -> bool:
    return cost.high is not None and cost.high <= MOST_US_PER_CALL


def _is_covered(coverage: Interval) -> bool:
    return coverage.is_within(LEAST_COVERAGE, MOST_COVERAGE)


def _is_outside(coverage: Interval) -> bool:
    return coverage.is_above(MOST_COVERAGE) or (coverage.high is not None and coverage.high < LEAST_COVERAGE)
