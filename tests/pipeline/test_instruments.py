"""Which instruments a device has, on machines with and without counters."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from boundby.machine.energy import EnergyMeter, RaplCounter
from boundby.machine.sampler import NoSource, NvmlSource
from boundby.timing.timer import Timer
from tests.fakes import FakeClock
from utils.baseline import instruments

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TICK_S = 2.0**-4


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class FakeGpu(NvmlSource):
    """A GPU that takes 64 W; its counter moves in ticks, or not at all."""

    def __init__(self, clock: FakeClock, tick_s: float | None = TICK_S) -> None:
        self.reasons = {}
        self._clock, self._tick_s = clock, tick_s

    def read(self) -> dict[str, float]:
        return {"gpu_power_w": 64.0}

    def joules(self) -> float:
        self._clock.advance(2.0**-8)
        if self._tick_s is None:
            return 0.0
        return 64.0 * (self._clock.now // self._tick_s) * self._tick_s


class NoEnergy(FakeGpu):
    def joules(self) -> float:
        raise OSError("NVML: Not Supported")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> Callable[[Any], list[torch.device]]:
    """Return a setter of what the driver gives; it returns the list of the devices asked for. No meter sleeps."""
    monkeypatch.setattr(
        instruments, "EnergyMeter", lambda counter, timer: EnergyMeter(counter, timer, sleep=clock.advance)
    )

    def set_source(source: Any) -> list[torch.device]:
        asked: list[torch.device] = []

        def gpu_source(device: torch.device) -> Any:
            asked.append(device)
            return source

        monkeypatch.setattr(instruments, "gpu_source", gpu_source)
        return asked

    return set_source


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    class Here(RaplCounter):
        def __init__(self) -> None:
            super().__init__(tmp_path)

    monkeypatch.setattr(instruments, "RaplCounter", Here)
    return tmp_path


def package(powercap: Path) -> Path:
    """Make a package without a counter and return its folder."""
    folder = powercap / "intel-rapl:0"
    folder.mkdir()
    (folder / "name").write_text("package-0\n")
    return folder


@pytest.mark.parametrize(
    ("device", "make", "readings"),
    [
        (GPU, FakeGpu, {"gpu_power_w", "process_bytes"}),
        (GPU, lambda clock: NoSource("NVML: Driver Not Loaded"), {"process_bytes"}),
        (CPU, lambda clock: NoSource("the device is not a GPU"), {"process_bytes"}),
    ],
)
def test_the_host_is_read_and_a_gpu_where_its_driver_answers(driver, clock, device, make, readings):
    asked = driver(make(clock))
    source = instruments.source(device)
    assert asked == [device] and source.reason is None
    assert readings <= set(source.read())


def test_the_host_is_watched_by_a_reference_on_a_cpu_alone():
    watch = instruments.watch(CPU)
    with torch.inference_mode():  # as visits are made
        conditions = watch.start().stop()
    assert conditions.slowdown is not None and conditions.slowdown >= 1.0
    assert instruments.watch(GPU).start().stop().slowdown is None


def test_a_gpu_with_a_counter_has_a_meter_and_its_idle_power(driver, clock):
    asked = driver(FakeGpu(clock))
    meter, idle_w, reason = instruments.energy(GPU, Timer(clock))
    assert asked == [GPU]
    assert meter is not None and meter.tick_s == TICK_S
    assert idle_w == pytest.approx(64.0, rel=0.02)  # a tick more or less in a window of 50
    assert reason is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda clock: NoSource("NVML: Driver Not Loaded"), "NVML: Driver Not Loaded"),
        (NoEnergy, "no energy counter: NVML: Not Supported"),
        (lambda clock: FakeGpu(clock, tick_s=None), "no energy counter: the energy counter did not move within 1 s"),
    ],
)
def test_a_gpu_without_a_counter_that_moves_tells_why(driver, clock, make, reason):
    driver(make(clock))
    assert instruments.energy(GPU, Timer(clock)) == (None, None, reason)


def test_a_cpu_without_a_readable_counter_tells_so(powercap, clock):
    expected = f"no energy counter: {powercap} has no intel-rapl package"
    assert instruments.energy(CPU, Timer(clock)) == (None, None, expected)
    package(powercap)
    meter, idle_w, reason = instruments.energy(CPU, Timer(clock))
    assert (meter, idle_w) == (None, None)
    assert reason is not None
    assert reason.startswith("no energy counter: ") and str(powercap / "intel-rapl:0" / "energy_uj") in reason


def test_a_cpu_whose_package_counts_has_a_meter(powercap, driver, clock, monkeypatch):
    counter = package(powercap) / "energy_uj"
    counter.write_text("0")
    driver(NoSource("the device is not a GPU"))
    read = instruments.RaplCounter.joules

    def joules(self: RaplCounter) -> float:  # 32 W
        clock.advance(2.0**-8)
        counter.write_text(str(int(32e6 * (clock.now // TICK_S) * TICK_S)))
        return read(self)

    monkeypatch.setattr(instruments.RaplCounter, "joules", joules)
    meter, idle_w, reason = instruments.energy(CPU, Timer(clock))
    assert meter is not None and reason is None
    assert idle_w == pytest.approx(32.0, rel=0.02)


def test_the_state_of_the_machine_is_what_torch_and_the_kernel_say(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 9.0, 9.0))
    monkeypatch.setattr(instruments, "usable_cpus", lambda: {3, 1})
    monkeypatch.setattr(instruments, "machine", lambda: {"cpu_quota_cores": 2.5})
    state = instruments.machine_state()
    assert (
        json.loads(json.dumps(state))
        == state
        == {
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "affinity": [1, 3],
            "cpu_quota_cores": 2.5,
            "load_1min": 1.5,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        }
    )
