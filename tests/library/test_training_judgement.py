"""Verdicts on runs whose times are made, so that their limit is known: also on a device, and of several processes."""

import contextlib
import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from boundby.bound.verdict import Doubt, Fix, Gain
from boundby.training import StageTimer, StageTimes, TimerOptions, judge_training
from boundby.training.judgement import ENOUGH_STEPS, LEAST_STEPS
from boundby.training.records import METRIC, OCCURRENCE, Summaries
from tests.fakes import FakeNanoseconds
from tests.judged_runs import HEALTHY, Stream, gain_of, judged, run, trace

# What a trace of the host says of any loop here: no operator runs, so that it is launching, by large factors.
LAUNCH = trace(
    "launch",
    gains=(
        Gain(Fix("do_less_between"), 15.9, "the host is between operators"),
        Gain(Fix("shorten_python"), 8.0, "the host is in Python"),
    ),
)
LEFT = 0.134 / 0.034  # times the speed where the slow stage is gone


@pytest.mark.parametrize(
    ("slow", "bound", "advice", "at_most"),
    [
        ("data", "input", "load_ahead", LEFT),
        ("h2d", "transfer", "hide_copies", 0.134 / 0.1),  # the copy itself is left
        ("optimizer", "optimizer", "cheaper_update", 0.132 / 0.032),
        ("clip", "optimizer", "clip_on_device", LEFT),
        ("scheduler", "optimizer", "cheaper_schedule", LEFT),
        ("callbacks", "under_utilised", None, LEFT),
        ("logging", "under_utilised", "log_less", LEFT),
        ("checkpoint", "under_utilised", "save_beside", LEFT),
        ("validation", "under_utilised", "evaluate_less", LEFT),
        ("garbage_collection", "under_utilised", "collect_rarely", LEFT),
        ("compile", "under_utilised", "compile_ahead", LEFT),
        ("all_reduce", "communication", "hide_communication", LEFT),
        ("rollout", None, "generate_faster", None),
        ("reward", None, "score_faster", None),
        ("reference", None, "lighter_reference", None),
    ],
)
def test_the_stage_that_takes_most_of_the_time_is_the_bound_and_the_first_advice(slow, bound, advice, at_most):
    verdict = judged({**HEALTHY, slow: 0.1})
    assert verdict.stages[0].name == slow
    assert verdict.share_of_limit == pytest.approx(verdict.causes[0].share)
    assert str(verdict.gains[0].fix) in verdict.parts["Next"][0]
    if bound:
        assert (verdict.bound, verdict.alternatives, verdict.confidence, verdict.doubts) == (bound, (), "high", ())
        assert verdict.causes[0].bound == bound
        assert verdict.gains[0].at_most == pytest.approx(at_most, rel=0.03)
    for saw in (None, LAUNCH) if advice else ():
        assert judged({**HEALTHY, slow: 0.1}, saw=saw).gains[0].fix.kind == advice


def test_a_healthy_loop_is_bound_by_its_work_of_which_the_stages_tell_no_kind():
    verdict = judged(HEALTHY)
    assert (verdict.bound, verdict.alternatives, verdict.confidence) == ("compute", ("memory", "launch"), "medium")
    assert verdict.share_of_limit == pytest.approx(0.03 / 0.0341, rel=0.01)
    assert verdict.step_s == pytest.approx(0.0341, rel=0.01) and verdict.steps == 40


def test_shares_are_of_self_time_and_those_of_a_stage_of_the_loop_s_own_count_for_what_is_around_it():
    timer = StageTimer(clock=FakeNanoseconds())
    timer.start()

    def spend(seconds, name=None):
        with contextlib.suppress(ValueError), timer.stage(name) if name else contextlib.nullcontext():
            timer.clock.advance(seconds)
            if seconds > 99:
                raise ValueError  # a step in which a stage raised is left out

    for step in range(31):
        with timer.stage("forward"):
            spend(1)
            spend(3, "attention")
            spend(2, "cache")
        with timer.stage("data"):
            spend(2, "cache")  # inside two kinds of stages it counts for neither
        spend(2 if step != 7 else 100, "data" if step == 7 else None)
        timer.step()
    verdict = judge_training([timer.snapshot()])
    assert {stage.name: (stage.bound, stage.share) for stage in verdict.stages if stage.share} == {
        "cache": ("inconclusive", 0.4),
        "attention": ("compute", 0.3),
        "(in no stage)": ("inconclusive", 0.2),
        "forward": ("compute", 0.1),
    }
    assert (verdict.steps, verdict.step_s, verdict.bound) == (30, 10.0, "inconclusive")
    assert [(cause.bound, cause.share) for cause in verdict.causes[:2]] == [("inconclusive", 0.6), ("compute", 0.4)]


