"""Background readings of a GPU from a source: NVML, or none with a reason.

NVML's utilisation is the share of its last sample period, 1/6 s to 1 s, in which one or more kernels ran. A single
small kernel after another gives 100 %: it tells that the GPU was not idle, never what limits a model.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

LEAST_INTERVAL_S = 0.2  # NVML repeats a value within its sample period; reading faster shows nothing new
LEAST_WINDOW_S = 2.0  # two of the longest sample periods


@dataclass(frozen=True)
class Reading:
    """One observation: when, in seconds of the sampler's clock, and the GPU's utilisation in percent."""

    at: float
    gpu_utilization_pct: float


class Source(Protocol):
    """Where readings come from; `reason` says why there are none."""

    reason: str | None

    def utilization_pct(self) -> float:
        """Return the present utilisation in percent; raises OSError where it cannot be read."""
        ...


class NoSource:
    """A machine without readings."""

    def __init__(self, reason: str) -> None:
        self.reason: str | None = reason

    def utilization_pct(self) -> float:
        """Raise OSError with the reason."""
        raise OSError(self.reason)


class NvmlSource:
    """The readings of one NVIDIA GPU, found by its UUID, since NVML and CUDA number GPUs differently."""

    reason: str | None = None

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def utilization_pct(self) -> float:
        """Return NVML's utilisation; raises OSError where the driver refuses."""
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error


def nvml_source(uuid: str | None) -> Source:
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
        self._source = source
        self._interval_s = max(interval_s, LEAST_INTERVAL_S)
        self._readings: list[Reading] = []
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
            self._thread.join()

    def between(self, start: float, end: float) -> list[Reading]:
        """Return the readings taken in this span of the sampler's clock."""
        return [reading for reading in self._readings if start <= reading.at <= end]

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._readings.append(Reading(self.clock(), self._source.utilization_pct()))
            except OSError as error:
                self.reason = str(error)
                return
