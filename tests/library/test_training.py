"""Stages of a loop on a clock that moves only when told to, so that every time is exact."""

import threading

import numpy as np
import pytest

from boundby.training import StageTimer
from boundby.training.records import ABSENT, CUT, DISTURBED, RAISED
from tests.timed_loops import S, host_ns, reasons, run


def test_a_step_is_split_into_its_stages_and_what_lies_in_none(timer, clock):
    for _ in range(2):
        run(timer, clock, data=1, forward=2, backward=4)
        clock.advance(1)
        timer.step()
    times = timer.snapshot()
    shares = {each.name: each.share for each in times.stages}
    assert shares == {"step": 0.125, "data": 0.125, "forward": 0.25, "backward": 0.5}
    assert (times.step.host_s.n, times.step.host_s.total, times.step.self_total_s) == (2, 16, 2)
    assert times.last_step == 1
    assert times.rows_of("backward")["start_ns"].tolist() == [3 * S, 11 * S]
    assert times.rows_of("backward")["step"].tolist() == [0, 1]


def test_a_stage_inside_another_is_in_its_time_and_not_in_its_own(timer, clock):
    with timer.stage("update"):
        clock.advance(1)
        run(timer, clock, forward=2)
    timer.step()
    times = timer.snapshot()
    update, forward = times.stage("update"), times.stage("forward")
    assert (update.host_s.total, update.self_total_s, forward.self_total_s) == (3, 1, 2)
    assert times.names[times.rows_of("forward")["parent"][0]].name == "update"
    assert times.rows_of("update")["parent"].tolist() == [ABSENT]
    assert sum(each.share for each in times.stages) == 1


def test_micro_batches_are_occurrences_of_one_step(timer, clock):
    for _ in range(3):
        run(timer, clock, forward=1, backward=2)
    run(timer, clock, optimizer=1)
    timer.step()
    assert host_ns(timer, "forward") == [S, S, S]
    assert timer.snapshot().stage("backward").share == 0.6


def test_an_excluded_block_is_taken_out_of_everything_around_it(timer, clock):
    with timer.span("epoch"), timer.stage("update"):
        clock.advance(1)
        with timer.excluded("evaluation"):
            run(timer, clock, forward=8)  # a hook that also fires in an evaluation
        clock.advance(1)
    timer.step()
    assert host_ns(timer, "update") == [2 * S]
    assert host_ns(timer, "step", "step") == [2 * S]
    assert host_ns(timer, "evaluation", "excluded") == [8 * S]
    assert host_ns(timer, "forward") == []
    assert timer.snapshot().stage("update").self_total_s == 2
    assert timer.snapshot().stage("evaluation", "excluded").share is None
    assert reasons(timer) == []


def test_an_epoch_holds_steps_and_is_part_of_none(timer, clock):
    with timer.span("epoch"):
        for _ in range(2):
            run(timer, clock, forward=1)
            timer.step()
    times = timer.snapshot()
    timer.stop()
    epoch = timer.snapshot().stage("epoch", "span")
    assert (epoch.host_s.total, epoch.self_total_s, epoch.share) == (2, 0, None)
    assert times.stage("forward").share == 1


def test_a_stage_around_steps_becomes_a_span(timer, clock):
    with timer.stage("epoch"):
        for _ in range(2):
            run(timer, clock, forward=1)
            timer.step()
    timer.step()
    assert host_ns(timer, "epoch", "span") == [2 * S]
    assert timer.snapshot().stage("epoch") is None
    assert host_ns(timer, "step", "step") == [S, S, 0]
    assert reasons(timer) == []


@pytest.mark.parametrize(
    ("marks", "kept", "reason"),
    [
        ("-forward", {}, "ended without a begin"),
        ("+update +forward -update -forward", {"update": [(3 * S, 0)], "forward": [(2 * S, CUT)]}, "was open when"),
        ("+forward +backward +forward -forward", {"forward": [(S, 0)]}, "began again before it had ended"),
    ],
)
def test_marks_out_of_order_are_put_right(timer, clock, marks, kept, reason):
    for mark in marks.split():
        (timer.begin if mark[0] == "+" else timer.end)(mark[1:])
        clock.advance(1 if mark != "+forward" or "update" not in marks else 2)
    timer.step()
    times, found = timer.snapshot(), {}
    for row in times.occurrences:
        if times.names[row["stage"]].kind == "stage":
            found.setdefault(times.names[row["stage"]].name, []).append((row["host_ns"], row["flags"]))
    assert found == kept
    assert any(reason in each for each in reasons(timer))


def test_an_end_that_never_came_costs_one_stage_and_no_step(timer, clock):
    timer.begin("forward")  # the model raised, and the trainer went on with the next batch
    clock.advance(1)
    timer.step()
    run(timer, clock, forward=2)
    timer.step()
    assert host_ns(timer, "forward") == [2 * S]
    assert host_ns(timer, "step", "step") == [S, 2 * S]
    timer.stop()
    assert reasons(timer) == ["'forward' has begun and not ended"]


