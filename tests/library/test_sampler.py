"""Readings in the background by quantity, and the reason where there are none."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from boundby.machine import sampler as sampler_module
from boundby.machine.sampler import (
    AmdSource,
    DeviceLostError,
    NoSource,
    NvmlSource,
    PsutilSource,
    Sampler,
    Sources,
    nvml_source,
)
from tests.fakes import FakeClock

LONG_S = 60.0  # ends a test that hangs; none waits so long


class FakeGpu:
    """Gives one reading after another; raises `error` after the last. `exhausted` is set when the last was given."""

    reason: str | None = None
    reasons: Mapping[str, str] = {}

    def __init__(self, readings: list[dict[str, float]], clock: FakeClock, error: str = "GPU is lost") -> None:
        self._readings, self._clock, self._error = iter(readings), clock, error
        self.exhausted = threading.Event()
        self.threads: set[str] = set()

    def read(self) -> dict[str, float]:
        self.threads.add(threading.current_thread().name)
        self._clock.advance(1.0)
        reading = next(self._readings, None)
        if reading is None:
            self.exhausted.set()
            raise OSError(self._error)
        return reading


def utilization(*values: float) -> list[dict[str, float]]:
    return [{"gpu_utilization_pct": value} for value in values]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def at_once(monkeypatch, clock):
    """Return a sampler of a source that is asked again at once."""
    monkeypatch.setattr(sampler_module, "LEAST_INTERVAL_S", 0.0)
    return lambda source: Sampler(source, interval_s=0.0, clock=clock)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "boundby-sampler"]


def test_readings_are_taken_in_a_thread_that_ends_with_the_block_and_a_span_holds_those_taken_in_it(clock, at_once):
    both = {"gpu_power_w": 300.0, "gpu_sm_clock_mhz": 1980.0}
    readings = [both, {"gpu_power_w": 310.0}, {"gpu_sm_clock_mhz": 1755.0}]
    source = FakeGpu(readings, clock)  # taken at 0, 1 and 2 s of the clock
    with at_once(source) as sampler:
        assert source.exhausted.wait(LONG_S)
    assert (source.threads, threads()) == ({"boundby-sampler"}, [])
    assert [reading.values for reading in sampler.between(0.0, 100.0)] == readings
    assert [(reading.at, reading.values) for reading in sampler.between(1.0, 1.0)] == [(1.0, readings[1])]
    assert sampler.between(2.5, 9.0) == [] and sampler.by_quantity(50.0, 100.0) == {}
    assert sampler.by_quantity(0.0, 9.0) == {"gpu_power_w": [300.0, 310.0], "gpu_sm_clock_mhz": [1980.0, 1755.0]}
    with pytest.raises(ZeroDivisionError), at_once(FakeGpu(utilization(*[1.0] * 100), clock)):
        raise ZeroDivisionError
    assert threads() == []


def test_the_block_ends_when_the_thread_has(at_once):
    asked = threading.Event()

    def read():
        asked.set()
        threading.Event().wait(0.05)  # the block ends in the middle of this reading
        return {"gpu_power_w": 50.0}

    with at_once(SimpleNamespace(reason=None, reasons={}, read=read)) as sampler:
        assert asked.wait(LONG_S)
    assert threads() == [] and sampler.between(0.0, float("inf"))


def test_a_source_that_fails_ends_the_readings_and_gives_the_reason(clock, at_once):
    with at_once(FakeGpu(utilization(10.0), clock, error="NVML: GPU is lost")) as sampler:
        for thread in threading.enumerate():
            if thread.name == "boundby-sampler":
                thread.join(LONG_S)  # by itself
        assert threads() == []
        assert sampler.now() == {}
    assert sampler.reason == sampler.why_not("gpu_power_w") == "NVML: GPU is lost"
    assert len(sampler.between(0.0, 100.0)) == 1


@pytest.mark.parametrize(("asked", "used"), [(0.001, 0.2), (1.5, 1.5)])
def test_the_source_is_not_asked_more_often_than_it_has_news(asked, used, clock):
    waited: list[float] = []

    def wait(seconds):
        waited.append(seconds)
        return len(waited) == 4  # then the block ends

    source = FakeGpu(utilization(*[1.0] * 9), clock)
    sampler = Sampler(source, interval_s=asked, clock=clock)
    sampler._stop = SimpleNamespace(wait=wait, set=lambda: None)
    with sampler:
        pass
    assert waited == [used] * 4
    assert len(sampler.between(0.0, 100.0)) == 3


def test_a_reading_at_once_is_taken_in_the_calling_thread_and_not_kept(clock):
    source = FakeGpu([{"gpu_power_w": 300.0}], clock)
    sampler = Sampler(source, clock=clock)
    assert sampler.now() == {"gpu_power_w": 300.0}
    assert source.threads == {threading.current_thread().name}
    assert sampler.between(0.0, 100.0) == []
    assert sampler.now() == {}  # the source raised


def test_without_a_source_there_is_a_reason_and_no_thread():
    with Sampler(NoSource("the device is not a GPU")) as sampler:
        assert threads() == []
    assert sampler.reason == sampler.why_not("gpu_power_w") == "the device is not a GPU"
    assert sampler.between(0.0, float("inf")) == []
    assert (sampler.by_quantity(0.0, float("inf")), sampler.now()) == ({}, {})
    with pytest.raises(OSError, match="the device is not a GPU"):
        nvml_source(None).read()


class NvmlError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that is used: functions in `lacks` answer "Not Supported", an old one has none in `absent`."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(
        self, *uuids: str, pids: Any = None, lacks: Any = (), absent: Any = (), is_divided: bool = False
    ) -> None:
        self.uuids, self.lacks, self.absent, self.is_divided = uuids, lacks, absent, is_divided
        self.pids = (os.getpid(),) if pids is None else pids
        self.calls: list[str] = []

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.uuids:
            raise NvmlError("Not Found")
        return f"handle of {uuid}"

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        return [int(self.is_divided and handle == "handle of GPU-0a1b"), 0]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):  # noqa: N802
        assert handle.startswith("handle of MIG-")
        return "handle of the whole"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[[], Any]] = {
            "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetPowerUsage": lambda: 512_500,
            "nvmlDeviceGetClockInfo": lambda: 1980,
            "nvmlDeviceGetTemperature": lambda: 45,
            "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(used=2**34, total=2**37),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda: 0x4,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: 0x8,
            "nvmlDeviceGetComputeRunningProcesses": lambda: [SimpleNamespace(pid=pid) for pid in self.pids],
            "nvmlDeviceGetTotalEnergyConsumption": lambda: 1_234_500,
        }
        if name not in answers or name in self.absent:
            raise AttributeError(f"module 'pynvml' has no attribute '{name}'")

        def call(handle: str, *which: int) -> Any:
            asked = {"nvmlDeviceGetClockInfo": self.NVML_CLOCK_SM}
            asked["nvmlDeviceGetTemperature"] = self.NVML_TEMPERATURE_GPU
            is_part = self.uuids[-1].startswith("MIG-")
            of_whole = is_part and ("Clock" in name or "Temperature" in name)
            assert handle == ("handle of the whole" if of_whole else f"handle of {self.uuids[-1]}")
            assert which == ((asked[name],) if name in asked else ())
            self.calls.append(name)
            if name in self.lacks:
                raise NvmlError("Not Supported")
            return answers[name]()

        return call


GPU = "GPU-0a1b"
ALL = {
    "gpu_utilization_pct": 97.0,
    "gpu_power_w": 512.5,
    "gpu_sm_clock_mhz": 1980.0,
    "gpu_temperature_c": 45.0,
    "gpu_memory_used_bytes": 2.0**34,
    "gpu_clock_event_reasons": 4.0,
    "gpu_processes": 0.0,
}


def source_of(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, uuid: str = GPU) -> NvmlSource:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    source = nvml_source(uuid)
    assert isinstance(source, NvmlSource) and source.reason is None
    return source


def without(*quantities: str) -> dict[str, float]:
    return {quantity: value for quantity, value in ALL.items() if quantity not in quantities}


@pytest.mark.parametrize("uuid", ["0a1b", GPU], ids=["torch", "nvml"])
def test_a_gpu_however_its_uuid_is_written_gives_all_quantities_in_their_units(uuid, monkeypatch):
    source = source_of(monkeypatch, FakeNvml("GPU-9e9e", GPU), uuid)  # NVML sees all that the machine has
    assert (source.read(), source.reasons, source.joules()) == (ALL, {}, 1234.5)


@pytest.mark.parametrize(
    ("uuid", "nvml", "visible"),
    [
        ("MIG-5c6d", FakeNvml("MIG-5c6d"), ""),
        ("5c6d", FakeNvml(GPU, "MIG-5c6d"), "1"),  # torch leaves out what the name begins with
        ("0a1b", FakeNvml(GPU, "MIG-5c6d", is_divided=True), "MIG-5c6d,MIG-7e8f"),  # an older torch names the whole
    ],
    ids=["nvml", "torch", "older torch"],
)
def test_a_part_of_a_gpu_has_no_power_of_its_own_and_the_clock_of_the_whole(uuid, nvml, visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    source = source_of(monkeypatch, nvml, uuid)
    assert source.read() == without("gpu_utilization_pct", "gpu_power_w")
    assert source.reasons["gpu_power_w"] == "NVML: a part of a GPU (MIG) has no such counter of its own"
    with pytest.raises(OSError, match="has no such counter of its own"):
        source.joules()


@pytest.mark.parametrize("visible", ["0", None], ids=str)
def test_a_part_of_a_gpu_that_nobody_names_is_not_read_as_the_whole(visible, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(GPU, is_divided=True))
    assert "set CUDA_VISIBLE_DEVICES to the name of the part" in nvml_source("0a1b").reason


class FakeAmdsmi:
    """The part of amdsmi that is used, on a GPU of the MI300 kind: what it does not have is "N/A"."""

    class AmdSmiException(Exception):
        pass

    AmdSmiClkType = SimpleNamespace(GFX="gfx")
    AmdSmiTemperatureType = SimpleNamespace(JUNCTION="junction")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")

    def __init__(self, energy: dict[str, Any]) -> None:
        self.energy = energy

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[tuple[Any, ...], Any] = {
            ("amdsmi_get_gpu_activity",): {"gfx_activity": 97, "umc_activity": 40},
            ("amdsmi_get_power_info",): {"average_socket_power": "N/A", "current_socket_power": 512},
            ("amdsmi_get_clock_info", "gfx"): {"clk": 1980},
            ("amdsmi_get_temp_metric", "junction", "current"): "N/A",
            ("amdsmi_get_gpu_vram_usage",): {"vram_used": 2**14},
            ("amdsmi_get_gpu_process_list",): [{"pid": os.getpid()}, {"pid": 2**23}],
            ("amdsmi_get_energy_count",): self.energy,
        }

        def call(handle: str, *which: str) -> Any:
            assert handle == "the third"
            if answers[name, *which] is None:
                raise self.AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED")
            return answers[name, *which]

        return call


@pytest.mark.parametrize(
    "energy",
    [{"energy_accumulator": 2_000_000, "counter_resolution": 15.25}, {"power": 2e6, "counter_resolution": 15.25}],
)
def test_an_amd_gpu_is_read_by_amdsmi_in_the_same_units_and_what_is_not_available_has_a_reason(energy, monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", FakeAmdsmi(energy))
    source = AmdSource("the third")
    absent = ("gpu_temperature_c", "gpu_clock_event_reasons")
    assert source.read() == without(*absent) | {"gpu_power_w": 512.0, "gpu_processes": 1.0}
    assert source.reasons == {"gpu_temperature_c": "amdsmi: this GPU has no value for temperature"}
    assert source.joules() == 30.5


def test_an_amd_gpu_without_an_energy_counter_tells_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", FakeAmdsmi(None))
    with pytest.raises(OSError, match="amdsmi: AMDSMI_STATUS_NOT_SUPPORTED"):
        AmdSource("the third").joules()


REFUSED = {
    "gpu_utilization_pct": "nvmlDeviceGetUtilizationRates",
    "gpu_power_w": "nvmlDeviceGetPowerUsage",
    "gpu_temperature_c": "nvmlDeviceGetTemperature",
    "gpu_processes": "nvmlDeviceGetComputeRunningProcesses",
}


@pytest.mark.parametrize("quantity", REFUSED)
def test_a_quantity_that_nvml_refuses_has_a_reason_and_the_others_go_on(quantity, monkeypatch):
    nvml = FakeNvml(GPU, lacks=(REFUSED[quantity],))
    source = source_of(monkeypatch, nvml)
    sampler = Sampler(source)
    assert [source.read(), sampler.now()] == [without(quantity)] * 2
    assert source.reasons == {quantity: "NVML: Not Supported"}
    assert sampler.why_not(quantity) == "NVML: Not Supported"
    assert sampler.why_not("gpu_memory_used_bytes") is None
    nvml.lacks = ()  # an error that passes does not silence the quantity for good
    assert quantity in source.read() and source.reasons == {}


def test_a_gpu_that_refuses_everything_is_an_os_error_which_says_so_once(monkeypatch):
    class Refusing(FakeNvml):
        def __getattr__(self, name):
            self.lacks = (name,)
            return super().__getattr__(name)

    source = source_of(monkeypatch, Refusing(GPU))
    for _ in range(2):
        with pytest.raises(OSError, match=r"^NVML: Not Supported$"):
            source.read()
    assert set(source.reasons) == set(ALL)
    with pytest.raises(OSError, match="NVML: Not Supported"):
        source.joules()


CLOCK_EVENTS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


@pytest.mark.parametrize("older", ["absent", "lacks"], ids=["pynvml", "driver"])
def test_an_older_one_calls_clock_events_throttle_reasons_and_without_either_name_has_a_reason(older, monkeypatch):
    nvml = FakeNvml(GPU, **{older: CLOCK_EVENTS[:1]})
    assert source_of(monkeypatch, nvml).read() == ALL | {"gpu_clock_event_reasons": 8.0}
    source = source_of(monkeypatch, FakeNvml(GPU, absent=CLOCK_EVENTS))
    assert source.read() == without("gpu_clock_event_reasons")
    assert CLOCK_EVENTS[1] in source.reasons["gpu_clock_event_reasons"]


def test_other_processes_on_the_gpu_are_counted_or_unknown_and_not_none(monkeypatch):
    ours, other = os.getpid(), 2**23  # no pid of Linux
    in_container = (other, other + 1)  # which shows pids of the host: one of them is ours
    for pids, others in (((ours,), 0), ((ours, other), 1), ((ours, *range(other, other + 3)), 3), (in_container, 1)):
        assert source_of(monkeypatch, FakeNvml(GPU, pids=pids)).read()["gpu_processes"] == others
    source = source_of(monkeypatch, FakeNvml(GPU, pids=()))
    assert source.read() == without("gpu_processes")
    assert source.reasons == {"gpu_processes": "the driver lists no process to this container, not even this one"}


def test_an_unknown_gpu_and_a_machine_without_pynvml_have_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(GPU))
    assert nvml_source("9f9f").reason == "NVML: Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import then raises
    assert "pynvml" in nvml_source("0a1b").reason


class Cpu:
    """The CPU times and the process that psutil shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._times = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 64.0))
        monkeypatch.setattr(psutil, "_last_cpu_times", {})  # what the real times of this process were is kept apart
        monkeypatch.setattr(psutil, "cpu_times", lambda: self._times)
        processes = {os.getpid(): SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=4096, vms=2**40))}
        monkeypatch.setattr(psutil, "Process", processes.__getitem__)

    def spend(self, busy: float, idle: float) -> None:
        self._times = self._times._replace(user=self._times.user + busy, idle=self._times.idle + idle)


