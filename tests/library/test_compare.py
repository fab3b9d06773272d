"""Two runs are told apart only where their rounds tell them apart."""

import math

import numpy as np
import pytest
from scipy import stats as reference

from boundby.timing import compare
from boundby.timing.compare import Contrast, holm, independent, judge, paired, paired_shares, rounds_for_same
from boundby.timing.rounds import Outcome, StopRule, sweep
from boundby.timing.stats import WIDENING

QUIET = [1.0, 1.01, 0.99, 1.005, 0.995]
LOUD = [1.0, 1.2, 0.85, 1.1, 0.9]


def scaled(rounds: list[float], factor: float) -> list[float]:
    return [factor * value for value in rounds]


def verdicts(contrasts: list[Contrast], minimum_effect: float = 0.02) -> list[str]:
    return [comparison.verdict for comparison in judge(contrasts, minimum_effect)]


def test_interval_is_welchs_on_the_logarithms_with_a_widened_error():
    a, b = [1.0, 1.1, 0.9, 1.05, 1.0], [1.2, 1.3, 1.1, 1.25, 1.22, 1.18, 1.3]
    contrast = independent(a, b)
    expected = reference.ttest_ind(np.log(b), np.log(a), equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert contrast.freedom == pytest.approx(expected.df, rel=1e-12)
    assert contrast.log_ratio == pytest.approx((low + high) / 2, rel=1e-12)
    assert contrast.reach == pytest.approx(WIDENING * (high - low) / 2, rel=1e-12)
    assert contrast.p == pytest.approx(2 * reference.t.sf(expected.statistic / WIDENING, expected.df), rel=1e-9)


def test_paired_interval_is_that_of_the_ratios():
    a, b = [1.0, 2.0, 4.0, 8.0], [1.1, 2.0, 4.5, 8.1]
    contrast = paired(a, b)
    logs = np.log(np.divide(b, a))
    low, high = reference.t.interval(0.95, 3, loc=logs.mean(), scale=WIDENING * reference.sem(logs))
    assert (contrast.log_ratio, contrast.freedom) == (pytest.approx(logs.mean(), rel=1e-12), 3)
    assert contrast.reach == pytest.approx((high - low) / 2, rel=1e-9)


def test_pairs_need_the_same_parts():
    with pytest.raises(ValueError, match="A has 2 and B has 1"):
        paired([1.0, 2.0], [1.0])


@pytest.mark.parametrize("rounds", [[], [0.0, 1.0], [-1.0], [math.nan], [math.inf, 1.0]])
def test_a_round_without_a_positive_value_is_refused(rounds):
    with pytest.raises(ValueError, match="each round needs one positive value"):
        independent(QUIET, rounds)


@pytest.mark.parametrize("minimum_effect", [0.0, -0.01, math.inf, math.nan])
def test_a_minimum_effect_that_is_not_positive_is_refused(minimum_effect):
    with pytest.raises(ValueError, match="minimum effect is a positive share"):
        judge([independent(QUIET, QUIET)], minimum_effect)


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.08, "slower"),
        (1 / 1.08, "faster"),
        (1.0, "same"),
        (1.002, "same"),
        (1.019, "ambiguous"),
        (1 / 1.019, "ambiguous"),
    ],
)
def test_quiet_rounds_get_the_verdict_that_their_ratio_asks_for(factor, verdict):
    assert verdicts([independent(QUIET, scaled(QUIET, factor))]) == [verdict]


def test_a_difference_below_the_minimum_effect_is_never_slower():
    steady = [1.0, 1.0001, 0.9999, 1.0, 1.0]
    comparison = judge([independent(steady, scaled(steady, 1.01))], 0.02)[0]
    assert (comparison.p_adjusted < 1e-6, comparison.verdict) == (True, "same")


def test_a_large_ratio_of_loud_rounds_is_ambiguous():
    comparison = judge([independent(LOUD, scaled(LOUD, 1.1))], 0.02)[0]
    assert comparison.verdict == "ambiguous"
    assert comparison.low is not None and comparison.high is not None and comparison.low < 1 < 1.1 < comparison.high


def test_b_against_a_is_the_mirror_image_of_a_against_b():
    pairs = [(QUIET, scaled(LOUD, 1.3)), (QUIET, scaled(QUIET, 1.0203)), (LOUD, QUIET), (QUIET, scaled(QUIET, 0.95))]
    there = judge([independent(a, b) for a, b in pairs], 0.02)
    back = judge([independent(b, a) for a, b in pairs], 0.02)
    mirrored = {"slower": "faster", "faster": "slower", "same": "same", "ambiguous": "ambiguous"}
    for first, second in zip(there, back, strict=True):
        assert second.verdict == mirrored[first.verdict]
        assert first.low is not None and second.high is not None
        assert second.high == pytest.approx(1 / first.low, rel=1e-12)


def test_steady_rounds_without_any_spread_are_judged():
    assert verdicts([independent([1.0] * 5, [1.0] * 5)]) == ["same"]
    assert verdicts([independent([1.0] * 5, [1.05] * 5)]) == ["slower"]


