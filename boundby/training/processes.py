"""The processes of the newest run in a folder, told apart from those of earlier runs that had other numbers of them."""

from pathlib import Path

from boundby.training.reader import read_stage_times
from boundby.training.records import StageTimes
from boundby.training.writer import DOCUMENT, LOG

TOGETHER_S = 60.0  # within which the processes of one run begin, or else they overlap


def ranks_in(folder: str | Path) -> tuple[int | None, ...]:
    """Return the processes that left stage times of the newest run: None for one without a rank in its names.

    What cannot be read may be of that run, unless its rank is beyond the number of its processes.
    """
    folder = Path(folder)
    found = _named_in(folder)
    if len(found) < 2:
        return found
    known = {rank: times for rank in found if (times := _head(folder, rank))}
    if not known:
        return found
    newest = max(known, key=lambda rank: _began(known[rank]))
    if newest is None:
        return (None,)
    return tuple(rank for rank in found if rank is not None and _may_be_of(known[newest], rank, known.get(rank)))


def is_of_one_run(times: StageTimes, newest: StageTimes) -> bool:
    """Tell whether a process belongs to the same run as the one that began last."""
    overlaps = (times.written_unix_s or 0.0) >= _began(newest)
    is_together = overlaps or _began(times) > _began(newest) - TOGETHER_S
    return times.world_size == newest.world_size and is_together


def _named_in(folder: Path) -> tuple[int | None, ...]:
    """Return the processes of all runs, by the names of their files."""
    found: set[int | None] = set()
    for name in (DOCUMENT, LOG):
        if (folder / name).is_file():
            found.add(None)
        for path in folder.glob(f"rank*_{name}"):
            number = path.name.removesuffix(f"_{name}").removeprefix("rank")
            if number.isdecimal():
                found.add(int(number))
    return tuple(sorted(found, key=lambda rank: -1 if rank is None else rank))


def _may_be_of(newest: StageTimes, rank: int, times: StageTimes | None) -> bool:
    return rank < newest.world_size if times is None else is_of_one_run(times, newest)


def _head(folder: Path, rank: int | None) -> StageTimes | None:
    try:
        return read_stage_times(folder, rank, with_rows=False)
    except (OSError, ValueError):
        return None


def _began(times: StageTimes) -> float:
    return times.started_unix_s or 0.0
