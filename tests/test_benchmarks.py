"""How the benchmarks judge what they measured: plain numbers in, sentences out."""

import pytest

from benchmarks import repeatability, sampler_overhead
from boundby.timing.stats import Estimate, estimate

DISTURBED = ["the measurement was disturbed: other processes used 0.9 of 2 cores"]
PLAIN = [230.0, 221.0, 256.0, 240.0, 235.0]


@pytest.mark.parametrize(("factor", "said"), [(1.029, ""), (1.031, "+3.1 %"), (0.969, "-3.1 %")])
def test_three_percent_from_the_plain_loop_are_allowed_in_both_directions(factor, said):
    failures = repeatability.shortfalls([factor * 100.0] * 5, [100.0] * 5, DISTURBED)
    assert failures == ([f"ours is {said} from the plain loop, allowed are 3 %"] if said else [])
    assert repeatability.shortfalls([100.0], [100.0], DISTURBED) == [], "one repeat has no spread"


def test_the_difference_is_taken_within_each_repeat_and_not_between_medians():
    """The machine slows down over the repeats: the medians agree, the repeats do not."""
    plain = [100.0, 110.0, 120.0, 130.0, 140.0]
    ours = [110.0, 120.0, 120.0, 140.0, 110.0]
    assert sorted(ours)[2] == sorted(plain)[2]
    assert any("from the plain loop" in failure for failure in repeatability.shortfalls(ours, plain, DISTURBED))


def test_what_was_loaded_or_lost_without_a_word_fails():
    doubts = ["the 95 % interval is +-20.9 %, wider than the 1.0 % asked for", "the warm-up did not converge"]
    (failure,) = repeatability.shortfalls(PLAIN, PLAIN, doubts)
    assert "no doubt that says 'disturbed'" in failure
    assert repeatability.shortfalls(PLAIN, PLAIN, None) == ["ours gave no row with one core loaded"]
    (failure,) = repeatability.shortfalls([None, 100.0, 101.0], [200.0, 100.0, 101.0], DISTURBED)
    assert failure == "ours gave no value in 1 of 3 repeats"
    assert repeatability.ratios([None, 90.0, 80.0], [100.0, 100.0, None]) == [0.9]
    failures = repeatability.shortfalls([None], [None], None)
    assert len(failures) == 3
    assert not any("%" in failure for failure in failures)
    (failure,) = repeatability.shortfalls([99.0, 100.0, 102.0], [99.0, 100.0, 101.0], DISTURBED)
    assert failure == "ours spreads over 3.0 %, the plain loop over 2.0 %"


@pytest.mark.parametrize(
    ("ratio", "fails", "said"),
    [
        (Estimate(1.02, 1.011, 1.03, 20), True, "FAILED"),
        (Estimate(1.02, 1.009, 1.03, 20), False, "not settled"),
        (Estimate(1.0, 0.995, 1.005, 20), False, "passed"),
        (Estimate(1.5, None, None, 1, "one round gives no interval"), False, "not settled"),
    ],
)
def test_a_sampler_is_too_costly_only_where_the_whole_interval_says_so(ratio, fails, said):
    assert sampler_overhead.costs_too_much(ratio) is fails
    assert sampler_overhead.judge(ratio, readings=100).startswith(said)


def test_a_sampler_that_read_nothing_never_passes():
    assert sampler_overhead.judge(Estimate(1.0, 0.999, 1.001, 20), readings=0).startswith("FAILED")
    assert sampler_overhead.describe(Estimate(1.005, 0.998, 1.012, 20)) == "+0.50 % [-0.20, +1.20]"
    assert sampler_overhead.describe(estimate([1.01])) == "+1.00 %, one round gives no interval"
