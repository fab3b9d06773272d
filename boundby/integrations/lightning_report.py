"""What a fit came to, as a few lines of text: its stages, and what limits it."""

from collections.abc import Iterator
from pathlib import Path

from boundby.training import StageTimes, read_stage_times
from boundby.training.judgement import judge_training
from boundby.training.reader import is_of_one_run
from boundby.training.records import Statistics
from boundby.verdict import Verdict

HEAD = f"{'stage':<16}{'share %':>9}{'median ms':>12}{'mean ms':>12}{'count':>8}"


def verdict(folder: Path, times: StageTimes, trace: Verdict | None) -> str:
    """Return what limits the fit, from the times of this process and of all others that are in the folder."""
    return str(judge_training([times, *_others(folder, times)], trace))


def table(times: StageTimes) -> str:
    """Return the stages as lines of text, by the clock of the host, in steps that no profiler disturbed."""
    step = times.step
    if step is None or not step.host_s.n:
        return "No step has ended that nothing disturbed; there is no table of stages."
    stages = [each for each in times.stages if each.kind not in ("step", "span")]
    rows = [_row(each.name, each.share, each.host_s) for each in stages if each.host_s.n]
    return "\n".join([HEAD, *rows, _row("(in no stage)", step.share, None), _row("whole step", None, step.host_s)])


def _row(name: str, share: float | None, spent: Statistics | None) -> str:
    median, mean = (spent.median, spent.mean) if spent else (None, None)
    cells = [_number(share, 100, 1), _number(median, 1e3, 3), _number(mean, 1e3, 3)]
    return f"{name:<16}{cells[0]:>9}{cells[1]:>12}{cells[2]:>12}{spent.n if spent else '':>8}"


def _number(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{scale * value:.{digits}f}"


def _others(folder: Path, times: StageTimes) -> Iterator[StageTimes]:
    """Yield the times of the other processes as far as they are written; those on other machines may not be here."""
    for rank in range(times.world_size):
        if rank == times.rank:
            continue
        try:
            other = read_stage_times(folder, rank)
        except (OSError, ValueError):
            continue
        if is_of_one_run(other, times):
            yield other
