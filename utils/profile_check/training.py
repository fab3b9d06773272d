"""Check a training run: its configuration, its metrics, and the stage times of its processes, each and as one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from boundby.training import StageTimes, ranks_in, read_stage_times
from boundby.training.records import UNUSUAL, times_from
from boundby.training.results import SUMMARY, goes_on
from boundby.training.store import DOCUMENT
from utils.profile_check.subject import Check, Subject
from utils.training import progress, run_folder
from utils.training.progress import Metrics

NS_PER_S = 1e9
SAME = 1e-9  # relative: sums of the same numbers in another order
AGAIN = "train again"


class ProfilingSettings(msgspec.Struct):
    """Whether anything was to be recorded."""

    enabled: bool


class Settings(msgspec.Struct):
    """What is read of the settings of a run."""

    profiling: ProfilingSettings


class Config(msgspec.Struct):
    """What is read of config.json."""

    schema_version: Literal[1]
    kind: Literal["training_run"]
    steps_planned: int
    world_size: int
    settings: Settings


@dataclass(frozen=True)
class Process:
    """One process of a run: where its files are, and its stage times, None where they cannot be read."""

    subject: Subject
    times: StageTimes | None

    @property
    def has_recorded(self) -> bool:
        """Whether there has to be what a recording leaves: also its absence is in a manifest, once a run has ended."""
        return self.subject.manifest.is_file() or (self.times is not None and self.times.status != "running")


@dataclass(frozen=True)
class TrainingRun:
    """A training run as far as it can be read; without a configuration it is of a loop of the user's own."""

    processes: tuple[Process, ...]

    @property
    def times(self) -> tuple[StageTimes, ...]:
        """The stage times of all processes that have some."""
        return tuple(each.times for each in self.processes if each.times)


class Total(msgspec.Struct):
    """The times of one stage."""

    n: int
    total: float


class SummaryStage(msgspec.Struct):
    """One stage in the summary of a process."""

    name: str
    kind: str
    host_s: Total


class Summary(msgspec.Struct):
    """What is read of the summary of a process."""

    status: str
    stages: list[SummaryStage]


class Rank(msgspec.Struct):
    """One process in the summary of several."""

    rank: int


class JobSummary(msgspec.Struct):
    """What is read of the summary of several processes."""

    ranks: list[Rank]
    missing_ranks: list[int]


def read(subject: Subject) -> tuple[TrainingRun | None, list[Check]]:
    """Return the training run in the folder, None where it is another profile, and what is to be said about it."""
    ranks, has_config = ranks_in(subject.folder), (subject.folder / run_folder.CONFIG).is_file()
    if subject.is_pipeline or not (ranks or has_config):
        return None, []
    config, checks = _config(subject) if has_config else (None, [])
    processes = []
    for rank in ranks:
        own = replace(subject, prefix="" if rank is None else f"rank{rank}_", has_table=True)
        times, said = _stage_times(own, rank)
        checks += said
        if times is not None:
            checks += _summary(own, times)
        processes.append(Process(own, times))
    run = TrainingRun(tuple(processes))
    if config is not None:
        checks += [*_metrics(subject, config, run), *_recorded(subject, config, ranks)]
    return run, [*checks, *_together(subject, run.times)]


def _config(subject: Subject) -> tuple[Config | None, list[Check]]:
    path = subject.folder / run_folder.CONFIG
    config, checks = subject.read("configuration", path, Config, "the settings of the training", AGAIN)
    if config is None:
        return None, checks
    told = f"{config.steps_planned:,} steps, {config.world_size} process(es)"
    return config, [subject.ok("configuration", path, told)]


def _recorded(subject: Subject, config: Config, ranks: Sequence[int | None]) -> Iterator[Check]:
    path = subject.folder / run_folder.CONFIG
    if not config.settings.profiling.enabled:
        yield subject.note("profiling", path, "profiling.enabled was false: the run was not recorded (--profiler on)")
    elif len(ranks) < config.world_size:
        text = f"stage times of {len(ranks)} of {config.world_size} process(es) are here"
        yield subject.fault("processes", path, text, AGAIN)


