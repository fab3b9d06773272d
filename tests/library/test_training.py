"""Stages of a loop on clocks that move only when told to; and long runs, odd names, failures, and their listeners."""

import contextlib
import gc
import sys
import threading
import types

import numpy as np
import pytest

from boundby.training import StageTimer, TimerOptions
from boundby.training.aggregate import SAMPLE, RunningStatistics
from boundby.training.recorder import MOST_WAITING
from boundby.training.records import ABSENT, CUT, DISTURBED, RAISED, bytes_of, times_from
from tests.fakes import FakeNanoseconds
from tests.timed_loops import Device, S, host_ns, reasons, run


def test_a_step_is_split_into_its_stages_of_every_micro_batch_and_what_lies_in_none(timer, clock):
    for _ in range(2):
        run(timer, clock, data=1, forward=2, backward=3)
        run(timer, clock, backward=1)
        clock.advance(1)
        timer.step()
    times = timer.snapshot()
    shares = {stage.name: stage.share for stage in times.stages}
    assert shares == {"step": 0.125, "data": 0.125, "forward": 0.25, "backward": 0.5}
    assert (times.step.host_s.n, times.step.host_s.total, times.step.self_total_s) == (2, 16, 2)
    assert times.last_step == 1
    assert times.rows_of("backward")["start_ns"].tolist() == [3 * S, 6 * S, 11 * S, 14 * S]
    assert times.rows_of("backward")["step"].tolist() == [0, 0, 1, 1]


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
    assert sum(stage.share for stage in times.stages) == 1


@pytest.mark.parametrize("marker", ["span", "stage"])
def test_a_stage_around_steps_is_a_span_and_part_of_none(timer, clock, marker):
    with getattr(timer, marker)("epoch"):
        for _ in range(2):
            run(timer, clock, forward=1)
            timer.step()
    timer.step()
    times = timer.snapshot()
    epoch = times.stage("epoch", "span")
    assert (epoch.host_s.total, epoch.self_total_s, epoch.share) == (2, 0, None)
    assert (times.stage("epoch"), times.stage("forward").share) == (None, 1)
    assert host_ns(timer, "step", "step") == [S, S, 0] and reasons(timer) == []


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
    times, recorded = timer.snapshot(), {}
    for row in times.occurrences:
        if times.names[row["stage"]].kind == "stage":
            recorded.setdefault(times.names[row["stage"]].name, []).append((row["host_ns"], row["flags"]))
    assert recorded == kept
    assert any(reason in text for text in reasons(timer))


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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_passes_through_and_marks_its_stage(timer, clock, error):
    with pytest.raises(error), timer.stage("update"), timer.stage("forward"):
        clock.advance(1)
        raise error
    timer.step()
    times = timer.snapshot()
    assert times.rows_of("forward")["flags"].tolist() == [RAISED]
    assert (times.stage("forward").host_s.n, times.stage("forward").unusual) == (0, 1)


@pytest.mark.parametrize(("error", "flags"), [(None, [0]), (RuntimeError("worker died"), [0, RAISED])])
def test_the_wait_that_finds_the_end_of_the_data_is_no_occurrence_and_an_error_of_a_loader_passes(
    timer, clock, error, flags
):
    def batches():
        clock.advance(1)
        yield 1
        if error:
            raise error
        clock.advance(5)

    with pytest.raises(RuntimeError, match="worker died") if error else contextlib.nullcontext():
        assert list(timer.timed(batches())) == [1]
    timer.step()
    assert timer.snapshot().rows_of("data")["flags"].tolist() == flags
    assert host_ns(timer, "data")[0] == S


def test_a_resumed_run_goes_on_counting_and_the_number_of_a_step_holds_for_its_stages(clock):
    timer = StageTimer(clock=clock)
    timer.start(first_step=700)
    timer.step()
    run(timer, clock, backward=1)
    timer.metrics({"loss": 1.0})
    timer.step(705)  # steps that the trainer skipped
    assert timer.snapshot().rows_of("backward")["step"].tolist() == [705]
    assert timer.snapshot().metric_rows["step"].tolist() == [705]
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


