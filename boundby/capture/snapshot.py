"""The history of a device's allocator with Python stacks, as the viewer at pytorch.org/memory_viz reads it."""

from pathlib import Path
from types import ModuleType

import torch

from boundby import files
from boundby.capture.manifest import Record
from boundby.capture.schedule import Span
from boundby.capture.window import DuringRecording

MAX_ENTRIES = 100_000  # each takes some KB; torch's own default has no limit
UNAVAILABLE = "memory snapshot"


def memory_module(device: torch.device) -> ModuleType | None:
    """Return the module of torch that keeps the history of this device's allocator; None where there is none."""
    module = getattr(getattr(torch, device.type, None), "memory", None)
    has_both = hasattr(module, "_record_memory_history") and hasattr(module, "_dump_snapshot")
    return module if has_both else None


class MemorySnapshot(DuringRecording):
    """Keeps the history of the allocations of the recorded steps and writes it to `path`, which `written` then is."""

    def __init__(self, record: Record, span: Span, memory: ModuleType, path: Path) -> None:
        super().__init__(UNAVAILABLE, record, span)
        self._memory = memory
        self._path = path
        self.written: Path | None = None

    def open(self) -> None:
        """Let the allocator keep its history; a history that the program keeps itself is left alone."""
        is_kept = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if is_kept is not None and is_kept():
            raise RuntimeError("the program keeps the history of the allocator itself")
        # Stacks of C++ frames ("all") make writing the file a hundred times slower.
        self._memory._record_memory_history(stacks="python", max_entries=MAX_ENTRIES)

    def close(self, *, export: bool) -> None:
        """Write the history and let the allocator forget it."""
        try:
            if export:
                with files.replacing(self._path) as temporary:
                    self._memory._dump_snapshot(str(temporary))
                self.written = self._path
        finally:
            self._memory._record_memory_history(enabled=None)
