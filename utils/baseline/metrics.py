"""What is seen beside the clock while something is measured: time, memory, utilisation."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypedDict

import torch

from boundby.machine import MemoryMeter, MemoryUse, Sampler, synchronizer
from utils.baseline import instruments

SAMPLED = ("gpu_utilization_pct", "gpu_power_w", "gpu_sm_clock_mhz", "cpu_utilization_pct")


@dataclass(frozen=True)
class Measurement:
    """A measurement that has been started."""

    meter: MemoryMeter
    sampler: Sampler
    own: ExitStack  # ends the sampler where it is of this measurement alone
    start_s: float


class Seen(TypedDict):
    """What happened in a measurement; `reading_reasons` is of quantities without any reading."""

    batch_size: int
    num_samples: int
    window_s: float
    latency_per_sample_ms: float
    latency_per_batch_ms: float
    throughput_samples_per_sec: float | None
    batches_per_sec: float | None
    memory: MemoryUse
    readings: dict[str, list[float]]
    reading_reasons: dict[str, str]


class MetricsCollector:
    """Collects what is seen beside the clock.

    Without a `sampler` each measurement starts and ends one of its own, for the device and the host.
    """

    def __init__(self, device: torch.device | str, sampler: Sampler | None = None) -> None:
        self.device = torch.device(device)
        self.sampler = sampler
        self._synchronize = synchronizer(self.device)

    def start_measurement(self) -> Measurement:
        """Start to watch time, memory and utilisation; give the result to `end_measurement`."""
        own = ExitStack()
        sampler = self.sampler or own.enter_context(Sampler(instruments.source(self.device)))
        meter = MemoryMeter(self.device)
        meter.start()
        return Measurement(meter, sampler, own, sampler.clock())

    def end_measurement(self, measurement: Measurement, batch_size: int, num_samples: int) -> Seen:
        """Return what happened since `measurement` was started, all work that the device was given included.

        Raises ValueError for less than one sample or a batch size below 1.
        """
        if num_samples < 1 or batch_size < 1:
            raise ValueError(f"num_samples is {num_samples} and batch_size {batch_size}; both must be 1 or more")
        sampler = measurement.sampler
        self._synchronize()
        end = sampler.clock()
        memory = measurement.meter.stop()
        measurement.own.close()
        window_s, batches = end - measurement.start_s, -(-num_samples // batch_size)
        return {
            "batch_size": batch_size,
            "num_samples": num_samples,
            "window_s": window_s,
            "latency_per_sample_ms": 1e3 * window_s / num_samples,
            "latency_per_batch_ms": 1e3 * window_s / batches,
            "throughput_samples_per_sec": num_samples / window_s if window_s else None,
            "batches_per_sec": batches / window_s if window_s else None,
            "memory": memory,
            "readings": sampler.by_quantity(measurement.start_s, end),
            "reading_reasons": {name: why for name in SAMPLED if (why := sampler.why_not(name))},
        }