def test_the_interval_of_a_share_holds_it_and_grows_with_its_spread_until_the_bound_changes_at_its_ends():
    def noisy(step, data=0.1, spread=0.8):
        return {**HEALTHY, "data": data * (1 + spread * ((step * 7919) % 13 - 6) / 6)}

    calm, loud = judged({**HEALTHY, "data": 0.1}, 200).causes[0], judged(noisy, 200).causes[0]
    assert calm.low < calm.share < calm.high and loud.low < loud.share < loud.high
    assert loud.high - loud.low > 5 * (calm.high - calm.low)
    assert calm.iqr < 0.01 and not calm.drift
    work = {"forward": 0.01, "backward": 0.02}
    assert judged({**work, "data": 0.018}, 26, idle=0).bound == "compute"
    mixed = judged(lambda step: {**work, "data": noisy(step, 0.018, 0.6)["data"]}, 26, idle=0)
    assert (mixed.bound, mixed.alternatives) == ("mixed", ("compute", "input"))


@pytest.mark.parametrize(("data_s", "bound"), [(0.0206, "mixed"), (0.01999, "mixed"), (0.0194, "compute")])
def test_a_second_stage_within_two_thirds_of_the_first_makes_it_mixed(data_s, bound):
    verdict = judged({"data": data_s, "forward": 0.01, "backward": 0.02}, 100, idle=0)
    assert verdict.bound == bound
    assert verdict.alternatives == (("compute", "input") if bound == "mixed" else ("memory", "launch"))


def test_a_share_that_changes_over_the_run_is_a_doubt_and_its_bound_mixed():
    def slower_and_slower(step):
        return {**HEALTHY, "data": 0.001 if step < 50 else 0.15}

    verdict = judged(slower_and_slower, 100)
    assert (verdict.bound, verdict.confidence) == ("mixed", "low")
    assert set(verdict.alternatives) == {"input", "compute"}
    assert any(str(doubt).startswith("drift: data: 79 % more") for doubt in verdict.doubts)
    assert abs(verdict.causes[0].drift) > 0.5


def test_a_checkpoint_now_and_then_is_unsteady():
    verdict = judged(lambda step: {**HEALTHY, **({"checkpoint": 1.5} if step % 20 == 0 else {})}, 200)
    assert verdict.bound == "mixed" and set(verdict.alternatives) == {"under_utilised", "compute"}
    assert any(str(doubt).startswith("unsteady: checkpoint") for doubt in verdict.doubts)


@pytest.mark.parametrize("steps", range(LEAST_STEPS))
def test_too_few_steps_say_nothing_and_few_are_a_doubt(steps):
    verdict = judged({**HEALTHY, "data": 0.1}, steps)
    assert (verdict.bound, verdict.share_of_limit, verdict.confidence) == ("inconclusive", None, "low")
    assert verdict.doubts == (Doubt("steps", f"{steps} undisturbed ones are known, 5 are needed"),)
    assert (verdict.step_s is None) == (not steps) == (not verdict.stages)
    few, enough = (judged({**HEALTHY, "data": 0.1}, steps) for steps in (ENOUGH_STEPS - 1, ENOUGH_STEPS))
    assert (few.bound, few.confidence, len(few.doubts)) == ("input", "low", 1)
    assert (enough.bound, enough.confidence, enough.doubts) == ("input", "high", ())


def test_a_run_that_failed_early_says_nothing_and_why():
    early = judged({**HEALTHY, "data": 0.1}, 12, error=RuntimeError("out of memory"))
    assert early.bound == "inconclusive"
    assert str(early.doubts[0]) == (
        "steps: 12 undisturbed ones are known, 20 are needed; rank 0 failed, after step 11: RuntimeError: out of memory"
    )
    late = judged({**HEALTHY, "data": 0.1}, 30, error=RuntimeError("out of memory"))
    assert (late.bound, late.confidence) == ("input", "high")
    assert "rank 0 failed, after step 29: RuntimeError: out of memory" in late.evidence


