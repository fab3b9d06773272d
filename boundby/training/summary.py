"""What a profiled loop says of itself when it ends, in `profiler_summary.json`: a process, and a job of several.

Every process writes its own, and `write_job_summary` makes one of those that are there: the first process does so when
it stops, and so does the last one to stop. Where some were killed, anybody may do it later.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from boundby import files
from boundby.bound import Verdict
from boundby.capture import Remark
from boundby.training.judgement import TrainingVerdict, judge_training
from boundby.training.reader import ranks_in, read_stage_times
from boundby.training.records import SCHEMA_VERSION, Kind, MetricSummary, StageSummary, StageTimes, Statistics, Status
from boundby.training.results import SUMMARY, RunFiles
from boundby.training.store import DOCUMENT, LOG, file_name

if TYPE_CHECKING:
    from boundby.capture import CaptureManifest

NO_TRACE = "there is no trace of this run that could be read; manifest.json and given_up say why"
MOST_ATTEMPTS = 5  # to write a summary that no process has outdated meanwhile
WORST: tuple[Status, ...] = ("failed", "running", "finished")


class ProcessSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How far a process came, and how long its steps took."""

    rank: int
    status: Status
    error: str | None
    elapsed_s: float
    first_step: int
    last_step: int | None
    step_s: Statistics | None
    in_no_stage_share: float | None
    profiler_s: float | None = None  # of the recording


class RunSummary(ProcessSummary, frozen=True, kw_only=True):
    """The summary of one process; `verdict` is on its stages and has its text, `trace_verdict` on its trace alone."""

    schema_version: int = SCHEMA_VERSION
    world_size: int
    stages: tuple[StageSummary, ...]
    metrics: tuple[MetricSummary, ...]
    verdict: dict[str, Any]
    trace_verdict: dict[str, Any] | None
    trace_reason: str | None
    given_up: tuple[Remark, ...]
    unavailable: tuple[Remark, ...] = ()  # what this device cannot give


class RankSummary(ProcessSummary, frozen=True, kw_only=True):
    """A process of a job, and its document of stage times."""

    pid: int | None
    stage_times: str


