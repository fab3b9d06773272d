"""Speak to the person at the terminal and to the log: results on stdout, progress on stderr, everything in the file."""

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from boundby.formatting import printable as printable
from utils.command import streams
from utils.command.credentials import without

HEARTBEAT_S = 10.0  # of silence, after which a line says that the work goes on
LOGGER = logging.getLogger("boundby")


class Console:
    """Two streams and a log. Nothing else in the pipeline writes to the terminal."""

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        streams.open_standard()
        self.out: TextIO = out or sys.stdout or io.StringIO()
        self.err: TextIO = err or sys.stderr or io.StringIO()
        self._clock = clock
        self._lock = threading.RLock()
        self._said, self._silent_since = clock(), clock()
        self._progress: Progress | None = None
        self.document: Any = None
        self._kept: tuple[TextIO, int] | None = None  # stdout and its descriptor, until the document is there
        for stream in (self.out, self.err):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a console that is not UTF-8 degrades, it does not fail

    def say(self, text: str) -> None:
        """Show a result on stdout."""
        self._silent_since = self._clock()
        self._write(self.out, text)

    def note(self, text: str) -> None:
        """Show progress or a doubt on stderr."""
        self._silent_since = self._clock()
        self._write(self.err, text)

    @contextlib.contextmanager
    def documented(self) -> Iterator[None]:
        """Keep stdout in the block for one document: what is said or printed, by other programs too, goes to stderr."""
        out, stdout = self.out, os.dup(1)
        out.flush()
        os.dup2(2, 1)
        self.out, self._kept = self.err, (out, stdout)
        try:
            with contextlib.redirect_stdout(self.err):
                yield
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            self.out, self._kept = out, None

    def publish(self) -> None:
        """Write the `document` to the stdout that `documented` keeps, unless that is done. A text is JSON already."""
        if self._kept is None:
            return
        (out, stdout), self._kept = self._kept, None
        from boundby import files

        text = self.document
        if not isinstance(text, str):
            text = files.encode_json(text, indent=2, ascii_only=True)  # a console must not change a character of it
        os.dup2(stdout, 1)
        self._write(out, text)
        os.dup2(2, 1)

    @contextlib.contextmanager
    def progress(self, total: int | None, label: str, clock: Callable[[], float] | None = None) -> Iterator["Progress"]:
        """Yield a `Progress` over `total` units of work, closed when the block ends."""
        outer, progress = self._progress, Progress(self, total, label, clock or self._clock)
        self._progress = progress
        try:
            yield progress
        finally:
            self._progress = outer
            progress.close()

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Say in the block, from a thread that sleeps meanwhile, that the work goes on whenever all is silent."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(max(0.0, self._said + HEARTBEAT_S - self._clock())):
                self.beat()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def beat(self) -> None:
        """Say how far the work is where nothing was said for `HEARTBEAT_S`."""
        if self._clock() - self._said < HEARTBEAT_S:
            return
        if self._progress is not None:
            self._progress.beat()
        else:
            silent = _mm_ss(self._clock() - self._silent_since)
            self._write(self.err, f"{time.strftime('%H:%M:%S')} still running, {silent} since the last line")

    def _write(self, stream: TextIO, text: str) -> None:
        text = without(printable(text))
        LOGGER.info("%s", text)
        with self._lock:
            self._said = self._clock()
            try:
                if self._progress is not None:
                    self._progress.clear()
            except (OSError, ValueError):  # the terminal of the bar is gone
                self._progress = None
            streams.write(stream, text)  # its reader, such as `head`, may have seen enough; the measurement goes on

    def refreshed(self) -> None:
        """Note that a bar was drawn, which is no silence."""
        self._said = self._clock()


class Progress:
    """A bar on a terminal; elsewhere one plain line per named point, and one at least every 10 s.

    `total` is the number of units, `left_s` the seconds left where the work knows them better than the pace so far
    does. Both may change; None is unknown.
    """

    def __init__(self, console: Console, total: int | None, label: str, clock: Callable[[], float]) -> None:
        self.total, self.left_s = total, None  # type: int | None, float | None
        self._console, self._label, self._clock = console, label, clock
        self._done, self._text = 0, ""
        self._started = self._last = self._advanced = clock()
        self._bar = None
        if console.err.isatty():
            from tqdm import tqdm

            layout = "{desc} |{bar:20}| {unit}"  # tqdm puts a comma before a postfix
            self._bar = tqdm(
                total=total, desc=label, file=console.err, leave=False, dynamic_ncols=True, bar_format=layout, unit=""
            )

    def advance(self, amount: int = 1, text: str = "") -> None:
        """Count `amount` units as done; `text` says which point was reached and what it gave."""
        self._done += amount
        self._advanced = self._clock()
        if self._bar is not None:
            if text:
                LOGGER.info("%s", self._line(text))
            self._draw(text)
        elif text or self._clock() - self._last >= HEARTBEAT_S:
            self._last = self._clock()
            self._console.note(self._line(text))

    def left(self, seconds: float, text: str) -> None:
        """Count what is not left of `total` seconds as done; `text` is said once, when it is another than before."""
        self.left_s = max(0.0, seconds)
        amount = max(0, round((self.total or 0) - self.left_s) - self._done)
        self.advance(amount, "" if text == self._text else text)
        self._text = text

    def beat(self) -> None:
        """Show how far it is, though no unit was finished."""
        if self._bar is not None:
            self._draw()
        else:
            self._console.note(self._line(f"({_mm_ss(self._clock() - self._started)} so far)"))

    def clear(self) -> None:
        """Take the bar off the terminal until it is drawn again."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _draw(self, text: str = "") -> None:
        assert self._bar is not None
        self._bar.total, self._bar.n = self.total, self._done
        self._bar.set_description_str(f"{self._label} {self._pace()}", refresh=False)
        self._bar.unit = without(printable(text)) or self._bar.unit
        self._bar.refresh()
        self._console.refreshed()

    def _line(self, text: str) -> str:
        return f"{time.strftime('%H:%M:%S')} {self._label} {self._pace()} {text}".rstrip()

    def _pace(self) -> str:
        """Return how much of how much is done, and how long the rest may take."""
        left_s = self.left_s
        if left_s is None and self.total and self._done:
            pace_s = (self._advanced - self._started) / self._done
            left_s = max(0.0, pace_s * max(0, self.total - self._done) - (self._clock() - self._advanced))
        of = f"/{self.total}" if self.total else ""
        done = f"{self._done}{of}" if of or self._done else ""
        return done + ("" if left_s is None else f" ETA {_mm_ss(left_s)}")


class _Log(logging.FileHandler):
    """A log whose full disk ends nothing and shows no traceback."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- its name in logging
        return


class _Harmless(logging.Formatter):
    """Writes no credentials and no control characters, which a warning of a library may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return without(printable(super().format(record)))


def log_to(path: Path) -> logging.Handler:
    """Append what is said, and Python's warnings, to the log at `path`; return the handler for `stop_logging`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _Log(path, encoding="utf-8")
    handler.setFormatter(_Harmless("%(asctime)s %(message)s"))
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
    with contextlib.suppress(OSError):  # what a full disk has left in its buffer
        handler.close()


def _mm_ss(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