def test_time_in_no_known_stage_speaks_against_every_answer():
    mostly = judged({"mystery": 0.06, "data": 0.01, "other": 0.03})
    assert mostly.bound == "inconclusive"
    assert [str(doubt) for doubt in mostly.doubts] == [
        "unexplained: more of the time is in no known stage than in any kind of them (mystery 60 %, other 30 %; not "
        "marked: forward, backward, optimizer)"
    ]
    assert gain_of(mostly, "shorten mystery") == pytest.approx(2.5, rel=0.02)
    partly = judged(HEALTHY, idle=0.01)
    assert (partly.bound, partly.confidence) == ("compute", "low")
    assert str(partly.doubts[0]).startswith("unexplained: 23 % of the time is in no known stage")
    assert gain_of(partly, "no stage") == pytest.approx(0.044 / 0.034, rel=0.02)
    nowhere = judged({"forward": 0.01, "backward": 0.02}, idle=0.04)
    mixed = judged({"forward": 0.025, "optimizer": 0.021}, idle=0.023)
    assert (nowhere.bound, mixed.bound) == ("inconclusive", "mixed")
    for verdict, where in ((nowhere, "between backward and forward"), (mixed, "between optimizer and forward")):
        assert f"100 % of that {where}" in verdict.parts["Next"][0], "what to take out, before what to look at"


def test_steps_that_were_disturbed_or_warm_up_are_left_out():
    def slow_start(step):
        return {**HEALTHY, "forward": 5.0 if step < 2 else 3.0 if step in (30, 31) else 0.01}

    verdict = judged(slow_start, 60, disturbed=(30, 31))
    assert verdict.steps == 56 and verdict.step_s == pytest.approx(0.0341, rel=0.01)
    assert "steps left out: 2 of warm-up, 2 disturbed" in verdict.evidence


def test_the_oldest_step_of_a_full_ring_has_lost_stages_and_is_left_out():
    verdict = judged({"data": 3.0, "forward": 1.0}, 50, capacity=31, idle=0)  # ten steps of three rows, and an end
    assert verdict.steps == 10 and verdict.bound == "input"
    assert verdict.causes[0].share == pytest.approx(0.75, rel=0.01)


def test_the_verdict_does_not_depend_on_the_unit_of_time():
    fast, slow = judged(HEALTHY), judged({name: 100 * spent for name, spent in HEALTHY.items()}, idle=0.01)
    assert (fast.bound, fast.alternatives, fast.confidence) == (slow.bound, slow.alternatives, slow.confidence)
    assert [stage.share for stage in fast.stages] == pytest.approx([stage.share for stage in slow.stages], rel=1e-3)


def test_without_rows_the_totals_are_judged_and_doubted_and_without_totals_the_rows_of_the_log():
    times = run({**HEALTHY, "data": 0.1})
    totals = replace(times, occurrences=np.zeros(0, OCCURRENCE), metric_rows=np.zeros(0, METRIC))
    verdict = judge_training([totals])
    assert (verdict.bound, verdict.confidence, verdict.steps) == ("input", "low", 40)
    assert [doubt.kind for doubt in verdict.doubts] == ["steps"]
    assert verdict.causes[0].share == pytest.approx(0.1 / 0.1331, rel=0.01) and verdict.causes[0].low is None
    assert judge_training([replace(times, summary=Summaries())]).bound == "input"
    assert judge_training([replace(totals, summary=Summaries())]).bound == "inconclusive"


def test_the_text_says_what_why_and_next_in_few_lines():
    text, healthy = str(judged({**HEALTHY, "data": 0.1})), str(judged(HEALTHY))
    assert [line[:5] for line in text.splitlines()[:4]] == ["What:", "Why: ", "     ", "Next:"]
    assert "input (high confidence)" in text and "data takes 75 % of the time" in text
    assert "compute (medium confidence; maybe memory or launch)" in healthy
    assert ("record a trace of a few steps" in healthy, "a trace" in text) == (True, False)


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ({**HEALTHY, "optimizer": 0.004}, "record a trace"),  # 1.1 times at most; the work is nine tenths
        ({**HEALTHY, "optimizer": 0.03}, "make the update cheaper"),  # 1.9 times, and the work could give as much
        (lambda step: {**HEALTHY, "own": 0.024 if step % 2 else 0.035}, "shorten own"),
    ],
)
def test_what_is_known_to_gain_comes_before_work_of_which_half_would_gain_less(seconds, first):
    verdict = judged(seconds)
    assert verdict.parts["Next"][0].startswith(first)
    assert verdict.bound != "mixed" or len(verdict.alternatives) > 1


