"""Loops with one fault each: the first advice is the one against it, whatever a trace of slowed-down steps says."""

import pytest

from boundby.bound.verdict import Fix, Gain
from boundby.training import judge_training
from tests.judged_runs import HEALTHY, judged, run, trace

# What a trace of the host says of any of them: no operator runs, so that it is launching, by large factors.
LAUNCH = trace(
    "launch",
    gains=(
        Gain(Fix("do_less_between"), 15.9, "the host is between operators"),
        Gain(Fix("shorten_python"), 8.0, "the host is in Python"),
    ),
)

SLIGHT = trace("launch", gains=(Gain(Fix("do_less_between"), 1.5, "the host is between operators"),))


@pytest.mark.parametrize(
    ("stage", "advice"),
    [
        ("data", "load_ahead"),  # a slow disk, or a collate function in Python
        ("h2d", "hide_copies"),
        ("optimizer", "cheaper_update"),
        ("clip", "clip_on_device"),
        ("scheduler", "cheaper_schedule"),
        ("logging", "log_less"),
        ("checkpoint", "save_beside"),
        ("validation", "evaluate_less"),
        ("garbage_collection", "collect_rarely"),
        ("compile", "compile_ahead"),
        ("communication", "hide_communication"),
        ("rollout", "generate_faster"),
        ("reward", "score_faster"),
        ("reference", "lighter_reference"),
    ],
)
@pytest.mark.parametrize("saw", [None, LAUNCH], ids=["no trace", "a trace that says launch"])
def test_the_first_advice_is_against_the_stage_that_takes_the_time(stage, advice, saw):
    verdict = judged({**HEALTHY, stage: 0.1}, saw=saw)
    assert verdict.gains[0].fix.kind == advice
    (first,) = [line for line in str(verdict).splitlines() if line.startswith("Next:")]
    assert str(verdict.gains[0].fix) in first


def test_what_a_trace_adds_is_bounded_by_the_work_it_lies_in():
    verdict = judged({**HEALTHY, "data": 0.1}, saw=LAUNCH)
    of_trace = {gain.fix.kind: gain.at_most for gain in verdict.gains}
    assert of_trace["do_less_between"] == pytest.approx(0.134 / 0.104, rel=0.02)


def test_waiting_for_a_value_of_the_device_in_each_step_is_told_by_the_trace():
    waits = Gain(Fix("stay_asynchronous"), 1.6, "the host waits")
    saw = trace("launch", gains=(waits, Gain(Fix("launch_less"), 1.2, "the host is late")))
    on_device = {"forward": 0.01, "backward": 0.02, "optimizer": 0.002}
    verdict = judged({"data": 0.0001, "forward": 0.005, "backward": 0.005, "logging": 0.02}, device=on_device, saw=saw)
    assert verdict.gains[0].fix.kind == "stay_asynchronous"


def test_an_evaluation_between_steps_is_weighed_against_the_run():
    verdict = judged(HEALTHY, 30, idle=0, between=0.068, saw=SLIGHT)
    assert (verdict.gains[0].fix.kind, verdict.gains[0].at_most) == ("evaluate_less", pytest.approx(3.0, rel=0.01))
    assert verdict.bound != "under_utilised", "the steps themselves are as they were"


def test_what_costs_most_of_the_run_comes_before_what_costs_most_of_a_step():
    steps = {"optimizer": 0.009, "forward": 0.001}  # ten times the speed of the steps, and five times that of the run
    verdict = judged(steps, 30, idle=0, between=0.04)
    assert [gain.fix.kind for gain in verdict.gains[:2]] == ["evaluate_less", "cheaper_update"]


def test_a_rank_that_the_others_wait_for_is_told_first():
    slow = run({**HEALTHY, "forward": 0.1}, world_size=2)
    fast = run({**HEALTHY, "backward": 0.11}, rank=1, world_size=2)
    assert judge_training([slow, fast], SLIGHT).gains[0].fix.kind == "straggler"
