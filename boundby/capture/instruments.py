"""What watches recorded steps beside torch's profiler: the allocator's history, and Nsight with ranges of NVTX."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

from boundby import files
from boundby.capture.manifest import Record
from boundby.capture.remarks import summary

MAX_ENTRIES = 100_000  # of the allocator's history; each takes some KB, and torch's own default has no limit
SNAPSHOT = "memory snapshot"
# Set by Nsight Systems (once its session has begun), Nsight Compute and nvprof, in this order.
SESSION_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "NVPROF_ID")
# Set from the start of the process, also to other tools' libraries.
INJECTION_VARIABLES = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
INJECTED_NAMES = ("nsight", "nsys", "toolsinjection")


class Instrument:
    """Something that watches a window of steps and never raises; by itself it does nothing."""

    def start(self) -> None:
        """Begin, before the first step of the window, which may be one of warm-up."""

    def record(self) -> None:
        """Begin to record."""

    def step(self) -> None:
        """Take note that a step has ended."""

    def stop(self, *, export: bool = True) -> None:
        """End at once, if not over; without `export` nothing is written."""


class DuringRecording(Instrument):
    """An instrument that works in the recorded steps alone: a subclass says how to open and to close it.

    Whatever `open` and `close` raise is a downgrade of `what`.
    """

    def __init__(self, what: str, log: Record) -> None:
        self._what = what
        self._log = log
        self.is_open = False

    def open(self) -> None:
        """Begin to watch."""
        raise NotImplementedError

    def close(self, *, export: bool) -> None:
        """End what `open` began, whatever happened in between."""
        raise NotImplementedError

    def record(self) -> None:
        """Open it."""
        with self._log.guard(self._what):
            self.open()
            self.is_open = True

    def stop(self, *, export: bool = True) -> None:
        """Close it."""
        is_open, self.is_open = self.is_open, False
        if is_open:
            with self._log.guard(self._what):
                self.close(export=export)


def memory_module(device: torch.device) -> ModuleType | None:
    """Return the module of torch that keeps the history of this device's allocator; None where there is none."""
    module: ModuleType | None = getattr(getattr(torch, device.type, None), "memory", None)
    has_both = hasattr(module, "_record_memory_history") and hasattr(module, "_dump_snapshot")
    return module if has_both else None


class MemorySnapshot(DuringRecording):
    """Keeps the history of the allocations of the recorded steps and writes it to `path`, which `written` then is.

    The viewer at pytorch.org/memory_viz reads it.
    """

    def __init__(self, log: Record, memory: ModuleType, path: Path) -> None:
        super().__init__(SNAPSHOT, log)
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


def nsight_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the environment variable that shows a Nsight session around this process, None without one."""
    for name in SESSION_VARIABLES:
        if environment.get(name):
            return name
    for name in INJECTION_VARIABLES:
        if any(part in environment.get(name, "").lower() for part in INJECTED_NAMES):
            return name
    return None


def reason_under_nsight(variable: str) -> str:
    """Return why torch.profiler stays off."""
    return f"{variable} shows a Nsight session, which needs the interface to the GPU that torch.profiler uses"


class NsightRange(DuringRecording):
    """Lets `nsys profile -c cudaProfilerApi` collect the recorded steps alone, with a range of NVTX per operator."""

    def __init__(self, log: Record) -> None:
        super().__init__("Nsight range", log)
        self._operators: torch.autograd.profiler.emit_nvtx | None = None

    def open(self) -> None:
        """Start the collection."""
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        try:
            if torch.cuda.is_available():
                operators = torch.autograd.profiler.emit_nvtx(record_shapes=False)  # type: ignore[no-untyped-call]
                operators.__enter__()  # type: ignore[no-untyped-call]
                self._operators = operators
        except Exception as error:
            self._log.lacks("NVTX ranges of operators", summary(error))

    def close(self, *, export: bool) -> None:
        """Stop the collection: the session would wait forever for an open range."""
        operators, self._operators = self._operators, None
        try:
            if operators is not None:
                operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


class StepRanges:
    """Ranges `step_{n}` of NVTX around the steps of a program; `push` and `pop` never raise and may do nothing."""

    def __init__(self, log: Record, wanted: bool) -> None:
        self._log = log
        self.is_on = wanted
        self._is_open = False

    def push(self, number: int) -> None:
        """Begin the range of step `number`."""
        if not self.is_on:
            return
        try:
            torch.cuda.nvtx.range_push(f"step_{number}")  # type: ignore[no-untyped-call]
            self._is_open = True
        except Exception as error:
            self._log.lacks("NVTX ranges", summary(error))
            self.is_on = False

    def pop(self) -> None:
        """End the range that is open."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        except Exception as error:
            self._log.downgrade("NVTX ranges", summary(error))
            self.is_on = False
