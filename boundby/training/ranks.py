"""All processes of one run in sum: what each of them is known to have done, and who is slowest in which stage.

Every process writes its own files, and `write_merged_summary` makes one of those that are there: the first process does
so when it stops, and so does the last one to stop. Where some were killed, anybody may do it later.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from boundby import files
from boundby.training.judgement import judge_training
from boundby.training.reader import ranks_in, read_stage_times
from boundby.training.records import SCHEMA_VERSION, Kind, StageTimes, Status
from boundby.training.results import NO_TRACE, SUMMARY, RunFiles, read_trace_verdict, verdict_document
from boundby.training.store import DOCUMENT, LOG, file_name
from boundby.training.verdict import TrainingVerdict
from boundby.verdict import Verdict

MOST_ATTEMPTS = 5  # to write a summary that no process has outdated meanwhile
WORST: tuple[Status, ...] = ("failed", "running", "finished")


@dataclass(frozen=True)
class StageOverRanks:
    """The seconds per step that each process spent in a stage, with what lies inside it."""

    name: str
    kind: Kind
    per_step_s: Mapping[int, float]
    mean_s: float
    median_s: float
    minimum_s: float
    maximum_s: float
    slowest_rank: int
    slowest_over_median: float | None  # None where the median is zero


class Told(msgspec.Struct):
    """What only the summary of a process says, once it has stopped: of its recording, and what it gave up."""

    given_up: list[dict[str, Any]]
    unavailable: list[dict[str, Any]] = []
    profiler_s: float | None = None


@dataclass(frozen=True)
class MergedRanks:
    """What the processes of a run left, in the order of their ranks; some may be missing, or not be readable."""

    world_size: int
    times: tuple[StageTimes, ...]
    missing: tuple[int, ...]
    unreadable: Mapping[int, str]
    stages: tuple[StageOverRanks, ...]
    verdict: TrainingVerdict | None  # None where no process can be read
    trace: Verdict | None
    told: Mapping[int, Told]  # by rank, of those in `times`


def merge_ranks(folder: str | Path) -> MergedRanks:
    """Return what is known of the processes of the run in a folder. Raises FileNotFoundError where there is none."""
    folder = Path(folder)
    known = [rank for rank in ranks_in(folder) if rank is not None]
    if not known:
        names = f"rank*_{DOCUMENT} or rank*_{LOG}"
        raise FileNotFoundError(f"{folder}: its newest run has no {names}; it is no run of several processes")
    times, unreadable = [], {}
    for rank in known:
        try:
            times.append(read_stage_times(folder, rank))
        except (OSError, ValueError) as error:
            unreadable[rank] = str(error)
    world_size = max([process.world_size for process in times] + [max(known) + 1])
    places = {rank: RunFiles(folder, rank, max(world_size, 2)) for rank in known}
    trace = next(filter(None, map(read_trace_verdict, places.values())), None)
    return MergedRanks(
        world_size=world_size,
        times=tuple(times),
        missing=tuple(rank for rank in range(world_size) if rank not in known),
        unreadable=unreadable,
        stages=_stages(times),
        verdict=judge_training(times, trace) if times else None,
        trace=trace,
        told={process.rank: _told(places[process.rank], process) for process in times},
    )


def merged_document(merged: MergedRanks) -> dict[str, Any]:
    """Return the run in sum, under the names that the summary of a single process has, and each process' own."""
    times = merged.times
    worst = min(times, key=lambda process: WORST.index(process.status), default=None)
    steps = [process.last_step for process in times if process.last_step is not None]
    seconds = [told.profiler_s for told in merged.told.values() if told.profiler_s is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "status": worst.status if worst else None,
        "error": worst.error if worst else None,
        "world_size": merged.world_size,
        "elapsed_s": max((process.elapsed_s for process in times), default=None),
        "first_step": min((process.first_step for process in times), default=None),
        "last_step": max(steps, default=None),
        "ranks": [{**_rank(process), "profiler_s": merged.told[process.rank].profiler_s} for process in times],
        "missing_ranks": list(merged.missing),
        "unreadable_ranks": [{"rank": rank, "reason": reason} for rank, reason in merged.unreadable.items()],
        "stages": [_stage_document(stage) for stage in merged.stages],
        "training_verdict": verdict_document(merged.verdict) if merged.verdict else None,
        "verdict": merged.trace.as_dict() if merged.trace else None,
        "verdict_reason": None if merged.trace else NO_TRACE,
        "profiler_s": max(seconds, default=None),
        "given_up": [{"rank": rank, **step} for rank, told in merged.told.items() for step in told.given_up],
        "unavailable": [
            {"rank": rank, **missing} for rank, told in merged.told.items() for missing in told.unavailable
        ],
    }


def write_merged_summary(folder: str | Path) -> MergedRanks:
    """Write `profiler_summary.json` of all processes, and return what it holds.

    Processes that stop at the same time may each write it; none leaves one that lacks what another had written before.
    Raises FileNotFoundError as `merge_ranks` does.
    """
    folder = Path(folder)
    for _ in range(MOST_ATTEMPTS):
        before = _versions(folder)
        merged = merge_ranks(folder)
        files.write_json(folder / SUMMARY, merged_document(merged))
        if _versions(folder) == before:
            break
    return merged


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
        return Told([asdict(remark) for remark in times.remarks])


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


def _stages(times: list[StageTimes]) -> tuple[StageOverRanks, ...]:
    """Return the stages of all processes, in the order of their first appearance, without spans: they hold steps."""
    spent: dict[tuple[str, Kind], dict[int, float]] = {}
    for process in times:
        steps = process.step.host_s.n if process.step else 0
        for stage in process.stages if steps else ():
            if stage.kind != "span":
                spent.setdefault((stage.name, stage.kind), {})[process.rank] = stage.host_s.total / steps
    return tuple(_over_ranks(name, kind, per_step) for (name, kind), per_step in spent.items())


def _over_ranks(name: str, kind: Kind, per_step_s: dict[int, float]) -> StageOverRanks:
    seconds = list(per_step_s.values())
    slowest, middle = max(per_step_s, key=lambda rank: per_step_s[rank]), median(seconds)
    return StageOverRanks(
        name=name,
        kind=kind,
        per_step_s=per_step_s,
        mean_s=mean(seconds),
        median_s=middle,
        minimum_s=min(seconds),
        maximum_s=max(seconds),
        slowest_rank=slowest,
        slowest_over_median=per_step_s[slowest] / middle if middle else None,
    )


def _rank(times: StageTimes) -> dict[str, Any]:
    step = times.step
    return {
        "rank": times.rank,
        "status": times.status,
        "error": times.error,
        "pid": times.pid,
        "elapsed_s": times.elapsed_s,
        "first_step": times.first_step,
        "last_step": times.last_step,
        "step_s": asdict(step.host_s) if step else None,
        "in_no_stage_share": step.share if step else None,
        "stage_times": file_name(DOCUMENT, times.rank, times.world_size),
    }


def _stage_document(stage: StageOverRanks) -> dict[str, Any]:
    document = asdict(stage)
    document["per_step_s"] = [{"rank": rank, "seconds": seconds} for rank, seconds in stage.per_step_s.items()]
    return document
