"""Runs an attempt in a process of its own, in an empty folder; this process sleeps meanwhile."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence


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
