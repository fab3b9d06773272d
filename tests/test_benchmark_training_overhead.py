"""How `benchmarks/training_overhead.py` judges what it measured, and how a spinning step is taken."""

import pytest

from benchmarks import training_overhead


@pytest.mark.parametrize(
    ("ratios", "fails", "is_open"),
    [
        ([1.004, 1.005, 1.006], False, False),
        ([1.020, 1.021, 1.022], True, False),
        ([0.95, 1.02, 1.09], False, True),  # in the middle of noise it is not known to be too much
        ([1.5], False, True),
    ],
)
def test_the_stage_timer_fails_only_where_the_whole_interval_says_so(ratios, fails, is_open):
    result = {"stage timer": ratios}
    assert bool(training_overhead.failures(result)) == fails
    assert training_overhead.unsettled(result) == ["stage timer"] * is_open


def test_limits_decide_the_exit_code_on_a_quiet_machine_alone(capsys):
    assert training_overhead.failures({"off": [1.0003, 1.0004, 1.0005]}) == []
    assert training_overhead.failures({"off": [1.002, 1.0021, 1.0022]}) == ["off costs +0.21 %, +0.10 % at most"]
    assert training_overhead._judge({"off": [1.0, 1.0, 1.0], "stage timer": [1.003, 1.003, 1.003]}, 2e-6) == 0
    assert capsys.readouterr().out.endswith("passed: everything is within its limits\n")
    assert training_overhead._judge({"off": [1.01, 1.01, 1.01], "stage timer": [1.003, 1.003, 1.003]}, 2e-6) == 1
    assert capsys.readouterr().out.startswith("\noff: +1.00 % [+1.00 %, +1.00 %] of a step\n")
    assert training_overhead._judge({"stage timer": [1.5, 1.5, 1.5]}, 70e-6) == 0
    assert "not settled: a bare step takes 70 µs beyond its spins" in capsys.readouterr().out


def test_what_a_spin_lasts_too_long_and_an_interrupted_step_are_left_out(monkeypatch):
    now = 0

    def spin():
        nonlocal now
        now += 7_000_000  # seven times as long as it should
        return 7_000_000

    def step():
        nonlocal now
        now += next(extra)

    extra = iter([0, 100_000, 500_000_000, 200_000])
    monkeypatch.setattr(training_overhead, "_spin", spin)
    monkeypatch.setattr(training_overhead.time, "perf_counter_ns", lambda: now)
    monkeypatch.setattr(training_overhead.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(training_overhead.time, "thread_time", lambda: 0.0)
    assert training_overhead._timed(4, lambda _: training_overhead.NOTHING, step) == pytest.approx(0.0051)


@pytest.mark.parametrize("name", training_overhead.WATCHES)
def test_a_method_takes_its_steps(name, monkeypatch):
    spins = []
    monkeypatch.setattr(training_overhead, "_spin", lambda: spins.append(name) or 0)
    assert min(training_overhead.abba(training_overhead.WATCHES[name], 3)) >= training_overhead.STEP_S
    assert len(spins) == 4 * 3 * len(training_overhead.STAGES)
