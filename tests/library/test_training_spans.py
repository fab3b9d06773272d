"""An epoch has the time of the training in it alone; what is excluded from it ends where it says."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from boundby.capture import Recorder, Schedule
from boundby.training import ManagerOptions, ProfilerManager, StageTimer, TimerOptions
from boundby.training.recorder import ENOUGH_WAITING
from boundby.training.records import CUT, DISTURBED, RAISED
from tests.fakes import FakeNanoseconds
from tests.timed_loops import S, host_ns, reasons, run


def flags(timer: StageTimer) -> list[int]:
    return timer.snapshot().rows_of("epoch", "span")["flags"].tolist()


def restart(timer: StageTimer, clock: FakeNanoseconds, seconds: float, *, disturbs: bool) -> None:
    """Do what a profiler does between two steps: something for so many seconds, and perhaps it slows down the next."""
    clock.advance(seconds)
    timer.restart_step()
    if disturbs:
        timer.disturb()


def train(timer, clock, disturbed, evaluate=lambda: None):
    """Run two epochs of four steps of a second, and the profiler for 10 seconds behind each step."""
    restart(timer, clock, 10, disturbs=0 in disturbed)
    for epoch in range(2):
        with timer.span("epoch"):
            for step in range(4 * epoch, 4 * epoch + 4):
                run(timer, clock, forward=1)
                timer.step()
                restart(timer, clock, 10, disturbs=step + 1 in disturbed)
        evaluate()


def test_what_the_profiler_does_between_steps_is_in_none_of_the_spans_inside_one_another(timer, clock):
    with timer.span("run"), timer.stage("fold"):  # this one becomes a span with the first step
        train(timer, clock, set())
    assert host_ns(timer, "epoch", "span") == [4 * S, 4 * S]
    assert host_ns(timer, "run", "span") == host_ns(timer, "fold", "span") == [8 * S]
    assert host_ns(timer, "step", "step") == [S] * 8


def test_a_span_that_begins_between_a_step_and_what_follows_it_loses_its_own_part_alone(timer, clock):
    timer.step()
    clock.advance(3)
    with timer.span("epoch"):
        with timer.excluded():
            clock.advance(2)
        clock.advance(5)
        timer.restart_step()
        run(timer, clock, forward=1)
        timer.step()
        run(timer, clock, forward=1)
    assert host_ns(timer, "epoch", "span") == [2 * S]


def test_a_step_that_begins_anew_takes_the_stages_with_it_that_are_open(timer, clock):
    with timer.stage("update"):
        run(timer, clock, forward=2)
        with timer.excluded():
            clock.advance(4)
            timer.restart_step()
            clock.advance(8)
        clock.advance(1)
        run(timer, clock, forward=16)
    timer.step()
    assert host_ns(timer, "step", "step") == host_ns(timer, "update") == [17 * S]
    assert timer.snapshot().stage("update").self_total_s == 1
    assert host_ns(timer, "evaluation", "excluded") == [8 * S]


def test_an_evaluation_within_an_epoch_is_taken_out_of_it(timer, clock):
    with timer.span("epoch"):
        for _ in range(2):
            run(timer, clock, forward=1)
            with timer.excluded():
                clock.advance(8)
            timer.step()
            with timer.excluded():
                clock.advance(8)
            restart(timer, clock, 10, disturbs=False)
    assert host_ns(timer, "epoch", "span") == [2 * S]


@pytest.mark.parametrize(
    ("disturbed", "expected"),
    [
        (set(), [0, 0]),
        ({0}, [DISTURBED, 0]),
        ({2}, [DISTURBED, 0]),
        ({3}, [DISTURBED, 0]),
        ({4}, [0, DISTURBED]),  # it runs when the first epoch ends, and is none of its steps
        ({7}, [0, DISTURBED]),
        ({8}, [0, 0]),
        ({3, 4}, [DISTURBED, DISTURBED]),
    ],
)
def test_an_epoch_is_left_out_if_one_of_its_own_steps_was_disturbed(timer, clock, disturbed, expected):
    train(timer, clock, disturbed, lambda: timer.metrics({"accuracy": 1.0}))
    assert flags(timer) == expected
    epochs = timer.snapshot().stage("epoch", "span")
    assert (epochs.host_s.n, epochs.unusual) == (expected.count(0), 2 - expected.count(0))


@pytest.mark.parametrize(("disturbed", "expected"), [(0, [DISTURBED, 0]), (1, [0, DISTURBED])])
def test_a_step_that_lies_in_two_epochs_belongs_to_that_with_the_most_of_it(timer, clock, disturbed, expected):
    """As in Lightning, where a step ends when the first batch of the next epoch is fetched."""
    for step in range(2):
        if step == disturbed:
            timer.disturb()
        with timer.span("epoch"):
            clock.advance(0.125)
            if step:
                timer.step()
                if step == disturbed:
                    timer.disturb()
            run(timer, clock, forward=4)
            with timer.excluded():
                clock.advance(8)
    assert flags(timer) == expected


def test_a_span_that_an_exception_leaves_says_so_beside_the_rest(timer, clock):
    timer.disturb()
    with pytest.raises(ValueError), timer.span("epoch"):
        run(timer, clock, forward=1)
        timer.step()
        raise ValueError
    assert flags(timer) == [DISTURBED | RAISED]
    assert not flags(timer)[0] & CUT


def test_the_time_that_understanding_takes_is_in_no_epoch(clock):
    """The clock moves when the timer begins the step anew after it has understood what was noted."""
    timer = StageTimer(clock=clock)
    timer.start()
    understand = timer.recorder.settle
    timer.recorder.settle = lambda **how: (understand(**how), clock.advance(5))
    began = clock()
    with timer.span("epoch"):
        for _ in range(ENOUGH_WAITING + 1):
            timer.step()
    assert clock() == began + 5 * S, "it was understood once"
    timer.stop()
    assert host_ns(timer, "epoch", "span") == [0]


def test_recording_and_reading_between_steps_are_in_no_epoch_and_their_time_is_told(tmp_path, clock, monkeypatch):
    step = Recorder.step

    def slow(recorder):
        step(recorder)
        clock.advance(10)

    monkeypatch.setattr(Recorder, "step", slow)
    monkeypatch.setattr("boundby.training.manager.perf_counter", lambda: clock() / S)
    options = ManagerOptions(TimerOptions(in_background=False), readings=False)
    manager = ProfilerManager(tmp_path, device=torch.device("cpu"), schedule=Schedule(1, 1, 1), options=options)
    manager.timer.clock = clock
    states = []
    with manager:
        for _ in range(2):
            with manager.span("epoch"):
                for _ in range(3):
                    states.append((manager.slows_step, manager.between_steps_s))
                    run(manager.timer, clock, forward=1)
                    manager.step()
    assert states == [(False, 0), (True, 10), (True, 20), (False, 30), (False, 40), (False, 50)]
    assert host_ns(manager.timer, "epoch", "span") == [3 * S, 3 * S]
    assert flags(manager.timer) == [DISTURBED, 0]
    assert manager.snapshot().stage("epoch", "span").host_s.total == 3

    off = ProfilerManager(tmp_path / "off", enabled=False)
    with off:
        off.step()
        assert (off.between_steps_s, off.slows_step) == (0, False)


def batches(clock: FakeNanoseconds) -> Iterator[int]:
    for number in range(3):
        clock.advance(2)
        yield number
    clock.advance(2)


def inside_a(marker, times=1):
    def inside(timer, clock):
        with contextlib.ExitStack() as stack:
            for _ in range(times):
                stack.enter_context(getattr(timer, marker)("evaluation"))
            clock.advance(8)

    return inside


def a_loader_to_its_end(timer: StageTimer, clock: FakeNanoseconds) -> None:
    assert list(timer.timed(batches(clock), "evaluation")) == [0, 1, 2]  # the wait for its end is taken back


INSIDE = [*map(inside_a, ("excluded", "stage", "span")), inside_a("excluded", times=2), a_loader_to_its_end]


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("is_watched", [False, True])
def test_what_has_its_name_inside_does_not_end_it(timer, clock, inside, is_watched):
    if is_watched:  # then every mark is understood at once
        timer.hooks.register("stage_end", lambda name, seconds: None)
    for _ in range(2):
        run(timer, clock, forward=1)
        with timer.stage("callbacks"):
            with timer.excluded("evaluation"):
                clock.advance(1)
                inside(timer, clock)
                clock.advance(32)
                run(timer, clock, forward=64)
            clock.advance(1)
        timer.step()
    assert host_ns(timer, "step", "step") == [2 * S] * 2
    assert host_ns(timer, "callbacks") == host_ns(timer, "forward") == [S] * 2
    assert host_ns(timer, "evaluation", "excluded") == [(1 + 8 + 32 + 64) * S] * 2
    assert host_ns(timer, "evaluation") == host_ns(timer, "evaluation", "span") == []
    assert (reasons(timer), timer.snapshot().stage("evaluation", "excluded").share) == ([], None)


def test_ends_that_never_came_inside_it_are_forgotten_with_its_step_and_an_exception_ends_all(timer, clock):
    timer.begin("evaluation", "excluded")
    timer.begin("evaluation")
    timer.step()
    with pytest.raises(ValueError), timer.excluded(), timer.excluded("evaluation"):
        clock.advance(8)
        raise ValueError
    run(timer, clock, forward=1)
    timer.step()
    assert host_ns(timer, "forward") == [S] and host_ns(timer, "step", "step") == [0, S]
    assert reasons(timer) == ["'evaluation', which is excluded, was open when its step ended"]


def test_whoever_asks_is_told_whether_something_excluded_is_open(timer):
    timer.hooks.register("stage_end", lambda name, seconds: calls.append((name, timer.is_excluded)))
    calls: list[tuple[str, bool]] = []
    with timer.excluded("evaluation"):
        with timer.stage("forward"):
            pass
        with timer.excluded("evaluation"):
            pass
    assert calls == [("forward", True), ("evaluation", True), ("evaluation", False)]
