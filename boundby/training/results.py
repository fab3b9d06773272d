"""What a profiled loop leaves in its folder when it ends, beside the stage times: from the trace, and in sum.

Every process writes its own files, and `write_merged_summary` makes one of those that are there: the first process does
so when it stops, and so does the last one to stop. Where some were killed, anybody may do it later.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import msgspec

from boundby import files
from boundby.bound import Verdict
from boundby.files import SILENT_S
from boundby.formatting import NOTHING, number, table
from boundby.machine import host_id
from boundby.trace import Analysis, analyze, read_trace
from boundby.training.judgement import TrainingVerdict, judge_training
from boundby.training.reader import ranks_in, read_head, read_stage_times
from boundby.training.records import SCHEMA_VERSION, Kind, StageTimes, Statistics, Status
from boundby.training.store import DOCUMENT, LOG, file_name

if TYPE_CHECKING:
    from boundby.capture import CaptureManifest, Cycle

TRACE, OP_STATS, MANIFEST, SUMMARY = "trace.json", "op_stats.csv", "manifest.json", "profiler_summary.json"

CYCLES = "trace_cycle*.json"
CLOCKS_DIFFER_S = 1.0  # that of the system's table of processes, and that of the program
NO_TRACE = "there is no trace of this run that could be read; manifest.json and given_up say why"


@dataclass(frozen=True)
class RunFiles:
    """The files of one process of a run."""

    folder: Path
    rank: int
    world_size: int

    def path(self, name: str) -> Path:
        """Return the path of a file, with the rank in its name where there are several."""
        return self.folder / file_name(name, self.rank, self.world_size)


def manifest_of_nothing(place: RunFiles, reason: str | None) -> "CaptureManifest":
    """Return the manifest of a run that records no trace, for this reason; None where it could not."""
    from boundby.capture import CaptureManifest

    return CaptureManifest(
        rank=place.rank, world_size=place.world_size, trace_wanted=reason is None, trace_reason=reason
    )


def give_name(file: Path, path: Path) -> None:
    """Link or copy a file to `path`."""
    with files.replacing(path) as temporary:
        try:
            os.link(file, temporary)
        except OSError:  # a file system without links, or another one
            shutil.copyfile(file, temporary)


def publish_cycle(place: RunFiles, cycle: "Cycle") -> bool:
    """Give the trace of a cycle the names under which TensorBoard and people look for it; tell whether it has one."""
    if cycle.trace_path is None:
        return False
    give_name(cycle.trace_path, place.folder / f"rank{place.rank}.{time.time_ns()}.pt.trace.json")
    give_name(cycle.trace_path, place.path(CHROME_TRACE))
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


def summary_document(times: StageTimes, manifest: "CaptureManifest | None", verdict: Verdict | None) -> dict[str, Any]:
    """Return the summary of the run: its stages, the verdicts on it and on its trace, and what was given up."""
    given_up = [msgspec.structs.asdict(remark) for remark in times.remarks]
    if manifest:
        given_up += [msgspec.structs.asdict(downgrade) for downgrade in manifest.downgrades]
    return {
        "schema_version": SCHEMA_VERSION,
        **_of_process(times),
        "world_size": times.world_size,
        "stages": [asdict(stage) for stage in times.stages if stage.kind != "step"],
        "metrics": [asdict(metric) for metric in times.metrics],
        "verdict": verdict_document(judge_training([times], verdict)),
        "trace_verdict": verdict.as_dict() if verdict else None,
        "trace_reason": None if verdict else NO_TRACE,
        "profiler_s": manifest.seconds if manifest else None,
        "given_up": given_up,
        "unavailable": [msgspec.structs.asdict(missing) for missing in manifest.unavailable] if manifest else [],
    }


def _of_process(times: StageTimes) -> dict[str, Any]:
    step = times.step
    return {
        "rank": times.rank,
        "status": times.status,
        "error": times.error,
        "elapsed_s": times.elapsed_s,
        "first_step": times.first_step,
        "last_step": times.last_step,
        "step_s": asdict(step.host_s) if step else None,
        "in_no_stage_share": step.share if step else None,
    }


def trace_verdict_of(summary: Any) -> Verdict | None:
    """Return the verdict on the trace that stands in a summary, None where there is none that can be read."""
    try:
        verdict = summary["trace_verdict"]
        return Verdict.from_dict(verdict) if verdict else None
    except (LookupError, TypeError, ValueError):
        return None


def read_trace_verdict(place: RunFiles) -> Verdict | None:
    """Return the verdict on the trace of a process by its summary, None where there is none that can be read."""
    try:
        return trace_verdict_of(files.read_json(place.path(SUMMARY)))
    except (OSError, ValueError):
        return None


def verdict_document(verdict: TrainingVerdict) -> dict[str, Any]:
    """Return the verdict on a run with its text."""
    return {**verdict.as_dict(), "text": str(verdict).splitlines()}


def remove_earlier(place: RunFiles) -> str | None:
    """Remove the recording and the summary that an earlier run of this process left, all of it.

    Return None; or why everything stays, where that run goes on still.
    """
    times = read_head(place.folder, place.rank if place.world_size > 1 else None)
    if times and goes_on(times):
        which = f"process {times.pid}{'' if times.host == host_id() else ' of another machine'}"
        which = "this process" if (times.pid, times.host) == (os.getpid(), host_id()) else which
        return f"{place.folder}: another profiler of {which} still writes there; give each a folder of its own"
    for path in [*_recorded(place), place.path(MANIFEST), place.path(SUMMARY)]:
        path.unlink(missing_ok=True)
    if place.rank == 0:
        (place.folder / SUMMARY).unlink(missing_ok=True)  # of all processes
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


def _recorded(place: RunFiles) -> Iterator[Path]:
    """Yield what a recording leaves under fixed names, and what its manifest names in this folder."""
    yield from (place.path(name) for name in (TRACE, OP_STATS))
    yield from place.folder.glob(place.path(CYCLES).name)
    from boundby.capture import CaptureManifest

    try:
        manifest = files.read_as(place.path(MANIFEST), CaptureManifest)
    except (OSError, ValueError):
        return
    here = place.folder.absolute()
    yield from (path for path in manifest.files if path.absolute().parent == here)


CHROME_TRACE = "chrome_trace.json"
STAGE_COLUMNS = ("stage", "share %", "median ms", "mean ms", "p95 ms", "count")
NO_STAGES = "No step has ended that nothing disturbed; there is no table of stages."
INSIDE: tuple[Kind, ...] = ("stage", "background", "excluded")
MOST_ATTEMPTS = 5  # to write a summary that no process has outdated meanwhile
WORST: tuple[Status, ...] = ("failed", "running", "finished")


class Told(msgspec.Struct):
    """What only the summary of a process says, once it has stopped: of its recording, and what it gave up."""

    given_up: list[dict[str, Any]]
    unavailable: list[dict[str, Any]] = []
    profiler_s: float | None = None


def merged_summary(folder: str | Path) -> dict[str, Any]:
    """Return what the processes of the run in a folder left, under the names that the summary of a single one has.

    Some processes may be missing, or not be readable. Raises FileNotFoundError where the run is not of several.
    """
    folder = Path(folder)
    known = [rank for rank in ranks_in(folder) if rank is not None]
    if not known:
        names = f"rank*_{DOCUMENT} or rank*_{LOG}"
        raise FileNotFoundError(f"{folder}: its newest run has no {names}; it is no run of several processes")
    times: list[StageTimes] = []
    unreadable = []
    for rank in known:
        try:
            times.append(read_stage_times(folder, rank))
        except (OSError, ValueError) as error:
            unreadable.append({"rank": rank, "reason": str(error)})
    world_size = max([process.world_size for process in times] + [max(known) + 1])
    places = {rank: RunFiles(folder, rank, max(world_size, 2)) for rank in known}
    trace = next(filter(None, map(read_trace_verdict, places.values())), None)
    told = {process.rank: _told(places[process.rank], process) for process in times}
    worst = min(times, key=lambda process: WORST.index(process.status), default=None)
    return {
        "schema_version": SCHEMA_VERSION,
        "status": worst.status if worst else None,
        "error": worst.error if worst else None,
        "world_size": world_size,
        "elapsed_s": max((process.elapsed_s for process in times), default=None),
        "first_step": min((process.first_step for process in times), default=None),
        "last_step": max((process.last_step for process in times if process.last_step is not None), default=None),
        "ranks": [
            _of_process(process)
            | {
                "pid": process.pid,
                "stage_times": file_name(DOCUMENT, process.rank, process.world_size),
                "profiler_s": told[process.rank].profiler_s,
            }
            for process in times
        ],
        "missing_ranks": [rank for rank in range(world_size) if rank not in known],
        "unreadable_ranks": unreadable,
        "stages": _stages_over_ranks(times),
        "verdict": verdict_document(judge_training(times, trace)) if times else None,
        "trace_verdict": trace.as_dict() if trace else None,
        "trace_reason": None if trace else NO_TRACE,
        "profiler_s": max((one.profiler_s for one in told.values() if one.profiler_s is not None), default=None),
        "given_up": [{"rank": rank, **step} for rank, one in told.items() for step in one.given_up],
        "unavailable": [{"rank": rank, **missing} for rank, one in told.items() for missing in one.unavailable],
    }


def write_merged_summary(folder: str | Path) -> None:
    """Write `profiler_summary.json` of all processes.

    Processes that stop at the same time may each write it; none leaves one that lacks what another had written before.
    Raises FileNotFoundError as `merged_summary` does.
    """
    folder = Path(folder)
    for _ in range(MOST_ATTEMPTS):
        before = _versions(folder)
        files.write_json(folder / SUMMARY, merged_summary(folder))
        if _versions(folder) == before:
            return


def merge_at_stop(place: RunFiles) -> None:
    """Write the merged summary if this stopping process is the first rank or finds all others stopped.

    The others leave it: a thousand processes that read the files of a thousand are too many.
    """
    others = (RunFiles(place.folder, rank, place.world_size) for rank in range(place.world_size))
    if place.world_size > 1 and (place.rank == 0 or all(other.path(SUMMARY).is_file() for other in others)):
        write_merged_summary(place.folder)


def _told(place: RunFiles, times: StageTimes) -> Told:
    """Return what the summary of a process says; where there is none yet, its stage times know what they gave up."""
    try:
        return msgspec.convert(files.read_json(place.path(SUMMARY)), Told)
    except (OSError, ValueError):
        return Told([msgspec.structs.asdict(remark) for remark in times.remarks])


def _versions(folder: Path) -> list[tuple[str, int, int]]:
    """Return inode and time of the files of all processes, which change when one writes."""
    versions = []
    for name in (DOCUMENT, SUMMARY):
        for path in sorted(folder.glob(f"rank*_{name}")):
            try:
                status = path.stat()
            except OSError:
                continue
            versions.append((path.name, status.st_ino, status.st_mtime_ns))
    return versions


def _stages_over_ranks(times: list[StageTimes]) -> list[dict[str, Any]]:
    """Return the seconds per step that each process spent in a stage, with what lies inside it, and who is slowest.

    The stages come in the order of their first appearance; without spans, which hold steps.
    """
    spent: dict[tuple[str, Kind], dict[int, float]] = {}
    for process in times:
        steps = process.step.host_s.n if process.step else 0
        for stage in process.stages if steps else ():
            if stage.kind != "span":
                spent.setdefault((stage.name, stage.kind), {})[process.rank] = stage.host_s.total / steps
    documents: list[dict[str, Any]] = []
    for (name, kind), per_step_s in spent.items():
        seconds, slowest = list(per_step_s.values()), max(per_step_s, key=lambda rank: per_step_s[rank])
        middle = median(seconds)
        documents.append(
            {
                "name": name,
                "kind": kind,
                "per_step_s": [{"rank": rank, "seconds": own_s} for rank, own_s in per_step_s.items()],
                "mean_s": mean(seconds),
                "median_s": middle,
                "minimum_s": min(seconds),
                "maximum_s": max(seconds),
                "slowest_rank": slowest,
                "slowest_over_median": per_step_s[slowest] / middle if middle else None,
            }
        )
    return documents
