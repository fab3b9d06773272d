"""Sleeps in every part of real trainings stand in the stage of that part: a plain loop, the Trainer, Lightning.

A sleep lasts as long as the system makes it last: each is timed where it happens, and its stage is held against the
sleeps of the same step. The median over the steps must be within 5 % and a millisecond, in the best of a few attempts.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from boundby.training import ProfCallback, ProfilerCallback, ProfilerManager
from tests import lightning_fits, trainer_runs
from tests.fakes import FakeNanoseconds
from tests.lightning_fits import PACKAGES, Rows, module_of, nobody
from utils.training import loop, tasks
from utils.training.progress import Progress
from utils.training.settings import Plan

pytestmark = [pytest.mark.truth, pytest.mark.timeout(600)]
pytestmark += [pytest.mark.filterwarnings(warning) for warning in lightning_fits.WARNINGS]

ATTEMPTS = 5
WITHIN, WITHIN_S = 0.05, 0.001
BATCH = 2
SLEEPS_S = {
    "load": 0.008,
    "copy": 0.006,
    "forward": 0.012,
    "backward": 0.018,
    "clip": 0.009,
    "optimizer": 0.010,
    "callback": 0.007,
    "evaluation": 0.1,  # beside which the Trainer does some milliseconds of work
}
WAITS = {
    trainer_runs.LOAD: "load",
    trainer_runs.TRANSFER: "copy",
    trainer_runs.FORWARD: "forward",
    trainer_runs.BACKWARD: "backward",
    trainer_runs.CLIP: "clip",
    trainer_runs.OPTIMIZER: "optimizer",
    trainer_runs.CALLBACK: "callback",
    trainer_runs.EVALUATE: "evaluation",
}
TELLS = {"read": "load", "transfer": "copy", "optimize": "optimizer", "validate": "evaluation"}
TELLS |= {"callback before": "callback", "callback behind": "callback"}


class Nap(NamedTuple):
    part: str
    start_s: float
    seconds: float


class Sleeper(FakeNanoseconds):
    """Sleeps in each part, and keeps when and how long."""

    def __init__(self) -> None:
        super().__init__()
        self.naps: list[Nap] = []

    def __call__(self, part: str) -> None:
        part = TELLS.get(part, part)
        began = time.perf_counter()
        time.sleep(SLEEPS_S[part])
        self.naps.append(Nap(part, began, time.perf_counter() - began))

    def wait(self, nanoseconds: int) -> None:
        self(WAITS[nanoseconds])


class Fit(NamedTuple):
    """What was recorded: `parts` are what each stage of a step holds, and how many naps; `column` is its time."""

    manager: ProfilerManager
    parts: dict[str, tuple[tuple[str, ...], int]]
    column: str = "host_ns"
    steps: tuple[int, ...] | None = None  # that are like any other; None: all that no profiler disturbed


class SlowBackward(torch.autograd.Function):
    """The identity, which takes its time backwards."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, sleep: Callable[[str], None]) -> torch.Tensor:
        context.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.sleep("backward")
        return gradient, None


