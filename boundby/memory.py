"""How much memory a block of work held: the device allocator's counters, and the resident set of this process."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from boundby.device import allocator, is_gpu
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


def free_bytes(device: torch.device) -> int:
    """Return the bytes that may still be taken in the memory of a GPU, or of the host for another device."""
    if is_gpu(device):
        return int(torch.cuda.mem_get_info(device)[0])
    left = memory_limit_bytes() - psutil.Process().memory_info().rss
    return max(0, min(int(psutil.virtual_memory().available), int(left)))


class ProcessPeak:
    """The most memory that this process has held, as the Linux kernel tells it under `root`, proc(5)."""

    def __init__(self, root: Path = Path("/proc/self")) -> None:
        self._root = root

    def reset(self) -> bool:
        """Set the peak back to the present size (writing 5 to clear_refs); return whether that was done."""
        try:
            (self._root / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def read(self) -> int | None:
        """Return the peak in bytes; None where the kernel does not tell it."""
        try:
            lines = (self._root / "status").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


class MemoryMeter:
    """Measure the memory of what happens between `start` and `stop`."""

    def __init__(self, device: torch.device, process: ProcessPeak | None = None) -> None:
        self._allocator = allocator(device)
        self._process = process or ProcessPeak()
        self._before: int | None = None
        self._peak_is_of_block = False

    def start(self) -> None:
        """Set the peaks back to what is held now."""
        if self._allocator is not None:
            self._allocator.reset_peaks()
            self._before = self._allocator.allocated
        self._peak_is_of_block = self._process.reset()

    def stop(self) -> MemoryUse:
        """Return what was held, and at most held, since `start`."""
        resident = psutil.Process().memory_info().rss
        peak = self._process.read() if self._peak_is_of_block else None
        reasons = () if peak is not None else ("the kernel does not tell the peak of this process over a block",)
        doubts = _near("main memory", peak or resident, memory_limit_bytes())
        device = self._allocator
        if device is None:
            nothing = (None, None, None, None, None, None)
            return MemoryUse(*nothing, resident, peak, (CPU_REASON, *reasons), tuple(doubts))
        return MemoryUse(
            device_allocated_bytes=device.allocated,
            device_reserved_bytes=device.reserved,
            device_peak_allocated_bytes=device.peak_allocated,
            device_peak_reserved_bytes=device.peak_reserved,
            device_total_bytes=device.total,
            device_before_bytes=self._before,
            process_bytes=resident,
            process_peak_bytes=peak,
            reasons=reasons,
            doubts=(*_near("device memory", device.peak_reserved, device.total), *doubts),
        )


def _near(what: str, used: int, limit: int) -> list[str]:
    if used < NEAR_LIMIT * limit:
        return []
    return [f"{what} is nearly full: {used / 1e6:.0f} of {limit / 1e6:.0f} MB; a larger batch may run out"]
