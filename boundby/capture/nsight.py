"""What Nsight Systems and Nsight Compute need of the program: ranges with names, and the steps worth collecting."""

import os
from collections.abc import Mapping

import torch

from boundby.capture.manifest import Record, summary
from boundby.capture.schedule import Span
from boundby.capture.window import DuringRecording

# Set by Nsight Systems (once its session has begun), Nsight Compute and nvprof, in this order.
SESSION_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "NVPROF_ID")
# Set from the start of the process, also to other tools' libraries.
INJECTION_VARIABLES = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
INJECTED_NAMES = ("nsight", "nsys", "toolsinjection")


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


class StepRanges:
    """Ranges `step_{n}` of NVTX around the steps of a program; `push` and `pop` never raise and may do nothing."""

    def __init__(self, record: Record, wanted: bool) -> None:
        self._record = record
        self.is_on = wanted
        self._is_open = False

    def push(self, number: int) -> None:
        """Begin the range of step `number`."""
        if not self.is_on:
            return
        try:
            torch.cuda.nvtx.range_push(f"step_{number}")
            self._is_open = True
        except Exception as error:
            self._record.lacks("NVTX ranges", summary(error))
            self.is_on = False

    def pop(self) -> None:
        """End the range that is open."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            torch.cuda.nvtx.range_pop()
        except Exception as error:
            self._record.downgrade("NVTX ranges", summary(error))
            self.is_on = False


class NsightRange(DuringRecording):
    """Lets `nsys profile -c cudaProfilerApi` collect the recorded steps alone."""

    def __init__(self, record: Record, span: Span) -> None:
        super().__init__("Nsight range", record, span)

    def open(self) -> None:
        """Start the collection."""
        torch.cuda.profiler.start()

    def close(self, *, export: bool) -> None:
        """Stop the collection: the session would wait for ever for a range that stays open."""
        torch.cuda.profiler.stop()
