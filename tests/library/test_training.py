"""Stages of a loop on a clock and a device that move only when told to, so that every time is exact.

python -m pytest tests/library/test_training.py
"""

import gc
import subprocess
import sys
import threading
import types
from collections.abc import Iterator

import numpy as np
import pytest

from boundby.training import StageTimer, TimerOptions
from boundby.training.document import bytes_of, times_from
from boundby.training.ring import ABSENT, CUT, DISTURBED, RAISED
from boundby.training.tally import SAMPLE, Tally

S = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 5 * S

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * S)


class Device:
    """A stream whose marks get their time when the test lets the device reach them."""

    def __init__(self) -> None:
        self.queued: list[list] = []  # [time or None]
        self.reused = 0
        self.stream = 0

    def mark(self) -> list:
        self.queued.append([None, self.stream])
        return self.queued[-1]

    def reach(self, *times: float) -> None:
        waiting = [mark for mark in self.queued if mark[0] is None]
        for mark, at in zip(waiting, times, strict=False):
            mark[0] = at

    def has_passed(self, mark: list) -> bool:
        return mark[0] is not None

    def seconds_between(self, start: list, end: list) -> float | None:
        return end[0] - start[0] if start[1] == end[1] else None

    def reuse(self, mark: list) -> None:
        self.reused += 1


def reachable_bytes(whole: object) -> int:
    """Return the bytes of everything that the object holds, without modules, types and code."""
    seen, queue, total = set(), [whole], 0
    while queue:
        each = queue.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | types.FunctionType | Clock):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        queue += gc.get_referents(each)
    return total


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> Iterator[StageTimer]:
    timer = StageTimer(clock=clock)
    timer.start()
    yield timer
    timer.stop()


def run(timer: StageTimer, clock: Clock, **seconds: float) -> None:
    for name, duration in seconds.items():
        with timer.stage(name):
            clock.advance(duration)


def reasons(timer: StageTimer) -> list[str]:
    return [remark.reason for remark in timer.remarks.all()]


def host_ns(timer: StageTimer, name: str, kind: str = "stage") -> list[int]:
    return timer.snapshot().rows_of(name, kind)["host_ns"].tolist()


def test_a_step_is_split_into_its_stages_and_what_lies_in_none(timer: StageTimer, clock: Clock) -> None:
    for _ in range(2):
        run(timer, clock, data=1, forward=2, backward=4)
        clock.advance(1)
        timer.step()
    times = timer.snapshot()
    assert {each.name: each.share for each in times.stages} == {
        "step": 0.125,
        "data": 0.125,
        "forward": 0.25,
        "backward": 0.5,
    }
    assert (times.step.host_s.n, times.step.host_s.total, times.step.self_total_s) == (2, 16, 2)
    assert times.last_step == 1
    assert times.rows_of("backward")["start_ns"].tolist() == [3 * S, 11 * S]
    assert times.rows_of("backward")["step"].tolist() == [0, 1]


def test_a_stage_inside_another_is_in_its_time_and_not_in_its_own(timer: StageTimer, clock: Clock) -> None:
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


def test_micro_batches_are_occurrences_of_one_step(timer: StageTimer, clock: Clock) -> None:
    for _ in range(3):
        run(timer, clock, forward=1, backward=2)
    run(timer, clock, optimizer=1)
    timer.step()
    assert host_ns(timer, "forward") == [S, S, S]
    assert timer.snapshot().stage("backward").share == 0.6


def test_an_excluded_block_is_taken_out_of_everything_around_it(timer: StageTimer, clock: Clock) -> None:
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


def test_an_epoch_holds_steps_and_is_part_of_none(timer: StageTimer, clock: Clock) -> None:
    with timer.span("epoch"):
        for _ in range(2):
            run(timer, clock, forward=1)
            timer.step()
    times = timer.snapshot()
    timer.stop()
    epoch = timer.snapshot().stage("epoch", "span")
    assert (epoch.host_s.total, epoch.self_total_s, epoch.share) == (2, 0, None)
    assert times.stage("forward").share == 1


