"""What a profile is measured with: a clock, a wait, and what a device offers. Tests give their own."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from boundby.device import is_gpu, is_host, synchronizer
from boundby.disturbance import HostCounters, Watch
from boundby.layers.attachment import Clock
from boundby.layers.device_time import CudaMarks, DeviceMarks
from boundby.layers.memory import Allocator, CudaAllocator
from boundby.layers.timing import probe_cost_ns


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