@pytest.fixture
def cpu(monkeypatch):
    return Cpu(monkeypatch)


def test_the_host_gives_a_thread_its_load_since_the_last_reading_and_our_resident_bytes(cpu):
    source, readings = PsutilSource(), []

    def read():
        for busy, idle in ((3.0, 1.0), (1.0, 3.0)):  # the first since the source was made, by another thread
            cpu.spend(busy, idle)
            readings.append(source.read())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(LONG_S)
    assert readings == [{"cpu_utilization_pct": load, "process_bytes": 4096.0} for load in (75.0, 25.0)]
    assert (source.reason, source.reasons) == (None, {})


HOST = {"process_bytes": 4096.0}


def test_sources_give_the_quantities_of_all_but_of_those_that_fail_or_the_reasons_of_all(clock):
    sources = Sources(FakeGpu([{"gpu_power_w": 300.0}], clock), FakeGpu([HOST], clock))
    assert sources.reason is None
    assert sources.read() == {"gpu_power_w": 300.0, **HOST}
    sources = Sources(FakeGpu([], clock), FakeGpu([HOST], clock, error="no /proc"))
    assert sources.read() == HOST
    with pytest.raises(OSError, match="GPU is lost; no /proc"):
        sources.read()
    with Sampler(Sources(NoSource("the device is not a GPU"), NoSource("no psutil"))) as sampler:
        assert threads() == []
    assert sampler.reason == sampler.why_not("process_bytes") == "the device is not a GPU; no psutil"


