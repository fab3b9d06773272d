"""What happens in a loop is noted at once and understood later; nobody who looks can tell."""

import threading

import pytest

from boundby.training import StageTimer
from boundby.training.recorder import MOST_EVENTS


def seconds_of(timer: StageTimer, name: str, kind: str = "stage") -> list[float]:
    return (timer.snapshot().rows_of(name, kind)["host_ns"] / 1e9).tolist()


def test_whoever_looks_within_a_stage_sees_it_open_and_what_ended_before(timer, clock):
    with timer.stage("forward"):
        clock.advance(2)
    with timer.stage("backward"):
        clock.advance(3)
        seen = timer.snapshot()
        assert [(each.name, each.since_s) for each in seen.open] == [("backward", 3.0)]
        assert seen.rows_of("forward")["host_ns"].tolist() == [2 * 10**9]
        clock.advance(1)
    assert seconds_of(timer, "backward") == [4.0]


def test_a_hook_registered_within_a_step_is_told_of_the_stages_that_had_begun(timer, clock):
    told: list[tuple] = []
    timer.begin("forward")
    clock.advance(1)
    timer.begin("attention")
    clock.advance(2)
    timer.hooks.register("stage_end", lambda *what: told.append(what))
    timer.hooks.register("step_end", lambda *what: told.append(what))
    timer.end("attention")
    timer.end("forward")
    timer.step(7)
    assert told == [("attention", 2.0), ("forward", 3.0), (7, 3.0)]


def test_a_hook_of_a_trace_leaves_the_stages_for_later(timer, clock):
    timer.hooks.register("trace_ready", print)
    timer.begin("forward")
    clock.advance(1)
    timer.end("forward")
    assert not timer.hooks.watch_stages
    assert seconds_of(timer, "forward") == [1.0]


@pytest.mark.parametrize("endless", ["begin", "end", "metrics", "timed"])
def test_a_step_that_never_ends_takes_no_more_and_more_memory(timer, endless):
    act = {
        "begin": lambda: timer.begin("forward"),
        "end": lambda: timer.end("forward"),
        "metrics": lambda: timer.metrics({"loss": 1.0}),
        "timed": lambda: list(timer.timed([])),
    }[endless]
    for _ in range(3 * MOST_EVENTS):
        act()
    assert len(timer.recorder.events) <= MOST_EVENTS + 1


def test_events_of_two_threads_are_told_apart_whoever_understands_them(timer, clock):
    timer.begin("forward")
    clock.advance(1)

    def load():
        timer.begin("forward")  # of the same name, in the other thread
        clock.advance(4)
        timer.end("forward")

    loader = threading.Thread(target=load)
    loader.start()
    loader.join()
    clock.advance(1)
    timer.end("forward")
    timer.step()
    assert seconds_of(timer, "forward", "background") == [4.0]
    assert seconds_of(timer, "forward") == [6.0]
    assert seconds_of(timer, "step", "step") == [6.0]


def test_a_clock_that_fails_does_not_reach_the_loop(clock):
    broken = False

    def read():
        if broken:
            raise OSError("no clock")
        return clock()

    timer = StageTimer(clock=read)
    timer.start()
    broken = True
    with timer.stage("forward"):
        pass
    timer.metrics({"loss": 1.0})
    timer.step()
    broken = False
    timer.stop()
    assert timer.snapshot().stages == ()
    assert {remark.reason for remark in timer.remarks.all()} == {"OSError: no clock"}
