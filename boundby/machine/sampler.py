"""Background readings of the machine from a source: NVML, amdsmi, psutil, several of them, or none with a reason.

NVML's utilisation is the share of its last sample period, 1/6 s to 1 s, in which one or more kernels ran. A single
small kernel after another gives 100 %: it tells that the GPU was not idle, never what limits a model. The CPU's is the
share of the machine's core time in which anything ran, a thread that spins while it waits included.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

HUNG_S = 10.0  # for which a driver that answers nothing is waited for at the end
LEAST_INTERVAL_S = 0.2  # NVML repeats a value within its sample period; reading faster shows nothing new
LEAST_WINDOW_S = 2.0  # two of the longest sample periods
GPU_QUANTITIES = (
    "gpu_utilization_pct",
    "gpu_power_w",
    "gpu_sm_clock_mhz",
    "gpu_temperature_c",
    "gpu_memory_used_bytes",
    "gpu_clock_event_reasons",
    "gpu_processes",
)
# What a quantity may be; drivers also answer 0xFFFFFFFF degrees, 0 W, and masks of all ones.
POSSIBLE = {
    "gpu_utilization_pct": (0, 100),
    "gpu_power_w": (0.1, 1e4),
    "gpu_sm_clock_mhz": (1, 1e4),
    "gpu_temperature_c": (-50, 200),
    "gpu_memory_used_bytes": (0, 2**50),
    "gpu_clock_event_reasons": (0, 0xFFFF),
    "gpu_processes": (0, 2**22),
}
GPU_IS_LOST = 15  # nvmlReturn_t
MOST_J = 1e15  # that a GPU may have taken: a driver may answer 2**64 - 1 mJ


class DeviceLostError(BaseException):
    """This process can no longer use its GPU; `point` is what was running.

    No `except Exception` stops it, of a model or of a library: each further call would only bring the same error.
    """

    def __init__(self, reason: str, point: str | None = None) -> None:
        super().__init__(reason, point)
        self.reason, self.point = reason, point

    def __str__(self) -> str:
        return f"{self.point}: {self.reason}" if self.point else self.reason


@dataclass(frozen=True)
class Reading:
    """One observation: when, in seconds of the sampler's clock, and what was read, by quantity.

    Quantities: `gpu_utilization_pct`, `gpu_power_w`, `gpu_sm_clock_mhz`, `gpu_temperature_c`, `gpu_memory_used_bytes`,
    `gpu_clock_event_reasons` (NVML's bit mask), `gpu_processes` (others than this one), `cpu_utilization_pct`,
    `process_bytes`. One that the machine does not give is absent.
    """

    at: float
    values: Mapping[str, float]


class Source(Protocol):
    """Where readings come from; `reason` says why there are none, `reasons` why a single quantity is missing."""

    reason: str | None

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why a quantity is missing."""

    def read(self) -> dict[str, float]:
        """Return the present values by quantity; raises OSError where nothing can be read any more."""
        ...


class NoSource:
    """A machine without readings, those of a GPU above all."""

    def __init__(self, reason: str) -> None:
        self.reason: str | None = reason
        self.reasons: Mapping[str, str] = dict.fromkeys(GPU_QUANTITIES, reason)

    def read(self) -> dict[str, float]:
        """Raise OSError with the reason."""
        raise OSError(self.reason)


class DriverSource:
    """The readings of one GPU by the library of its driver, which may refuse any quantity."""

    reason: str | None = None
    nonsense: Mapping[str, str] = {}  # what it has answered so far that no GPU has, by quantity
    library: str

    def __init__(self, error: type[Exception]) -> None:
        self.reasons: Mapping[str, str] = {}
        self.error = error  # of the library

    def _getters(self) -> dict[str, Callable[[], float | None]]:
        raise NotImplementedError

    def _joules(self) -> float:
        raise NotImplementedError

    def read(self) -> dict[str, float]:
        """Return what the driver gives; what it refuses, or cannot mean, is noted in `reasons`.

        Raises OSError if it gives nothing, and DeviceLostError where it says that the GPU is lost.
        """
        values: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for quantity, get in self._getters().items():
            try:
                value = get()
                least, most = POSSIBLE[quantity]
                if value is not None and not least <= float(value) <= most:
                    reasons[quantity] = f"{self.library} answered {value}, which no GPU has"
                    self.nonsense = {**self.nonsense, quantity: reasons[quantity]}
                    continue
            except Exception as error:  # an older library lacks some; a driver may refuse, or answer what is no number
                reasons[quantity] = self._reason(error)
                continue
            if value is None:
                reasons[quantity] = "the driver lists no process to this container, not even this one"
            else:
                values[quantity] = float(value)
        self.reasons = reasons  # as a whole: another thread may be reading it
        if not values:
            raise OSError("; ".join(dict.fromkeys(reasons.values())))
        return values

    def joules(self) -> float:
        """Return the energy since the driver was loaded; raises OSError where the GPU has no such counter.

        Raises DeviceLostError as `read` does.
        """
        try:
            answer = float(self._joules())
        except Exception as error:  # as in `read`
            raise OSError(self._reason(error)) from error
        if not 0 <= answer <= MOST_J:
            raise OSError(f"{self.library} answered {answer:g} J, which no GPU has taken")
        return answer

    def _reason(self, error: Exception) -> str:
        """Return what the library says. Raises DeviceLostError where that is the loss of the GPU."""
        reason = f"{self.library}: {error}"
        if isinstance(error, self.error) and (getattr(error, "value", None) == GPU_IS_LOST or "is lost" in str(error)):
            raise DeviceLostError(reason) from error
        return reason


def _others(pids: Sequence[int]) -> int | None:
    """Return how many other processes compute on the GPU; in a container the driver may show pids of the host."""
    if os.getpid() in pids:
        return len(pids) - 1
    return len(pids) - 1 if pids else None  # one of them is this process under the pid it has on the host


class NvmlSource(DriverSource):
    """The readings of one NVIDIA GPU, found by its UUID, since NVML and CUDA number GPUs differently.

    A part of a GPU (MIG) has memory and processes of its own, and clock and temperature of the whole. What the whole
    takes is none of its readings: the other parts are in it. Raises OSError where it is not known which part it is.
    """

    library = "NVML"

    def __init__(self, uuid: str) -> None:
        import pynvml

        super().__init__(pynvml.NVMLError)
        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle, self._is_part = self._handle_of(uuid)
        self._whole = self._handle
        if self._is_part:
            self._whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)

    def _handle_of(self, uuid: str) -> tuple[Any, bool]:
        """Return the handle, and whether it is of a part; torch leaves out what the name of either begins with."""
        find = self._nvml.nvmlDeviceGetHandleByUUID
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        try:
            handle = find(name)
        except self.error:
            if name == uuid:
                raise
            return find(f"MIG-{uuid}"), True
        if name.startswith("MIG-"):
            return handle, True
        try:
            is_divided = bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except (self.error, AttributeError):  # one that cannot be divided
            is_divided = False
        if not is_divided:
            return handle, False
        part = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
        if not part.startswith("MIG-"):
            raise OSError("the GPU is divided (MIG); set CUDA_VISIBLE_DEVICES to the name of the part that is measured")
        return find(part), True

    def _joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._undivided())) / 1e3

    def _getters(self) -> dict[str, Callable[[], float | None]]:
        nvml, handle, whole = self._nvml, self._handle, self._whole
        return {
            "gpu_utilization_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(self._undivided()).gpu,
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(self._undivided()) / 1e3,
            "gpu_sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM),
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU),
            "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_clock_event_reasons": self._clock_event_reasons,
            "gpu_processes": lambda: _others(
                [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            ),
        }

    def _undivided(self) -> Any:
        if self._is_part:
            raise LookupError("a part of a GPU (MIG) has no such counter of its own")
        return self._handle

    def _clock_event_reasons(self) -> int:
        """Return the bit mask; older drivers and older pynvml know it by its former name alone."""
        try:
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._whole))
        except (AttributeError, self.error):
            return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._whole))


