"""Check a training run: its configuration, its metrics, and its processes as one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from boundby.training import StageTimes, ranks_in
from boundby.training.results import SUMMARY
from utils.profile_check import stage_times
from utils.profile_check.stage_times import AGAIN
from utils.profile_check.subject import Check, Subject, read_strictly
from utils.training import progress, run_folder


class ProfilingSettings(msgspec.Struct):
    """Whether anything was to be recorded."""

    enabled: bool


class Settings(msgspec.Struct):
    """What is read of the settings of a run."""

    framework: str
    profiling: ProfilingSettings


class Config(msgspec.Struct):
    """What is read of config.json."""

    schema_version: Literal[1]
    kind: Literal["training_run"]
    steps_planned: int
    world_size: int
    settings: Settings


class Steps(msgspec.Struct):
    """The columns of metrics.json."""

    step: list[int]
    loss: list[float | None]
    samples_per_s: list[float]


class Epoch(msgspec.Struct):
    """One epoch."""

    epoch: int
    steps: int
    accuracy: float | None


class Metrics(msgspec.Struct):
    """What is read of metrics.json."""

    schema_version: Literal[1]
    status: Literal["running", "finished", "failed", "interrupted"]
    error: str | None
    steps_planned: int
    non_finite_losses: int
    epochs: list[Epoch]
    steps: Steps


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
    is_profiled: bool

    @property
    def times(self) -> tuple[StageTimes, ...]:
        """The stage times of all processes that have some."""
        return tuple(each.times for each in self.processes if each.times)


def read(subject: Subject) -> tuple[TrainingRun | None, list[Check]]:
    """Return the training run in the folder, None where it is another profile, and what is to be said about it."""
    ranks, has_config = ranks_in(subject.folder), (subject.folder / run_folder.CONFIG).is_file()
    if subject.is_pipeline or not (ranks or has_config):
        return None, []
    config, checks = _config(subject) if has_config else (None, [])
    processes = []
    for rank in ranks:
        own = replace(subject, prefix="" if rank is None else f"rank{rank}_", has_table=True)
        times, said = stage_times.read(own, rank)
        checks += said
        if times is not None:
            checks += stage_times.summary(own, times)
        processes.append(Process(own, times))
    is_profiled = bool(ranks) or config is None or config.settings.profiling.enabled
    run = TrainingRun(tuple(processes), is_profiled)
    if config is not None:
        checks += [*_metrics(subject, config, run), *_recorded(subject, config, ranks)]
    return run, [*checks, *_together(subject, run.times)]


def _config(subject: Subject) -> tuple[Config | None, list[Check]]:
    path = subject.folder / run_folder.CONFIG
    try:
        config = read_strictly(path, Config)
    except (OSError, ValueError) as error:
        return None, [subject.unreadable("configuration", path, error)]
    told = f"{config.settings.framework}, {config.steps_planned:,} steps, {config.world_size} process(es)"
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
    try:
        metrics = read_strictly(path, Metrics)
    except FileNotFoundError:
        yield subject.fault("existence", path, "it is missing: losses, speed and accuracy", AGAIN)
        return
    except (OSError, ValueError) as error:
        yield subject.unreadable("metrics", path, error)
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
    if config.settings.framework != "loop" or "loss" not in times.metric_names:
        return  # the callbacks log what their framework makes of the losses
    rows = times.metric_rows[times.metric_rows["metric"] == times.metric_names.index("loss")]
    known = dict(enumerate(metrics.steps.loss))
    if any(known.get(int(row["step"])) not in (None, float(row["value"])) for row in rows):
        yield "its losses are not those of the stage times"


def _together(subject: Subject, times: Sequence[StageTimes]) -> Iterator[Check]:
    """Yield what is to be said about the summary of several processes."""
    if not times or times[0].world_size == 1:
        return
    path: Path = subject.folder / SUMMARY
    try:
        document = read_strictly(path, dict[str, Any])
        found = [each["rank"] for each in document["ranks"]]
        missing = document["missing_ranks"]
    except FileNotFoundError:
        if all(each.status != "running" for each in times):
            yield subject.fault("existence", path, "it is missing: all processes in sum", AGAIN)
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield subject.unreadable("summary", path, error)
        return
    here = [each.rank for each in times]
    if found != here or missing:
        told, lacking = (", ".join(map(str, each)) or "none" for each in (found, missing))
        text = f"it is of the ranks {told} (missing: {lacking}); those here are {', '.join(map(str, here))}"
        yield subject.fault("summary", path, text, AGAIN)
    else:
        yield subject.ok("summary", path, f"of the ranks {', '.join(map(str, found))}")