def test_the_reason_of_a_missing_quantity_comes_from_its_source(clock, monkeypatch):
    gpu = source_of(monkeypatch, FakeNvml(GPU, lacks=("nvmlDeviceGetPowerUsage",)))
    sampler = Sampler(Sources(gpu, FakeGpu([HOST], clock)))
    assert sampler.now() == without("gpu_power_w") | HOST
    assert (sampler.why_not("gpu_power_w"), sampler.why_not("process_bytes")) == ("NVML: Not Supported", None)
    sources = Sources(NoSource("the device is not a GPU"), FakeGpu([HOST], clock))
    sampler = Sampler(sources)
    assert (sources.reason, sampler.now()) == (None, HOST)
    assert sampler.why_not("gpu_power_w") == "the device is not a GPU"


NONSENSE = {
    "gpu_utilization_pct": ("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=2**32 - 1), "4294967295"),
    "gpu_power_w": ("nvmlDeviceGetPowerUsage", 0, "0.0"),
    "gpu_sm_clock_mhz": ("nvmlDeviceGetClockInfo", -1, "-1"),
    "gpu_temperature_c": ("nvmlDeviceGetTemperature", 0xFFFFFFFF, "4294967295"),
    "gpu_memory_used_bytes": ("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=2**64 - 1), str(2**64 - 1)),
    "gpu_clock_event_reasons": ("nvmlDeviceGetCurrentClocksEventReasons", 2**64 - 1, str(2**64 - 1)),
}


@pytest.mark.parametrize("quantity", NONSENSE)
def test_an_answer_that_no_gpu_has_is_no_reading_and_is_kept_for_a_doubt(quantity, monkeypatch):
    name, answer, shown = NONSENSE[quantity]
    nvml = FakeNvml(GPU)
    setattr(nvml, name, lambda *_: answer)
    source = source_of(monkeypatch, nvml)
    assert source.read() == without(quantity)
    assert source.reasons == source.nonsense == {quantity: f"NVML answered {shown}, which no GPU has"}
    assert Sources(source, NoSource("no host")).nonsense == source.nonsense


@pytest.mark.parametrize("answer", ["[N/A]", None, float("nan"), object()], ids=lambda answer: type(answer).__name__)
def test_an_answer_that_is_no_number_is_no_reading(answer, monkeypatch):
    nvml = FakeNvml(GPU)
    nvml.nvmlDeviceGetTemperature = lambda *_: answer
    source = source_of(monkeypatch, nvml)
    assert source.read() == without("gpu_temperature_c") and "gpu_temperature_c" in source.reasons


def test_a_gpu_that_is_lost_to_the_driver_ends_the_thread_and_is_told_to_who_measures(monkeypatch):
    lost = NvmlError("GPU is lost")
    lost.value = 15

    def refuse(*_):
        raise lost

    nvml = FakeNvml(GPU)
    source = source_of(monkeypatch, nvml)
    nvml.nvmlDeviceGetPowerUsage = nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
    for ask in (source.read, source.joules):
        with pytest.raises(DeviceLostError, match="NVML: GPU is lost"):
            ask()
    sampler = Sampler(source)
    sampler._stop.wait = lambda _: False
    with sampler:
        sampler._thread.join(LONG_S)
        assert not sampler._thread.is_alive()
    with pytest.raises(DeviceLostError, match="NVML: GPU is lost"):
        sampler.now()


def test_energy_has_a_reason_where_the_driver_answers_what_no_gpu_has_taken(monkeypatch):
    nvml = FakeNvml(GPU)
    source = source_of(monkeypatch, nvml)
    for answer in (-1, 2**64 - 1, "[N/A]", None):
        nvml.nvmlDeviceGetTotalEnergyConsumption = lambda *_, answer=answer: answer
        with pytest.raises(OSError, match="NVML"):
            source.joules()
