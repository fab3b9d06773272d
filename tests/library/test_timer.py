"""What a timed call waits for, what the device alone needs for it, and when a callable counts as warm."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from boundby.timing.timer import CHUNK, QUEUE_DEPTH, DeviceTime, Timer, WarmUpRule, warm_up
from tests.fakes import FakeClock, QueuedDevice

RULE = WarmUpRule(least_runs=1, least_s=0.0, window_runs=4, window_s=0.0, tolerance=0.03, cap_s=1000.0)


class Device:
    """A device with a queue: a call only enqueues, and a synchronization spends the time."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.queued = 0.0
        self.events: list[str] = []

    def work(self, seconds: float) -> Callable[[], None]:
        def enqueue() -> None:
            self.events.append("work")
            self.queued += seconds

        return enqueue

    def synchronize(self) -> None:
        self.events.append("synchronize")
        self.clock.advance(self.queued)
        self.queued = 0.0


@pytest.fixture
def clock():
    return FakeClock(now=64.0)


@pytest.fixture
def device(clock):
    return Device(clock)


def test_an_isolated_call_runs_from_an_idle_device_to_an_idle_device(clock, device):
    timer = Timer(clock, device.synchronize)
    device.work(8.0)()  # left over from before: not part of the call
    device.events.clear()
    assert timer.isolated(device.work(0.5)) == 0.5
    assert device.events == ["synchronize", "work", "synchronize"]


def test_pipelined_calls_wait_once_at_the_end(clock, device):
    timer = Timer(clock, device.synchronize)
    device.work(8.0)()
    device.events.clear()
    assert timer.pipelined(device.work(0.25) for _ in range(3)) == 0.75
    assert device.events == ["synchronize", "work", "work", "work", "synchronize"]


def test_to_issue_a_call_takes_the_time_of_the_host_and_not_of_the_device(clock, device):
    def work():
        clock.advance(0.125)
        device.work(8.0)()

    device.work(64.0)()  # left over from before: the host issues the call into an empty queue
    device.events.clear()
    assert Timer(clock, device.synchronize).enqueue(work) == 0.125
    assert device.events == ["synchronize", "work", "synchronize"]  # and leaves it empty


HOST_S, DEVICE_S, LAUNCHES = 2**-10, 2**-13, 8  # the device is eight times as quick as the host that feeds it


def launches(queue: QueuedDevice) -> Callable[[], None]:
    def work() -> None:
        for _ in range(LAUNCHES):
            queue.issue(HOST_S, DEVICE_S)

    return work


def test_marks_without_a_backlog_would_measure_the_gaps_of_the_host(clock):
    queue = QueuedDevice(clock)
    start = queue.mark()
    launches(queue)()
    assert queue.seconds_between(start, queue.mark()) == LAUNCHES * HOST_S + DEVICE_S


def test_the_time_on_the_device_has_no_gap_of_the_host(clock):
    queue = QueuedDevice(clock)
    timer = Timer(clock, queue.synchronize)
    enqueue_s = timer.enqueue(launches(queue))
    assert enqueue_s == LAUNCHES * HOST_S
    assert timer.on_device(launches(queue), queue, enqueue_s) == DeviceTime(LAUNCHES * DEVICE_S, by="backlog")
    assert queue.held == [1.5 * enqueue_s]


def test_the_time_on_the_device_is_not_that_of_work_left_in_its_queue(clock):
    queue = QueuedDevice(clock)
    queue.issue(0.0, 64.0)
    timer = Timer(clock, queue.synchronize)
    assert timer.on_device(launches(queue), queue, LAUNCHES * HOST_S).seconds == LAUNCHES * DEVICE_S
    assert queue.has_passed(queue.mark())  # and none is left in it


@pytest.mark.parametrize(("keeps", "is_valid"), [(1.0, True), (0.75, True), (0.625, False), (0.0, False)])
def test_a_device_that_had_to_wait_for_the_host_has_no_time(clock, keeps, is_valid):
    queue = QueuedDevice(clock, keeps)
    device_time = Timer(clock, queue.synchronize).on_device(launches(queue), queue, LAUNCHES * HOST_S)
    if is_valid:
        assert device_time == DeviceTime(LAUNCHES * DEVICE_S, by="backlog")
    else:
        assert device_time == DeviceTime(None, "the device reached the call before the host had issued all of it")
    assert queue.has_passed(queue.mark())


def test_a_call_that_waits_for_the_device_itself_has_no_device_time(clock):
    queue = QueuedDevice(clock)

    def work():
        queue.issue(HOST_S, DEVICE_S)
        queue.synchronize()  # such as .item()

    device_time = Timer(clock, queue.synchronize).on_device(work, queue, HOST_S)
    assert device_time.seconds is None and device_time.reason is not None


@pytest.mark.parametrize(
    ("enqueue_s", "backlog_s"), [(0.0, 1e-3), (0.0005, 1e-3), (0.001, 1.5e-3), (0.02, 0.03), (0.033, 0.0495)]
)
def test_a_backlog_lasts_half_as_long_again_as_the_host_needs_and_at_least_1_ms(clock, enqueue_s, backlog_s):
    queue = QueuedDevice(clock)
    Timer(clock, queue.synchronize).on_device(launches(queue), queue, enqueue_s)
    assert queue.held == [pytest.approx(backlog_s, rel=1e-12)]


def test_a_call_that_takes_longer_to_issue_than_a_backlog_may_last_is_not_made(clock):
    queue = QueuedDevice(clock)
    device_time = Timer(clock, queue.synchronize).on_device(lambda: 1 / 0, queue, enqueue_s=0.068)
    assert device_time.seconds is None and device_time.reason is not None and "takes 68 ms" in device_time.reason
    assert queue.held == []