def test_waits_for_data_that_come_in_bursts_are_told_as_such():
    in_bursts = judged(lambda step: {**HEALTHY, "data": 0.8 if step % 10 == 0 else 0.01}, 100)
    assert "% of that in a tenth of the steps, as where an epoch begins" in str(in_bursts)
    assert "tenth of the steps" not in str(judged({**HEALTHY, "data": 0.1}, 100))


def random_runs() -> Iterator[list[StageTimes]]:
    """Yield runs of any shape: stages in any order, hostile names, zeros, huge and few steps, several processes."""
    names = ["data", "h2d", "forward", "backward", "optimizer", "clip", "logging", "barrier", "step", "x" * 300, "é\n"]
    for seed in range(60):
        draw = random.Random(seed)
        world_size = draw.choice([1, 1, 2, 3])
        scale = {name: draw.choice([0.0, 1e-9, 0.001, 0.1, 1e6]) for name in draw.sample(names, draw.randint(0, 6))}
        device = {name: draw.choice([0.0, 0.01]) for name in scale} if draw.random() < 0.3 else None
        seconds = lambda step, scale=scale, draw=draw: {name: most_s * draw.random() for name, most_s in scale.items()}  # noqa: E731
        sizes = lambda step, draw=draw: {"tokens": draw.choice([-1, 0, 1, 7, 1e300])}  # noqa: E731
        yield [
            run(
                seconds,
                draw.choice([0, 1, 4, 5, 19, 60]),
                **{"rank": rank, "world_size": world_size, "idle": draw.choice([0.0, 0.001]), "device": device},
                **{"metrics": sizes if seed % 2 else None, "capacity": draw.choice([3, 50, 1000])},
                error=draw.choice([None, ValueError("x")]),
            )
            for rank in range(world_size)
        ]


def test_any_run_has_a_verdict_that_holds_together():
    bounds = set()
    for times in random_runs():
        for saw in (None, trace("launch"), trace("input")):
            verdict = judge_training(times, saw)
            bounds.add(verdict.bound)
            assert sum(stage.share for stage in verdict.stages) == pytest.approx(1) or not any(
                stage.share for stage in verdict.stages
            )
            for stage in (*verdict.stages, *verdict.causes):
                low, high = stage.ends
                assert -1e-9 <= low <= stage.share + 1e-9 and stage.share <= high + 1e-9 and high <= 1 + 1e-9
            assert all(1.02 <= gain.at_most <= 1000 for gain in verdict.gains if gain.fix.kind != "straggler")
            assert (verdict.bound == "inconclusive") <= bool(verdict.doubts)
            assert verdict.bound not in verdict.alternatives
            assert verdict.bound != "mixed" or len(verdict.alternatives) > 1
            lines = str(verdict).splitlines()
            assert 2 <= len(lines) <= 12 and lines[0].startswith("What:  ") and all(map(str.isprintable, lines))
            json.dumps(verdict.as_dict(), allow_nan=False)
    assert {"inconclusive", "mixed", "input"} <= bounds


DEVICE = {"data": 0.0, "forward": 0.01, "backward": 0.02, "optimizer": 0.002}
AHEAD = {"data": 0.001, "forward": 0.002, "backward": 0.003, "optimizer": 0.001, "logging": 0.025}  # it waits there


def test_on_a_device_its_own_clock_decides_and_not_where_the_host_waits():
    verdict = judged(AHEAD, device=DEVICE)
    assert (verdict.bound, verdict.on_device) == ("compute", True)
    assert verdict.alternatives == ("memory",)  # the host issues for 6 of 32 ms: launching does not hold it up
    assert "the host issues work for 19 % of the time" in verdict.evidence
    assert verdict.step_s == pytest.approx(0.032)
    assert judged(AHEAD).bound == "under_utilised"  # what the host's clock alone would say


