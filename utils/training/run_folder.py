"""The folder of a training run: its name, who may write there, and what says that it is one of ours."""

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundby import environment, files
from utils.errors import EnvironmentLacksError, InputError
from utils.training.plan import Plan
from utils.training.settings import TrainingSettings

if TYPE_CHECKING:
    from utils.training.process import Process

RUNS = Path("runs")
CONFIG, KIND, SCHEMA_VERSION = "config.json", "training_run", 1
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REFUSED = 0
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
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "run_id": folder.resolve().name,
        "pid": os.getpid(),
        "started_unix_s": time.time(),
        "settings": settings.model_dump(),
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
