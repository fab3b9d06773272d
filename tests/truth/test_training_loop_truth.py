"""Sleeps put into every part of the plain loop stand in the stage of that part, with and without accumulation.

How long each sleep really took is measured around it: on a busy machine one of 5 ms may take 9. The rest of its stage
is then held against the same stage of a loop that does not sleep.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from boundby.training import ProfilerManager, StageTimes, read_stage_times
from utils.training import loop, tasks
from utils.training.progress import Progress
from utils.training.settings import Plan

pytestmark = [pytest.mark.truth, pytest.mark.timeout(600)]

STEPS, BATCH = 16, 2
SLEEPS_MS = {"data": 7.0, "h2d": 5.0, "forward": 9.0, "backward": 11.0, "optimizer": 6.0, "evaluation": 40.0}
RELATIVE, ABSOLUTE_MS = 0.05, 1.0
ATTEMPTS = 3

Sleep = Callable[[str], None]


class Sleeper:
    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str) -> None:
        began = time.perf_counter()
        time.sleep(SLEEPS_MS[name] / 1e3)
        self.ms[name].append((time.perf_counter() - began) * 1e3)


class SlowBackward(torch.autograd.Function):
    """The identity, which takes its time backwards."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, sleep: Sleep) -> torch.Tensor:
        context.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.sleep("backward")
        return gradient, None


class SlowModel(tasks.BaselineCNN):
    def __init__(self, sleep: Sleep) -> None:
        super().__init__()
        self.sleep = sleep

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.sleep("forward" if self.training else "evaluation")
        output = super().forward(pixel_values, labels)
        return {**output, "loss": SlowBackward.apply(output["loss"], self.sleep)} if self.training else output


def measured(folder: Path, accumulate: int, monkeypatch: pytest.MonkeyPatch, sleep: Sleep) -> StageTimes:
    task = tasks.prepare("baseline_cnn", 0.1, seed=0)
    model = SlowModel(sleep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: sleep("optimizer"))
    to_device = loop.to_device

    def slow_collate(rows: Any) -> Any:
        sleep("data")
        return default_collate(rows)

    def slow_to_device(batch: Any, device: torch.device) -> Any:
        if model.training:
            sleep("h2d")
        return to_device(batch, device)

    rows = task.split.training[: BATCH * accumulate * STEPS]
    batches = torch.utils.data.DataLoader(rows, batch_size=BATCH, collate_fn=slow_collate)
    evaluation = torch.utils.data.DataLoader(task.split.evaluation[:4], batch_size=4)
    plan = Plan(STEPS, STEPS, BATCH, accumulate, 1)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "to_device", slow_to_device)
        with ProfilerManager(folder, device=torch.device("cpu")) as profiler:
            work = loop.Work(model, optimizer, batches, evaluation, torch.device("cpu"))
            loop.fit(work, plan, profiler, Progress(None, plan, print))
    return read_stage_times(folder)


def times_ms(times: StageTimes, name: str) -> np.ndarray:
    rows = times.rows_of(name, "excluded" if name == "evaluation" else "stage")["host_ns"] / 1e6
    return rows[1:] if name == "data" else rows  # the first of them makes the iterator


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_sleep_stands_in_its_stage_within_5_percent_and_1_ms(tmp_path, monkeypatch, accumulate):
    for attempt in range(1, ATTEMPTS + 1):
        sleeper = Sleeper()
        bare = measured(tmp_path / f"bare{attempt}", accumulate, monkeypatch, lambda name: None)
        slow = measured(tmp_path / f"slow{attempt}", accumulate, monkeypatch, sleeper)
        wrong = []
        for name, asked in SLEEPS_MS.items():
            recorded, slept, work = times_ms(slow, name), np.array(sleeper.ms[name]), np.median(times_ms(bare, name))
            assert len(recorded) == len(slept) and (recorded >= slept).all(), f"{name}: a sleep is not in its stage"
            beyond = float(np.median(recorded - slept) - work)
            print(
                f"attempt {attempt}, accumulation {accumulate}: {name} {asked:.1f} ms asked, median slept "
                f"{np.median(slept):.2f}, stage {np.median(recorded):.2f}, work {work:.2f}, beyond {beyond:+.3f} ms"
            )
            wrong += [] if abs(beyond) <= RELATIVE * asked + ABSOLUTE_MS else [name]
        assert len(times_ms(slow, "forward")) == STEPS * accumulate and len(times_ms(slow, "optimizer")) == STEPS
        if not wrong:
            return
    pytest.fail(f"not in {ATTEMPTS} attempts: {', '.join(wrong)}")