def test_a_device_that_waits_for_data_is_bound_by_input_and_one_that_the_host_holds_up_perhaps_by_launch():
    verdict = judged({**AHEAD, "data": 0.1, "logging": 0.0}, device={**DEVICE, "data": 0.07})
    assert (verdict.bound, verdict.confidence) == ("input", "high")
    assert verdict.causes[0].share == pytest.approx(0.07 / 0.102)
    busy = {"data": 0.0001, "forward": 0.011, "backward": 0.021}
    assert judged(busy, device={"forward": 0.011, "backward": 0.021}).alternatives == ("memory", "launch")
    gaps = judged(AHEAD, device={**DEVICE, "between": 0.008})
    shares = {stage.name: stage.share for stage in gaps.stages}
    assert shares["(in no stage)"] == pytest.approx(0.2, rel=0.03)  # before the first stage nothing is marked
    assert "unexplained" in [doubt.kind for doubt in gaps.doubts]


def test_nested_stages_on_a_device_are_not_counted_twice():
    clock, stream = FakeNanoseconds(), Stream()
    timer = StageTimer(clock=clock, marks=stream, options=TimerOptions(device="cuda:0"))
    timer.start()
    for _ in range(30):
        with timer.stage("forward"):
            stream.now += 1.0
            with timer.stage("attention"):
                stream.now += 2.0
            with timer.stage("loss"):
                stream.now += 1.0
        clock.advance(1)
        timer.step()
    shares = {stage.name: stage.share for stage in judge_training([timer.snapshot()]).stages if stage.share}
    assert shares == {"attention": 0.5, "forward": 0.25, "loss": 0.25}


def test_a_device_without_times_is_a_doubt():
    times = replace(run(HEALTHY), device="cuda:0")
    verdict = judge_training([times])
    assert not verdict.on_device and verdict.confidence == "low"
    assert any(str(doubt).startswith("device: the times of cuda:0 are not known") for doubt in verdict.doubts)


@pytest.mark.parametrize(
    ("said", "bound", "alternatives", "agrees"),
    [
        (trace("compute", alternatives=("memory",)), "compute", ("memory",), True),
        (trace("memory", alternatives=("compute",)), "memory", (), True),
        (trace("launch"), "launch", (), True),
        (trace("communication"), "communication", (), True),
        (trace("input"), "compute", ("memory", "launch"), False),
        (trace("mixed"), "compute", ("memory", "launch"), None),
        (trace("inconclusive"), "compute", ("memory", "launch"), None),
    ],
)
def test_a_trace_tells_the_kind_of_work_or_disagrees(said, bound, alternatives, agrees):
    verdict = judged(HEALTHY, saw=said)
    assert (verdict.bound, verdict.alternatives, verdict.trace_agrees) == (bound, alternatives, agrees)
    assert verdict.confidence == ("low" if agrees is False else "medium")  # the kind of work is never measured here
    disagrees = f"trace: it says {said.bound}, the stages say compute"
    assert any(str(doubt).startswith(disagrees) for doubt in verdict.doubts) == (agrees is False)
    assert verdict.trace_bound == said.bound


def test_a_trace_does_not_overrule_a_stage_that_takes_the_time():
    slow = {**HEALTHY, "data": 0.1}
    agreeing, silent, other = (judged(slow, saw=trace(bound)) for bound in ("input", "launch", "memory"))
    assert [verdict.bound for verdict in (agreeing, silent, other)] == ["input"] * 3
    assert [verdict.trace_agrees for verdict in (agreeing, silent, other)] == [True, None, False]
    assert [verdict.confidence for verdict in (agreeing, silent, other)] == ["high", "high", "low"]
    assert judged({**HEALTHY, "optimizer": 0.1}, saw=trace("memory")).trace_agrees is True
    silent = judged({"step": 1.0}, saw=trace("memory"))
    assert (silent.bound, silent.alternatives) == ("inconclusive", ("memory",))


def test_the_gains_inside_the_work_are_the_trace_s():
    fuse = Gain(Fix("launch_less"), 1.8, "launch takes 4 of 9 ms")
    ahead = Gain(Fix("load_ahead"), 1.5, "input")
    verdict = judged(HEALTHY, saw=trace("launch", gains=(fuse, ahead)))
    assert verdict.gains[0].fix == fuse.fix and verdict.gains[0].basis.startswith("by the trace, whose steps")
    assert [gain.basis for gain in verdict.gains if gain.fix == ahead.fix] == ["data takes 2.9 % of the time"]
    assert not any(gain.fix == fuse.fix for gain in judged(HEALTHY, saw=trace("input", gains=(fuse,))).gains)


