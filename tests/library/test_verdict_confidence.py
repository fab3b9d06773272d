"""How often each word of confidence is right, on forwards whose owners are known, measured with errors."""

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from boundby.judgement import OF_OWNERS, Times, judge
from boundby.roofline import Interval, Limits, OperatorLoad
from boundby.split import Split
from boundby.trials import fewer_threads
from boundby.verdict import Fix, Owner, Trial, Verdict
from tests.fakes import FakeThreads

SECONDS, CASES = 0.02, 600
LIMITS = Limits(Interval.exact(1e12), ((2**28, Interval.exact(1e11)),), Interval.exact(1e-9))
OPERATORS = [OperatorLoad("aten::mm", 1, 1e9, 0, 0)]
REPLAY_NOISE, TRIAL_NOISE, TRIAL_REACH = 0.06, 0.01, 0.025  # standard errors of an owner and of a factor; half interval


def spread(value: float, reach: float) -> Interval:
    return Interval(value, value / (1 + reach), value * (1 + reach))


def on_half_the_threads(rng: random.Random, shares: dict[str, float], expected: Trial) -> Trial:
    """Return the trial: kernels take up to twice as long, memory and what is around them something in between."""
    shared = rng.uniform(1.6, 2.0)
    longer = {"compute": shared, "kernels": shared, "memory": rng.uniform(1, 2), "around": rng.uniform(1, 2), "host": 1}
    factor = 1 / sum(share * longer[kind] for kind, share in shares.items())
    return replace(expected, measured=spread(factor * rng.gauss(1, TRIAL_NOISE), TRIAL_REACH))


def in_bfloat16(rng: random.Random, shares: dict[str, float], seen: dict[str, float]) -> Trial:
    """Return the trial, with what the owners that were seen predict: all but the host is twice as fast."""

    def factor(of: dict[str, float]) -> float:
        return sum(of.values()) / (of["host"] + (sum(of.values()) - of["host"]) / 2)

    measured = spread(factor(shares) * rng.gauss(1, TRIAL_NOISE), TRIAL_REACH)
    return Trial(Fix("dtype", {"dtype": "bfloat16"}), measured, predicted=spread(factor(seen), 0.12))


def case(rng: random.Random, expected: Trial) -> tuple[str, Verdict]:
    weights = {kind: rng.gammavariate(0.7, 1) for kind in OF_OWNERS}
    shares = {kind: weight / sum(weights.values()) for kind, weight in weights.items()}
    truth: Counter[str] = Counter()
    for kind, share in shares.items():
        truth[OF_OWNERS[kind]] += share
    seen = {kind: share * rng.gauss(1, REPLAY_NOISE) for kind, share in shares.items()}
    owners = [Owner(kind, SECONDS * share) for kind, share in seen.items()]
    owners.append(Owner("remainder", SECONDS * (1 - sum(seen.values()))))
    trials = [on_half_the_threads(rng, shares, expected), in_bfloat16(rng, shares, seen)]
    split = Split(SECONDS, tuple(owners), None)
    times = Times(Interval.exact(SECONDS))
    return truth.most_common(1)[0][0], judge(times, OPERATORS, LIMITS, split=split, trials=trials[: rng.randint(0, 2)])


@pytest.mark.parametrize("seed", [1, 2])
def test_high_is_right_in_95_of_100_and_medium_in_80(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    FakeThreads(monkeypatch, 2)
    candidate = fewer_threads(lambda: None)
    assert candidate is not None
    expected = Trial(candidate.fix, Interval.exact(1.0), expected=candidate.expected)
    rng = random.Random(seed)
    said: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for truth, found in (case(rng, expected) for _ in range(CASES)):
        said[found.confidence] += 1
        right[found.confidence] += found.bound == truth or (found.bound == "mixed" and truth in found.alternatives)
    shares = {word: right[word] / said[word] for word in said}
    assert shares["high"] >= 0.95 and shares["medium"] >= 0.80, (shares, said)
    assert said["high"] >= 0.2 * CASES and said["low"] <= 0.4 * CASES, said
