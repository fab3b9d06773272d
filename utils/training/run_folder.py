"""The folder of a training run: its name, what says that it is one of ours, and what was found in it."""

import os
import re
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from boundby import files
from boundby.machine import environment
from boundby.training import (
    NO_STAGES,
    STAGE_COLUMNS,
    UNUSUAL,
    RunFiles,
    StageTimes,
    TrainingVerdict,
    judge_training,
    ranks_in,
    read_stage_times,
    read_trace_verdict,
    stage_rows,
)
from utils.command import EnvironmentLacksError, InputError, removed
from utils.render import Block, Paragraph, Table, plain_text
from utils.training.settings import Plan, TrainingSettings

CONFIG, KIND = "config.json", "training_run"
RUNS = Path("runs")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SCALARS = "tensorboard"  # the folder of the scalars
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "numpy", "scikit-learn")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What config.json holds: what is run, with what, by which process."""

    schema_version: Literal[1] = 1
    kind: Literal["training_run"] = KIND
    run_id: str
    pid: int
    process_space: str
    started_unix_s: float
    settings: dict[str, Any]  # of the schema `TrainingSettings`
    steps_planned: int
    epochs_planned: int
    samples_per_step: int
    world_size: int
    versions: dict[str, str | None]
    environment: dict[str, str]

    @property
    def is_recorded(self) -> bool:
        """Whether the training was to be recorded."""
        return bool(self.settings["profiling"]["enabled"])


def describe(folder: Path, settings: TrainingSettings, plan: Plan) -> None:
    """Write config.json."""
    config = RunConfig(
        run_id=folder.resolve().name,
        pid=os.getpid(),
        process_space=files.process_space(),
        started_unix_s=time.time(),
        settings=removed(settings.model_dump()),
        steps_planned=plan.steps,
        epochs_planned=plan.epochs,
        samples_per_step=plan.samples_per_step,
        world_size=plan.world_size,
        versions=environment.versions(PACKAGES),
        environment=environment.settings(),
    )
    files.write_json(folder / CONFIG, config)


def named(run_id: str | None, output: Path | None, name: str) -> Path:
    """Return the folder that is asked for, or one of this name. Raises InputError for a run id that is a path."""
    if run_id is not None and not RUN_ID.fullmatch(run_id):
        raise InputError(f"--run-id {run_id!r}: letters, digits, '.', '_' and '-' only, at most 100; no path")
    return output or RUNS / (run_id or name)


def make(folder: Path) -> None:
    """Make the folder of a run. Raises InputError where it holds something, EnvironmentLacksError if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            what = "an earlier run" if is_run(folder) else "other files"
            raise InputError(f"{folder}: holds {what}; nothing is overwritten: give another --run-id or --output")
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{folder}: is no folder; give another --run-id or --output") from None
    except OSError as error:
        raise EnvironmentLacksError(
            f"{folder}: cannot be written: {error.strerror}; give another --output, or make room"
        ) from None


def is_run(folder: Path) -> bool:
    """Tell whether the folder says of itself that it is a training run."""
    try:
        document = files.read_json(folder / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND


def ranks_of(folder: Path) -> tuple[StageTimes, ...]:
    """Return the stage times of every process of a run. Raises OSError or ValueError where they cannot be read."""
    return tuple(read_stage_times(folder, rank) for rank in ranks_in(folder))


def judge(folder: Path, ranks: tuple[StageTimes, ...]) -> TrainingVerdict:
    """Return the verdict on a run, with what the trace of its first process says."""
    first = ranks[0]
    return judge_training(ranks, read_trace_verdict(RunFiles(folder, first.rank, first.world_size)))


def told(folder: Path) -> dict[str, Any]:
    """Return a run that has ended as --json prints it: where it lies, its files, and the verdict if it was recorded."""
    ranks = ranks_of(folder)
    verdict = judge(folder, ranks).as_dict() if ranks else None
    return {"folder": str(folder), "files": files_in(folder), "verdict": verdict}


def files_in(folder: Path) -> list[str]:
    """Return the names of the files of a run, without those that are being written."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(files.TEMPORARY_PREFIX))


def lines(folder: Path, ranks: tuple[StageTimes, ...]) -> list[str]:
    """Return what a person reads of a recorded run: the stages of its first process, and the verdict on all."""
    return [*plain_text.lines([table(ranks[0])]), "", *str(judge(folder, ranks)).splitlines()]


def table(times: StageTimes) -> Block:
    """Return the stages of one process."""
    rows = stage_rows(times)
    if not rows:
        return Paragraph(NO_STAGES)
    which = f" of rank {times.rank} of {times.world_size}" if times.world_size > 1 else ""
    caption = f"Stages{which}, by the clock of the host, in steps that the profiler left alone"
    return Table(STAGE_COLUMNS, rows, left=(0,), caption=caption)


def write_scalars(times: StageTimes, folder: Path) -> None:
    """Write the seconds of each occurrence for TensorBoard, without those that a profiler has slowed down."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for row in times.occurrences[(times.occurrences["flags"] & UNUSUAL) == 0]:
            name = times.names[row["stage"]]
            writer.add_scalar(f"{name.kind}_s/{name.name}", row["host_ns"] / 1e9, int(row["step"]))