ISSUE_S, KERNEL_S = 2.0**-15, 2.0**-16  # of one launch: a device that is quicker than its host


def chunked(queue: QueuedDevice, number: int, chunk: int) -> Callable[[Callable[[], None]], None]:
    def run(begin: Callable[[], None]) -> None:
        for launch in range(number):
            if launch % chunk == 0:
                begin()
            queue.issue(ISSUE_S, KERNEL_S)

    return run


@pytest.mark.parametrize(("number", "has_room"), [(900, True), (1021, True), (1022, False), (1289, False)])
def test_a_call_of_more_launches_than_the_queue_holds_has_a_time_in_chunks_alone(clock, number, has_room):
    queue = QueuedDevice(clock, depth=QUEUE_DEPTH)
    timer, run = Timer(clock, queue.synchronize), chunked(queue, number, CHUNK)
    whole = timer.on_device(lambda: run(lambda: None), queue, number * ISSUE_S)
    assert (whole.seconds is not None) == has_room  # three places are those of the backlog and two marks
    issued = timer.enqueue_chunks(run)
    assert issued == [ISSUE_S * len(range(first, min(number, first + CHUNK))) for first in range(0, number, CHUNK)]
    queue.held.clear()
    assert timer.in_chunks(run, queue, issued) == DeviceTime(number * KERNEL_S, by="chunks")
    assert queue.held == [max(1e-3, 1.5 * seconds) for seconds in issued]
    assert queue.has_passed(queue.mark())  # nothing is left in it


def test_one_chunk_that_the_device_had_to_wait_for_leaves_the_call_without_a_time(clock):
    queue = QueuedDevice(clock)
    timer, run = Timer(clock, queue.synchronize), chunked(queue, 3 * CHUNK, CHUNK)
    late = [1.0, 0.1, 1.0]
    device_time = timer.in_chunks(run, queue, [share * CHUNK * ISSUE_S for share in late])
    assert (device_time.seconds, device_time.reason) == (
        None,
        "the device reached the call before the host had issued all of it",
    )


def test_an_error_of_the_work_passes_through_and_without_a_device_the_time_is_that_of_the_call(clock):
    assert Timer(clock).isolated(lambda: clock.advance(0.125)) == 0.125
    queue = QueuedDevice(clock)
    timer = Timer(clock, queue.synchronize)
    for timed in (timer.isolated, timer.enqueue, lambda work: timer.on_device(work, queue, HOST_S)):
        with pytest.raises(ZeroDivisionError):
            timed(lambda: 1 / 0)


def times(clock: FakeClock, seconds: Callable[[int], float]) -> Callable[[], None]:
    """Return a callable whose call number n (from 0) takes `seconds(n)`."""
    calls = iter(range(10**6))
    return lambda: clock.advance(seconds(next(calls)))


LEVELS = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [
        (lambda n: 0.5, 12),
        (lambda n: 2.0 if n < 6 else 0.5, 20),  # medians of the windows: 2, (2 + 0.5) / 2, 0.5, 0.5, 0.5
        (lambda n: {1: 9.0, 6: 2.0, 8: 5.0}.get(n, 0.5), 12),
        (lambda n: LEVELS[n // 4], 28),
    ],
    ids=["steady", "slow first calls", "a single slow call in a window", "one agreement is not enough"],
)
def test_a_callable_is_warm_after_three_windows_that_agree(clock, seconds, runs):
    warm = warm_up(times(clock, seconds), Timer(clock), RULE)
    assert (warm.runs, warm.converged) == (runs, True)


@pytest.mark.parametrize(("step", "converged"), [(1.03, True), (1.04, False), (1 / 1.04, False)])
def test_neighbouring_windows_agree_within_the_tolerance(clock, step, converged):
    rule = replace(RULE, tolerance=0.0301, cap_s=100.0)
    assert warm_up(times(clock, lambda n: step ** (n // 4)), Timer(clock), rule).converged is converged


def test_a_callable_that_never_settles_stops_at_the_cap(clock):
    warm = warm_up(times(clock, lambda n: 1.0 if n // 4 % 2 else 0.5), Timer(clock), replace(RULE, cap_s=10.0))
    assert (warm.runs, warm.seconds, warm.converged) == (14, 10.0, False)  # 4 x 0.5 + 4 x 1 + 4 x 0.5 + 2 x 1


@pytest.mark.parametrize(
    ("changes", "each_s", "runs"),
    [({"window_s": 1.0}, 0.125, 3 * 8), ({"least_s": 9.0}, 0.5, 20), ({"least_runs": 18}, 0.5, 20)],
    ids=["a window in seconds", "the least seconds", "the least runs"],
)
def test_warm_up_lasts_long_enough_in_runs_and_in_seconds(clock, changes, each_s, runs):
    warm = warm_up(times(clock, lambda n: each_s), Timer(clock), replace(RULE, **changes))
    assert (warm.runs, warm.seconds, warm.converged) == (runs, runs * each_s, True)


@pytest.mark.parametrize("least_runs", [1, 5, 8])
def test_the_least_runs_are_made_beyond_the_cap_and_prove_no_convergence(clock, least_runs):
    rule = WarmUpRule(least_runs=least_runs, cap_s=10.0)
    warm = warm_up(times(clock, lambda n: 16.0), Timer(clock), rule)
    assert (warm.runs, warm.seconds, warm.converged) == (least_runs, 16.0 * least_runs, False)


def test_warm_up_times_its_calls_like_measured_ones(clock, device):
    warm = warm_up(device.work(0.5), Timer(clock, device.synchronize), RULE)
    assert warm.seconds == 6.0
    assert device.events == ["synchronize", "work", "synchronize"] * 12
