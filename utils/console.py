"""Speak to the person at the terminal and to the log: results on stdout, progress on stderr, everything in the file."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from boundby.formatting import printable

HEARTBEAT_S = 30.0
LOGGER = logging.getLogger("boundby")


class Console:
    """Two streams and a log. Nothing else in the pipeline writes to the terminal."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        for stream in (self.out, self.err):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a console that is not UTF-8 degrades, it does not fail

    def say(self, text: str) -> None:
        """Show a result on stdout."""
        self._write(self.out, text)

    def note(self, text: str) -> None:
        """Show progress or a doubt on stderr."""
        self._write(self.err, text)

    @contextlib.contextmanager
    def progress(
        self, total: int | None, label: str, clock: Callable[[], float] = time.monotonic
    ) -> Iterator["Progress"]:
        """Yield a `Progress` over `total` units of work, closed when the block ends."""
        progress = Progress(self, total, label, clock)
        try:
            yield progress
        finally:
            progress.close()

    def _write(self, stream: TextIO, text: str) -> None:
        text = printable(text)
        LOGGER.info("%s", text)
        try:
            stream.write(text + "\n")
            stream.flush()
        except BrokenPipeError:  # the reader, such as `head`, has seen enough; the measurement goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Progress:
    """A tqdm bar on a terminal; elsewhere one plain line per named point, and one at least every 30 s of advances."""

    def __init__(self, console: Console, total: int | None, label: str, clock: Callable[[], float]) -> None:
        self._console, self._total, self._label, self._clock = console, total, label, clock
        self._done = 0
        self._started = self._last = clock()
        self._bar = None
        if console.err.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, file=console.err, leave=False, dynamic_ncols=True)

    def advance(self, amount: int = 1, text: str = "") -> None:
        """Count `amount` units as done; `text` says which point was reached and what it gave."""
        self._done += amount
        if self._bar is not None:
            self._bar.set_postfix_str(printable(text), refresh=False)
            self._bar.update(amount)
            if text:
                LOGGER.info("%s", self._line(text))
        elif text or self._clock() - self._last >= HEARTBEAT_S:
            self._last = self._clock()
            self._console.note(self._line(text))

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, text: str) -> str:
        of = f"/{self._total}" if self._total else ""
        elapsed = self._clock() - self._started
        left = (
            f" ETA {_minutes(elapsed / self._done * (self._total - self._done))}" if self._total and self._done else ""
        )
        return f"{time.strftime('%H:%M:%S')} {self._label} {self._done}{of}{left} {text}".rstrip()


def log_to(path: Path) -> logging.Handler:
    """Append what is said, and Python's warnings, to the log at `path`; return the handler for `stop_logging`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOGGER.setLevel(logging.INFO)
    LOGGER.addHandler(handler)
    logging.getLogger("py.warnings").addHandler(handler)
    logging.captureWarnings(True)
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Undo `log_to`."""
    logging.captureWarnings(False)
    logging.getLogger("py.warnings").removeHandler(handler)
    LOGGER.removeHandler(handler)
    handler.close()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
