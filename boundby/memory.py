"""How much memory a block of work held, by the device allocator's counters and the resident set of this process.

`fit_peaks` tells from the peaks of some batches what a larger one will hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import torch

from boundby.device import allocator, is_gpu
from boundby.environment import memory_limit_bytes
from boundby.known import Missing

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


LEAST_POINTS = 3  # to fit a line and see how far the next point is from it
LEAST_RISE = 0.03  # of the peak, over the points: less is lost among thread pools and what allocators keep
LENGTHS_APART = 1.5  # times as long must the longest texts be, so that pairs of tokens are told from tokens
MOST_ERROR = 0.10  # of a point that was left out
FURTHEST = 16  # times the largest batch measured: no prediction goes beyond


@dataclass(frozen=True, order=True)
class Peak:
    """The most bytes held while batches no larger than `samples` × `tokens`, padding included, were computed."""

    samples: int
    tokens: int
    bytes: int

    @property
    def cells(self) -> int:
        """Tokens, padding included."""
        return self.samples * self.tokens


@dataclass(frozen=True)
class PeakModel:
    """Peak = fixed + tokens × bytes + pairs of tokens of one text × bytes, fitted to measured peaks.

    The fixed part has the weights, and the process with its libraries or what the allocator keeps. Kernels that hold
    the scores of attention make the last term; it is 0 where no length tells it. `error` is the largest relative error
    of a point by the others, `largest` the point of most tokens.
    """

    fixed_bytes: float
    bytes_per_token: float
    bytes_per_pair: float
    error: float
    largest: Peak

    def bytes_at(self, samples: int, tokens: int) -> float:
        """Return the peak of batches of this shape."""
        return self.fixed_bytes + samples * self._bytes_per_sample(tokens)

    def most_samples(self, tokens: int, limit_bytes: float) -> tuple[int, bool]:
        """Return the largest batch of such texts that stays within nine tenths of the limit, 0 where none does.

        The second value tells whether a larger one may fit: none is predicted beyond 16 times what was measured.
        """
        most = int(max(0.0, NEAR_LIMIT * limit_bytes - self.fixed_bytes) / self._bytes_per_sample(tokens))
        furthest = FURTHEST * self.largest.cells // tokens
        return min(most, furthest), most > furthest

    def _bytes_per_sample(self, tokens: int) -> float:
        return tokens * (self.bytes_per_token + tokens * self.bytes_per_pair)


def fit_peaks(peaks: Sequence[Peak]) -> PeakModel | Missing:
    """Return the model of these peaks, or why they do not tell it."""
    points = sorted(set(peaks), key=lambda peak: (peak.cells, peak.bytes))
    if len({peak.cells for peak in points}) < LEAST_POINTS:
        return Missing(f"the peaks of {len(points)} batch sizes are known, it takes {LEAST_POINTS}")
    bytes_held, tokens = [peak.bytes for peak in points], [peak.tokens for peak in points]
    if max(bytes_held) < (1 + LEAST_RISE) * min(bytes_held):
        return Missing("the peak hardly rises over the batch sizes that were measured")
    terms = [(True, False)]
    if max(tokens) >= LENGTHS_APART * min(tokens) and len(points) > LEAST_POINTS:
        terms += [(True, True), (False, True)]
    found = [(error, chosen) for chosen in terms if (error := _left_out_error(points, chosen)) is not None]
    if not found or min(found)[0] > MOST_ERROR:
        return Missing("the peaks do not follow the tokens of a batch")
    error, chosen = min(found)
    fixed, per_token, per_pair = cast("np.ndarray", _fitted(points, chosen)).tolist()
    return PeakModel(fixed, per_token, per_pair, error, points[-1])


def _left_out_error(points: Sequence[Peak], terms: tuple[bool, bool]) -> float | None:
    """Return the largest relative error of a point by the others; None where no such model has only positive parts."""
    if _fitted(points, terms) is None:
        return None
    errors = []
    for place, point in enumerate(points):
        parts = _fitted([*points[:place], *points[place + 1 :]], terms)
        if parts is None:
            return None
        errors.append(abs(float(_columns([point])[0] @ parts) / point.bytes - 1))
    return max(errors)


def _columns(points: Sequence[Peak]) -> np.ndarray:
    return np.array([(1, peak.cells, peak.cells * peak.tokens) for peak in points], dtype=np.float64)


def _fitted(points: Sequence[Peak], terms: tuple[bool, bool]) -> np.ndarray | None:
    """Return fixed bytes, bytes a token and bytes a pair, by least squares of the relative errors; None: negative."""
    columns, held = _columns(points), np.array([peak.bytes for peak in points], dtype=np.float64)
    used = np.flatnonzero([True, *terms])
    weighted = columns[:, used] / held[:, None]
    size = np.abs(weighted).max(axis=0)
    parts = np.zeros(3)
    parts[used] = np.linalg.lstsq(weighted / size, np.ones(len(points)), rcond=None)[0] / size
    return parts if (parts >= 0).all() and parts[1:].any() else None