class SlowModel(torch.nn.Module):
    def __init__(self, sleep: Callable[[str], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.sleep = sleep

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.sleep("forward" if self.training else "evaluation")
        logits = self.layer(pixel_values.flatten(1))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": SlowBackward.apply(loss, self.sleep) if self.training else loss, "logits": logits}


def fit_loop(accumulate: int, folder: Path, sleep: Sleeper) -> Fit:
    plan, model = Plan(16, 16, BATCH, accumulate, 1), SlowModel(sleep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: sleep("optimizer"))
    to_device = loop.to_device
    split = tasks.prepare("baseline_cnn", 0.1, seed=0).split
    batches = DataLoader(
        split.training[: BATCH * accumulate * plan.steps],
        batch_size=BATCH,
        collate_fn=lambda rows: (sleep("load"), default_collate(rows))[1],
    )
    evaluation = DataLoader(split.evaluation[:4], batch_size=4)
    with pytest.MonkeyPatch.context() as patch, ProfilerManager(folder, device=torch.device("cpu")) as manager:
        patch.setattr(loop, "to_device", lambda *args: (sleep("copy"), to_device(*args))[1])
        work = loop.Work(model, optimizer, batches, evaluation, torch.device("cpu"))
        loop.fit(work, plan, manager, Progress(None, plan, print))
    parts = {"data": (("load",), accumulate), "h2d": (("copy",), accumulate), "optimizer": (("optimizer",), 1)}
    return Fit(manager, {**parts, **{name: ((name,), accumulate) for name in ("forward", "backward")}})


def fit_trainer(accumulate: int, attach: bool, folder: Path, sleep: Sleeper) -> Fit:
    callback = ProfCallback(str(folder), profile_memory=False, with_stack=False, export_key_averages=False)
    settings = {"eval_strategy": "steps", "eval_steps": 4, "gradient_accumulation_steps": accumulate}
    with trainer_runs.slow_copies(sleep):
        trainer_runs.losses(folder, callback, attach=attach, watch=sleep, logging_steps=100, **settings)
    parts = {"optimizer": (("optimizer",), 1), "clip": (("clip",), 1), "callbacks": (("callback",), 1)}
    parts |= {name: ((name,), accumulate) for name in ("forward", "backward")}
    parts |= {"data": (("load", "copy"), 2 * accumulate), "h2d": (("copy",), accumulate)}
    # The first step also fills the loader; an evaluation comes before the fourth and the eighth.
    return Fit(callback.manager, parts, steps=(1, 2, 3, 5, 6, 7))


def fit_lightning(accumulate: int, package: str, folder: Path, sleep: Sleeper) -> Fit:
    callback = ProfilerCallback(True, folder, 8, 0, 1, 1, 1, say=nobody)
    rows = DataLoader(Rows(24 * BATCH * accumulate, sleep), batch_size=BATCH)
    watchers = [lightning_fits.watcher_of(package, sleep) for _ in range(2)]
    settings = {"accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0, "val_check_interval": 1 / 4}
    settings["val"] = DataLoader(Rows(3 * BATCH, nobody), batch_size=BATCH)
    lightning_fits.fit(package, module_of(package, sleep), rows, watchers[0], callback, watchers[1], **settings)
    parts = {"data": (("load",), BATCH * accumulate), "h2d": (("copy",), accumulate), "optimizer": (("optimizer",), 1)}
    parts |= {name: ((name,), accumulate) for name in ("forward", "backward")}
    return Fit(callback.manager, {**parts, "callbacks": (("callback",), 4 * accumulate)}, "self_ns")


def misses_of(fit: Fit, naps: list[Nap]) -> dict[str, float]:
    """Return by how many seconds the stages miss what was slept in them, those that do by too much."""
    base_s, times = time.perf_counter() - fit.manager.snapshot().elapsed_s, fit.manager.snapshot()
    ends, misses = times.rows_of("step", "step"), {}
    for stage, (parts, count) in fit.parts.items():
        rows = times.rows_of(stage)
        by_step = [rows[rows["step"] == step] for step in fit.steps or ends["step"][ends["flags"] == 0].tolist()]
        slept = [inside(step_rows, base_s, naps, parts) for step_rows in by_step]
        assert {len(seconds) for seconds in slept} == {count}, f"{stage} does not hold its own parts"
        recorded_s = [float(step_rows[fit.column].sum()) / 1e9 for step_rows in by_step]
        misses |= missed(stage, recorded_s, [sum(seconds) for seconds in slept])
    evaluations = times.rows_of("evaluation", "excluded")
    slept = [inside(evaluations[row : row + 1], base_s, naps, tuple(SLEEPS_S)) for row in range(len(evaluations))]
    assert all(slept)
    return misses | missed("evaluation", (evaluations["host_ns"] / 1e9).tolist(), [sum(seconds) for seconds in slept])


def inside(rows: Any, base_s: float, naps: list[Nap], parts: tuple[str, ...]) -> list[float]:
    """Return the seconds of the naps of these parts that began in a row."""
    starts = base_s + rows["start_ns"] / 1e9
    spans = list(zip(starts, starts + rows["host_ns"] / 1e9, strict=True))
    return [
        nap.seconds for nap in naps if nap.part in parts and any(start <= nap.start_s < end for start, end in spans)
    ]


def missed(stage: str, recorded_s: list[float], slept_s: list[float]) -> dict[str, float]:
    """Return the median difference under the name of the stage, where it is too large."""
    difference = median(recorded - slept for recorded, slept in zip(recorded_s, slept_s, strict=True))
    print(f"{stage}: slept {median(slept_s) * 1e3:.2f} ms, recorded {median(recorded_s) * 1e3:.2f} ms")
    return {stage: difference} if abs(difference) > WITHIN * median(slept_s) + WITHIN_S else {}


@pytest.mark.parametrize(
    "fit",
    [
        *(pytest.param(functools.partial(fit_loop, count), id=f"loop, {count}") for count in (1, 3)),
        *(
            pytest.param(functools.partial(fit_trainer, count, attach), id=f"trainer, {count}, attached {attach}")
            for count, attach in ((1, True), (2, False))
        ),
        *(
            pytest.param(functools.partial(fit_lightning, count, package), id=f"{package}, {count}")
            for package, count in ((PACKAGES[0], 1), (PACKAGES[0], 2), (PACKAGES[1], 1))
        ),
    ],
)
def test_sleeps_land_in_their_stage_within_5_percent_and_a_millisecond(fit, tmp_path):
    for attempt in range(ATTEMPTS):
        sleeper = Sleeper()
        misses = misses_of(fit(tmp_path / str(attempt), sleeper), sleeper.naps)
        if not misses:
            return
        print(f"attempt {attempt + 1}: {misses}")
    assert not misses
