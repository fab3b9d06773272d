"""The runs in a folder, each known by the head of its stage times; what has not changed is not read again."""

import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from boundby.training.reader import ranks_in, read_stage_times
from boundby.training.records import StageTimes
from boundby.training.store import DOCUMENT, LOG
from utils.monitor import text
from utils.monitor.alerts import SILENT_S

DEEPEST = 3  # folders below the one that is watched: RUNS/model/run
MOST_FOLDERS = 5_000  # that are looked into


@dataclass(frozen=True)
class RunEntry:
    """One run as the list shows it; what could not be read is None, with the `fault`."""

    path: str  # below the watched folder, "." for that itself
    changed_unix_s: float
    fault: str | None = None
    status: str | None = None
    ranks: int = 0
    started_unix_s: float | None = None
    elapsed_s: float | None = None
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
            found = {}
            for folder in folders_below(self.root):
                stamp = stamp_of(folder)
                if not stamp:
                    continue
                path = folder.relative_to(self.root).as_posix()
                known = self._known.get(path)
                found[path] = known if known and known[0] == stamp else (stamp, entry_of(folder, path, stamp))
            self._known = found
        return sorted((entry for _, entry in found.values()), key=lambda each: (-each.changed_unix_s, each.path))


def folders_below(root: Path) -> Iterator[Path]:
    """Yield the folder and those below it, without following links; those that hold a run are not looked into."""
    pending = [(root, 0)]
    for _ in range(MOST_FOLDERS):
        if not pending:
            return
        folder, depth = pending.pop()
        yield folder
        if depth >= DEEPEST or (depth and stamp_of(folder)):
            continue
        try:
            with os.scandir(folder) as entries:
                inside = [Path(each.path) for each in entries if _is_folder(each)]
        except OSError:
            continue
        pending += [(each, depth + 1) for each in sorted(inside, reverse=True)]


def stamp_of(folder: Path) -> Stamp:
    """Return name, time of change in ns and size of every file of stage times in a folder."""
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(_stamped(each) for each in entries if _is_of_a_run(each)))
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
    ranks = ranks_in(folder)
    try:
        times = read_stage_times(folder, ranks[0], with_rows=False)
    except (OSError, ValueError, IndexError) as error:
        return RunEntry(path, changed, fault=text.reason(error, folder))
    return _entry(times, path, changed, len(ranks))


def _entry(times: StageTimes, path: str, changed: float, ranks: int) -> RunEntry:
    return RunEntry(
        path=path,
        changed_unix_s=changed,
        status=times.status,
        ranks=ranks,
        started_unix_s=times.started_unix_s,
        elapsed_s=times.elapsed_s,
        last_step=times.last_step,
        step_s=times.step.host_s.median if times.step else None,
    )


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
