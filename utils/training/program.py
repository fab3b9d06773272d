"""Run a training program of somebody's own with its steps recorded, without a change to it, and say what they show."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import boundby.training
from boundby import files
from boundby.cli import typed
from boundby.machine import environment
from utils.command import InputError, removed
from utils.training import run_folder

STARTUP = Path(boundby.training.__file__).parent / "startup"
FOLDER_VARIABLE, NOT_RECORDED = "BOUNDBY_RECORD_INTO", "not_recorded.txt"  # as in its sitecustomize.py
PROGRAM = "program.json"
NOTHING_SEEN = (
    "nothing was recorded: no second optimizer step of torch was seen. The program must be started by a Python that "
    "reads PYTHONPATH (no -I, -E or -S), and train with torch.optim"
)
Say = Callable[[str], object]


def run(program: Sequence[str], run_id: str | None, output: Path | None, say: Say, note: Say) -> tuple[int, Path]:
    """Run the program, record it into a folder of its own, say the verdict; return its exit code and that folder.

    Its input and output are its own. Raises InputError where there is no such program, or the folder cannot be taken.
    """
    if shutil.which(program[0]) is None:
        raise InputError(f"{program[0]}: no such program; give what you would type: boundby train -- python train.py")
    started = datetime.now(UTC)
    named = next((Path(word).stem for word in program[1:] if word.endswith(".py")), Path(program[0]).name)
    folder = run_folder.named(run_id, output, f"{started:%Y%m%dT%H%M%S}Z-{named}").resolve()
    run_folder.make(folder)
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    note(f"recording the steps of {' '.join(program)} into {folder}")
    began = time.monotonic()
    code = _waited(program, {**os.environ, "PYTHONPATH": path, FOLDER_VARIABLE: str(folder)})
    facts = {
        "program": removed(list(program)),
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 3),
        "started": started.isoformat(timespec="seconds"),
        "environment": environment.settings(),
    }
    files.write_json(folder / PROGRAM, facts)
    say("\n".join(_closing(folder, code)))
    return code, folder


def _waited(program: Sequence[str], variables: dict[str, str]) -> int:
    """Return the exit code of the program, as a shell counts it; what is to stop us stops the program first."""
    child = subprocess.Popen(program, env=variables)
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except BaseException as stop:
            if child.poll() is None and not isinstance(stop, KeyboardInterrupt):  # a terminal tells the child itself
                child.send_signal(signal.SIGTERM)


def _closing(folder: Path, code: int) -> Iterator[str]:
    try:
        ranks = run_folder.ranks_of(folder)
    except (OSError, ValueError) as error:
        yield f"{folder}: what was recorded cannot be read: {error}"
        return
    if code:
        yield f"the program ended with {code}"
    if not ranks:
        why = folder / NOT_RECORDED
        yield f"nothing was recorded: {why.read_text(encoding='utf-8').strip()}" if why.is_file() else NOTHING_SEEN
        return
    yield from run_folder.lines(folder, ranks)
    yield from (f"{remark.what}: {remark.reason}" for remark in ranks[0].remarks)
    yield f"\nin {folder}; beside others of yours: {typed('monitor', str(folder.parent))}"