@pytest.mark.parametrize(
    ("stages", "slowed", "at_most", "basis"),
    [
        (HEALTHY, 1.0, 2.0, "by the trace, whose steps recording slows down"),
        (HEALTHY, 1.5, 4.0, "by the trace, whose steps took 1.5 times as long"),
        (HEALTHY, 4.0, 1 / (1 - 30 / 34.1), "of the work alone: backward and forward take 88.0 % of the time"),
        ({"step": 0.0341}, 1.5, 4.0, "by the trace, whose steps took 1.5 times as long"),
        ({"step": 0.0341}, 4.0, None, ""),
    ],
)
def test_a_gain_from_slowed_steps_is_bounded_by_what_can_vanish_from_the_others(stages, slowed, at_most, basis):
    half = Gain(Fix("launch_less"), 2.0, "likely 2.00: half of it would remain")
    saw = replace(trace("launch", gains=(half,)), step_s=slowed * 0.0341)
    gains = [gain for gain in judged(stages, saw=saw).gains if gain.fix == half.fix]
    expected = [] if at_most is None else [(pytest.approx(at_most, rel=0.02), basis)]
    assert [(gain.at_most, gain.basis) for gain in gains] == expected


SLIGHT = trace("launch", gains=(Gain(Fix("do_less_between"), 1.5, "the host is between operators"),))


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


def sizes(step: int) -> dict[str, float]:
    return {"samples": 2.0 if step % 4 == 3 else 8.0}


def test_work_that_does_not_grow_with_the_batch_is_under_utilised():
    verdict = judged(HEALTHY, metrics=sizes)
    assert (verdict.bound, verdict.alternatives) == ("under_utilised", ("launch",))
    assert any(
        sentence.startswith("forward and backward: ") and "(2 and 8 samples, 40 steps)" in sentence
        for sentence in verdict.evidence
    )
    growing = 0.002 / 0.0341  # data and h2d take twice as long for twice the batch
    assert gain_of(verdict, "double the batch") == pytest.approx(2 / (1 + growing), rel=0.03)
    assert judged(HEALTHY, metrics=sizes, saw=trace("launch")).bound == "launch"
    for quantity in ("samples", "tokens"):
        one_size = judged(HEALTHY, metrics=lambda step, quantity=quantity: {quantity: 2.0})
        assert one_size.alternatives == ("memory", "launch") and not one_size.evidence


def test_work_that_grows_with_the_batch_is_not_launching():
    def proportional(step):
        work = sizes(step)["samples"] / 8
        return {**HEALTHY, "forward": 0.01 * work, "backward": 0.02 * work}

    verdict = judged(proportional, metrics=sizes)
    assert (verdict.bound, verdict.alternatives) == ("compute", ("memory",))
    assert gain_of(verdict, "double the batch") < 1.1  # the update alone is shared by more samples
    doubted = judged(proportional, metrics=sizes, saw=trace("launch"))
    assert (doubted.bound, doubted.alternatives) == ("compute", ("memory", "launch"))


def test_tiny_batches_make_one_bound_of_work_and_update():
    tiny = {"data": 0.0001, "forward": 0.0004, "backward": 0.0006, "optimizer": 0.0008}
    assert judged(tiny).bound == "mixed"
    assert judged(tiny, idle=0, metrics=sizes).bound == "under_utilised"
    assert judged(tiny, idle=0, saw=trace("launch")).bound == "launch"
    waiting = {**tiny, "data": 0.001}
    verdict = judged(waiting, idle=0, metrics=sizes)
    assert verdict.bound == "mixed" and set(verdict.alternatives) == {"under_utilised", "input"}


def ranks(*seconds: dict[str, float], steps: int = 40) -> list[StageTimes]:
    return [run(stages, steps, rank=rank, world_size=len(seconds)) for rank, stages in enumerate(seconds)]


FAST = {"data": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.002}


def waiting(seconds: float, **others: float) -> dict[str, float]:
    """Return the stages of a process that waits in its backward for another one."""
    return {**FAST, **others, "backward": 0.02 + seconds}


