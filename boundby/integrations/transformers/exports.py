"""What a cycle leaves, in a folder named after its last step; and Nsight Systems in place of torch.profiler."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from boundby import files
from boundby.capture import CaptureManifest, Cycle, Schedule, nsight_variable
from boundby.remarks import Remarks
from boundby.trace import Trace, op_stats, read_trace
from boundby.trace.intervals import host_tree
from boundby.trace.links import links
from boundby.trace.memory import memory_page, memory_use
from boundby.trace.operator_table import table_lines, table_rows
from boundby.trace.window import window, without_excluded
from boundby.training.manager import ProfilerManager
from boundby.training.results import give_name
from boundby.training.store import file_name

TRACE, STACKS, SNAPSHOT = "trace.pt.trace.json", "stacks.txt", "memory_snapshot.pickle"
FOLDER = re.compile(r"iteration_\d+(?:_run(\d+))?")
MEMORY_TIMELINE, KEY_AVERAGES = "memory-timeline.html", "key_averages.txt"

ABSENT = "this program does not run under it; torch.profiler stays off, and the stages alone are timed. Start it with: "
NO_TRACE_WANTED = "enable_nsight_systems keeps torch.profiler off; without it a few steps are recorded"
TRACED = "cuda,nvtx,osrt"


def runs_in(output_dir: Path, rank: int) -> int:
    """Return the number of the last run of which this rank has left a trace in the folder; 0 where there is none."""
    folders = (path.parent.name for path in output_dir.glob(f"iteration_*/rank{rank}_{TRACE}"))
    return max((int(match[1] or 1) for match in map(FOLDER.fullmatch, folders) if match), default=0)


def folder_name(step: int, run: int) -> str:
    """Return the name of the folder of a cycle that ended at a step, in the first or a later run."""
    return f"iteration_{step}" if run == 1 else f"iteration_{step}_run{run}"


@dataclass(frozen=True)
class Exports:
    """What is written beside the trace."""

    memory_timeline: bool  # and the snapshot of the device's allocator
    stacks: bool
    key_averages: bool


class Iteration:
    """The folder of one cycle, with files made from its trace; a file that fails is a remark and stops no other."""

    def __init__(self, folder: Path, manifest: CaptureManifest, trace_path: Path, remarks: Remarks) -> None:
        self._folder = folder
        self._manifest = manifest
        self._trace_path = trace_path
        self._remarks = remarks

    def write(self, exports: Exports, cycle: Cycle) -> None:
        """Write the trace under the name that TensorBoard looks for, and what else is asked for."""
        snapshot, stacks = self._manifest.snapshot_path, self._manifest.stacks_path
        self._attempt("trace", lambda: give_name(self._trace_path, self._path(TRACE)))
        if exports.key_averages:
            self._attempt(KEY_AVERAGES, self._write_key_averages)
        if exports.memory_timeline:
            self._attempt("memory timeline", self._write_memory_timeline)
            if snapshot:
                self._attempt("memory snapshot", lambda: give_name(snapshot, self._path(SNAPSHOT)))
        if exports.stacks and cycle.stacks and stacks:  # of several cycles the last one alone records them
            self._attempt("stacks", lambda: give_name(stacks, self._path(STACKS)))

    @cached_property
    def _trace(self) -> Trace:
        return without_excluded(read_trace(self._trace_path))

    def _path(self, name: str) -> Path:
        return self._folder / f"rank{self._manifest.rank}_{name}"

    def _write_key_averages(self) -> None:
        """Write the operators by shapes and stack; several processes write a table each."""
        grouped = table_rows(op_stats(self._trace, ("shapes", "stack")))
        name = file_name(KEY_AVERAGES, self._manifest.rank, self._manifest.world_size)
        files.write_text(self._folder / name, "\n".join([*table_lines(grouped), ""]))

    def _write_memory_timeline(self) -> None:
        trace = self._trace
        uses = memory_use(trace, host_tree(trace), window(trace, links(trace)))
        title = f"Memory of rank {self._manifest.rank}, {self._folder.name}"
        files.write_text(self._path(MEMORY_TIMELINE), memory_page(uses, title))

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._remarks.add(f"{self._folder.name}: {what}", error)


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
    """A run that Nsight Systems profiles, into `report`."""

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
