"""A summary claims no more than its samples support."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from scipy import stats as reference
from scipy.signal import lfilter

from boundby.timing import stats
from boundby.timing.compare import independent, judge
from boundby.timing.rounds import Outcome, StopRule, sweep
from boundby.timing.stats import (
    WIDENING,
    Estimate,
    drift,
    estimate,
    independent_rounds,
    least_samples,
    reach,
    summarize,
    wilson_interval,
)


def test_summary_of_hand_made_samples():
    summary = summarize([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (summary.n, summary.mean, summary.median) == (5, 3.0, 3.0)
    assert (summary.minimum, summary.maximum) == (1.0, 5.0)
    assert (summary.q1, summary.q3) == (2.0, 4.0)
    assert summary.std == pytest.approx(math.sqrt(2.5), rel=1e-15)  # n - 1 in the denominator


def test_one_sample_has_no_spread_and_no_percentile_and_no_samples_no_summary():
    summary = summarize([2.0])
    assert (summary.n, summary.mean, summary.median, summary.maximum) == (1, 2.0, 2.0, 2.0)
    assert (summary.std, summary.p90, summary.p95, summary.p99) == (None, None, None, None)
    assert summary.doubts == ()
    with pytest.raises(ValueError, match="no samples"):
        summarize([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.mean = 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match="sample 2 of 4 is not finite"):
        summarize([1.0, 2.0, bad, 3.0])


@pytest.mark.parametrize(("p", "n"), [(0.90, 29), (0.95, 59), (0.99, 299)])
def test_a_percentile_is_given_from_the_first_n_that_supports_it(p, n):
    assert least_samples(p) == n
    assert 1 - p**n >= 0.95 > 1 - p ** (n - 1)  # the largest sample is above the quantile with that probability
    name = f"p{100 * p:.0f}"
    assert getattr(summarize([1.0] * (n - 1)), name) is None
    assert getattr(summarize([1.0] * n), name) == 1.0
    assert stats.percentile([1.0] * (n - 1), p) is None
    assert least_samples(0.90, confidence=0.99) == 44  # ln(0.01) / ln(0.9) = 43.7


def test_percentiles_are_those_of_the_sorted_samples():
    assert [n for n in range(1, 299) if summarize([1.0] * n).p99 is not None] == []
    summary = summarize([float(value) for value in reversed(range(301))])
    assert (summary.p90, summary.p95, summary.p99) == pytest.approx((270.0, 285.0, 297.0), rel=1e-12)


def test_an_outlier_beyond_ten_standard_deviations_is_counted_and_told():
    quiet = [10.0, 10.1, 9.9, 10.2, 9.8] * 6  # median 10, MAD 0.1: the limit is at 11.4826
    assert summarize([*quiet, 11.47]).outliers == 0
    summary = summarize([*quiet, 11.5])
    assert summary.outliers == 1
    assert summary.doubts == ("1 of 31 samples lie more than ten standard deviations from the median",)


def test_a_wide_middle_half_is_a_doubt():
    assert summarize([8.8, 9.0, 10.0, 11.0, 11.2]).doubts == ()
    [doubt] = summarize([8.0, 8.7, 10.0, 11.3, 12.0]).doubts
    assert "26 % of the median" in doubt


def test_interval_is_the_widened_t_interval_of_the_logarithms():
    rounds = [math.exp(1), math.exp(2), math.exp(3)]
    interval = estimate(rounds)
    reach = 1.1 * 4.302652729911275 / math.sqrt(3)  # t of 2 degrees of freedom at 97.5 %, from a table; their sd is 1
    assert interval.value == pytest.approx(math.exp(2), rel=1e-12)
    assert interval.low == pytest.approx(math.exp(2 - reach), rel=1e-9)
    assert interval.high == pytest.approx(math.exp(2 + reach), rel=1e-9)
    assert (interval.rounds, interval.reason) == (3, None)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("rounds", [[0.011, 0.012], [3.0, 3.3, 2.9, 3.1, 3.05], [1e-9, 1.0, 1e9, 2.0]])
def test_interval_agrees_with_scipy(rounds, confidence):
    logs = np.log(rounds)
    scale = WIDENING * reference.sem(logs)
    low, high = reference.t.interval(confidence, len(rounds) - 1, loc=logs.mean(), scale=scale)
    interval = estimate(rounds, confidence)
    assert (interval.low, interval.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)
    assert interval.value == pytest.approx(reference.gmean(rounds), rel=1e-12)


def test_one_round_gives_a_value_and_no_interval_and_equal_rounds_one_without_width():
    interval = estimate([0.25])
    assert interval.value == pytest.approx(0.25, rel=1e-15)
    assert (interval.low, interval.high, interval.half_width, interval.reason) == (
        None,
        None,
        None,
        "one round gives no interval",
    )
    interval = estimate([0.5] * 5)
    assert interval.low == interval.value == interval.high and interval.half_width == 0.0
    assert Estimate(value=10.0, low=9.0, high=11.0, rounds=5).half_width == 0.1


@pytest.mark.parametrize("rounds", [[], [1.0, 0.0], [1.0, -1.0], [math.nan], [1.0, math.inf]])
def test_a_round_without_a_positive_value_is_refused(rounds):
    with pytest.raises(ValueError, match="each round needs one positive value"):
        estimate(rounds)


def test_the_interval_of_a_rate_is_that_of_the_time_turned_over():
    seconds = [0.9, 1.0, 1.2, 1.1]
    time, rate = estimate(seconds), estimate([1 / value for value in seconds])
    assert time.low is not None and time.high is not None
    assert (rate.low, rate.value, rate.high) == pytest.approx((1 / time.high, 1 / time.value, 1 / time.low), rel=1e-12)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),  # Newcombe 1998, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_has_the_published_ends(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (5, 7), (990, 1000)])
def test_wilson_interval_agrees_with_scipy_and_stays_a_share(successes, n):
    low, high = wilson_interval(successes, n)
    expected = reference.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= low <= successes / n <= high <= 1
    assert all(wilson_interval(0, n)[0] >= 0 and wilson_interval(n, n)[1] <= 1 for n in range(1, 300))


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_what_is_not_a_share_has_no_wilson_interval(successes, n):
    with pytest.raises(ValueError, match=f"{successes} successes of {n} are not a share"):
        wilson_interval(successes, n)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([2.0, 2.0, 9.0, 1.0, 2.5, 2.5], 0.25),  # the middle third does not matter
        ([4.0, 4.0, 4.0, 4.0, 3.0, 3.0], -0.25),
        ([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 64.0, 2.0, 2.0], 0.0),  # nor does one disturbed round
        ([2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0], 0.5),  # thirds of eight hold two
        ([1.0, 1.0, 1.0, 1.0, 9.0], None),
        ([], None),
    ],
)
def test_drift_is_how_much_longer_the_last_third_of_the_rounds_is_than_the_first(rounds, expected):
    assert drift(rounds) == expected


def test_the_reach_of_an_interval_follows_from_the_spread_of_its_rounds():
    rounds = [1.0, 1.04, 0.98, 1.01, 1.03]
    assert reach(float(np.log(rounds).std(ddof=1)), 5) == pytest.approx(estimate(rounds).half_width, rel=0.001)
    with pytest.raises(ValueError, match="one round"):
        reach(0.1, 1)


def test_rounds_that_a_change_of_speed_leaves_correlated_count_as_fewer():
    rng = np.random.default_rng(0)
    independent, changed = rng.normal(0, 0.02, (2, 400, 20))
    changed[:, 12:] += 0.25
    assert np.mean([independent_rounds(logs) < 20 for logs in independent]) < 0.08
    assert max(independent_rounds(logs) for logs in changed) < 4
    assert independent_rounds(np.arange(7.0)) == 7, "so few cannot tell it from chance"
    assert independent_rounds(np.ones(20)) == 20
    interval = estimate(np.exp(changed[0]))
    assert interval.low < np.exp(0.25) and interval.high > 1, "it holds either speed"


BATCHES, PASSES, PAUSE = 10, 4, 12  # the pause in timings: warm calls, tokenizer, a fresh batch
TIMINGS = BATCHES * PASSES
RULE = StopRule(half_width=0.0121, max_seconds=math.inf, least_rounds=5, most_rounds=20)  # 10 s on a CPU
SWEEPS = 600
TRUTH_VISITS = 40_000


@dataclass(frozen=True)
class Noise:
    """The share of the variance of a timing that is correlated over `tau` timings; the rest is white."""

    correlated: float
    tau: float = TIMINGS + PAUSE

    def line(self, rng: np.random.Generator, timings: int) -> np.ndarray:
        """Return noise of variance 1."""
        kept = math.exp(-1 / self.tau)
        shocks = rng.standard_normal(timings) * math.sqrt(1 - kept**2)
        shocks[0] /= math.sqrt(1 - kept**2)  # so that it starts in its stationary state
        white = rng.standard_normal(timings)
        return math.sqrt(self.correlated) * lfilter([1], [1, -kept], shocks) + math.sqrt(1 - self.correlated) * white


IID, CORRELATED, HALF = Noise(0.0), Noise(1.0), Noise(0.5)


def medians(line: np.ndarray) -> np.ndarray:
    """Return for each visit, a row of `line`, the median of each batch over the passes."""
    return np.median(line.reshape(-1, PASSES, BATCHES), axis=1)


@cache
def truth(noise: Noise, sigma: float) -> float:
    """Return the geometric mean of the value of a visit over very many of them."""
    line = noise.line(np.random.default_rng(1), TRUTH_VISITS * TIMINGS)
    return float(np.exp(np.log(np.exp(sigma * medians(line)).mean(axis=1)).mean()))


def swept(rng: np.random.Generator, noise: Noise, sigmas: tuple[float, ...], seed: int) -> list[list[float]]:
    """Return the values of all rounds of each point of one sweep; the noise at point i is `sigmas[i]` of the line's."""
    visits = RULE.most_rounds * len(sigmas)
    line = noise.line(rng, visits * (TIMINGS + PAUSE)).reshape(visits, -1)[:, :TIMINGS]
    waiting = iter(medians(line))

    def visit(point: int, number: int) -> Outcome:
        return Outcome(point, number, "ok", 0.4, float(np.exp(sigmas[point] * next(waiting)).mean()))

    outcomes = sweep(range(len(sigmas)), visit, RULE, seed=seed)
    return [
        [outcome.value for outcome in outcomes if outcome.point == point and outcome.value]
        for point in range(len(sigmas))
    ]