def test_a_stage_around_steps_becomes_a_span(timer: StageTimer, clock: Clock) -> None:
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
        ("-forward", {}, "'forward' ended without a begin; ignored"),
        (
            "+update +forward -update -forward",
            {"update": [(3 * S, 0)], "forward": [(2 * S, CUT)]},
            "'forward' was open when 'update' ended around it",
        ),
        (
            "+forward +backward +forward -forward",
            {"forward": [(S, 0)]},
            "'forward' began again before it had ended; the first is dropped",
        ),
    ],
)
def test_marks_out_of_order_are_put_right(
    timer: StageTimer, clock: Clock, marks: str, kept: dict[str, list[tuple[int, int]]], reason: str
) -> None:
    for mark in marks.split():
        (timer.begin if mark[0] == "+" else timer.end)(mark[1:])
        clock.advance(1 if mark != "+forward" or "update" not in marks else 2)
    timer.step()
    times = timer.snapshot()
    rows = {name: times.rows_of(name) for name in ("update", "forward", "backward")}
    found = {
        name: list(zip(each["host_ns"].tolist(), each["flags"].tolist(), strict=True)) for name, each in rows.items()
    }
    assert {name: each for name, each in found.items() if each} == kept
    assert reason in reasons(timer)


def test_an_end_that_never_came_costs_one_stage_and_no_step(timer: StageTimer, clock: Clock) -> None:
    timer.begin("forward")  # the model raised, and the trainer went on with the next batch
    clock.advance(1)
    timer.step()
    run(timer, clock, forward=2)
    timer.step()
    assert host_ns(timer, "forward") == [2 * S]
    assert host_ns(timer, "step", "step") == [S, 2 * S]
    timer.stop()
    assert reasons(timer) == ["'forward' has begun and not ended"]


