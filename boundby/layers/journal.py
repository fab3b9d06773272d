"""The log file of an engine: what it did and what went wrong, one line each."""

import logging
import time
from pathlib import Path

from boundby import files

logger = logging.getLogger("boundby.layers")
logger.addHandler(logging.NullHandler())  # else Python writes warnings to stderr where a program set nothing up


class Journal:
    """Keeps the file at `path` complete at any time; the lines go to the logger `boundby.layers` too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Add a line."""
        logger.log(level, "%s", text)
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._lines.append(f"{moment} {logging.getLevelName(level).lower()}: {text}\n")
        files.write_text(self.path, "".join(self._lines))