def coverage(noise: Noise, sigmas: tuple[float, ...], sweeps: int = SWEEPS) -> list[float]:
    """Return for each point in how many of the sweeps its interval holds the truth, as a share."""
    rng = np.random.default_rng(20260822)
    held = np.zeros(len(sigmas))
    for seed in range(sweeps):
        for point, rounds in enumerate(swept(rng, noise, sigmas, seed)):
            interval = estimate(rounds)
            assert interval.low is not None and interval.high is not None
            held[point] += interval.low <= truth(noise, sigmas[point]) <= interval.high
    return list(held / sweeps)


# The sigmas make rounds vary by 1.6, 3 and 6 %: a quiet machine, one between, and one that uses up its 15 rounds.
EXTREME = pytest.mark.truth  # beside the middle one, which every run of the tests makes


SIGMAS = [(IID, sigma) for sigma in (0.3, 0.6, 1.2)] + [(CORRELATED, sigma) for sigma in (0.02, 0.045, 0.1)]
MIDDLE = (0.6, 0.045)


@pytest.mark.parametrize(
    ("noise", "sigma"), [pytest.param(*case, marks=() if case[1] in MIDDLE else EXTREME) for case in SIGMAS]
)
def test_intervals_cover_the_truth_on_independent_and_on_autocorrelated_noise(noise, sigma):
    assert 0.93 <= np.mean(coverage(noise, (sigma,) * 6)) <= 0.97