@pytest.mark.parametrize("stage", ["data", "forward", "optimizer"])
def test_the_slow_process_is_the_one_that_waits_least(stage):
    slow = {**FAST, stage: FAST[stage] + 0.05}
    verdict = judge_training(ranks(waiting(0.05), waiting(0.045, forward=0.015), slow, waiting(0.05)))
    who = verdict.straggler
    assert (who.rank, who.stage, verdict.rank) == (2, stage, 2)
    assert who.slower_by == pytest.approx(0.083 / 0.033, rel=0.02)
    assert who.gain == pytest.approx(0.083 / 0.038, rel=0.02)  # rank 1 is left
    assert gain_of(verdict, "rank 2") == who.gain
    assert verdict.stages[0].name == stage
    assert "the others wait for rank 2" in str(verdict)


def test_the_trace_of_one_that_waits_tells_nothing_of_the_work_of_the_slow_one():
    overlap = Gain(Fix("hide_communication"), 5.0, "communication takes 40 of 50 ms")
    slow = ranks(waiting(0.05), {**FAST, "forward": 0.06})
    verdict = judge_training(slow, trace("communication", gains=(overlap,)))
    assert (verdict.bound, verdict.rank, verdict.straggler.stage) == ("compute", 1, "forward")
    assert (verdict.trace_bound, verdict.trace_agrees) == ("communication", None)
    assert overlap.fix not in [gain.fix for gain in verdict.gains]
    assert judge_training(slow, trace("memory")).bound == "memory"


def test_two_processes_are_enough_a_small_difference_is_not_and_none_is_an_error():
    verdict = judge_training(ranks({**FAST, "data": 0.05}, waiting(0.049)))
    assert (verdict.straggler.rank, verdict.bound) == (0, "input")
    assert judge_training(ranks({**FAST, "data": 0.003}, waiting(0.002))).straggler is None
    sharded = judge_training(ranks({**FAST, "data": 0.05}, {**FAST, "forward": 0.059})).straggler
    assert (sharded.rank, sharded.stage) == (0, "data")  # where parameters are sharded, the forward gathers them
    with pytest.raises(ValueError, match="at least those of one process"):
        judge_training([])


def test_a_process_that_is_slow_now_and_then_is_no_straggler():
    def sometimes(step):
        return {**FAST, "data": 0.3 if step in (20, 21) else 0.001}

    def waits(step):
        return waiting(0.3 if step in (20, 21) else 0.0)

    times = [run(sometimes, rank=0, world_size=2), run(waits, rank=1, world_size=2)]
    assert judge_training(times).straggler is None


def test_processes_by_different_clocks_are_not_compared():
    slow = run({**FAST, "data": 0.05}, rank=0, world_size=2, device={**FAST, "data": 0.05})
    verdict = judge_training([slow, run(waiting(0.049), rank=1, world_size=2)])
    assert (verdict.straggler, verdict.on_device, verdict.rank) == (None, False, None)


def test_equal_processes_are_judged_together():
    verdict = judge_training(ranks({**FAST, "data": 0.1}, {**FAST, "data": 0.101}))
    assert (verdict.bound, verdict.rank, verdict.ranks, verdict.straggler) == ("input", None, (0, 1), None)
    data = next(stage for stage in verdict.stages if stage.name == "data")
    assert data.step_s == pytest.approx(0.1005, rel=0.01)


def test_missing_and_short_processes_are_named():
    whole, short = run(FAST, rank=0, world_size=4), run(FAST, 2, rank=3, world_size=4)
    verdict = judge_training([whole, short])
    assert [doubt.kind for doubt in verdict.doubts] == ["ranks", "ranks"]
    assert ["1, 2 of 4" in verdict.doubts[0].text, "known of 3" in verdict.doubts[1].text] == [True, True]
    assert (verdict.bound, verdict.rank) == ("compute", 0)


def test_processes_without_common_steps_are_not_mixed_up():
    early, late = ranks(FAST, {**FAST, "data": 0.1})
    later = late.occurrences.copy()
    later["step"] += 1000
    verdict = judge_training([early, replace(late, occurrences=later)])
    assert (verdict.rank, verdict.bound) == (0, "compute")
    assert Doubt("ranks", "no steps are known that all of them have; those of one are judged") in verdict.doubts
