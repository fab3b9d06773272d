"""Nsight Systems in place of torch.profiler: what it needs of the program, and the command that starts it."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from boundby.capture import Schedule, nsight_variable
from boundby.training.manager import ProfilerManager
from boundby.training.records import Remarks

ABSENT = "this program does not run under it; torch.profiler stays off, and the stages alone are timed. Start it with: "
NO_TRACE_WANTED = "enable_nsight_systems keeps torch.profiler off; without it a few steps are recorded"
TRACED = "cuda,nvtx,osrt"


def nsight_command(report: str, cycles: int, program: Sequence[str]) -> str:
    """Return the command that runs the program under Nsight Systems and collects the recorded steps alone.

    With several cycles each one makes a report of its own. The number must be right: with a smaller one the rest is
    lost, with a larger one the session waits for ranges that never come.
    """
    end = "stop" if cycles == 1 else f"repeat:{cycles}"
    options = ["-t", TRACED, "-c", "cudaProfilerApi", f"--capture-range-end={end}", "--cuda-graph-trace=node"]
    return shlex.join(["nsys", "profile", *options, "-o", report, *program])


class StageRanges:
    """A range of NVTX for every stage, from when it begins to when it ends; ranges may overlap."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._open: dict[str, int] = {}
        self._is_on = True

    def begin(self, name: str) -> None:
        """Begin the range of a stage; one of this name that never ended ends first."""
        self.end(name)
        self._attempt(lambda: self._open.update({name: torch.cuda.nvtx.range_start(name)}))

    def end(self, name: str, seconds: float = 0.0) -> None:
        """End the range of a stage."""
        opened = self._open.pop(name, None)
        if opened is not None:
            self._attempt(lambda: torch.cuda.nvtx.range_end(opened))

    def _attempt(self, action: Callable[[], object]) -> None:
        if not self._is_on:
            return
        try:
            action()
        except Exception as error:
            self._is_on = False
            self._remarks.add("NVTX ranges", error)


class NsightMode:
    """What a program does that is to be profiled by Nsight Systems, to whose `report` it goes."""

    def __init__(self, report: str, environment: Mapping[str, str] = os.environ) -> None:
        self.report = report
        self.is_active = nsight_variable(environment) is not None

    def prepare(self, manager: ProfilerManager, schedule: Schedule, total_steps: int | None) -> None:
        """Mark the stages for Nsight; where it is not there, tell how to start it."""
        if self.is_active:
            ranges = StageRanges(manager.timer.remarks)
            manager.register("stage_start", ranges.begin)
            manager.register("stage_end", ranges.end)
            return
        fitted = schedule if total_steps is None else schedule.fitted(total_steps)
        command = nsight_command(self.report, fitted.repeat if fitted else 1, sys.orig_argv)
        manager.timer.remarks.add("Nsight Systems", ABSENT + command)