class JobStage(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a job spend on a stage in each step, with what lies inside it."""

    name: str
    kind: Kind
    per_step_s: dict[int, float]  # by rank
    median_s: float
    slowest_rank: int
    slowest_over_median: float | None


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of several processes, by rank; status and error are those of the one that fared worst."""

    schema_version: int = SCHEMA_VERSION
    status: Status | None
    error: str | None
    world_size: int
    elapsed_s: float | None
    first_step: int | None
    last_step: int | None
    ranks: tuple[RankSummary, ...]
    missing_ranks: tuple[int, ...]
    unreadable_ranks: dict[int, str]  # with the reason
    stages: tuple[JobStage, ...]
    verdict: dict[str, Any] | None
    trace_verdict: dict[str, Any] | None
    trace_reason: str | None
    profiler_s: float | None
    given_up: dict[int, tuple[Remark, ...]]
    unavailable: dict[int, tuple[Remark, ...]]


def run_summary(times: StageTimes, manifest: "CaptureManifest | None", trace: Verdict | None) -> RunSummary:
    """Return the summary of a process from its stage times, what it recorded, and the verdict on its trace."""
    return RunSummary(
        **_of_process(times),
        world_size=times.world_size,
        stages=tuple(stage for stage in times.stages if stage.kind != "step"),
        metrics=times.metrics,
        verdict=_with_text(judge_training([times], trace)),
        trace_verdict=trace.as_dict() if trace else None,
        trace_reason=None if trace else NO_TRACE,
        profiler_s=manifest.seconds if manifest else None,
        given_up=(*times.remarks, *(manifest.downgrades if manifest else ())),
        unavailable=manifest.unavailable if manifest else (),
    )


def read_trace_verdict(run_files: RunFiles) -> Verdict | None:
    """Return the verdict on the trace of a process by its summary, None where there is none that can be read."""
    try:
        return trace_verdict_of(files.read_json(run_files.path(SUMMARY)))
    except (OSError, ValueError):
        return None


def trace_verdict_of(summary: Any) -> Verdict | None:
    """Return the verdict on the trace in the document of a summary, None where there is none that can be read."""
    try:
        verdict = summary["trace_verdict"]
        return Verdict.from_dict(verdict) if verdict else None
    except (LookupError, TypeError, ValueError):
        return None


def job_summary(folder: str | Path) -> JobSummary:
    """Return the summary of the processes of the run in a folder, of which some may be missing or unreadable.

    Raises FileNotFoundError where the run is not of several.
    """
    folder = Path(folder)
    known = [rank for rank in ranks_in(folder) if rank is not None]
    if not known:
        names = f"rank*_{DOCUMENT} or rank*_{LOG}"
        raise FileNotFoundError(f"{folder}: its newest run has no {names}; it is no run of several processes")
    processes: list[StageTimes] = []
    unreadable: dict[int, str] = {}
    for rank in known:
        try:
            processes.append(read_stage_times(folder, rank))
        except (OSError, ValueError) as error:
            unreadable[rank] = str(error)
    world_size = max([times.world_size for times in processes] + [max(known) + 1])
    files_of = {rank: RunFiles(folder, rank, max(world_size, 2)) for rank in known}
    trace = next(filter(None, map(read_trace_verdict, files_of.values())), None)
    summaries = {times.rank: _summary_of(files_of[times.rank], times) for times in processes}
    worst = min(processes, key=lambda times: WORST.index(times.status), default=None)
    return JobSummary(
        status=worst.status if worst else None,
        error=worst.error if worst else None,
        world_size=world_size,
        elapsed_s=max((times.elapsed_s for times in processes), default=None),
        first_step=min((times.first_step for times in processes), default=None),
        last_step=max((times.last_step for times in processes if times.last_step is not None), default=None),
        ranks=tuple(
            RankSummary(
                **_of_process(times),
                profiler_s=summaries[times.rank].profiler_s,
                pid=times.pid,
                stage_times=file_name(DOCUMENT, times.rank, times.world_size),
            )
            for times in processes
        ),
        missing_ranks=tuple(rank for rank in range(world_size) if rank not in known),
        unreadable_ranks=unreadable,
        stages=_stages_over_ranks(processes),
        verdict=_with_text(judge_training(processes, trace)) if processes else None,
        trace_verdict=trace.as_dict() if trace else None,
        trace_reason=None if trace else NO_TRACE,
        profiler_s=max((one.profiler_s for one in summaries.values() if one.profiler_s is not None), default=None),
        given_up={rank: one.given_up for rank, one in summaries.items() if one.given_up},
        unavailable={rank: one.unavailable for rank, one in summaries.items() if one.unavailable},
    )


def write_job_summary(folder: str | Path) -> None:
    """Write `profiler_summary.json` of all processes.

    Processes that stop at the same time may each write it; none leaves one that lacks what another had written before.
    Raises FileNotFoundError as `job_summary` does.
    """
    folder = Path(folder)
    for _ in range(MOST_ATTEMPTS):
        before = _versions(folder)
        files.write_json(folder / SUMMARY, job_summary(folder))
        if _versions(folder) == before:
            return


def merge_at_stop(run_files: RunFiles) -> None:
    """Write the summary of the job if this stopping process is the first rank or finds all others stopped.

    The others leave it: a thousand processes that read the files of a thousand are too many.
    """
    folder, world_size = run_files.folder, run_files.world_size
    others = (RunFiles(folder, rank, world_size).path(SUMMARY) for rank in range(world_size))
    if world_size > 1 and (run_files.rank == 0 or all(path.is_file() for path in others)):
        write_job_summary(folder)


def _of_process(times: StageTimes) -> dict[str, Any]:
    step = times.step
    return {
        "rank": times.rank,
        "status": times.status,
        "error": times.error,
        "elapsed_s": times.elapsed_s,
        "first_step": times.first_step,
        "last_step": times.last_step,
        "step_s": step.host_s if step else None,
        "in_no_stage_share": step.share if step else None,
    }


def _with_text(verdict: TrainingVerdict) -> dict[str, Any]:
    return {**verdict.as_dict(), "text": str(verdict).splitlines()}


def _summary_of(run_files: RunFiles, times: StageTimes) -> RunSummary:
    """Return what a process has written; where there is nothing sound, what its stage times say."""
    try:
        return files.read_as(run_files.path(SUMMARY), RunSummary)
    except (OSError, ValueError):
        return run_summary(times, None, None)


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


def _stages_over_ranks(processes: Sequence[StageTimes]) -> tuple[JobStage, ...]:
    """Return the stages in the order of their first appearance; without spans, which hold steps."""
    spent: dict[tuple[str, Kind], dict[int, float]] = {}
    for times in processes:
        steps = times.step.host_s.n if times.step else 0
        for stage in times.stages if steps else ():
            if stage.kind != "span":
                spent.setdefault((stage.name, stage.kind), {})[times.rank] = stage.host_s.total / steps
    stages = []
    for (name, kind), per_step_s in spent.items():
        slowest, middle = max(per_step_s, key=per_step_s.__getitem__), median(per_step_s.values())
        stages.append(
            JobStage(
                name=name,
                kind=kind,
                per_step_s=per_step_s,
                median_s=middle,
                slowest_rank=slowest,
                slowest_over_median=per_step_s[slowest] / middle if middle else None,
            )
        )
    return tuple(stages)