def test_one_round_gives_a_ratio_and_no_verdict():
    comparison = judge([independent([1.0], [2.0] * 5), independent(QUIET, scaled(QUIET, 1.08))], 0.02)
    assert (comparison[0].ratio, comparison[0].low, comparison[0].high, comparison[0].p_adjusted) == (
        2.0,
        None,
        None,
        None,
    )
    assert (comparison[0].verdict, comparison[0].more_rounds, comparison[0].reason is None) == (
        "ambiguous",
        None,
        False,
    )
    assert comparison[1].verdict == "slower"  # and is the only test of its family


def test_holm_multiplies_by_the_hypotheses_left_and_never_falls():
    # 5 x 0.001, 4 x 0.01, 3 x 0.02, 2 x 0.03, 1 x 0.5
    assert holm([0.001, 0.01, 0.02, 0.03, 0.5]) == pytest.approx([0.005, 0.04, 0.06, 0.06, 0.5], rel=1e-12)
    assert holm([0.03, 0.5, 0.001, 0.02, 0.01]) == pytest.approx([0.06, 0.5, 0.005, 0.06, 0.04], rel=1e-12)
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_more_rows_make_chance_findings_harder():
    doubtful = independent(QUIET, scaled([1.0, 1.01, 0.985, 1.015, 0.99], 1.022))
    assert doubtful.p is not None and 0.01 < doubtful.p < 0.05
    assert verdicts([doubtful]) == ["slower"]
    assert verdicts([doubtful] + [independent(QUIET, QUIET)] * 5)[0] == "ambiguous"


def settles(a: list[float], b: list[float], more: int, minimum_effect: float) -> str:
    """Return the verdict when each run has `more` further rounds with the same mean and spread of the logarithms."""

    def longer(rounds: list[float]) -> list[float]:
        logs, n = np.log(rounds), len(rounds) + more
        shape = np.linspace(-1, 1, n)[np.argsort(np.arange(n) * 0.618 % 1)]  # neighbours differ
        return list(np.exp(logs.mean() + shape / shape.std(ddof=1) * logs.std(ddof=1)))

    return verdicts([independent(longer(a), longer(b))], minimum_effect)[0]


@pytest.mark.parametrize(
    ("factor", "minimum_effect", "verdict"), [(1.1, 0.02, "slower"), (1 / 1.1, 0.02, "faster"), (1.0, 0.1, "same")]
)
def test_an_ambiguous_row_is_settled_by_the_rounds_it_asks_for_and_by_no_fewer(factor, minimum_effect, verdict):
    other = scaled([1.0, 1.08, 0.94, 1.05, 0.95], factor)
    comparison = judge([independent(LOUD, other)], minimum_effect)[0]
    assert (comparison.verdict, comparison.reason) == ("ambiguous", None)
    assert comparison.more_rounds is not None and comparison.more_rounds > 1
    assert settles(LOUD, other, comparison.more_rounds, minimum_effect) == verdict
    assert settles(LOUD, other, comparison.more_rounds - 1, minimum_effect) == "ambiguous"


def test_a_ratio_at_the_minimum_effect_says_that_rounds_do_not_help():
    comparison = judge([independent(QUIET, scaled(QUIET, 1.01999))], 0.02)[0]
    assert (comparison.verdict, comparison.more_rounds) == ("ambiguous", None)
    assert comparison.reason is not None and "200 more rounds would not settle it" in comparison.reason


def test_paired_parts_ask_for_no_rounds():
    comparison = judge([paired(LOUD, [1.1, 1.1, 1.1, 1.1, 0.8])], 0.02)[0]
    assert (comparison.verdict, comparison.more_rounds) == ("ambiguous", None)
    assert comparison.reason is not None and "the parts that both have" in comparison.reason


def test_the_difference_of_paired_shares_agrees_with_the_published_example():
    """The approval ratings of Agresti, Categorical Data Analysis, 10.1: 794, 150, 86 and 570 of 1600 people."""
    a = [True] * 794 + [True] * 150 + [False] * 86 + [False] * 570
    b = [True] * 794 + [False] * 150 + [True] * 86 + [False] * 570
    shares = paired_shares(a, b)
    assert (shares.n, shares.only_a, shares.only_b) == (1600, 150, 86)
    assert shares.difference == pytest.approx(-0.04, rel=1e-12)
    assert (shares.share_a, shares.share_b) == pytest.approx((944 / 1600, 880 / 1600), rel=1e-12)
    # -0.04 +- 1.96 x 0.0095 by Wald; half a trial in each of so full cells changes the fourth digit
    assert (shares.low, shares.high) == pytest.approx((-0.0586, -0.0214), abs=2e-4)


def test_equal_predictions_leave_the_difference_to_the_number_of_rows():
    few, many = paired_shares([True] * 10, [True] * 10), paired_shares([True] * 1000, [True] * 1000)
    assert few.difference == many.difference == 0.0
    assert few.low == -few.high and few.high == pytest.approx(1.96 / 12, rel=1e-3)
    assert many.high == pytest.approx(1.96 / 1002, rel=1e-3)


