"""metrics.json: losses, speeds and epochs as they come, fetched late from a device, and written whatever happens."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from boundby import files
from tests.fakes import FakeClock
from utils.training.progress import Progress
from utils.training.settings import Plan

PLAN = Plan(4, 2, 8, 1, 1)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


def progress_in(folder: Path, clock: FakeClock, said: list[str] | None = None) -> Progress:
    progress = Progress(folder / "metrics.json", PLAN, (said if said is not None else []).append, clock=clock)
    progress.begin()
    return progress


def read(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def test_losses_speeds_and_epochs_are_written(tmp_path, clock):
    progress = progress_in(tmp_path, clock)
    clock.advance(60)  # the model is made
    progress.begin_epoch()
    for loss, seconds in ((2.0, 0.5), (1.0, 0.25)):
        clock.advance(seconds)
        progress.end_step(loss)
    clock.advance(10)  # an evaluation
    progress.end_epoch(0.5)
    clock.advance(1)
    progress.end_step(torch.tensor(0.5))
    assert progress.said() == "3 steps, last loss 0.5000, accuracy 0.500, 21 samples/s in the last epoch"
    clock.advance(1)
    progress.end_step(float("nan"))
    progress.end_epoch(None)
    progress.end(None)
    document = read(tmp_path)
    assert document["steps"] == {"step": [0, 1, 2, 3], "loss": [2.0, 1.0, 0.5, None], "samples_per_s": [16, 32, 8, 8]}
    figures = {"epoch": 1, "steps": 2, "loss_mean": 1.5, "accuracy": 0.5, "samples_per_s": 16 / 0.75, "seconds": 0.75}
    assert document["epochs"][0] == figures
    assert (document["epochs"][1]["loss_mean"], document["epochs"][1]["accuracy"]) == (0.5, None)
    assert document["non_finite_losses"] == 1
    assert (document["status"], document["steps_planned"], document["samples_per_step"]) == ("finished", 4, 8)


def test_steps_that_the_profiler_slows_down_are_in_the_epoch_and_not_in_its_speed_and_what_is_between_in_none(
    tmp_path, clock
):
    profiler = SimpleNamespace(between_steps_s=0.0, slows_step=False)
    progress = progress_in(tmp_path, clock)
    progress.profiler = lambda: profiler
    for profiler.slows_step in (False, True, False, True, True):
        clock.advance(4 if profiler.slows_step else 1)
        progress.end_step(1.0)
        clock.advance(32)
        profiler.between_steps_s += 32
        if progress.steps == 3:
            progress.end_epoch(None)
    progress.end_epoch(None)
    document = read(tmp_path)
    assert document["steps"]["samples_per_s"] == [8.0, 2.0, 8.0, 2.0, 2.0]
    epochs = [(epoch["steps"], epoch["seconds"], epoch["samples_per_s"]) for epoch in document["epochs"]]
    assert epochs == [(3, 6.0, 8.0), (2, 8.0, None)]
    assert progress.said() == "5 steps, last loss 1.0000"


class OnDevice:
    """A loss on another device; reading it would wait."""

    device = torch.device("cuda")
    reads = 0

    def __float__(self) -> float:
        OnDevice.reads += 1
        return 1.5


def test_losses_on_a_device_are_fetched_when_the_file_is_due(tmp_path, clock):
    known = []
    progress = progress_in(tmp_path, clock)
    progress.on_loss = lambda step, loss: known.append((step, loss))
    OnDevice.reads = 0
    for _ in range(3):
        clock.advance(0.1)
        progress.end_step(OnDevice())
    assert OnDevice.reads == 0 and known == [] and not progress.is_due
    clock.advance(1)
    assert progress.is_due
    progress.end_step(OnDevice())
    assert known == [(step, 1.5) for step in range(4)] and not progress.is_due
    assert read(tmp_path)["steps"]["loss"] == [1.5] * 4


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(ValueError("bad"), "failed", "ValueError: bad"), (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt: ")],
)
def test_what_ended_the_training_is_said(tmp_path, clock, error, status, said):
    progress = progress_in(tmp_path, clock)
    assert read(tmp_path)["status"] == "running"
    progress.end(error)
    document = read(tmp_path)
    assert (document["status"], document["error"]) == (status, said)
    other = Progress(None, PLAN, print, clock=clock)  # that of another process than the first writes nothing
    other.begin()
    other.end_step(1.0)
    clock.advance(9)
    assert not other.is_due


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path, clock, monkeypatch):
    said: list[str] = []
    progress = progress_in(tmp_path, clock, said)

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_bytes", full)
    for _ in range(2):
        clock.advance(5)
        progress.end_step(1.0)
        progress.write()
    progress.end(None)
    assert len(said) == 1 and "metrics.json is not written any more" in said[0] and "No space left" in said[0]
    assert progress.steps == 2 and read(tmp_path)["status"] == "running"
