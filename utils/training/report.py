"""What a training run came to, for its end and for those who look at its folder later: stages, verdict, files."""

from pathlib import Path

from boundby.training import StageTimes, ranks_in, read_stage_times
from boundby.training.judgement import judge_training
from boundby.training.records import Statistics
from boundby.training.results import RunFiles, read_trace_verdict
from boundby.training.verdict import TrainingVerdict
from utils.render.blocks import Block, Paragraph, Table
from utils.render.formatting import NOTHING, number


def ranks_of(folder: Path) -> tuple[StageTimes, ...]:
    """Return the stage times of every process of a run. Raises OSError or ValueError where they cannot be read."""
    return tuple(read_stage_times(folder, rank) for rank in ranks_in(folder))


def judge(folder: Path, ranks: tuple[StageTimes, ...]) -> TrainingVerdict:
    """Return the verdict on a run, with what the trace of its first process says."""
    first = ranks[0]
    return judge_training(ranks, read_trace_verdict(RunFiles(folder, first.rank, first.world_size)))


def table(times: StageTimes) -> list[Block]:
    """Return the stages of one process."""
    rows = [_row(each.name, each.share, each.host_s) for each in times.stages if each.kind not in ("step", "span")]
    step = times.step
    if step is None or not step.host_s.n:
        return [Paragraph("No step has ended that nothing disturbed; there is no table of stages.")]
    rows.append(_row("(in no stage)", step.share, None))
    rows.append(_row("whole step", None, step.host_s))
    headers = ("stage", "share %", "median ms", "mean ms", "p95 ms", "count")
    which = f" of rank {times.rank} of {times.world_size}" if times.world_size > 1 else ""
    caption = f"Stages{which}, by the clock of the host, in steps that the profiler left alone"
    return [Table(headers, rows, left=(0,), caption=caption)]


def _row(name: str, share: float | None, spent: Statistics | None) -> tuple[str, ...]:
    values = (spent.median, spent.mean, spent.p95) if spent else (None, None, None)
    cells = (NOTHING if each is None else number(1e3 * each) for each in values)
    return (name, NOTHING if share is None else f"{100 * share:.1f}", *cells, f"{spent.n:,}" if spent else NOTHING)