def test_metrics_belong_to_steps_and_a_tensor_that_would_have_to_be_waited_for_is_left_out(timer):
    class Tensor:
        device = "cuda:0"

        def __float__(self):
            raise AssertionError("it was read")

    timer.metrics({"loss": 2.0, "samples": 8})
    timer.step()
    timer.metrics({"loss": np.float32(1.0), "lr": True}, step=0)
    timer.metrics({"loss": float("nan"), "other": Tensor()})
    times = timer.snapshot()
    assert [metric.name for metric in times.metrics] == ["loss", "samples", "lr"]
    loss = times.metrics[0]
    assert (loss.values.n, loss.values.mean, loss.values.minimum, loss.non_finite) == (2, 1.5, 1.0, 1)
    assert times.metric_rows["step"].tolist() == [0, 0, 0, 0, 1]
    [reason] = reasons(timer)
    assert reason.startswith("TypeError: it is a tensor on cuda:0")


def test_whoever_looks_within_a_stage_sees_it_open_and_what_ended_before(timer, clock):
    timer.hooks.register("trace_ready", print)  # it needs no stage at once
    run(timer, clock, forward=2)
    with timer.stage("backward"):
        clock.advance(3)
        seen = timer.snapshot()
        assert [(stage.name, stage.since_s) for stage in seen.open] == [("backward", 3.0)]
        assert seen.rows_of("forward")["host_ns"].tolist() == [2 * S]
        clock.advance(1)
    assert host_ns(timer, "backward") == [4 * S] and not timer.hooks.watch_stages


def test_a_hook_registered_within_a_step_is_told_of_the_stages_that_had_begun(timer, clock):
    calls: list[tuple] = []
    timer.begin("forward")
    clock.advance(1)
    timer.begin("attention")
    clock.advance(2)
    timer.hooks.register("stage_end", lambda *what: calls.append(what))
    timer.hooks.register("step_end", lambda *what: calls.append(what))
    timer.end("attention")
    timer.end("forward")
    timer.step(7)
    assert calls == [("attention", 2.0), ("forward", 3.0), (7, 3.0)]


@pytest.mark.parametrize("endless", ["begin", "end", "metrics", "timed"])
def test_a_step_that_never_ends_takes_no_more_and_more_memory(timer, endless):
    act = {
        "begin": lambda: timer.begin("forward"),
        "end": lambda: timer.end("forward"),
        "metrics": lambda: timer.metrics({"loss": 1.0}),
        "timed": lambda: list(timer.timed([])),
    }[endless]
    for _ in range(3 * MOST_WAITING):
        act()
    assert timer.recorder.num_waiting <= MOST_WAITING + 1


def test_events_of_two_threads_are_told_apart_whoever_understands_them(timer, clock):
    with timer.stage("forward"):
        clock.advance(1)
        loader = threading.Thread(target=run, args=(timer, clock), kwargs={"forward": 4})  # of the same name
        loader.start()
        loader.join()
        clock.advance(1)
    timer.step()
    times = timer.snapshot()
    assert host_ns(timer, "forward", "background") == [4 * S]
    assert host_ns(timer, "forward") == host_ns(timer, "step", "step") == [6 * S]
    assert (times.stage("forward").share, times.stage("forward", "background").share) == (1, None)
    assert sorted(set(times.occurrences["thread"].tolist())) == [0, 1]


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


