"""Runs an attempt in a process of its own, if need be in an environment of the peer's, and says how several differ.

An attempt runs in an empty folder, and this process sleeps meanwhile. The environment of a peer is made once, kept
under build/, and made again when what it should hold has changed.
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from boundby import files

LAST_LINES = 5  # of a failed command: pip gives its reason at the end
MOST_SECONDS = 1800.0


class AttemptFailed(Exception):
    """The process gave nothing; the message says why."""


def last_line(command: Sequence[str], limit_s: float, settings: Mapping[str, str] | None = None) -> str:
    """Return the last line that the command prints; `settings` are added to its environment.

    Raises AttemptFailed with the last line of its errors, or when it takes longer than `limit_s`; a process that is
    cut short takes its children with it.
    """
    with tempfile.TemporaryDirectory() as scratch:  # some tools leave files where they run
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=scratch,
            env={**os.environ, "TMPDIR": scratch, **(settings or {})},
            start_new_session=True,
        )
        with process:
            try:
                output, errors = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise AttemptFailed(f"did not end within {limit_s:.0f} s") from None
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    if process.returncode:
        raise AttemptFailed((errors or output).strip().split("\n")[-1] or f"exit code {process.returncode}")
    return output.strip().split("\n")[-1]


class PeerLacks(Exception):
    """The peer's environment cannot be made; the message says why."""


def prepare(root: Path, peer: str) -> Path:
    """Return the Python of the environment of `requirements-<peer>.txt` below `root`, made if need be.

    Raises PeerLacks with the reason.
    """
    folder = root / "build" / f"benchmark-{peer}"
    requirements = Path(__file__).with_name(f"requirements-{peer}.txt")
    python = folder / "bin" / "python"
    receipt, wanted = folder / "made-from.txt", _wanted(requirements)
    try:
        if receipt.is_file() and receipt.read_text(encoding="utf-8") == wanted:
            print(f"peer environment: {folder} (made before)", flush=True)
            return python
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off", "-r", str(requirements)])
        files.write_text(receipt, wanted)  # last: a half-made environment is made again
    except OSError as error:
        raise PeerLacks(str(error)) from error
    return python


def packages(python: Path) -> str:
    """Return every package of the environment with its version, in one line."""
    return ", ".join(_run([str(python), "-m", "pip", "freeze"], is_shown=False).split())


def _wanted(requirements: Path) -> str:
    return f"Python {platform.python_version()}\n{requirements.read_text(encoding='utf-8')}"


def _run(command: list[str], is_shown: bool = True) -> str:
    if is_shown:
        print(f"$ {' '.join(command)}", flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PeerLacks(f"{command[0]} did not end within {MOST_SECONDS:.0f} s") from error
    if done.returncode:
        raise PeerLacks(" | ".join((done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:]))
    return done.stdout


def spread(values: Sequence[float]) -> float | None:
    """Return the range of the values as a share of their median; None where there are fewer than two."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None
