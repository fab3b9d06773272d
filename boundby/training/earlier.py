"""What an earlier run left in the folder: none of it may be taken for a part of the run that begins."""

import os
from collections.abc import Iterator
from pathlib import Path

from boundby import files
from boundby.training.reader import read_stage_times
from boundby.training.records import StageTimes
from boundby.training.results import MANIFEST, OP_STATS, SUMMARY, TRACE, RunFiles

CYCLES = "trace_cycle*.json"
PATHS = ("trace_path", "stacks_path", "snapshot_path")  # keys of a manifest
CLOCKS_DIFFER_S = 1.0  # that of the system's table of processes, and that of the program


def remove_earlier(place: RunFiles) -> str | None:
    """Remove the recording and the summary that an earlier run of this process left, all of it.

    Return None; or why everything stays, where that run goes on still.
    """
    times = _earlier(place)
    if times and _goes_on(times):
        which = "this process" if times.pid == os.getpid() else f"process {times.pid}"
        return f"{place.folder}: another profiler of {which} still writes there; give each a folder of its own"
    for path in [*_recorded(place), place.path(MANIFEST), place.path(SUMMARY)]:
        path.unlink(missing_ok=True)
    if place.rank == 0:
        (place.folder / SUMMARY).unlink(missing_ok=True)  # of all processes
    return None


def _earlier(place: RunFiles) -> StageTimes | None:
    try:
        return read_stage_times(place.folder, place.rank if place.world_size > 1 else None, with_rows=False)
    except (OSError, ValueError):
        return None


def _goes_on(times: StageTimes) -> bool:
    """Tell whether a process that is alive writes these; a later one may have got its number."""
    if times.status != "running" or times.pid is None:
        return False
    import psutil  # takes 10 ms, and is needed after a run alone that was killed or goes on

    try:
        return psutil.Process(times.pid).create_time() <= (times.started_unix_s or 0.0) + CLOCKS_DIFFER_S
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _recorded(place: RunFiles) -> Iterator[Path]:
    """Yield what a recording leaves under fixed names, and what its manifest names in this folder."""
    yield from (place.path(name) for name in (TRACE, OP_STATS))
    yield from place.folder.glob(place.path(CYCLES).name)
    try:
        document = files.read_json(place.path(MANIFEST))
        parts = [document, *document.get("cycles", ())]
        named = [Path(each[key]) for each in parts for key in PATHS if each.get(key)]
    except (OSError, ValueError, TypeError, AttributeError):
        return
    here = place.folder.absolute()
    yield from (path for path in named if path.absolute().parent == here)
