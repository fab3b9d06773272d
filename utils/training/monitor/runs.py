"""The runs below a folder: found, read as far as is cheap, and their files; no link leads out of the folder."""

import functools
import itertools
import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from boundby import files
from boundby.training import DOCUMENT, LOG, StageTimes, StepTable, ranks_in, read_stage_times, step_table
from utils.training.monitor import text
from utils.training.monitor.alerts import SILENT_S

DEEPEST_RUN = 3  # folders below the one that is watched: RUNS/model/run
MOST_FOLDERS = 5_000  # that are looked into

LARGEST_DOCUMENT = 16 * 2**20  # bytes of JSON or CSV that is read for the page
LARGEST_DOWNLOAD = 512 * 2**20  # bytes: a file on its way to the browser is in memory
MOST_RANKS = 16  # that are read with all rows
MOST_FILES = 200  # that are shown
MOST_WALKED = 5_000
DEEPEST = 2  # folders below the run: traces of TensorBoard, iterations of a Trainer
MOST_RUNS = 6  # that are kept, for all who look
COST = 10  # the time between two readings of a run, at least, in times of what one takes


@dataclass(frozen=True)
class RunEntry:
    """One run as the list shows it; what could not be read is None, with the `fault`."""

    path: str  # below the watched folder, "." for that itself
    changed_unix_s: float
    fault: str | None = None
    status: str | None = None
    ranks: int = 0
    last_step: int | None = None
    step_s: float | None = None  # the median

    @property
    def name(self) -> str:
        """Return the path as it is shown."""
        return text.plain(self.path)

    def state(self, now_unix_s: float) -> str:
        """Return `finished`, `failed`, `running`, `silent` for one that stopped writing, or `unreadable`."""
        if self.status is None:
            return "unreadable"
        is_silent = self.status == "running" and now_unix_s - self.changed_unix_s > SILENT_S
        return "silent" if is_silent else self.status


Stamp = tuple[tuple[str, int, int], ...]


class Index:
    """Keeps what is known of the runs below a folder. Several sessions may ask at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, tuple[Stamp, RunEntry]] = {}
        self._scanning = threading.Lock()

    def runs(self) -> list[RunEntry]:
        """Return the runs, the one that was written last first. A missing folder has none."""
        with self._scanning:
            runs = {}
            for folder, stamp in folders_below(self.root):
                if not stamp:
                    continue
                path = folder.relative_to(self.root).as_posix()
                known = self._known.get(path)
                runs[path] = known if known and known[0] == stamp else (stamp, entry_of(folder, path, stamp))
            self._known = runs
        return sorted((entry for _, entry in runs.values()), key=lambda run: (-run.changed_unix_s, run.path))


def folders_below(root: Path) -> Iterator[tuple[Path, Stamp]]:
    """Yield the folder and those below it with their stamps, without following links.

    Those that hold a run are not looked into.
    """
    pending = [(root, 0)]
    for _ in range(MOST_FOLDERS):
        if not pending:
            return
        folder, depth = pending.pop()
        stamp = stamp_of(folder)
        yield folder, stamp
        if depth >= DEEPEST_RUN or (depth and stamp):
            continue
        try:
            with os.scandir(folder) as entries:
                inside = [Path(entry.path) for entry in entries if _is_folder(entry)]
        except OSError:
            continue
        pending += [(path, depth + 1) for path in sorted(inside, reverse=True)]


def stamp_of(folder: Path) -> Stamp:
    """Return name, time of change in ns and size of every file of stage times in a folder."""
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(_stamped(entry) for entry in entries if _is_of_a_run(entry)))
    except OSError:
        return ()


def entry_of(folder: Path, path: str, stamp: Stamp) -> RunEntry:
    """Return what the heads of the documents say."""
    changed = max(nanoseconds for _, nanoseconds, _ in stamp) / 1e9
    links = [name for name, _, size in stamp if size < 0]
    if links:
        return RunEntry(
            path, changed, fault=f"{text.plain(links[0])} is a link or no plain file; links are not followed"
        )
    try:
        ranks = ranks_in(folder)
        times = read_stage_times(folder, ranks[0], with_rows=False)
        median_s = times.step.host_s.median if times.step else None
        return RunEntry(path, changed, None, times.status, len(ranks), times.last_step, median_s)
    except Exception as error:  # whatever one run holds, the others are listed
        return RunEntry(path, changed, fault=text.reason(error, folder))


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
    except OSError:
        return False


def _is_of_a_run(entry: os.DirEntry) -> bool:
    name = entry.name
    return name in (DOCUMENT, LOG) or (name.startswith("rank") and name.endswith((f"_{DOCUMENT}", f"_{LOG}")))


def _stamped(entry: os.DirEntry) -> tuple[str, int, int]:
    """Return name, time and size of a file; a size of -1 for what is no plain file."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return entry.name, 0, -1
    return entry.name, status.st_mtime_ns, status.st_size if stat.S_ISREG(status.st_mode) else -1


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
        read, faults = [], []
        ranks = ranks_in(self.folder)
        for rank in ranks[:MOST_RANKS]:
            try:
                read.append(read_stage_times(self.folder, rank))
            except (OSError, ValueError) as error:
                faults.append(text.reason(error, self.folder))
        return Processes(tuple(read), tuple(faults), len(ranks[MOST_RANKS:]))

    def document(self, name: str) -> tuple[dict[str, object], str | None]:
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
        walked = itertools.islice(self._walk(self.folder, 0), MOST_WALKED)
        return sorted(walked, key=lambda file: (file.path.count("/"), file.path))[:MOST_FILES]

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
    inner = base / path
    if Path(path).is_absolute() or inner.resolve() != base.resolve() / path:
        raise ValueError(f"{text.plain(path)} lies outside of the folder, or behind a link")
    return inner


class Reader:
    """Gives the processes of a run: from memory while nothing has changed, or while reading would cost too much."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[Stamp, float, Processes]] = OrderedDict()  # and when to read it again
        self._reading = threading.Lock()

    def processes(self, run: RunFolder) -> Processes:
        """Return what is known of a run."""
        key = str(run.folder)
        with self._reading:
            kept, stamp, began = self._kept.get(key), run.stamp(), self._clock()
            if kept is None or (kept[0] != stamp and began >= kept[1]):
                processes, ended = run.processes(), self._clock()
                kept = stamp, ended + COST * (ended - began), processes
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_RUNS:
                self._kept.popitem(last=False)
            return kept[2]
