"""How much memory a block of work held, by the device allocator's counters and the resident set of this process.

`demand` counts what a forward holds, and `fit_peaks` tells with the peaks of some batches what a larger one will take.
"""

import bisect
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boundby.formatting import Missing
from boundby.machine.device import allocator, is_gpu
from boundby.machine.environment import memory_limit_bytes
from boundby.machine.records import MemoryUse
from boundby.work import Interval

NEAR_LIMIT = 0.9  # of the device's or the process's memory
CPU_REASON = "the CPU allocator keeps no statistics"


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
            return MemoryUse(
                process_bytes=resident, process_peak_bytes=peak, reasons=(CPU_REASON, *reasons), doubts=tuple(doubts)
            )
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


LEAST_POINTS = 3  # to tell what the process holds before any text from what its allocator keeps
KEPT_BELOW = 32 * 2**20  # glibc's largest threshold: larger blocks go back to the system when they are freed
FEW, MANY = 2, 3  # samples whose blocks are noted; one sample alone may go another way
MOST_KEPT = 3.0  # times the smaller blocks: what glibc kept of them beyond what was live, where they were most


@dataclass(frozen=True, order=True)
class Peak:
    """The most bytes held while batches no larger than `samples` × `tokens`, padding included, were computed."""

    samples: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Demand:
    """The blocks that a forward takes and gives back, in order, for texts of so many tokens.

    Each change is the bytes of a block whatever the batch, and those for each sample, both negative where it is freed.
    """

    tokens: int
    changes: tuple[tuple[float, float], ...]

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        fixed, per_sample = np.array(self.changes).T
        return fixed, per_sample

    @functools.cached_property
    def _blocks(self) -> frozenset[tuple[float, float]]:
        return frozenset((fixed, per_sample) for fixed, per_sample in self.changes if per_sample > 0)

    def live_bytes(self, samples: int, below: float = math.inf) -> float:
        """Return the most bytes live at any moment of a batch, or those of blocks of less than `below` bytes."""
        fixed, per_sample = self._columns
        sizes = fixed + samples * per_sample
        return float(np.where(np.abs(sizes) < below, sizes, 0.0).cumsum().max())

    def most_small_bytes(self, samples: int, below: float) -> float:
        """Return the most bytes live in blocks of less than `below`, in any batch up to this one."""
        last = {int((below - fixed - 1) / per_sample) for fixed, per_sample in self._blocks}
        return max(self.live_bytes(size, below) for size in (samples, *(size for size in last if 0 < size < samples)))


class _Blocks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes when storages come and go: (number, bytes), negative bytes where one is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[tuple[int, int]] = []
        self._held: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._held and storage.nbytes():
                self._held[key] = len(self.changes), storage.nbytes()
                self.changes.append(self._held[key])
                weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        number, size = self._held.pop(key)
        self.changes.append((number, -size))


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def demand(forward: Callable[[int], object], tokens: int) -> Demand | Missing:
    """Return what `forward`, called with a number of samples, takes in memory; it runs with two and with three.

    Every tensor between its operators counts, exactly and on any machine; what a kernel takes for itself does not.
    """
    noted = []
    for samples in (FEW, MANY):
        with torch.inference_mode(), _Blocks() as blocks:
            forward(samples)
        noted.append(blocks.changes)
    few, many = noted
    if not few or [number for number, _ in few] != [number for number, _ in many]:
        return Missing("the model takes other blocks of memory in a batch of another size")
    slopes = [(of_few, (of_many - of_few) / (MANY - FEW)) for (_, of_few), (_, of_many) in zip(few, many, strict=True)]
    return Demand(tokens, tuple((of_few - FEW * per_sample, per_sample) for of_few, per_sample in slopes))


@dataclass(frozen=True)
class PeakModel:
    """Peak = what is held before any text + what is live in the batch + what the allocator keeps of freed blocks.

    Live bytes are counted. The rest comes of measured peaks: `base` with its range, and `kept`, how many times the
    bytes of blocks below `below` stay beyond what is live. glibc keeps these in its heap, differently from run to run;
    a GPU's allocator has no such threshold (`below` is 0), and what it keeps is in the range of `base`.
    """

    demand: Demand
    base: Interval
    kept: float
    below: float

    def at(self, samples: int) -> Interval:
        """Return the peak of a batch in bytes, and the range in which the allocator's habits may put it."""
        live = self.demand.live_bytes(samples)
        small, most = self.demand.live_bytes(samples, self.below), self.demand.most_small_bytes(samples, self.below)
        freed = (small + most) / 2  # of smaller batches that came before, some
        high = self.base.high + live + MOST_KEPT * freed
        return Interval(self.base.value + live + self.kept * freed, self.base.low + live, high)

    def most_samples(self, limit_bytes: float) -> int:
        """Return the largest batch whose peak stays within nine tenths of the limit, 0 where none does."""
        room, step = NEAR_LIMIT * limit_bytes, 1
        while self.at(step).value <= room:
            step *= 2
        return bisect.bisect_right(range(1, step), room, key=lambda samples: self.at(samples).value)


def fit_peaks(peaks: Sequence[Peak], demands: Mapping[int, Demand], below: float) -> PeakModel | Missing:
    """Return the model for the longest texts in `demands`, which are by tokens, or why these peaks do not tell it."""
    points = sorted(peak for peak in set(peaks) if peak.tokens in demands)
    if len({peak.samples for peak in points}) < LEAST_POINTS:
        return Missing(f"the peaks of {len(points)} batch sizes are known, it takes {LEAST_POINTS}")
    rests = np.array([peak.bytes - demands[peak.tokens].live_bytes(peak.samples) for peak in points])
    small = np.array([demands[peak.tokens].most_small_bytes(peak.samples, below) for peak in points])
    spread = float(((small - small.mean()) ** 2).sum())
    slope = float((small - small.mean()) @ (rests - rests.mean())) / spread if spread else 0.0
    kept = min(max(slope, 0.0), MOST_KEPT / 2)
    bases = rests - kept * small
    if min(bases) <= 0:
        return Missing("a peak is below what its batch holds at least")
    longest = demands[max(demands)]
    if longest.live_bytes(2 * FEW) <= longest.live_bytes(FEW):
        return Missing("what a batch holds does not grow with its samples")
    # Each peak may hold as much of freed blocks as any does, or none.
    low = max(0.0, min(*bases, max(rests - MOST_KEPT * small)))
    high = max(*bases, min(rests))
    base = Interval(float(np.median(bases)), float(low), float(high))
    return PeakModel(longest, base, kept, below)
