"""One run, read for the page: its processes, its small documents, and its files."""

import functools
import itertools
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boundby import files
from boundby.training.reader import ranks_in, read_stage_times
from boundby.training.records import StageTimes
from boundby.training.steps import StepTable, step_table
from utils.monitor import text
from utils.monitor.index import Stamp, stamp_of

LARGEST_DOCUMENT = 16 * 2**20  # bytes of JSON or CSV that is read for the page
LARGEST_DOWNLOAD = 512 * 2**20  # bytes: a file on its way to the browser is in memory
MOST_RANKS = 16  # that are read with all rows
MOST_FILES = 200  # that are shown
MOST_WALKED = 5_000
DEEPEST = 2  # folders below the run: traces of TensorBoard, iterations of a Trainer

PURPOSES = {
    "config.json": "settings of the run",
    "metrics.json": "metrics of the training",
    "profiler_summary.json": "the run in sum",
    "stage_times.json": "stages: summary and occurrences",
    "stage_log.jsonl": "stages, as they were written",
    "op_stats.csv": "operators of the trace",
    "trace.json": "Chrome trace",
    "trace.json.gz": "Chrome trace, packed",
    "manifest.json": "what was recorded, and what was not",
}


@dataclass(frozen=True)
class Processes:
    """The stage times of the processes of a run, and why others could not be read."""

    ranks: tuple[StageTimes, ...]
    faults: tuple[str, ...]
    left_out: int = 0  # processes beyond `MOST_RANKS`

    @functools.cached_property
    def tables(self) -> dict[int, StepTable]:
        """The undisturbed steps of each process, by its rank."""
        return {times.rank: step_table(times) for times in self.ranks}


@dataclass(frozen=True)
class RunFile:
    """A plain file of a run."""

    path: str  # below the folder of the run
    size_bytes: int
    changed_unix_s: float

    @property
    def purpose(self) -> str:
        """Return what the file is for, as far as its name says."""
        name = self.path.rpartition("/")[2]
        if name.startswith("rank"):
            name = name.partition("_")[2]
        return PURPOSES.get(name, "")


class RunFolder:
    """A folder below the watched one, which no link leads out of.

    Raises ValueError where it is not below, or is reached through a link.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.folder = inside(root, path)

    def stamp(self) -> Stamp:
        """Return what changes whenever the stage times do."""
        return stamp_of(self.folder)

    def processes(self) -> Processes:
        """Return the stage times of every process, with all their rows."""
        linked = {name for name, _, size in self.stamp() if size < 0}
        if linked:
            return Processes((), tuple(f"{text.plain(name)} is a link or no plain file" for name in sorted(linked)))
        found, faults = [], []
        ranks = ranks_in(self.folder)
        for rank in ranks[:MOST_RANKS]:
            try:
                found.append(read_stage_times(self.folder, rank))
            except (OSError, ValueError) as error:
                faults.append(text.reason(error, self.folder))
        return Processes(tuple(found), tuple(faults), len(ranks[MOST_RANKS:]))

    def document(self, name: str) -> tuple[dict[str, Any], str | None]:
        """Return a JSON object of the run, and why it is empty where it cannot be read."""
        try:
            value = json.loads(self.read(name, LARGEST_DOCUMENT))
        except FileNotFoundError:
            return {}, f"{name} is not there"
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"{name}: {text.reason(error, self.folder)}"
        return (value, None) if isinstance(value, dict) else ({}, f"{name} holds no JSON object")

    def read(self, path: str, most: int = LARGEST_DOWNLOAD, *, is_cut: bool = False) -> bytes:
        """Return the content of a plain file of the run, at most the beginning if `is_cut`.

        Raises OSError, or ValueError for what is reached through a link, is no file, or has more than `most` bytes.
        """
        descriptor = os.open(inside(self.folder, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{text.plain(path)} is no plain file")
            if status.st_size > most and not is_cut:
                raise ValueError(f"{text.plain(path)} has more than {most >> 20} MiB")
            return file.read(most)

    def files(self) -> list[RunFile]:
        """Return the plain files of the run, without those that are being written."""
        found = itertools.islice(self._walk(self.folder, 0), MOST_WALKED)
        return sorted(found, key=lambda each: (each.path.count("/"), each.path))[:MOST_FILES]

    def _walk(self, folder: Path, depth: int) -> Iterator[RunFile]:
        try:
            with os.scandir(folder) as entries:
                there = list(entries)
        except OSError:
            return
        for entry in there:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and not entry.name.startswith(files.TEMPORARY_PREFIX):
                path = Path(entry.path).relative_to(self.folder).as_posix()
                yield RunFile(path, status.st_size, status.st_mtime)
            elif stat.S_ISDIR(status.st_mode) and depth < DEEPEST:
                yield from self._walk(Path(entry.path), depth + 1)


def inside(base: Path, path: str) -> Path:
    """Return the path below a folder. Raises ValueError where it leads out of it or through a link."""
    place = base / path
    if Path(path).is_absolute() or place.resolve() != base.resolve() / path:
        raise ValueError(f"{text.plain(path)} lies outside of the folder, or behind a link")
    return place
