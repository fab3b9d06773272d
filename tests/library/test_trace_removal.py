"""How long the window would last without a cause, of programs played on a simulated machine and of single gaps.

python -m pytest tests/library/test_trace_removal.py
"""

import pytest

from boundby.bound.trace_judgement import judge_trace
from boundby.trace import analyze, read_trace
from boundby.trace.removal import HOST_CAUSES
from tests.trace_truth.programs import random_program
from tests.trace_truth.recorder import text
from tests.trace_truth.simulator import played
from tests.traces import analysis_of, call, event, python_frame, step, work


@pytest.mark.parametrize("seed", range(40))
def test_nothing_gains_more_than_leaving_the_device_alone(tmp_path, seed):
    path = tmp_path / "trace.json"
    path.write_text(text(played(random_program(seed))))
    for device in analyze(read_trace(path)).devices:
        assert device.alone_ns <= device.window_ns
        for cause, left in device.without_ns.items():
            assert 0 <= device.least_ns[cause] <= left <= device.window_ns
            assert cause not in HOST_CAUSES or left >= device.alone_ns


def test_work_of_the_host_gains_no_more_than_the_device_lets_it(tmp_path):
    """10 ms of Python each time, of which the device works 8: only 2 can be gained."""
    events = [step(1, 0, 41_000)]
    for k in range(4):
        at = 10_000 * k
        events += [event("postprocess", at, 9980, "user_annotation"), call(at + 9985, 5, k), work(at + 10_000, 8000, k)]
    (device,) = analysis_of(tmp_path, *events).devices
    assert device.window_ns == 48_000_000
    assert device.without_ns["python"] == pytest.approx(32_000_000, rel=0.01)
    assert device.alone_ns == 32_000_000


def test_a_gain_names_what_takes_most_of_it_and_the_line_of_the_program(tmp_path):
    trace = analysis_of(
        tmp_path,
        step(1, 0, 5000),
        python_frame("/home/me/train.py(42): main", 1, 4990, 1, None),
        python_frame("site-packages/torch/nn/modules/module.py(1): _call_impl", 2, 4980, 2, 1),
        event("tokenize", 10, 4000, "user_annotation"),
        call(4500, 5, 70),
        work(4510, 490, 70),
    )
    most = trace.devices[0].contributors["tokenizing"]
    assert (most.name, most.spent_ns, most.where) == ("tokenize", 4_000_000, "train.py:42")
    first = judge_trace(trace).gains[0]
    assert first.fix.kind == "tokenize_ahead"
    assert first.basis == "likely 5.00: 1.00 of 5.00 ms would remain; mostly tokenize, 4.00 of 4.00 ms, train.py:42"


def test_identical_steps_are_never_called_mixed(tmp_path):
    """The lead of one bound over the next differs by a hair between recordings; both are named on either side."""
    for busy in (390, 405):
        events = []
        for k in range(4):
            at = 1000 * k
            events += [step(k, at, 1000), event("aten::mm", at, 998 - busy), call(at + 998 - busy, 1, k)]
            events.append(work(at + 1000 - busy, busy, k))
        verdict = judge_trace(analysis_of(tmp_path, *events))
        assert verdict.bound == "launch"
        assert verdict.alternatives in ((), ("compute",))


def test_a_host_that_runs_ahead_is_not_unsteady_for_its_first_steps(tmp_path):
    marks = [(0, 100), (100, 100), (200, 1000), (1200, 1000), (2200, 1000), (3200, 1000)]
    events = [step(k, at, length) for k, (at, length) in enumerate(marks)]
    for k, (at, length) in enumerate(marks):
        events += [call(at + 5, 5, k), event("aten::mm", at, length - 1), work(20 + 1000 * k, 1000, k)]
    kinds = [doubt.kind for doubt in judge_trace(analysis_of(tmp_path, *events)).doubts]
    assert "unsteady" not in kinds