def _metrics(subject: Subject, config: Config, run: TrainingRun) -> Iterator[Check]:
    path = subject.folder / progress.FILE
    metrics, checks = subject.read("metrics", path, Metrics, "losses, speed and accuracy", AGAIN)
    yield from checks
    if metrics is None:
        return
    wrong = [*_untrue(metrics, config), *(_unlike(metrics, config, run.times[0]) if run.times else ())]
    for text in wrong:
        yield subject.fault("metrics", path, text, AGAIN)
    if metrics.non_finite_losses:
        yield subject.note("losses", path, f"{metrics.non_finite_losses:,} losses are no finite numbers (null here)")
    if metrics.status in ("failed", "interrupted"):
        yield subject.note("status", path, f"the training was {metrics.status}: {metrics.error}")
    if not wrong:
        yield subject.ok("metrics", path, f"{len(metrics.steps.step):,} steps, {len(metrics.epochs)} epochs")


def _untrue(metrics: Metrics, config: Config) -> Iterator[str]:
    """Yield what cannot be true of metrics by themselves."""
    steps = metrics.steps
    if not len(steps.step) == len(steps.loss) == len(steps.samples_per_s):
        yield "its columns differ in length"
    if steps.step != list(range(len(steps.step))):
        yield "its steps are not numbered one by one"
    if metrics.non_finite_losses != steps.loss.count(None):
        yield f"{metrics.non_finite_losses} losses are said not to be finite, {steps.loss.count(None)} are null"
    if any(each <= 0 for each in steps.samples_per_s):
        yield "a speed is not above zero"
    if any(each.accuracy is not None and not 0 <= each.accuracy <= 1 for each in metrics.epochs):
        yield "an accuracy is not between 0 and 1"
    if sum(each.steps for each in metrics.epochs) > len(steps.step):
        yield "its epochs have more steps than there are"
    if metrics.status == "finished" and len(steps.step) != config.steps_planned:
        yield f"it says finished after {len(steps.step)} of {config.steps_planned} steps"


def _unlike(metrics: Metrics, config: Config, times: StageTimes) -> Iterator[str]:
    """Yield where the metrics and the stage times of the first process contradict one another."""
    if metrics.status == "running" or times.status == "running":
        return  # the two are written at moments of their own
    count = 0 if times.last_step is None else times.last_step - times.first_step + 1
    if count != len(metrics.steps.step):
        yield f"it has {len(metrics.steps.step)} steps, the stage times have {count}"
    if "loss" not in times.metric_names:
        return
    rows = times.metric_rows[times.metric_rows["metric"] == times.metric_names.index("loss")]
    known = dict(enumerate(metrics.steps.loss))
    if any(known.get(int(row["step"])) not in (None, float(row["value"])) for row in rows):
        yield "its losses are not those of the stage times"


def _together(subject: Subject, times: Sequence[StageTimes]) -> Iterator[Check]:
    """Yield what is to be said about the summary of several processes."""
    if not times or times[0].world_size == 1:
        return
    path = subject.folder / SUMMARY
    if not path.exists() and any(each.status == "running" for each in times):
        return
    summary, checks = subject.read("summary", path, JobSummary, "all processes in sum", AGAIN)
    yield from checks
    if summary is None:
        return
    found, missing = [process.rank for process in summary.ranks], summary.missing_ranks
    here = [each.rank for each in times]
    if found != here or missing:
        told, lacking = (", ".join(map(str, each)) or "none" for each in (found, missing))
        text = f"it is of the ranks {told} (missing: {lacking}); those here are {', '.join(map(str, here))}"
        yield subject.fault("summary", path, text, AGAIN)
    else:
        yield subject.ok("summary", path, f"of the ranks {', '.join(map(str, found))}")


def _stage_times(subject: Subject, rank: int | None) -> tuple[StageTimes | None, list[Check]]:
    """Return the stage times of a process, None where there are none to be read, and what is to be said about them."""
    path = subject.folder / f"{subject.prefix}{DOCUMENT}"
    checks: list[Check] = []
    try:
        checks += _rows(subject, path, times_from(path.read_bytes()))
    except (OSError, ValueError) as error:
        checks.append(_unread(subject, path, error))
    try:
        times = read_stage_times(subject.folder, rank)  # with what the log holds beyond it
    except (OSError, ValueError):
        return None, checks
    return times, [*checks, *_ending(subject, path, times), *_remarks(subject, path, times)]


