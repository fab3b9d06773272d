"""Verdicts on runs of a device, with what a trace says, and on what grows with the batch."""

import pytest
from msgspec.structs import replace

from boundby.training import StageTimer, TimerOptions, judge_training
from boundby.verdict import Fix, Gain
from tests.fakes import FakeNanoseconds
from tests.judged_runs import HEALTHY, Stream, gain_of, judged, run, trace

DEVICE = {"data": 0.0, "forward": 0.01, "backward": 0.02, "optimizer": 0.002}
AHEAD = {"data": 0.001, "forward": 0.002, "backward": 0.003, "optimizer": 0.001, "logging": 0.025}  # it waits there


def test_on_a_device_its_own_clock_decides_and_not_where_the_host_waits():
    found = judged(AHEAD, device=DEVICE)
    assert (found.bound, found.on_device) == ("compute", True)
    assert found.alternatives == ("memory",)  # the host issues for 6 of 32 ms: launching does not hold it up
    assert "the host issues work for 19 % of the time" in found.evidence
    assert found.step_s == pytest.approx(0.032)
    assert judged(AHEAD).bound == "under_utilised"  # what the host's clock alone would say


def test_a_device_that_waits_for_data_is_bound_by_input_and_one_that_the_host_holds_up_perhaps_by_launch():
    found = judged({**AHEAD, "data": 0.1, "logging": 0.0}, device={**DEVICE, "data": 0.07})
    assert (found.bound, found.confidence) == ("input", "high")
    assert found.causes[0].share == pytest.approx(0.07 / 0.102)
    busy = {"data": 0.0001, "forward": 0.011, "backward": 0.021}
    assert judged(busy, device={"forward": 0.011, "backward": 0.021}).alternatives == ("memory", "launch")
    gaps = judged(AHEAD, device={**DEVICE, "between": 0.008})
    shares = {each.name: each.share for each in gaps.stages}
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
    shares = {each.name: each.share for each in judge_training([timer.snapshot()]).stages if each.share}
    assert shares == {"attention": 0.5, "forward": 0.25, "loss": 0.25}


def test_a_device_without_times_is_a_doubt():
    times = replace(run(HEALTHY), device="cuda:0")
    found = judge_training([times])
    assert not found.on_device and found.confidence == "low"
    assert any(str(doubt).startswith("device: the times of cuda:0 are not known") for doubt in found.doubts)


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
    found = judged(HEALTHY, saw=said)
    assert (found.bound, found.alternatives, found.trace_agrees) == (bound, alternatives, agrees)
    assert found.confidence == ("low" if agrees is False else "medium")  # the kind of work is never measured here
    disagrees = f"trace: it says {said.bound}, the stages say compute"
    assert any(str(each).startswith(disagrees) for each in found.doubts) == (agrees is False)
    assert found.trace_bound == said.bound


def test_a_trace_does_not_overrule_a_stage_that_takes_the_time():
    slow = {**HEALTHY, "data": 0.1}
    agreeing, silent, other = (judged(slow, saw=trace(bound)) for bound in ("input", "launch", "memory"))
    assert [each.bound for each in (agreeing, silent, other)] == ["input"] * 3
    assert [each.trace_agrees for each in (agreeing, silent, other)] == [True, None, False]
    assert [each.confidence for each in (agreeing, silent, other)] == ["high", "high", "low"]
    assert judged({**HEALTHY, "optimizer": 0.1}, saw=trace("memory")).trace_agrees is True
    silent = judged({"step": 1.0}, saw=trace("memory"))
    assert (silent.bound, silent.alternatives) == ("inconclusive", ("memory",))


def test_the_gains_inside_the_work_are_the_trace_s():
    fuse = Gain(Fix("launch_less"), 1.8, "launch takes 4 of 9 ms")
    ahead = Gain(Fix("load_ahead"), 1.5, "input")
    found = judged(HEALTHY, saw=trace("launch", gains=(fuse, ahead)))
    assert found.gains[0].fix == fuse.fix and found.gains[0].basis.endswith("in steps that recording slows down")
    assert [each.basis for each in found.gains if each.fix == ahead.fix] == ["data takes 2.9 % of the time"]
    assert not any(each.fix == fuse.fix for each in judged(HEALTHY, saw=trace("input", gains=(fuse,))).gains)


def sizes(step: int) -> dict[str, float]:
    return {"samples": 2.0 if step % 4 == 3 else 8.0}


def test_work_that_does_not_grow_with_the_batch_is_under_utilised():
    found = judged(HEALTHY, metrics=sizes)
    assert (found.bound, found.alternatives) == ("under_utilised", ("launch",))
    assert any(
        each.startswith("forward and backward: ") and "(2 and 8 samples, 40 steps)" in each for each in found.evidence
    )
    growing = 0.002 / 0.0341  # data and h2d take twice as long for twice the batch
    assert gain_of(found, "double the batch") == pytest.approx(2 / (1 + growing), rel=0.03)
    assert judged(HEALTHY, metrics=sizes, saw=trace("launch")).bound == "launch"
    for quantity in ("samples", "tokens"):
        one_size = judged(HEALTHY, metrics=lambda step, quantity=quantity: {quantity: 2.0})
        assert one_size.alternatives == ("memory", "launch") and not one_size.evidence


def test_work_that_grows_with_the_batch_is_not_launching():
    def proportional(step):
        work = sizes(step)["samples"] / 8
        return {**HEALTHY, "forward": 0.01 * work, "backward": 0.02 * work}

    found = judged(proportional, metrics=sizes)
    assert (found.bound, found.alternatives) == ("compute", ("memory",))
    assert gain_of(found, "double the batch") < 1.1  # the update alone is shared by more samples
    doubted = judged(proportional, metrics=sizes, saw=trace("launch"))
    assert (doubted.bound, doubted.alternatives) == ("compute", ("memory", "launch"))


def test_tiny_batches_make_one_bound_of_work_and_update():
    tiny = {"data": 0.0001, "forward": 0.0004, "backward": 0.0006, "optimizer": 0.0008}
    assert judged(tiny).bound == "mixed"
    assert judged(tiny, idle=0, metrics=sizes).bound == "under_utilised"
    assert judged(tiny, idle=0, saw=trace("launch")).bound == "launch"
    waiting = {**tiny, "data": 0.001}
    found = judged(waiting, idle=0, metrics=sizes)
    assert found.bound == "mixed" and set(found.alternatives) == {"under_utilised", "input"}
