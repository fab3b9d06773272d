"""The files that a profiled loop leaves in its folder beside the stage times, and what a person reads at its end."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from boundby import files
from boundby.bound import Verdict
from boundby.files import SILENT_S
from boundby.formatting import NOTHING, number, table
from boundby.machine import host_id
from boundby.trace import Analysis, analyze, read_trace
from boundby.training.judgement import judge_training
from boundby.training.reader import read_head
from boundby.training.records import Kind, StageTimes, Statistics
from boundby.training.store import file_name

if TYPE_CHECKING:
    from boundby.capture import CaptureManifest, Cycle

TRACE, OP_STATS, MANIFEST, SUMMARY = "trace.json", "op_stats.csv", "manifest.json", "profiler_summary.json"

CYCLES, CHROME_TRACE = "trace_cycle*.json", "chrome_trace.json"
STAGE_COLUMNS = ("stage", "share %", "median ms", "mean ms", "p95 ms", "count")
NO_STAGES = "No step has ended that nothing disturbed; there is no table of stages."
INSIDE: tuple[Kind, ...] = ("stage", "background", "excluded")
CLOCKS_DIFFER_S = 1.0  # that of the system's table of processes, and that of the program


@dataclass(frozen=True)
class RunFiles:
    """The files of one process of a run."""

    folder: Path
    rank: int
    world_size: int

    def path(self, name: str) -> Path:
        """Return the path of a file, with the rank in its name where there are several."""
        return self.folder / file_name(name, self.rank, self.world_size)


def manifest_of_nothing(run_files: RunFiles, reason: str | None) -> "CaptureManifest":
    """Return the manifest of a run that records no trace, for this reason; None where it could not."""
    from boundby.capture import CaptureManifest

    return CaptureManifest(
        rank=run_files.rank, world_size=run_files.world_size, trace_wanted=reason is None, trace_reason=reason
    )


def give_name(file: Path, path: Path) -> None:
    """Link or copy a file to `path`."""
    with files.replacing(path) as temporary:
        try:
            os.link(file, temporary)
        except OSError:  # a file system without links, or another one
            shutil.copyfile(file, temporary)


def publish_cycle(run_files: RunFiles, cycle: "Cycle") -> bool:
    """Give the trace of a cycle the names under which TensorBoard and people look for it; tell whether it has one."""
    if cycle.trace_path is None:
        return False
    give_name(cycle.trace_path, run_files.folder / f"rank{run_files.rank}.{time.time_ns()}.pt.trace.json")
    give_name(cycle.trace_path, run_files.path(CHROME_TRACE))
    return True


def stage_rows(times: StageTimes) -> list[tuple[str, ...]]:
    """Return the stages as cells under `STAGE_COLUMNS`, by the clock of the host, in steps that nothing disturbed.

    Before the first of these has ended there is none.
    """
    step = times.step
    if step is None or not step.host_s.n:
        return []
    rows = [_stage_row(stage.name, stage.share, stage.host_s) for stage in times.stages if stage.kind in INSIDE]
    return [*rows, _stage_row("(in no stage)", step.share, None), _stage_row("whole step", None, step.host_s)]


def _stage_row(name: str, share: float | None, spent: Statistics | None) -> tuple[str, ...]:
    seconds = (spent.median, spent.mean, spent.p95) if spent else (None, None, None)
    cells = (NOTHING if value is None else number(1e3 * value) for value in seconds)
    return name, NOTHING if share is None else f"{100 * share:.1f}", *cells, f"{spent.n:,}" if spent else NOTHING


def told(ranks: Sequence[StageTimes], trace: Verdict | None) -> str:
    """Return what a person reads at the end of a run: the stages of its first process, and the verdict on all."""
    rows = stage_rows(ranks[0])
    stages = "\n".join(table(STAGE_COLUMNS, rows, left=[0])) if rows else NO_STAGES
    return f"{stages}\n{judge_training(ranks, trace)}"


def analysis_of(manifest: "CaptureManifest") -> Analysis:
    """Return what the trace of the manifest says."""
    assert manifest.trace_path is not None
    cycle = next(cycle for cycle in manifest.cycles if cycle.trace_path == manifest.trace_path)
    return analyze(read_trace(manifest.trace_path), expected_steps=cycle.steps_recorded, stacks_expected=cycle.stacks)


def remove_earlier(run_files: RunFiles) -> str | None:
    """Remove the recording and the summary that an earlier run of this process left, all of it.

    Return None; or why everything stays, where that run goes on still.
    """
    times = read_head(run_files.folder, run_files.rank if run_files.world_size > 1 else None)
    if times and goes_on(times):
        which = f"process {times.pid}{'' if times.host == host_id() else ' of another machine'}"
        which = "this process" if (times.pid, times.host) == (os.getpid(), host_id()) else which
        return f"{run_files.folder}: another profiler of {which} still writes there; give each a folder of its own"
    for path in [*_recorded(run_files), run_files.path(MANIFEST), run_files.path(SUMMARY)]:
        path.unlink(missing_ok=True)
    if run_files.rank == 0:
        (run_files.folder / SUMMARY).unlink(missing_ok=True)  # of all processes
    return None


def goes_on(times: StageTimes) -> bool:
    """Tell whether a process that may be alive writes these; a later one may have got its number.

    One on another host counts as alive until it has written nothing for a day.
    """
    if times.status != "running":
        return False
    if times.host != host_id():
        return time.time() - (times.written_unix_s or times.started_unix_s or 0.0) < SILENT_S
    if times.pid is None:
        return False
    import psutil  # takes 10 ms, and is needed after a run alone that was killed or goes on

    try:
        return bool(psutil.Process(times.pid).create_time() <= (times.started_unix_s or 0.0) + CLOCKS_DIFFER_S)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _recorded(run_files: RunFiles) -> Iterator[Path]:
    """Yield what a recording leaves under fixed names, and what its manifest names in this folder."""
    yield from (run_files.path(name) for name in (TRACE, OP_STATS))
    yield from run_files.folder.glob(run_files.path(CYCLES).name)
    from boundby.capture import CaptureManifest

    try:
        manifest = files.read_as(run_files.path(MANIFEST), CaptureManifest)
    except (OSError, ValueError):
        return
    here = run_files.folder.absolute()
    yield from (path for path in manifest.files if path.absolute().parent == here)