class AmdSource(DriverSource):
    """The readings of one AMD GPU by its handle of amdsmi; clock events are NVML's alone."""

    library = "amdsmi"

    def __init__(self, handle: Any) -> None:
        import amdsmi

        super().__init__(amdsmi.AmdSmiException)
        self._smi, self._handle = amdsmi, handle

    def _joules(self) -> float:
        answer = self._smi.amdsmi_get_energy_count(self._handle)
        count = _given(answer, "energy_accumulator", "power")  # of old, the name was that of something else
        return count * _given(answer, "counter_resolution") / 1e6  # which is in uJ

    def _getters(self) -> dict[str, Callable[[], float | None]]:
        smi, handle = self._smi, self._handle
        power = ("socket_power", "current_socket_power", "average_socket_power")
        return {
            "gpu_utilization_pct": lambda: _given(smi.amdsmi_get_gpu_activity(handle), "gfx_activity"),
            "gpu_power_w": lambda: _given(smi.amdsmi_get_power_info(handle), *power),
            "gpu_sm_clock_mhz": lambda: _given(
                smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX), "clk", "cur_clk"
            ),
            "gpu_temperature_c": lambda: _given({"temperature": self._temperature()}, "temperature"),
            "gpu_memory_used_bytes": lambda: _given(smi.amdsmi_get_gpu_vram_usage(handle), "vram_used") * 2**20,
            "gpu_processes": lambda: _others([process["pid"] for process in smi.amdsmi_get_gpu_process_list(handle)]),
        }

    def _temperature(self) -> Any:
        kinds, metrics = self._smi.AmdSmiTemperatureType, self._smi.AmdSmiTemperatureMetric
        return self._smi.amdsmi_get_temp_metric(self._handle, kinds.JUNCTION, metrics.CURRENT)