def _summary(subject: Subject, times: StageTimes) -> Iterator[Check]:
    """Yield what is to be said about the summary of a process that has ended."""
    path = subject.folder / f"{subject.prefix}{SUMMARY}"
    if times.status == "running" and not path.is_file():
        return
    summary, checks = subject.read("summary", path, Summary, "the run in sum", AGAIN)
    yield from checks
    if summary is None:
        return
    status, told = summary.status, {(stage.name, stage.kind): stage.host_s for stage in summary.stages}
    wrong = [] if status == times.status else [f"status is {status} here and {times.status} in {DOCUMENT}"]
    for each in times.stages:
        if each.kind != "step":
            there = told.get((each.name, each.kind))
            if there is None or (there.n, there.total) != (each.host_s.n, each.host_s.total):
                wrong.append(f"{each.name} is not as in {DOCUMENT}")
    for text in wrong:
        yield subject.fault("summary", path, text, AGAIN)
    if not wrong:
        yield subject.ok("summary", path, f"as in {DOCUMENT}: {len(told)} stages, {status}")


def _unread(subject: Subject, path: Path, error: Exception) -> Check:
    if isinstance(error, FileNotFoundError):
        return subject.fault("existence", path, "it is missing: the times of the stages", AGAIN)
    return subject.fault("stage times", path, f"it cannot be read: {type(error).__name__}: {error}", AGAIN)


def _rows(subject: Subject, path: Path, times: StageTimes) -> Iterator[Check]:
    """Yield whether the summaries are those of the rows, as far as these reach back."""
    rows, step = times.occurrences, times.step
    usual = rows[(rows["flags"] & UNUSUAL) == 0]
    if (usual["self_ns"] < 0).any() or (usual["host_ns"] < 0).any():
        yield subject.fault("nesting", path, "a stage is shorter than what lies inside it", AGAIN)
    if len(rows) < times.num_occurrences:
        kept = f"the last {len(rows):,} of {times.num_occurrences:,} occurrences; sums are over all"
        yield subject.note("rows", path, kept)
        return
    wrong = [each.name for place, each in enumerate(times.names) if not _agree(times, place)]
    for name in wrong:
        yield subject.fault("sums", path, f"the summary of {name} is not that of its occurrences", AGAIN)
    numbers = times.rows_of("step", "step")["step"]
    if len(numbers) and (np.diff(numbers) <= 0).any():
        yield subject.fault("steps", path, "the numbers of the steps do not rise", AGAIN)
    if not wrong:
        judged = step.host_s.n if step else 0
        told = f"{len(numbers):,} steps, {judged:,} of them undisturbed, {len(rows):,} occurrences; sums as in the rows"
        yield subject.ok("stage times", path, told)


def _agree(times: StageTimes, place: int) -> bool:
    """Tell whether the summary of a name is that of its rows."""
    name = times.names[place]
    found = times.stage(name.name, name.kind)
    rows = times.occurrences[times.occurrences["stage"] == place]
    usual = rows[(rows["flags"] & UNUSUAL) == 0]
    if found is None:
        return not len(rows)
    sums = (usual["host_ns"].sum() / NS_PER_S, usual["self_ns"].sum() / NS_PER_S)
    counted = (found.host_s.n, found.unusual) == (len(usual), len(rows) - len(usual))
    return counted and all(
        math.isclose(there, here, rel_tol=SAME, abs_tol=SAME)
        for there, here in zip((found.host_s.total, found.self_total_s), sums, strict=True)
    )


def _ending(subject: Subject, path: Path, times: StageTimes) -> Iterator[Check]:
    last = "no step has ended" if times.last_step is None else f"the last step that has ended is {times.last_step}"
    if times.status == "failed":
        yield subject.note("status", path, f"the training failed: {times.error}; {last}")
    elif goes_on(times):
        yield subject.note("status", path, f"it runs still; {last}")
    elif times.status == "running":
        yield subject.fault("status", path, f"the training was killed; {last}; what had been recorded is whole", AGAIN)
    if times.status != "running" and not (times.step and times.step.host_s.n):
        yield subject.fault("steps", path, "no undisturbed step has ended", "train for more steps")


def _remarks(subject: Subject, path: Path, times: StageTimes) -> Iterator[Check]:
    for each in times.remarks:
        often = f" ({each.count} times)" if each.count > 1 else ""
        yield subject.note("given up", path, f"given up: {each.what}: {each.reason}{often}")
