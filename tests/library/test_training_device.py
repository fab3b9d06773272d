"""Times of stages on a device that reaches its marks when told to."""

from boundby.training import StageTimer
from boundby.training.records import ABSENT
from tests.timed_loops import Device, S, host_ns, run


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
