"""The folder of a training run: its name, what says that it is one of ours, and what was found in it."""

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from boundby import environment, files
from boundby.training import StageTimes, ranks_in, read_stage_times
from boundby.training.judgement import TrainingVerdict, judge_training
from boundby.training.records import UNUSUAL, Statistics
from boundby.training.results import RunFiles, read_trace_verdict
from utils.credentials import removed
from utils.errors import EnvironmentLacksError, InputError
from utils.render.blocks import Block, Paragraph, Table
from utils.render.formatting import NOTHING, number
from utils.training.settings import Plan, TrainingSettings

if TYPE_CHECKING:
    from utils.training.job import Process

RUNS = Path("runs")
CONFIG, KIND, SCHEMA_VERSION = "config.json", "training_run", 1
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REFUSED = 0
SCALARS = "tensorboard"  # the folder of the scalars
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "numpy", "scikit-learn")


def claim(process: "Process", settings: TrainingSettings, run_id: str | None, output: Path | None) -> Path:
    """Return the folder of this run, made and empty; all processes of a job get the same one.

    Raises InputError for a run id that is no plain name, or a folder that holds something.
    """
    if run_id is not None and not RUN_ID.fullmatch(run_id):
        raise InputError(f"--run-id {run_id!r}: letters, digits, '.', '_' and '-' only, at most 100; no path")
    moment_ns = process.agreed(time.time_ns())
    folder = output or RUNS / (run_id or _name(settings, moment_ns))
    if process.is_first:
        try:
            _make(folder)
        except Exception:
            process.agreed(REFUSED)
            raise
    if process.agreed(moment_ns) == REFUSED:
        raise InputError(f"{folder}: rank 0 could not take it; see its message")
    return folder


def describe(folder: Path, settings: TrainingSettings, plan: Plan) -> None:
    """Write config.json: what is run, with what, by which process."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "run_id": folder.resolve().name,
        "pid": os.getpid(),
        "process_space": files.process_space(),
        "started_unix_s": time.time(),
        "settings": removed(settings.model_dump()),
        "steps_planned": plan.steps,
        "epochs_planned": plan.epochs,
        "samples_per_step": plan.samples_per_step,
        "world_size": plan.world_size,
        "versions": environment.versions(PACKAGES),
        "environment": environment.settings(),
    }
    files.write_json(folder / CONFIG, document)


def is_run(folder: Path) -> bool:
    """Tell whether the folder says of itself that it is a training run."""
    try:
        document = files.read_json(folder / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND


def _name(settings: TrainingSettings, moment_ns: int) -> str:
    moment = datetime.fromtimestamp(moment_ns / 1e9, UTC)
    stamp = f"{moment:%Y%m%dT%H%M%S}.{moment.microsecond // 1000:03d}Z"
    return f"{stamp}-{settings.model}-{settings.framework}"


def _make(folder: Path) -> None:
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


def ranks_of(folder: Path) -> tuple[StageTimes, ...]:
    """Return the stage times of every process of a run. Raises OSError or ValueError where they cannot be read."""
    return tuple(read_stage_times(folder, rank) for rank in ranks_in(folder))


def judge(folder: Path, ranks: tuple[StageTimes, ...]) -> TrainingVerdict:
    """Return the verdict on a run, with what the trace of its first process says."""
    first = ranks[0]
    return judge_training(ranks, read_trace_verdict(RunFiles(folder, first.rank, first.world_size)))


def table(times: StageTimes) -> list[Block]:
    """Return the stages of one process."""
    rows = [_row(each.name, each.share, each.host_s) for each in times.stages if each.kind not in ("step", "span")]
    step = times.step
    if step is None or not step.host_s.n:
        return [Paragraph("No step has ended that nothing disturbed; there is no table of stages.")]
    rows.append(_row("(in no stage)", step.share, None))
    rows.append(_row("whole step", None, step.host_s))
    headers = ("stage", "share %", "median ms", "mean ms", "p95 ms", "count")
    which = f" of rank {times.rank} of {times.world_size}" if times.world_size > 1 else ""
    caption = f"Stages{which}, by the clock of the host, in steps that the profiler left alone"
    return [Table(headers, rows, left=(0,), caption=caption)]


def _row(name: str, share: float | None, spent: Statistics | None) -> tuple[str, ...]:
    values = (spent.median, spent.mean, spent.p95) if spent else (None, None, None)
    cells = (NOTHING if each is None else number(1e3 * each) for each in values)
    return (name, NOTHING if share is None else f"{100 * share:.1f}", *cells, f"{spent.n:,}" if spent else NOTHING)


def write_scalars(times: StageTimes, folder: Path) -> None:
    """Write the seconds of each occurrence for TensorBoard, without those that a profiler has slowed down."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for row in times.occurrences[(times.occurrences["flags"] & UNUSUAL) == 0]:
            name = times.names[row["stage"]]
            writer.add_scalar(f"{name.kind}_s/{name.name}", row["host_ns"] / 1e9, int(row["step"]))
