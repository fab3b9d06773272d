"""Readings in the background, and the reason where there are none."""

import sys
import threading
from types import SimpleNamespace

import pytest

from boundby import sampler as sampler_module
from boundby.sampler import NoSource, Sampler, nvml_source
from tests.fakes import FakeClock

LONG_S = 60.0  # ends a test that hangs; none waits so long


class FakeGpu:
    """Gives one reading after another; raises `error` after the last. `exhausted` is set when the last was given."""

    reason: str | None = None

    def __init__(self, readings: list[float], clock: FakeClock, error: str = "GPU is lost") -> None:
        self._readings, self._clock, self._error = iter(readings), clock, error
        self.exhausted = threading.Event()
        self.threads: set[str] = set()

    def utilization_pct(self) -> float:
        self.threads.add(threading.current_thread().name)
        self._clock.advance(1.0)
        reading = next(self._readings, None)
        if reading is None:
            self.exhausted.set()
            raise OSError(self._error)
        return reading


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "LEAST_INTERVAL_S", 0.0)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "boundby-sampler"]


@pytest.mark.usefixtures("_at_once")
def test_readings_are_taken_in_a_thread_that_ends_with_the_block(clock: FakeClock) -> None:
    source = FakeGpu([10.0, 30.0, 50.0], clock)
    with Sampler(source, interval_s=0.0, clock=clock) as sampler:
        assert source.exhausted.wait(LONG_S)
    assert source.threads == {"boundby-sampler"}
    assert threads() == []
    assert [each.gpu_utilization_pct for each in sampler.between(0.0, 100.0)] == [10.0, 30.0, 50.0]


@pytest.mark.usefixtures("_at_once")
def test_a_span_holds_the_readings_taken_in_it(clock: FakeClock) -> None:
    source = FakeGpu([10.0, 20.0, 30.0, 40.0], clock)  # taken at 0, 1, 2 and 3 s of the clock
    with Sampler(source, interval_s=0.0, clock=clock) as sampler:
        assert source.exhausted.wait(LONG_S)
    assert [(each.at, each.gpu_utilization_pct) for each in sampler.between(1.0, 2.0)] == [(1.0, 20.0), (2.0, 30.0)]
    assert sampler.between(3.5, 9.0) == []


@pytest.mark.usefixtures("_at_once")
def test_the_block_ends_when_the_thread_has() -> None:
    asked = threading.Event()

    def utilization_pct() -> float:
        asked.set()
        sampler._stop.wait(LONG_S)  # the block ends in the middle of this reading
        return 50.0

    sampler = Sampler(SimpleNamespace(reason=None, utilization_pct=utilization_pct), interval_s=0.0)
    with sampler:
        assert asked.wait(LONG_S)
    assert threads() == []
    assert len(sampler.between(0.0, float("inf"))) == 1


@pytest.mark.usefixtures("_at_once")
def test_a_source_that_fails_ends_the_readings_and_gives_the_reason(clock: FakeClock) -> None:
    source = FakeGpu([10.0], clock, error="NVML: GPU is lost")
    with Sampler(source, interval_s=0.0, clock=clock) as sampler:
        assert sampler._thread is not None
        sampler._thread.join(LONG_S)  # by itself
        assert threads() == []
    assert sampler.reason == "NVML: GPU is lost"
    assert len(sampler.between(0.0, 100.0)) == 1


@pytest.mark.usefixtures("_at_once")
def test_the_thread_ends_when_the_block_raises(clock: FakeClock) -> None:
    with pytest.raises(ZeroDivisionError), Sampler(FakeGpu([1.0] * 100, clock), interval_s=0.0, clock=clock):
        raise ZeroDivisionError
    assert threads() == []


@pytest.mark.parametrize(("asked", "used"), [(0.001, 0.2), (1.5, 1.5)])
def test_the_source_is_not_asked_more_often_than_it_has_news(asked: float, used: float, clock: FakeClock) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 4  # then the block ends

    source = FakeGpu([1.0] * 9, clock)
    sampler = Sampler(source, interval_s=asked, clock=clock)
    sampler._stop = SimpleNamespace(wait=wait, set=lambda: None)  # type: ignore[assignment]
    with sampler:
        pass
    assert waited == [used] * 4
    assert len(sampler.between(0.0, 100.0)) == 3


def test_without_a_source_there_is_a_reason_and_no_thread() -> None:
    with Sampler(NoSource("the device is not a GPU")) as sampler:
        assert threads() == []
    assert sampler.reason == "the device is not a GPU"
    assert sampler.between(0.0, float("inf")) == []


def test_no_source_raises_its_reason() -> None:
    with pytest.raises(OSError, match="the device is not a GPU"):
        nvml_source(None).utilization_pct()


class NvmlError(Exception):
    pass


def nvml(handle_of: dict[str, str], utilization: int | None = 97) -> SimpleNamespace:
    def by_uuid(uuid: str) -> str:
        if uuid not in handle_of:
            raise NvmlError("Not Found")
        return handle_of[uuid]

    def rates(handle: str) -> SimpleNamespace:
        if utilization is None:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=utilization)

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUtilizationRates=rates,
    )


@pytest.mark.parametrize("uuid", ["0a1b", "GPU-0a1b"])
def test_a_gpu_is_found_by_its_uuid_as_torch_or_nvml_writes_it(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml({"GPU-0a1b": "handle"}))
    source = nvml_source(uuid)
    assert source.reason is None
    assert source.utilization_pct() == 97.0


def test_a_gpu_that_nvml_does_not_know_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml({}))
    assert nvml_source("0a1b").reason == "NVML: Not Found"


def test_a_machine_without_pynvml_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import then raises
    reason = nvml_source("0a1b").reason
    assert reason is not None and "pynvml" in reason


def test_a_driver_that_refuses_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml({"GPU-0a1b": "handle"}, utilization=None))
    with pytest.raises(OSError, match="NVML: Not Supported"):
        nvml_source("0a1b").utilization_pct()
