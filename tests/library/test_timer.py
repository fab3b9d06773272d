"""What a timed call waits for, and when a callable counts as warm."""

from collections.abc import Callable

import pytest

from boundby.timer import Timer, WarmUpRule, warm_up
from tests.fakes import FakeClock

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
def clock() -> FakeClock:
    return FakeClock(now=64.0)


@pytest.fixture
def device(clock: FakeClock) -> Device:
    return Device(clock)


def test_an_isolated_call_runs_from_an_idle_device_to_an_idle_device(clock: FakeClock, device: Device) -> None:
    timer = Timer(clock, device.synchronize)
    device.work(8.0)()  # left over from before: not part of the call
    device.events.clear()
    assert timer.isolated(device.work(0.5)) == 0.5
    assert device.events == ["synchronize", "work", "synchronize"]


def test_pipelined_calls_wait_once_at_the_end(clock: FakeClock, device: Device) -> None:
    timer = Timer(clock, device.synchronize)
    device.work(8.0)()
    device.events.clear()
    assert timer.pipelined(device.work(0.25) for _ in range(3)) == 0.75
    assert device.events == ["synchronize", "work", "work", "work", "synchronize"]


def test_without_a_device_the_time_is_that_of_the_call(clock: FakeClock) -> None:
    assert Timer(clock).isolated(lambda: clock.advance(0.125)) == 0.125


def test_an_error_of_the_work_passes_through(clock: FakeClock) -> None:
    with pytest.raises(ZeroDivisionError):
        Timer(clock).isolated(lambda: 1 / 0)


def times(clock: FakeClock, seconds: Callable[[int], float]) -> Callable[[], None]:
    """Return a callable whose call number n (from 0) takes `seconds(n)`."""
    calls = iter(range(10**6))
    return lambda: clock.advance(seconds(next(calls)))


def test_a_steady_callable_is_warm_after_three_windows(clock: FakeClock) -> None:
    warm = warm_up(times(clock, lambda n: 0.5), Timer(clock), RULE)
    assert (warm.runs, warm.seconds, warm.converged) == (12, 6.0, True)


def test_slow_first_calls_prolong_the_warm_up(clock: FakeClock) -> None:
    warm = warm_up(times(clock, lambda n: 2.0 if n < 6 else 0.5), Timer(clock), RULE)
    # medians of the windows: 2, (2 + 0.5) / 2, 0.5, 0.5, 0.5
    assert (warm.runs, warm.converged) == (20, True)


def test_a_single_slow_call_in_a_window_does_not_matter(clock: FakeClock) -> None:
    slow = {1: 9.0, 6: 2.0, 8: 5.0}
    assert warm_up(times(clock, lambda n: slow.get(n, 0.5)), Timer(clock), RULE).runs == 12


def test_one_agreement_between_windows_is_not_enough(clock: FakeClock) -> None:
    levels = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0]
    warm = warm_up(times(clock, lambda n: levels[n // 4]), Timer(clock), RULE)
    assert warm.runs == 28


@pytest.mark.parametrize(("step", "converged"), [(1.03, True), (1.04, False), (1 / 1.04, False)])
def test_neighbouring_windows_agree_within_the_tolerance(clock: FakeClock, step: float, converged: bool) -> None:
    rule = WarmUpRule(least_runs=1, least_s=0.0, window_runs=4, window_s=0.0, tolerance=0.0301, cap_s=100.0)
    warm = warm_up(times(clock, lambda n: step ** (n // 4)), Timer(clock), rule)
    assert warm.converged is converged


def test_a_callable_that_never_settles_stops_at_the_cap(clock: FakeClock) -> None:
    rule = WarmUpRule(least_runs=1, least_s=0.0, window_runs=4, window_s=0.0, cap_s=10.0)
    warm = warm_up(times(clock, lambda n: 1.0 if n // 4 % 2 else 0.5), Timer(clock), rule)
    assert not warm.converged
    assert warm.seconds == 10.0  # 4 x 0.5 + 4 x 1 + 4 x 0.5 + 2 x 1
    assert warm.runs == 14


def test_a_window_is_long_enough_in_runs_and_in_seconds(clock: FakeClock) -> None:
    rule = WarmUpRule(least_runs=1, least_s=0.0, window_runs=4, window_s=1.0, cap_s=1000.0)
    warm = warm_up(times(clock, lambda n: 0.125), Timer(clock), rule)
    assert warm.runs == 3 * 8


def test_warm_up_lasts_the_least_seconds(clock: FakeClock) -> None:
    rule = WarmUpRule(least_runs=1, least_s=9.0, window_runs=4, window_s=0.0, cap_s=1000.0)
    warm = warm_up(times(clock, lambda n: 0.5), Timer(clock), rule)
    assert (warm.seconds, warm.converged) == (10.0, True)  # the first whole window after 9 s


def test_warm_up_makes_the_least_runs(clock: FakeClock) -> None:
    rule = WarmUpRule(least_runs=18, least_s=0.0, window_runs=4, window_s=0.0, cap_s=1000.0)
    assert warm_up(times(clock, lambda n: 0.5), Timer(clock), rule).runs == 20


@pytest.mark.parametrize("least_runs", [1, 5, 8])
def test_the_least_runs_are_made_beyond_the_cap_and_prove_no_convergence(clock: FakeClock, least_runs: int) -> None:
    rule = WarmUpRule(least_runs=least_runs, cap_s=10.0)
    warm = warm_up(times(clock, lambda n: 16.0), Timer(clock), rule)
    assert (warm.runs, warm.seconds, warm.converged) == (least_runs, 16.0 * least_runs, False)


def test_warm_up_times_its_calls_like_measured_ones(clock: FakeClock, device: Device) -> None:
    warm = warm_up(device.work(0.5), Timer(clock, device.synchronize), RULE)
    assert warm.seconds == 6.0
    assert device.events == ["synchronize", "work", "synchronize"] * 12
