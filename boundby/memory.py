"""How much memory a block of work held: the device allocator's counters, and the resident set of this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from boundby.device import is_gpu
from boundby.environment import memory_limit_bytes

NEAR_LIMIT = 0.9  # of the device's or the process's memory
CPU_REASON = "the CPU allocator keeps no statistics"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes at the end of a block and at its peak. A field that this device cannot give is None; `reasons` say why."""

    device_allocated_bytes: int | None
    device_reserved_bytes: int | None
    device_peak_allocated_bytes: int | None
    device_peak_reserved_bytes: int | None
    device_total_bytes: int | None
    device_before_bytes: int | None
    process_bytes: int
    process_peak_bytes: int | None
    reasons: tuple[str, ...]
    doubts: tuple[str, ...]


class MemoryMeter:
    """Measure the memory of what happens between `start` and `stop`."""

    def __init__(self, device: torch.device, peak_of_process: Callable[[], int | None] | None = None) -> None:
        self._device = device
        self._peak_of_process = peak_of_process or _peak_resident_bytes
        self._before: int | None = None
        self._peak_is_of_block = False

    def start(self) -> None:
        """Set the peaks back to what is held now."""
        if is_gpu(self._device):
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        self._peak_is_of_block = _reset_peak_resident()

    def stop(self) -> MemoryUse:
        """Return what was held, and at most held, since `start`."""
        resident = psutil.Process().memory_info().rss
        peak = self._peak_of_process() if self._peak_is_of_block else None
        reasons = [] if peak is not None else ["the kernel does not tell the peak of this process over a block"]
        doubts = _near("main memory", peak or resident, memory_limit_bytes())
        if not is_gpu(self._device):
            nothing = (None,) * 6
            return MemoryUse(*nothing, resident, peak, (CPU_REASON, *reasons), tuple(doubts))
        total = torch.cuda.get_device_properties(self._device).total_memory
        peak_reserved = torch.cuda.max_memory_reserved(self._device)
        return MemoryUse(
            device_allocated_bytes=torch.cuda.memory_allocated(self._device),
            device_reserved_bytes=torch.cuda.memory_reserved(self._device),
            device_peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            device_peak_reserved_bytes=peak_reserved,
            device_total_bytes=total,
            device_before_bytes=self._before,
            process_bytes=resident,
            process_peak_bytes=peak,
            reasons=tuple(reasons),
            doubts=(*_near("device memory", peak_reserved, total), *doubts),
        )


def _near(what: str, used: int, limit: int) -> list[str]:
    if used < NEAR_LIMIT * limit:
        return []
    return [f"{what} is nearly full: {used / 1e6:.0f} of {limit / 1e6:.0f} MB; a larger batch may run out"]


def _reset_peak_resident() -> bool:
    """Set VmHWM back to the present size (Linux, proc(5): writing 5 to clear_refs); return whether that was done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_resident_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
