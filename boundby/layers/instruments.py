"""What a profile is measured with: a clock, a wait, and what a device offers. Tests give their own."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from boundby.device import CudaQueue, is_gpu, is_host, runtime, synchronizer
from boundby.disturbance import HostCounters, Watch
from boundby.layers.passes import Allocator
from boundby.layers.probes import Clock
from boundby.layers.timing import DeviceMarks, probe_cost_ns


class CudaMarks:
    """The streams of a GPU with pooled events."""

    def __init__(self, device: torch.device) -> None:
        self._queue = CudaQueue(device)
        self._device, self._runtime = device, runtime(device)
        self._pool: list[Any] = []
        self.hold = self._queue.hold
        self.has_passed = self._queue.has_passed
        self.seconds_between = self._queue.seconds_between

    def mark(self) -> Any:
        """Queue an event on the stream in use."""
        event = self._pool.pop() if self._pool else self._runtime.Event(enable_timing=True)
        event.record(self._runtime.current_stream(self._device))
        return event

    def stream(self) -> Hashable:
        """Return the stream in use."""
        return cast(Hashable, self._runtime.current_stream(self._device))

    def reuse(self, mark: Any) -> None:
        """Put the event back into the pool."""
        self._pool.append(mark)


@dataclass(frozen=True)
class CudaAllocator:
    """The caching allocator of a GPU."""

    device: torch.device

    def allocated_bytes(self) -> int:
        """Return what tensors hold now."""
        return int(runtime(self.device).memory_allocated(self.device))

    def peak_bytes(self) -> int:
        """Return the most that tensors held since the peak was last reset."""
        return int(runtime(self.device).max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        """Set the peak back to what is held now."""
        runtime(self.device).reset_peak_memory_stats(self.device)


def _no_wait() -> None:
    """Wait for nothing: a CPU has finished when the call returns."""


def _host_watch() -> Watch:
    return Watch(HostCounters())


@dataclass(frozen=True)
class Instruments:
    """The clock gives nanoseconds; `marks` and `allocator` are None where there is no device beside the host."""

    now: Clock = time.perf_counter_ns
    synchronize: Callable[[], None] = _no_wait
    marks: DeviceMarks | None = None
    allocator: Allocator | None = None
    probe_cost_ns: Callable[[Clock], float] = probe_cost_ns
    watch: Callable[[], Watch] = field(default=_host_watch)

    def seconds(self) -> float:
        """Return the time in seconds."""
        return self.now() / 1e9


def instruments_for(device: torch.device) -> Instruments:
    """Return the instruments of a CPU or a GPU. Raises ValueError for other devices."""
    if is_host(device):
        return Instruments()
    if is_gpu(device):
        return Instruments(synchronize=synchronizer(device), marks=CudaMarks(device), allocator=CudaAllocator(device))
    raise ValueError(f"layers on device {str(device)!r} cannot be timed; move the model to a CPU or a CUDA GPU")
