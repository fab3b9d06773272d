"""The memory pass: what the device's allocator held before, at the peak of, and after every call.

The allocator knows one peak at a time. So it is read and set back at every entry and exit, and carried outwards.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from boundby.layers.attachment import Targets, attached, visiting_probe
from boundby.layers.calls import Call, CallTree
from boundby.layers.timing import Run

MEMORY_RUNS = 3  # the first may still fill the allocator's or a library's own caches


class Allocator(Protocol):
    """Statistics of an allocator, in bytes."""

    def allocated_bytes(self) -> int:
        """Return what tensors hold now."""
        ...

    def peak_bytes(self) -> int:
        """Return the most they held since the peak was last set back."""
        ...

    def reset_peak(self) -> None:
        """Set the peak back to what is held now."""
        ...


@dataclass(frozen=True)
class CudaAllocator:
    """The caching allocator of a GPU."""

    device: torch.device

    def allocated_bytes(self) -> int:
        """Return what tensors hold now."""
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        """Return the most they held since the peak was last set back."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Set the peak back to what is held now."""
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True)
class CallMemory:
    """Bytes of the device around one call path: over several calls the first, the highest and the last."""

    before_bytes: int
    peak_above_bytes: int  # above what was there when the call was entered
    after_bytes: int


def measure_memory(run: Run, tree: CallTree, targets: Targets, allocator: Allocator) -> dict[Call, CallMemory]:
    """Return the memory of every call path, from the last of a few runs."""
    found: dict[Call, CallMemory] = {}
    for _ in range(MEMORY_RUNS):
        visitor = _Peaks(allocator)
        tree.enter_root()
        with attached(targets, visiting_probe(tree, visitor)):
            run()
        found = visitor.found
    return found


class _Peaks:
    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._peak = 0  # of the call that is open, up to the last entry or exit
        self.found: dict[Call, CallMemory] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = max(self._peak, self._allocator.peak_bytes())
        self._allocator.reset_peak()
        before = self._peak = self._allocator.allocated_bytes()
        return outer, before

    def leave(self, call: Call, token: Any, result: Any) -> None:
        outer, before = token
        peak = max(self._peak, self._allocator.peak_bytes())
        after = self._allocator.allocated_bytes()
        earlier = self.found.get(call)
        self.found[call] = CallMemory(
            before_bytes=earlier.before_bytes if earlier else before,
            peak_above_bytes=max(peak - before, earlier.peak_above_bytes if earlier else 0),
            after_bytes=after,
        )
        self._allocator.reset_peak()
        self._peak = max(outer, peak)
