"""What a whole dataset takes follows from some of its batches, on machines whose every time is known.

The simulated dataset has long-tailed lengths. A batch takes a time that is no quadratic of its length (small batches
stay in a cache), with white noise, a drift that lasts about a round, and spikes, as they were seen in plain loops on
two shared cores. The truth is what a plain loop over the whole dataset takes on average, spikes included.
"""

from collections import Counter

import numpy as np
import pytest

from boundby.timing.stats import estimate
from boundby.timing.whole_set import Arrivals, Cost, Shape, Totals, seconds_per_sample

LENGTHS = np.clip(np.random.default_rng(7).lognormal(3.9, 0.8, 2000), 3, 512).astype(int)


def totals(arrivals: Arrivals, index: int) -> Totals:
    shape = arrivals.shape(index)
    return Totals.one(shape.samples, shape.samples * shape.tokens, int(arrivals.tokens_real[index]))


def test_the_batches_of_a_dataset_are_known_before_anything_is_timed():
    arrivals = Arrivals.of([3, 1, 2, 5, 4], 2)
    assert len(arrivals) == 3
    assert [arrivals.shape(index) for index in range(3)] == [Shape(2, 3), Shape(2, 5), Shape(1, 4)]
    assert arrivals.totals == Totals(3, 5, tokens_real=15, tokens_padded=20, tokens_squared=18 + 50 + 16)
    assert sum((totals(arrivals, index) for index in range(3)), start=Totals.none()) == arrivals.totals
    assert arrivals.largest == 1
    assert str(Shape(8, 154)) == "8 × 154 tokens"
    with pytest.raises(ValueError, match="make no batches"):
        Arrivals.of([], 2)


def test_every_batch_is_as_likely_as_any_other_and_each_sample_holds_short_and_long_ones():
    arrivals = Arrivals.of(LENGTHS, 8)
    samples = [arrivals.sample(20, number) for number in range(1000)]
    assert {len(set(indices)) for indices in samples} == {20}
    counts = Counter(index for indices in samples for index in indices)
    assert min(counts.values()) > 0.9 * 80 and max(counts.values()) < 1.1 * 80  # 20 of 250, a thousand times
    means = [arrivals.longest[indices].mean() for indices in samples]
    random = [np.random.default_rng(seed).choice(arrivals.longest, 20).mean() for seed in range(1000)]
    assert np.std(means) < np.std(random) / 2.5
    assert samples[0] == sorted(samples[0]) == arrivals.sample(20, 0) != samples[1]
    assert arrivals.sample(250, 3) == arrivals.sample(999, 4) == list(range(250))


@pytest.mark.parametrize("terms", [(1e-3, 1e-5, 1e-8), (0.0, 2e-5, 0.0), (5e-3, 0.0, 0.0)])
def test_the_cost_of_a_batch_is_found_and_never_negative(terms):
    arrivals, cost = Arrivals.of(LENGTHS, 4), Cost(*terms)
    batches = [totals(arrivals, index) for index in arrivals.sample(40, 0)]
    fitted = Cost.fit(batches, [cost.of(batch) for batch in batches])
    assert fitted.of(arrivals.totals) == pytest.approx(cost.of(arrivals.totals), rel=2e-3)
    assert min(fitted.by_batch, fitted.by_token, fitted.by_square) >= 0


def test_lengths_that_do_not_differ_cost_by_token():
    cost = Cost.fit([Totals.one(4, 40, 40)] * 5, [2.0] * 5)
    assert cost.of(Totals.one(4, 80, 80)) == pytest.approx(4.0, rel=0.01)


SPIKE_S = 4e-3  # about what another process keeps a core for


def times(rng: np.random.Generator, arrivals: Arrivals, chosen: list[int], stolen: float) -> np.ndarray:
    """Return what these batches take one after another in a round; spikes steal this share of the time on average."""
    tokens = (arrivals.samples * arrivals.longest)[chosen].astype(float)
    seconds = 1e-3 + tokens * np.where(tokens < 600, 1.6e-5, 2e-5) + 4e-8 * tokens * arrivals.longest[chosen]
    noisy = seconds * np.exp(rng.normal(0, 0.05, len(chosen)) + rng.normal(0, 0.015))
    return noisy + rng.gamma(rng.poisson(stolen * noisy / SPIKE_S) + 1e-12, SPIKE_S)


@pytest.mark.parametrize("stolen", [0.0, 0.03])
@pytest.mark.parametrize(("batch_size", "count", "rounds"), [(1, 80, 5), (8, 20, 5), (8, 10, 10), (32, 5, 8)])
def test_intervals_cover_what_a_plain_loop_over_the_whole_dataset_takes(batch_size, count, rounds, stolen):
    """What is told holds it, or is within 3 % of it, in 19 of 20."""
    arrivals, rng, tries = Arrivals.of(LENGTHS, batch_size), np.random.default_rng(batch_size + count), 150
    every = list(range(len(arrivals)))
    truth = float(np.mean([times(rng, arrivals, every, stolen).sum() for _ in range(100)])) / len(LENGTHS)
    held, within, errors = 0, 0, []
    for attempt in range(tries):
        samples = [arrivals.sample(count, number + attempt * rounds) for number in range(rounds)]
        timed = [
            [*zip([totals(arrivals, index) for index in chosen], times(rng, arrivals, chosen, stolen), strict=True)]
            for chosen in samples
        ]
        interval = estimate(seconds_per_sample(timed, arrivals.totals))
        errors.append(interval.value / truth - 1)
        held += interval.low <= truth <= interval.high
        within += interval.low <= truth <= interval.high or abs(errors[-1]) <= 0.03
    assert held / tries >= 0.9  # nominally 0.95
    assert within / tries >= 0.95
    assert abs(np.mean(errors)) < 0.01


def test_a_round_without_times_has_no_value():
    assert seconds_per_sample([], Totals.one(1, 1, 1)) == seconds_per_sample([[]], Totals.one(1, 1, 1)) == []
