"""How `benchmarks/layer_overhead.py` judges what it measured, and how an attempt takes it."""

from dataclasses import replace

import pytest

from benchmarks import _layer_overhead, layer_overhead
from benchmarks.layer_overhead import Watched
from boundby.timing.stats import Estimate

GOOD = Watched(
    "gpt2", calls=100, plain_s=[0.050, 0.050, 0.050], ratios=[1.002, 1.002, 1.002], coverages=[1.0, 1.001, 0.999]
)


def test_a_cheap_probe_passes_and_its_cost_is_that_of_neighbours_per_call():
    assert layer_overhead.failures([GOOD]) == []
    assert layer_overhead.unsettled([GOOD]) == []
    result = replace(GOOD, plain_s=[0.040, 0.050, 0.090], ratios=[1.004] * 3).us_per_call
    assert result.value == pytest.approx(2.0) and result.low == pytest.approx(2.0)
    times = _layer_overhead.Times(plain_s=[1.0, 2.0, 4.0], watched_s=[1.1, 2.2, 4.4])
    assert times.ratio == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("changes", "fails", "is_open"),
    [
        ({"ratios": [1.0052] * 3}, True, None),
        ({"ratios": [1.0048] * 3}, False, None),
        ({"ratios": [0.97, 1.000, 1.03]}, False, "cost of a probe"),  # 0 in the middle of noise is not known to be so
        ({"ratios": [1.9]}, False, "cost of a probe"),
        ({"coverages": [0.969] * 3}, True, None),
        ({"coverages": [1.031] * 3}, True, None),
        ({"coverages": [1.029] * 3}, False, None),
        ({"coverages": [0.90, 0.95, 1.00]}, False, "coverage"),
        ({"ratios": [1.001] * 3, "coverages": [1.2] * 3, "plain_s": [0.0199] * 3}, False, None),  # too short a model
        ({"ratios": [1.001] * 3, "coverages": [1.2] * 3, "plain_s": [0.020] * 3}, True, None),
    ],
)
def test_a_cost_or_a_coverage_fails_only_where_the_whole_interval_says_so(changes, fails, is_open):
    watched = replace(GOOD, **changes)
    assert [failure.split(":")[0] for failure in layer_overhead.failures([watched])] == ["gpt2"] * fails
    assert [item.split(" on gpt2")[0] for item in layer_overhead.unsettled([watched])] == (
        [f"the {is_open}"] if is_open else []
    )


def test_a_missing_attempt_fails_and_the_others_still_count():
    watched = replace(GOOD, plain_s=[None, 0.05, 0.05], ratios=[None, 1.006, 1.006], coverages=[None, 1.0, 1.0])
    assert layer_overhead.failures([watched]) == [
        "gpt2: ours gave no value in 1 of 3 attempts",
        "gpt2: a probe costs 3.00 µs per call, 2.5 at most",
    ]
    nothing = Watched("gpt2", 0, [None], [None], [None])
    assert layer_overhead.failures([nothing]) == ["gpt2: ours gave no value in 1 of 1 attempts"]
    assert layer_overhead.unsettled([nothing]) == ["the cost of a probe on gpt2"]


def test_the_exit_code_is_1_only_for_what_surely_falls_short(capsys):
    assert layer_overhead.judge([GOOD, replace(GOOD, model="noisy", ratios=[0.9, 1.0, 1.2])]) == 0
    assert "not settled: the cost of a probe on noisy" in capsys.readouterr().out
    assert layer_overhead.judge([GOOD, replace(GOOD, model="slow", ratios=[1.02] * 3)]) == 1
    assert "FAILED: slow: a probe costs 10.00 µs per call" in capsys.readouterr().out
    assert layer_overhead.shown(Estimate(1.5, 1.25, 1.75, 3), 2) == "1.50 [1.25, 1.75]"
    assert layer_overhead.shown(Estimate(1.5, None, None, 1), 2) == "1.50"
    assert layer_overhead.shown(None, 2) == "unknown"


def test_an_attempt_that_failed_says_why_and_has_no_numbers(monkeypatch):
    def fail(*args):
        raise layer_overhead._attempts.AttemptFailed("killed")

    monkeypatch.setattr(layer_overhead._attempts, "last_line", fail)
    attempt = layer_overhead.attempt_of("gpt2", "probes", 1.0)
    assert (attempt.plain_s, attempt.ratio, attempt.coverage, attempt.said) == (None, None, None, "killed")


@pytest.mark.parametrize("method", _layer_overhead.METHODS)
def test_every_method_runs_as_many_forwards_with_as_without_what_watches(method):
    model, forward = _layer_overhead.prepared("small modules")
    runs = []
    result = _layer_overhead.METHODS[method](model, lambda: runs.append(forward()), 7)
    assert len(result.plain_s) == len(result.watched_s) == 7
    assert len(runs) == {"probes": 14, "plain": 28, "profiler": 29}[method]  # one before each that is timed
    assert result.calls == (201 if method == "probes" else None)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_forwards_are_counted_to_fill_half_of_the_time(monkeypatch):
    monkeypatch.setattr(_layer_overhead, "seconds_of", lambda run: 0.01)
    assert _layer_overhead.count_forwards(lambda: None, 4.0) == 200
    assert _layer_overhead.count_forwards(lambda: None, 0.001) == _layer_overhead.LEAST_RUNS
    assert _layer_overhead.count_forwards(lambda: None, 400.0) == _layer_overhead.MOST_RUNS