def _given(answer: Mapping[str, Any], *names: str) -> float:
    """Return the first of these fields that has a value; raises LookupError where none has, which amdsmi calls N/A."""
    value = next((answer[name] for name in names if answer.get(name, "N/A") != "N/A"), None)
    if value is None:
        raise LookupError(f"this GPU has no value for {names[0].replace('_', ' ')}")
    return float(value)


class PsutilSource:
    """The load of the CPUs and the resident memory of this process."""

    reason: str | None = None

    def __init__(self) -> None:
        import psutil

        self.reasons: Mapping[str, str] = {}
        self._psutil, self._process = psutil, psutil.Process(os.getpid())
        self._before = self._times()

    def read(self) -> dict[str, float]:
        """Return the load since the last call and the resident bytes."""
        (before_busy, before_all), now = self._before, self._times()
        values = {"process_bytes": float(self._process.memory_info().rss)}
        if now[1] > before_all:  # else the counters have not moved yet
            values["cpu_utilization_pct"] = 100 * (now[0] - before_busy) / (now[1] - before_all)
            self._before = now
        return values

    def _times(self) -> tuple[float, float]:
        """Return busy and all seconds of all cores; psutil.cpu_percent keeps them by thread and begins with a 0."""
        times = self._psutil.cpu_times()
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them in user and nice
        everything = sum(times) - guests
        return everything - times.idle - getattr(times, "iowait", 0.0), everything


class Sources:
    """Several sources as one; those without readings only give their reason."""

    def __init__(self, *sources: Source) -> None:
        self._given = sources
        self._live = [source for source in sources if source.reason is None]
        self.reason = None if self._live else "; ".join(str(source.reason) for source in sources)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why a quantity is missing, over all sources."""
        return {quantity: why for source in self._given for quantity, why in source.reasons.items()}

    @property
    def nonsense(self) -> Mapping[str, str]:
        """What the drivers have answered so far that no GPU has, by quantity."""
        drivers = (source for source in self._given if isinstance(source, DriverSource))
        return {quantity: why for driver in drivers for quantity, why in driver.nonsense.items()}

    def read(self) -> dict[str, float]:
        """Return the values of all sources that still answer; raises OSError where none does."""
        values: dict[str, float] = {}
        failures = []
        for source in self._live:
            try:
                values |= source.read()
            except OSError as error:
                failures.append(str(error))
        if not values:
            raise OSError("; ".join(failures))
        return values


def nvml_source(uuid: str | None) -> "NvmlSource | NoSource":
    """Return the source for the GPU with this UUID, or `NoSource` with the reason; None is a machine without a GPU."""
    if uuid is None:
        return NoSource("the device is not a GPU")
    try:
        return NvmlSource(uuid)
    except Exception as error:  # the driver's library may be missing, foreign or too old, each with its own type
        return NoSource(f"NVML: {error}")


class Sampler:
    """A thread that reads the source at intervals; use it as a context manager."""

    def __init__(
        self, source: Source, interval_s: float = LEAST_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ):
        self.reason = source.reason
        self.clock = clock
        self.source = source
        self._interval_s = max(interval_s, LEAST_INTERVAL_S)
        self._readings: list[Reading] = []
        self._lost: DeviceLostError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.reason is None:
            self._thread = threading.Thread(target=self._run, name="boundby-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(HUNG_S)
            if self._thread.is_alive():  # as a daemon it ends with the program
                self.reason = f"the driver gave no answer within {HUNG_S:.0f} s"

    def between(self, start: float, end: float) -> list[Reading]:
        """Return the readings taken in this span of the sampler's clock."""
        return [reading for reading in self._readings if start <= reading.at <= end]

    def by_quantity(self, start: float, end: float) -> dict[str, list[float]]:
        """Return what was read in this span, by quantity."""
        values_by_quantity: dict[str, list[float]] = {}
        for reading in self.between(start, end):
            for quantity, value in reading.values.items():
                values_by_quantity.setdefault(quantity, []).append(value)
        return values_by_quantity

    def why_not(self, quantity: str) -> str | None:
        """Return why this quantity is missing, or None where it is not known to be."""
        return self.reason or self.source.reasons.get(quantity)

    def now(self) -> dict[str, Any]:
        """Return one reading taken at once, in the calling thread; {} where there is none.

        Raises DeviceLostError where the driver says, or has said to the thread, that the GPU is lost.
        """
        if self._lost:
            raise self._lost
        try:
            return self.source.read() if self.reason is None else {}
        except OSError:
            return {}

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._readings.append(Reading(self.clock(), self.source.read()))
            except DeviceLostError as lost:  # the thread that measures is told by `now`
                self._lost, self.reason = lost, lost.reason
                return
            except Exception as error:  # psutil and NVML have errors of their own; the measurement goes on without
                self.reason = str(error) or type(error).__name__
                return