@pytest.mark.parametrize(
    ("noise", "loud", "quiet"),
    [
        pytest.param(IID, 1.0, 0.2, marks=EXTREME),
        (CORRELATED, 0.055, 0.011),
        pytest.param(HALF, 0.08, 0.03, marks=EXTREME),
    ],
)
def test_the_one_point_that_keeps_a_sweep_going_is_covered_too(noise, loud, quiet):
    """The worst case of optional stopping: this point alone decides when to stop."""
    covered = coverage(noise, (loud, *[quiet] * 5))
    assert 0.93 - 2 * math.sqrt(0.93 * 0.07 / SWEEPS) <= covered[0] <= 0.97 + 2 * math.sqrt(0.97 * 0.03 / SWEEPS)
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.parametrize("rounds", [2, 5, 10, 15])
def test_a_fixed_number_of_rounds_is_covered_too(rounds):
    random = np.random.default_rng(20240601)
    intervals = [estimate(values) for values in np.exp(random.normal(math.log(0.02), 0.03, size=(4000, rounds)))]
    assert (
        0.93
        <= sum(interval.low <= 0.02 <= interval.high for interval in intervals if interval.low and interval.high) / 4000
        <= 0.97
    )


def test_without_the_widening_optional_stopping_covers_too_little(monkeypatch):
    """Why `WIDENING` is there, and that these simulations can fail."""
    monkeypatch.setattr(stats, "WIDENING", 1.0)
    wide = StopRule(half_width=0.03, max_seconds=math.inf, least_rounds=5, most_rounds=15)  # as one may ask for
    monkeypatch.setitem(globals(), "RULE", wide)
    assert coverage(CORRELATED, (0.055, *[0.011] * 5))[0] < 0.93


def test_no_difference_on_an_autocorrelated_machine_is_rarely_called_slower():
    rng = np.random.default_rng(20260822)
    tables = []
    for seed in range(150):
        a, b = (swept(rng, CORRELATED, (0.06,) * 6, seed) for _ in "AB")
        tables.append(
            [comparison.verdict for comparison in judge([independent(*pair) for pair in zip(a, b, strict=True)], 0.02)]
        )
    assert sum("slower" in table for table in tables) / len(tables) <= 0.05