def test_times_of_the_device_come_when_it_has_passed_the_marks(clock):
    device = Device()
    with StageTimer(clock=clock, marks=device) as timer:
        run(timer, clock, forward=1, backward=1)
        timer.step()
        assert timer.snapshot().num_occurrences == 0  # nothing is waited for
        device.reach(10.0, 13.0)
        timer.step()
        assert host_ns(timer, "forward") == [S]  # the rest still waits behind it
        device.reach(13.5, 15.5)
        timer.step()
        times = timer.snapshot()
    assert times.rows_of("forward")["device_ns"].tolist() == [3 * S]
    assert times.rows_of("backward")["device_ns"].tolist() == [2 * S]
    assert times.rows_of("forward")["gap_ns"].tolist() == [ABSENT]
    assert times.rows_of("backward")["gap_ns"].tolist() == [S // 2]
    assert (times.stage("backward").device_s.total, times.stage("backward").starvation_s.total) == (2, 0.5)
    assert device.reused == 3  # the last one begins the next gap


def test_marks_are_used_again_and_a_device_that_never_answers_costs_its_times_alone(clock):
    device = Device()
    with StageTimer(clock=clock, marks=device) as timer:
        for _ in range(100):
            run(timer, clock, data=1)
            device.reach(1.0, 2.0)
            timer.step()
        assert len(device.queued) - device.reused <= 1
        run(timer, clock, forward=1)
        timer.step()
    times = timer.snapshot()
    assert times.rows_of("forward")["device_ns"].tolist() == [ABSENT]
    assert times.stage("forward").device_s is None
    assert [remark.what for remark in times.remarks] == ["device times"]


def test_what_is_to_be_written_within_a_step_is_added_up_at_its_next_mark(tmp_path, clock):
    device = Device()
    with StageTimer(tmp_path, clock=clock, marks=device, options=TimerOptions(in_background=False)) as timer:
        run(timer, clock, forward=1)
        device.reach(1.0, 2.0)
        writer = threading.Thread(target=timer.flush)  # which may not ask the device
        writer.start()
        writer.join()
        assert timer.recorder.num_waiting == 1
        run(timer, clock, backward=1)
        assert timer.recorder.num_waiting == 1, "the backward, which the device has not passed"


def test_a_collection_of_garbage_across_a_mark_is_left_where_it_fell(timer, clock):
    with timer.stage("forward"):
        timer.recorder.collected(clock() - S, clock())
        clock.advance(1)
        timer.recorder.collected(clock() - S // 2, clock())
    timer.step()
    assert host_ns(timer, "garbage_collection") == [S // 2]


def test_a_mark_that_fails_ends_the_times_of_the_device(clock):
    said: list[str] = []

    class Broken(Device):
        def has_passed(self, mark):
            raise RuntimeError("CUDA error: the launch failed")

    with StageTimer(clock=clock, marks=Broken(), say=said.append) as timer:
        for _ in range(3):
            run(timer, clock, forward=1)
            timer.step()
    assert timer.snapshot().stage("forward").host_s.n == 3
    assert said == ["device times: RuntimeError: CUDA error: the launch failed"]


def test_there_is_no_time_between_marks_of_two_streams_or_around_an_evaluation(clock):
    device = Device()
    with StageTimer(clock=clock, marks=device) as timer:
        with timer.stage("update"), timer.excluded():
            clock.advance(1)
        device.reach(1.0, 2.0)
        timer.step()
        assert timer.snapshot().rows_of("update")["device_ns"].tolist() == [ABSENT]
        with timer.stage("h2d"):
            device.stream = 1
        device.reach(3.0, 4.0)
        timer.step()
        assert timer.snapshot().rows_of("h2d")["device_ns"].tolist() == [ABSENT]


def reachable_bytes(whole: object) -> int:
    """Return the bytes of everything that the object holds, without modules, types and code."""
    seen, queue, total = set(), [whole], 0
    while queue:
        part = queue.pop()
        if id(part) in seen or isinstance(part, type | types.ModuleType | types.FunctionType | FakeNanoseconds):
            continue
        seen.add(id(part))
        total += sys.getsizeof(part)
        queue += gc.get_referents(part)
    return total


def test_memory_is_flat_over_a_long_run(clock):
    timer = StageTimer(clock=clock, options=TimerOptions(capacity=64))
    timer.start()
    sizes = []
    for step in range(10_000):
        run(timer, clock, data=1, forward=1)
        timer.metrics({"loss": step})
        timer.step()
        if step in (4_000, 9_999):
            timer.snapshot()  # understands what is noted, of which there may be more or less
            sizes.append(reachable_bytes(timer))
    assert sizes[1] < 1.01 * sizes[0]  # the numbers in it have grown by some digits
    times = timer.snapshot()
    assert (len(times.occurrences), len(times.metric_rows)) == (64, 64)
    assert (times.num_occurrences, times.stage("forward").host_s.n) == (30_000, 10_000)
    timer.stop()


def test_names_are_bounded_too(timer, clock):
    for number in range(1000):
        run(timer, clock, **{f"layer {number}": 1})
    timer.step()
    times = timer.snapshot()
    assert len(times.names) == 257
    assert times.stage("(others)").host_s.n == 745
    assert reasons(timer) == ["more than 256; the further ones are summed as (others)"]


def test_odd_names_and_numbers_stay_writable(timer, clock):
    for name in ("\udcff", "x" * 500):
        run(timer, clock, **{name: 1})
    timer.metrics({"\udcff": 1e300, "loss": 1.0})
    timer.step()
    times = times_from(bytes_of(timer.snapshot()))
    assert [name.name for name in times.names] == ["step", "?", "x" * 200]
    assert [(metric.name, metric.non_finite) for metric in times.metrics] == [("?", 1), ("loss", 0)]


def test_a_tally_samples_a_long_stream_evenly():
    tally = RunningStatistics()
    for value in range(100_000):
        tally.add(value)
    statistics = tally.statistics()
    assert (statistics.n, statistics.total, statistics.minimum, statistics.maximum) == (
        100_000,
        sum(range(100_000)),
        0,
        99_999,
    )
    assert statistics.sampled == SAMPLE
    assert abs(statistics.median - 50_000) < 4 * 50_000 / SAMPLE**0.5  # four standard errors
    assert abs(statistics.p90 - 90_000) < 4 * 30_000 / SAMPLE**0.5
    few = RunningStatistics()
    assert few.statistics().mean is None
    for value in range(28):
        few.add(value)
    assert few.statistics().p90 is None, "too few for a quantile"


@pytest.mark.parametrize("name", [None, [], {}])
def test_a_name_that_is_none_is_a_remark(timer, clock, name):
    with timer.stage(name):
        run(timer, clock, forward=1)
    timer.metrics(name)
    timer.metrics({"loss": "low"}, step="first")
    timer.step()
    assert host_ns(timer, "forward") == [S]
    assert "stage times" in [remark.what for remark in timer.remarks.all()]


@pytest.mark.parametrize("kind", ["step", "background", "x"])
def test_only_stages_spans_and_what_is_excluded_can_be_begun(timer, kind):
    timer.begin("forward", kind)
    timer.step()
    assert [name.name for name in timer.snapshot().names] == ["step"]
    assert "cannot be begun" in reasons(timer)[0]


@pytest.mark.parametrize("number", ["many", 2**70, 1.5])
def test_a_number_that_is_none_is_counted_on(timer, clock, number):
    timer.step(3)
    run(timer, clock, forward=1)
    timer.step(number)
    assert timer.snapshot().rows_of("forward")["step"].tolist() == [4]
    assert reasons(timer) == [f"{number!r} is none; counted on"]


def test_a_timer_that_is_disabled_or_fails_again_and_again_stays_off_whatever_its_listener_does(clock, tmp_path):
    said: list[str] = []
    timer = StageTimer(clock=clock, say=lambda text: said.append(text) or 1 / 0)
    with timer, StageTimer(tmp_path / "run", enabled=False, clock=clock) as off:
        for _ in range(150):
            timer.begin(None)
        timer.snapshot()
        timer.begin("forward")
        run(off, clock, forward=1)
        assert list(off.timed([1, 2])) == [1, 2]
        off.metrics({"loss": 1})
        off.step()
    assert reasons(timer)[-1] == "given up after 100 failures" and said
    assert timer.snapshot().status == "finished"
    assert off.snapshot().stages == () and not (tmp_path / "run").exists()


def test_hooks_are_told_in_order_and_dropped_when_they_raise(timer, clock):
    calls: list[tuple] = []
    timer.hooks.register("stage_start", lambda name: calls.append(("start", name)))
    timer.hooks.register("stage_end", lambda name, seconds: calls.append(("end", name, seconds)))
    timer.hooks.register("step_end", lambda number, seconds: calls.append(("step", number, seconds)))
    timer.hooks.register("step_end", lambda number, seconds: 1 / 0)
    for _ in range(2):
        run(timer, clock, forward=2)
        timer.step()
    assert calls[:3] == [("start", "forward"), ("end", "forward", 2.0), ("step", 0, 2.0)]
    assert len(calls) == 6
    assert reasons(timer) == ["ZeroDivisionError: division by zero"]
    with pytest.raises(ValueError, match="stage_begin"):
        timer.hooks.register("stage_begin", print)
