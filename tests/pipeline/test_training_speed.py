"""The speed that a recorded training tells is that of the training, by a clock that moves where the test says."""

import functools
import json
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from boundby.capture import Recorder
from boundby.training import manager
from tests.fakes import FakeClock
from utils.settings.yaml_file import load
from utils.training import run
from utils.training.progress import Progress
from utils.training.settings import TrainingSettings

ROOT = Path(__file__).resolve().parents[2]
STEP_S, SLOW_S, PROFILER_S, SETUP_S = 1.0, 4.0, 64.0, 1024.0
SETTINGS = (
    "profiling.enabled=true", "profiling.wait_steps=1", "profiling.warmup_steps=1", "profiling.active_steps=2",
    "profiling.repeat_cycles=1", "training.steps_per_epoch=5", "training.max_epochs=2",
    "training.accumulate_grad_batches=2", "data.subsample_percentage=0.2",
)  # fmt: skip
DISTURBED = (1, 2, 3)


@pytest.fixture
def clock(monkeypatch):
    """A clock that each step moves, a slow one more, and what is no part of a step most."""
    clock, recorders = FakeClock(), []
    start, step, fit = Recorder.start, Recorder.step, run.fit
    started = lambda recorder, *args: (recorders.append(recorder), start(recorder, *args))  # noqa: E731
    monkeypatch.setattr(Recorder, "start", started)
    monkeypatch.setattr(Recorder, "step", lambda recorder: (step(recorder), clock.advance(PROFILER_S)))
    monkeypatch.setattr(run, "fit", lambda job: (clock.advance(SETUP_S), fit(job)))
    monkeypatch.setattr(run, "Progress", functools.partial(Progress, clock=clock))
    monkeypatch.setattr(manager, "perf_counter", clock)
    hook = register_optimizer_step_post_hook(lambda *_: clock.advance(SLOW_S if recorders[0].is_at_work else STEP_S))
    yield clock
    hook.remove()


@pytest.mark.usefixtures("clock")
def test_export_recording_and_setup_are_in_no_speed_of_a_training(tmp_path):
    overrides = [f"profiling.output_dir={tmp_path / 'logs'}", *SETTINGS]
    settings = load(TrainingSettings, ROOT / "configs" / "training.yaml", overrides)
    said: list[str] = []
    run.run(settings, None, tmp_path / "run", said.append, said.append)
    document = json.loads((tmp_path / "run" / "metrics.json").read_text())
    samples = document["samples_per_step"]
    durations = [SLOW_S if step in DISTURBED else STEP_S for step in range(10)]
    assert document["steps"]["samples_per_s"] == [samples / duration for duration in durations]
    epochs = [(epoch["seconds"], epoch["samples_per_s"]) for epoch in document["epochs"]]
    assert epochs == [(sum(durations[:5]), samples / STEP_S), (sum(durations[5:]), samples / STEP_S)]
    assert any(f"{samples / STEP_S:,.0f} samples/s in the last epoch" in text for text in said)