def test_an_exclusion_whose_end_never_came_ends_with_its_step(timer, clock):
    timer.begin("evaluation", "excluded")
    timer.step()
    run(timer, clock, forward=1)
    assert host_ns(timer, "step", "step") == [0]
    timer.step()
    assert host_ns(timer, "forward") == [S]
    assert reasons(timer) == ["'evaluation', which is excluded, was open when its step ended"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_passes_through_and_marks_its_stage(timer, clock, error):
    with pytest.raises(error), timer.stage("update"), timer.stage("forward"):
        clock.advance(1)
        raise error
    timer.step()
    times = timer.snapshot()
    assert times.rows_of("forward")["flags"].tolist() == [RAISED]
    assert (times.stage("forward").host_s.n, times.stage("forward").unusual) == (0, 1)


def test_the_wait_that_finds_the_end_of_the_data_is_no_occurrence(timer, clock):
    def batches():
        for each in range(2):
            clock.advance(1)
            yield each
        clock.advance(5)

    assert list(timer.timed(batches())) == [0, 1]
    timer.step()
    assert host_ns(timer, "data") == [S, S]


def test_a_loader_that_raises_passes_its_exception_on(timer):
    def batches():
        yield 1
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        list(timer.timed(batches()))
    timer.step()
    assert timer.snapshot().rows_of("data")["flags"].tolist() == [0, RAISED]


def test_a_resumed_run_goes_on_counting_and_the_number_of_a_step_holds_for_its_stages(clock):
    timer = StageTimer(clock=clock)
    timer.start(first_step=700)
    timer.step()
    run(timer, clock, backward=1)
    timer.step(705)  # steps that the trainer skipped
    assert timer.snapshot().rows_of("backward")["step"].tolist() == [705]
    run(timer, clock, forward=1)
    timer.step()
    times = timer.snapshot()
    assert times.rows_of("step", "step")["step"].tolist() == [700, 705, 706]
    assert times.rows_of("forward")["step"].tolist() == [706]
    assert (times.first_step, times.last_step) == (700, 706)
    timer.stop()


def test_a_disturbed_step_stays_out_of_the_summaries(timer, clock):
    for seconds in (1, 50, 1):
        if seconds == 50:
            timer.disturb()
        run(timer, clock, forward=seconds)
        timer.step()
    times = timer.snapshot()
    assert times.rows_of("forward")["flags"].tolist() == [0, DISTURBED, 0]
    assert (times.stage("forward").host_s.maximum, times.step.host_s.total, times.step.unusual) == (1, 2, 1)


def test_what_is_done_between_two_steps_may_be_left_out(timer, clock):
    timer.step()
    clock.advance(9)
    timer.restart_step()
    run(timer, clock, forward=1)
    timer.step()
    assert host_ns(timer, "step", "step") == [0, S]


def test_stages_of_other_threads_are_kept_apart(timer, clock):
    def prefetch():
        run(timer, clock, data=4)

    with timer.stage("data"):
        thread = threading.Thread(target=prefetch)
        thread.start()
        thread.join()
    timer.step()
    times = timer.snapshot()
    assert (times.stage("data").self_total_s, times.stage("data").share) == (4, 1)
    background = times.stage("data", "background")
    assert (background.host_s.total, background.share) == (4, None)
    assert sorted(set(times.occurrences["thread"].tolist())) == [0, 1]


def test_many_threads_lose_no_stage(timer):
    def work():
        for _ in range(200):
            with timer.stage("reward"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        timer.step()
    for thread in threads:
        thread.join()
    timer.step()
    times = timer.snapshot()
    assert times.stage("reward", "background").host_s.n == 1600
    assert times.occurrences["index"].tolist() == list(range(1651))


def test_metrics_belong_to_steps(timer):
    timer.metrics({"loss": 2.0, "samples": 8})
    timer.step()
    timer.metrics({"loss": np.float32(1.0), "lr": True}, step=0)
    timer.metrics({"loss": float("nan")})
    times = timer.snapshot()
    loss = next(each for each in times.metrics if each.name == "loss")
    assert (loss.values.n, loss.values.mean, loss.values.minimum, loss.non_finite) == (2, 1.5, 1.0, 1)
    assert times.metric_rows["step"].tolist() == [0, 0, 0, 0, 1]


def test_a_tensor_that_would_have_to_be_waited_for_is_left_out(timer):
    class Tensor:
        device = "cuda:0"

        def __float__(self):
            raise AssertionError("it was read")

    timer.metrics({"loss": Tensor(), "samples": 4})
    assert [each.name for each in timer.snapshot().metrics] == ["samples"]
    assert reasons(timer) == [
        "TypeError: it is a tensor on cuda:0, and reading it would wait for the device; give a float of it"
    ]