@pytest.mark.parametrize(("a", "b"), [([], []), ([True], [True, False])])
def test_shares_of_different_trials_are_refused(a, b):
    with pytest.raises(ValueError, match="paired shares need the same trials"):
        paired_shares(a, b)


@pytest.mark.parametrize(("n", "only_a", "only_b"), [(200, 0.01, 0.01), (1000, 0.03, 0.01), (2000, 0.002, 0.002)])
def test_the_interval_of_paired_shares_covers_the_difference(n, only_a, only_b):
    rng = np.random.default_rng(7)
    counts = rng.multinomial(n, [only_a, only_b, 1 - only_a - only_b], size=4000)
    truth, covered = only_b - only_a, 0
    for lost, won, _ in counts:
        both = np.arange(n)
        shares = paired_shares(both >= won, (both < won) | (both >= won + lost))
        covered += shares.low <= truth <= shares.high
    assert 0.93 <= covered / len(counts) <= 0.985  # few discordant rows: conservative, as published


SIZES = (1, 2, 4, 8, 16, 32)
CPU_RULE = StopRule(half_width=0.03, max_seconds=math.inf)


def run_of(rng: np.random.Generator, sigma: float, factor: float = 1.0) -> dict[int, list[float]]:
    """Return the rounds of a whole sweep with the stop rule of a CPU; each round varies by `sigma`."""
    noise = {size: iter(factor * np.exp(rng.normal(0, sigma, CPU_RULE.most_rounds))) for size in SIZES}
    outcomes = sweep(SIZES, lambda size, number: Outcome(size, number, "ok", 0.4, float(next(noise[size]))), CPU_RULE)
    return {size: [outcome.value for outcome in outcomes if outcome.point == size and outcome.value] for size in SIZES}


def tables(sigma: float, factor: float, count: int, minimum_effect: float) -> list[list[str]]:
    rng = np.random.default_rng(20260822)
    rows = []
    for _ in range(count):
        a, b = run_of(rng, sigma), run_of(rng, sigma, factor)
        rows.append(verdicts([independent(a[size], b[size]) for size in SIZES], minimum_effect))
    return rows


@pytest.mark.parametrize("sigma", [0.01, 0.02])
def test_a_difference_of_5_percent_is_found_in_nine_of_ten_rows(sigma):
    """What a sweep delivers that stops at 3 %: with rounds that vary by 2 %, 7 of them and half-widths around 2 %."""
    rows = [verdict for table in tables(sigma, 1.05, 150, 0.02) for verdict in table]
    assert rows.count("slower") / len(rows) >= 0.90
    assert rows.count("faster") == rows.count("same") == 0


@pytest.mark.parametrize("sigma", [0.03, 0.04])
def test_a_difference_of_5_percent_is_found_in_nine_of_ten_comparisons_of_noisier_rounds(sigma):
    """With rounds that vary by 4 % a sweep often ends at its 15 rounds; single rows are found in 7 of 10."""
    judged_tables = tables(sigma, 1.05, 150, 0.02)
    assert sum("slower" in table for table in judged_tables) / len(judged_tables) >= 0.90
    assert not any("faster" in table or "same" in table for table in judged_tables)


@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.06])
def test_no_difference_is_called_slower_in_at_most_one_of_twenty_tables(sigma):
    judged_tables = tables(sigma, 1.0, 150, 0.02)
    assert sum("slower" in table for table in judged_tables) / len(judged_tables) <= 0.05


@pytest.mark.parametrize("spread", [0.005, 0.01, 0.03])
def test_two_runs_of_the_same_work_are_the_same_in_nine_of_ten_after_the_rounds_that_this_asks_for(spread):
    needed = rounds_for_same(spread, minimum_effect=0.03)
    rng = np.random.default_rng(0)

    def share(rounds: int) -> float:
        tables = [independent(*np.exp(rng.normal(0, spread, (2, rounds)))) for _ in range(600)]
        return sum(judge([table], 0.03)[0].verdict == "same" for table in tables) / len(tables)

    assert share(needed) >= 0.88
    assert needed == 2 or share(needed - 1) < 0.93
    assert rounds_for_same(1.0, 0.03) is None


@pytest.mark.parametrize(("counted", "least", "most"), [(compare.independent_rounds, 0.0, 0.05), (len, 0.4, 1.0)])
def test_a_run_that_changed_its_speed_on_the_way_is_rarely_called_slower(monkeypatch, counted, least, most):
    """Shared hosts do: forwards took 1.2 to 1.35 times as long for a fifth of a sweep. The second case is why."""
    monkeypatch.setattr(compare, "independent_rounds", counted)
    rng, called_slower = np.random.default_rng(1), 0
    for _ in range(300):
        logs = rng.normal(0, 0.02, (2, 20))
        logs[1, : rng.integers(5, 16)] += 0.22
        called_slower += verdicts([independent(*np.exp(logs))], 0.03) == ["slower"]
    assert least <= called_slower / 300 <= most
