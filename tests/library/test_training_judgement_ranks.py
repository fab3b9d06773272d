"""Verdicts on several processes, of which one may be slow."""

import pytest
from msgspec.structs import replace

from boundby.training import StageTimes, judge_training
from boundby.verdict import Doubt
from tests.judged_runs import gain_of, run


def ranks(*seconds: dict[str, float], steps: int = 40) -> list[StageTimes]:
    return [run(each, steps, rank=rank, world_size=len(seconds)) for rank, each in enumerate(seconds)]


FAST = {"data": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.002}


def waiting(seconds: float, **others: float) -> dict[str, float]:
    """Return the stages of a process that waits in its backward for another one."""
    return {**FAST, **others, "backward": 0.02 + seconds}


@pytest.mark.parametrize("stage", ["data", "forward", "optimizer"])
def test_the_slow_process_is_the_one_that_waits_least(stage):
    slow = {**FAST, stage: FAST[stage] + 0.05}
    found = judge_training(ranks(waiting(0.05), waiting(0.045, forward=0.015), slow, waiting(0.05)))
    who = found.straggler
    assert (who.rank, who.stage, found.rank) == (2, stage, 2)
    assert who.slower_by == pytest.approx(0.083 / 0.033, rel=0.02)
    assert who.gain == pytest.approx(0.083 / 0.038, rel=0.02)  # rank 1 is left
    assert gain_of(found, "rank 2") == who.gain
    assert found.stages[0].name == stage
    assert "the others wait for rank 2" in str(found)


def test_two_processes_are_enough_a_small_difference_is_not_and_none_is_an_error():
    found = judge_training(ranks({**FAST, "data": 0.05}, waiting(0.049)))
    assert (found.straggler.rank, found.bound) == (0, "input")
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
    found = judge_training([slow, run(waiting(0.049), rank=1, world_size=2)])
    assert (found.straggler, found.on_device, found.rank) == (None, False, None)


def test_equal_processes_are_judged_together():
    found = judge_training(ranks({**FAST, "data": 0.1}, {**FAST, "data": 0.101}))
    assert (found.bound, found.rank, found.ranks, found.straggler) == ("input", None, (0, 1), None)
    data = next(each for each in found.stages if each.name == "data")
    assert data.step_s == pytest.approx(0.1005, rel=0.01)


def test_missing_and_short_processes_are_named():
    whole, short = run(FAST, rank=0, world_size=4), run(FAST, 2, rank=3, world_size=4)
    found = judge_training([whole, short])
    assert [doubt.kind for doubt in found.doubts] == ["ranks", "ranks"]
    assert ["1, 2 of 4" in found.doubts[0].text, "known of 3" in found.doubts[1].text] == [True, True]
    assert (found.bound, found.rank) == ("compute", 0)


def test_processes_without_common_steps_are_not_mixed_up():
    early, late = ranks(FAST, {**FAST, "data": 0.1})
    later = late.occurrences.copy()
    later["step"] += 1000
    found = judge_training([early, replace(late, occurrences=later)])
    assert (found.rank, found.bound) == (0, "compute")
    assert Doubt("ranks", "no steps are known that all of them have; those of one are judged") in found.doubts