def test_an_exclusion_whose_end_never_came_ends_with_its_step(timer: StageTimer, clock: Clock) -> None:
    timer.begin("evaluation", "excluded")
    timer.step()
    run(timer, clock, forward=1)
    assert host_ns(timer, "step", "step") == [0]
    timer.step()
    assert host_ns(timer, "forward") == [S]
    assert reasons(timer) == ["'evaluation', which is excluded, was open when its step ended"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_passes_through_and_marks_its_stage(
    timer: StageTimer, clock: Clock, error: type[BaseException]
) -> None:
    with pytest.raises(error), timer.stage("update"), timer.stage("forward"):
        clock.advance(1)
        raise error
    timer.step()
    times = timer.snapshot()
    assert times.rows_of("forward")["flags"].tolist() == [RAISED]
    assert (times.stage("forward").host_s.n, times.stage("forward").unusual) == (0, 1)


def test_the_wait_that_finds_the_end_of_the_data_is_no_occurrence(timer: StageTimer, clock: Clock) -> None:
    def batches() -> Iterator[int]:
        for each in range(2):
            clock.advance(1)
            yield each
        clock.advance(5)

    assert list(timer.timed(batches())) == [0, 1]
    timer.step()
    assert host_ns(timer, "data") == [S, S]


def test_a_loader_that_raises_passes_its_exception_on(timer: StageTimer) -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        list(timer.timed(batches()))
    timer.step()
    assert timer.snapshot().rows_of("data")["flags"].tolist() == [0, RAISED]


def test_a_resumed_run_goes_on_counting(clock: Clock) -> None:
    timer = StageTimer(clock=clock)
    timer.start(first_step=700)
    timer.step()
    timer.step(705)  # steps that the trainer skipped
    run(timer, clock, forward=1)
    timer.step()
    times = timer.snapshot()
    assert times.rows_of("step", "step")["step"].tolist() == [700, 705, 706]
    assert times.rows_of("forward")["step"].tolist() == [706]
    assert (times.first_step, times.last_step) == (700, 706)
    timer.stop()


def test_the_number_of_a_step_holds_for_its_stages(timer: StageTimer, clock: Clock) -> None:
    run(timer, clock, forward=1)
    timer.step(41)
    assert timer.snapshot().rows_of("forward")["step"].tolist() == [41]


def test_a_disturbed_step_stays_out_of_the_summaries(timer: StageTimer, clock: Clock) -> None:
    for seconds in (1, 50, 1):
        if seconds == 50:
            timer.disturb()
        run(timer, clock, forward=seconds)
        timer.step()
    times = timer.snapshot()
    assert times.rows_of("forward")["flags"].tolist() == [0, DISTURBED, 0]
    assert (times.stage("forward").host_s.maximum, times.step.host_s.total, times.step.unusual) == (1, 2, 1)


def test_what_is_done_between_two_steps_may_be_left_out(timer: StageTimer, clock: Clock) -> None:
    timer.step()
    clock.advance(9)
    timer.restart_step()
    run(timer, clock, forward=1)
    timer.step()
    assert host_ns(timer, "step", "step") == [0, S]


def test_stages_of_other_threads_are_kept_apart(timer: StageTimer, clock: Clock) -> None:
    def prefetch() -> None:
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


def test_many_threads_lose_no_stage(timer: StageTimer) -> None:
    def work() -> None:
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


def test_metrics_belong_to_steps(timer: StageTimer) -> None:
    timer.metrics({"loss": 2.0, "samples": 8})
    timer.step()
    timer.metrics({"loss": np.float32(1.0), "lr": True}, step=0)
    timer.metrics({"loss": float("nan")})
    times = timer.snapshot()
    loss = next(each for each in times.metrics if each.name == "loss")
    assert (loss.values.n, loss.values.mean, loss.values.minimum, loss.non_finite) == (2, 1.5, 1.0, 1)
    assert times.metric_rows["step"].tolist() == [0, 0, 0, 0, 1]


def test_a_tensor_that_would_have_to_be_waited_for_is_left_out(timer: StageTimer) -> None:
    class Tensor:
        device = "cuda:0"

        def __float__(self) -> float:
            raise AssertionError("it was read")

    timer.metrics({"loss": Tensor(), "samples": 4})
    assert [each.name for each in timer.snapshot().metrics] == ["samples"]
    assert reasons(timer) == [
        "TypeError: it is a tensor on cuda:0, and reading it would wait for the device; give a float of it"
    ]


def test_times_of_the_device_come_when_it_has_passed_the_marks(clock: Clock) -> None:
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


def test_marks_are_used_again(clock: Clock) -> None:
    device = Device()
    with StageTimer(clock=clock, marks=device) as timer:
        for _ in range(100):
            run(timer, clock, data=1, forward=1)
            device.reach(1.0, 2.0, 3.0, 4.0)
            timer.step()
    assert len(device.queued) - device.reused <= 1


def test_a_device_that_never_answers_costs_its_times_alone(clock: Clock) -> None:
    with StageTimer(clock=clock, marks=Device()) as timer:
        run(timer, clock, forward=1)
        timer.step()
    times = timer.snapshot()
    assert times.rows_of("forward")["device_ns"].tolist() == [ABSENT]
    assert times.stage("forward").device_s is None
    assert [remark.what for remark in times.remarks] == ["device times"]


def test_a_mark_that_fails_ends_the_times_of_the_device(clock: Clock) -> None:
    said: list[str] = []

    class Broken(Device):
        def has_passed(self, mark: list) -> bool:
            raise RuntimeError("CUDA error: the launch failed")

    with StageTimer(clock=clock, marks=Broken(), say=said.append) as timer:
        for _ in range(3):
            run(timer, clock, forward=1)
            timer.step()
    assert timer.snapshot().stage("forward").host_s.n == 3
    assert said == ["device times: RuntimeError: CUDA error: the launch failed"]


def test_no_time_between_marks_of_two_streams(clock: Clock) -> None:
    device = Device()
    with StageTimer(clock=clock, marks=device) as timer:
        with timer.stage("h2d"):
            device.stream = 1
        device.reach(1.0, 2.0)
        timer.step()
        assert timer.snapshot().rows_of("h2d")["device_ns"].tolist() == [ABSENT]


def test_an_evaluation_inside_leaves_no_time_on_the_device(clock: Clock) -> None:
    device = Device()
    with StageTimer(clock=clock, marks=device) as timer:
        with timer.stage("update"), timer.excluded():
            clock.advance(1)
        device.reach(1.0, 2.0)
        timer.step()
        assert timer.snapshot().rows_of("update")["device_ns"].tolist() == [ABSENT]


def test_memory_is_flat_over_a_long_run(clock: Clock) -> None:
    timer = StageTimer(clock=clock, options=TimerOptions(capacity=64))
    timer.start()
    sizes = []
    for step in range(20_000):
        run(timer, clock, data=1, forward=1)
        timer.metrics({"loss": step})
        timer.step()
        if step in (4_000, 19_999):
            sizes.append(reachable_bytes(timer))
    assert sizes[1] < 1.01 * sizes[0]  # the numbers in it have grown by some digits
    times = timer.snapshot()
    assert (len(times.occurrences), len(times.metric_rows)) == (64, 64)
    assert (times.num_occurrences, times.stage("forward").host_s.n) == (60_000, 20_000)
    timer.stop()


def test_names_are_bounded_too(timer: StageTimer, clock: Clock) -> None:
    for number in range(1000):
        run(timer, clock, **{f"layer {number}": 1})
    timer.step()
    times = timer.snapshot()
    assert len(times.names) == 257
    assert times.stage("(others)").host_s.n == 745
    assert reasons(timer) == ["more than 256; the further ones are summed as (others)"]


def test_odd_names_and_numbers_stay_writable(timer: StageTimer, clock: Clock) -> None:
    for name in ("\udcff", "x" * 500):
        run(timer, clock, **{name: 1})
    timer.metrics({"\udcff": 1e300, "loss": 1.0})
    timer.step()
    times = times_from(bytes_of(timer.snapshot()))
    assert [each.name for each in times.names] == ["step", "?", "x" * 200]
    assert [(each.name, each.non_finite) for each in times.metrics] == [("?", 1), ("loss", 0)]


def test_a_tally_samples_a_long_stream_evenly() -> None:
    tally = Tally()
    for value in range(100_000):
        tally.add(value)
    found = tally.statistics()
    assert (found.n, found.total, found.minimum, found.maximum) == (100_000, sum(range(100_000)), 0, 99_999)
    assert found.sampled == SAMPLE
    assert abs(found.median - 50_000) < 4 * 50_000 / SAMPLE**0.5  # four standard errors
    assert abs(found.p90 - 90_000) < 4 * 30_000 / SAMPLE**0.5


def test_no_quantile_without_enough_values() -> None:
    tally = Tally()
    for value in range(28):
        tally.add(value)
    assert tally.statistics().p90 is None
    assert Tally().statistics().mean is None


@pytest.mark.parametrize("name", [None, [], {}])
def test_a_name_that_is_none_is_a_remark(timer: StageTimer, clock: Clock, name: object) -> None:
    with timer.stage(name):
        run(timer, clock, forward=1)
    timer.metrics(name)
    timer.metrics({"loss": "low"}, step="first")
    timer.step()
    assert host_ns(timer, "forward") == [S]
    assert "stage times" in [remark.what for remark in timer.remarks.all()]


@pytest.mark.parametrize("kind", ["step", "background", "x"])
def test_only_stages_spans_and_what_is_excluded_can_be_begun(timer: StageTimer, kind: str) -> None:
    timer.begin("forward", kind)
    timer.step()
    assert [each.name for each in timer.snapshot().names] == ["step"]
    assert "cannot be begun" in reasons(timer)[0]


@pytest.mark.parametrize("number", ["many", 2**70, 1.5])
def test_a_number_that_is_none_is_counted_on(timer: StageTimer, clock: Clock, number: object) -> None:
    timer.step(3)
    run(timer, clock, forward=1)
    timer.step(number)
    assert timer.snapshot().rows_of("forward")["step"].tolist() == [4]
    assert reasons(timer) == [f"{number!r} is none; counted on"]


def test_a_timer_that_fails_again_and_again_stays_off(timer: StageTimer) -> None:
    for _ in range(150):
        timer.begin(None)
    timer.snapshot()
    timer.begin("forward")
    assert reasons(timer)[-1] == "given up after 100 failures"
    timer.stop()
    assert timer.snapshot().status == "finished"


def test_a_listener_that_raises_is_not_heard_of(clock: Clock) -> None:
    def say(text: str) -> None:
        raise OSError("terminal gone")

    with StageTimer(clock=clock, say=say) as timer:
        timer.end("forward")
        timer.step()
    assert timer.snapshot().step.host_s.n == 1


def test_a_disabled_timer_does_nothing(clock: Clock, tmp_path) -> None:
    with StageTimer(tmp_path / "run", enabled=False, clock=clock) as timer:
        with timer.stage("forward"):
            pass
        assert list(timer.timed([1, 2])) == [1, 2]
        timer.metrics({"loss": 1})
        timer.step()
    assert not (tmp_path / "run").exists()
    assert timer.snapshot().stages == ()


def test_hooks_are_told_in_order_and_dropped_when_they_raise(timer: StageTimer, clock: Clock) -> None:
    told: list[tuple] = []
    timer.hooks.register("stage_start", lambda name: told.append(("start", name)))
    timer.hooks.register("stage_end", lambda name, seconds: told.append(("end", name, seconds)))
    timer.hooks.register("step_end", lambda number, seconds: told.append(("step", number, seconds)))
    timer.hooks.register("step_end", lambda number, seconds: 1 / 0)
    for _ in range(2):
        run(timer, clock, forward=2)
        timer.step()
    assert told[:3] == [("start", "forward"), ("end", "forward", 2.0), ("step", 0, 2.0)]
    assert len(told) == 6
    assert reasons(timer) == ["ZeroDivisionError: division by zero"]
    with pytest.raises(ValueError, match="stage_begin"):
        timer.hooks.register("stage_begin", print)


def test_the_package_loads_no_torch() -> None:
    code = "import sys, boundby.training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
