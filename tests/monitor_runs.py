"""Runs as training loops leave them, made with a fake clock: for the tests of the monitor."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from boundby import files
from boundby.training import StageTimer, StageTimes, TimerOptions
from tests.fakes import FakeNanoseconds

USUAL = {"data": 1.0, "forward": 3.0, "backward": 5.0, "optimizer": 1.0}  # ms
HOSTILE = "<script>alert(1)</script>![x](http://192.0.2.1/x.png) **b** :red[r] $x$ [l](javascript:alert(2)) `c` :fire:"


class Loop:
    """A training loop whose stages take as long as it is told."""

    def __init__(self, folder: Path | None, *, rank: int = 0, world_size: int = 1) -> None:
        self.clock = FakeNanoseconds()
        options = TimerOptions(in_background=False, rank=rank, world_size=world_size)
        self.timer = StageTimer(folder, clock=self.clock, options=options)
        self.timer.start()

    def step(self, stages: Mapping[str, float] = USUAL, metrics: Mapping[str, Any] | None = None) -> None:
        for name, milliseconds in stages.items():
            with self.timer.stage(name):
                self.clock.advance(milliseconds / 1e3)
        self.timer.metrics({"loss": 1.0, **(metrics or {})})
        self.timer.step()

    def steps(self, number: int, stages: Mapping[str, float] = USUAL) -> "Loop":
        for _ in range(number):
            self.step(stages)
        return self


def times_of(steps: Iterable[Mapping[str, float]]) -> StageTimes:
    loop = Loop(None)
    for step in steps:
        loop.step(step)
    return loop.timer.snapshot()


def write_run(folder: Path, number: int = 60, stages: Mapping[str, float] = USUAL, **place: int) -> Path:
    """Write a run that has finished, with the small files of a demo loop; return its folder."""
    loop = Loop(folder, **place)
    for step in range(number):
        pace = 1 + (step * 7 % 5) / 50
        loop.step({name: value * pace for name, value in stages.items()}, {"process_memory_bytes": 2**30 + step})
    loop.timer.remarks.add("memory snapshot", "this device keeps no history")
    loop.timer.stop()
    files.write_json(folder / "config.json", {"training": {"batch_size": 8}, "model": folder.name})
    files.write_json(folder / "metrics.json", {"loss": [1.0, 0.5]})
    unavailable = [{"what": "device times", "reason": "a CPU keeps none"}]
    files.write_json(
        folder / "manifest.json",
        {"schema_version": 1, "trace_reason": "not asked for", "unavailable": unavailable, "downgrades": []},
    )
    row = {"name": "aten::mm", "input_shapes": "[[8, 8], [8, 8]]", "calls": 3, "cpu_self_ms": 1.5, "cpu_total_ms": 2.0}
    files.write_csv(folder / "op_stats.csv", [row], list(row))
    return folder
