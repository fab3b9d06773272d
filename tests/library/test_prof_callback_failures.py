"""Whatever fails around `ProfCallback`, the training is the same, and what was recorded is readable."""

import json
from typing import Any

import accelerate.data_loader
import pytest
import torch

from boundby.capture.exclusion import AT_WORK
from boundby.integrations.transformers import ProfCallback
from boundby.trace import read_trace
from boundby.training import read_stage_times
from tests.fakes import FakeNanoseconds
from tests.trainer_runs import EVALUATING, Model, given_up_in, losses, losses_of, make_trainer, names_in


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return losses(tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_losses_are_the_same_to_the_last_bit_and_nothing_is_left_on_trainer_model_and_loader(tmp_path, attach):
    settings = EVALUATING | {"gradient_accumulation_steps": 2, "bf16": True}
    expected = losses(tmp_path / "bare", **settings)
    callback = ProfCallback(str(tmp_path / "profile"), 2, 1, 1)
    trainer = make_trainer(tmp_path / "profiled", callback, **settings)
    before, copies = state_of(trainer), accelerate.data_loader.send_to_device
    if attach:
        callback.attach(trainer)
        assert state_of(trainer) != before
    trainer.train()
    assert losses_of(trainer) == expected and len(expected) == 10
    assert state_of(trainer) == before and accelerate.data_loader.send_to_device is copies
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks
    assert "step" not in vars(trainer.optimizer) or "attachment" not in trainer.optimizer.step.__code__.co_filename
    times = read_stage_times(tmp_path / "profile")
    assert {"data", "forward", "backward", "optimizer", "checkpoint", "logging"} <= {each.name for each in times.stages}
    logged = next(each for each in times.metrics if each.name == "loss")
    assert logged.values.n == 10 and logged.values.total == pytest.approx(sum(expected))


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_failing_profiler_is_said_once_and_changes_nothing(method, tmp_path, bare, monkeypatch, caplog):
    original = getattr(torch.profiler.profile, method)

    def failing(self, *args):
        if method == "stop":
            original(self, *args)
        raise RuntimeError(f"{method} is broken")

    monkeypatch.setattr(torch.profiler.profile, method, failing)
    assert losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)) == bare
    assert any(f"{method} is broken" in reason for reason in given_up_in(tmp_path).values())
    assert [each.getMessage() for each in caplog.records if each.name.startswith("boundby")] == [
        f"trace: RuntimeError: {method} is broken"
    ]
    assert read_stage_times(tmp_path).step.host_s.n > 0
    assert not [name for name in names_in(tmp_path) if name.startswith("iteration")]


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_a_callback_that_cannot_begin_stays_off(attach, tmp_path, bare, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no profile today")

    monkeypatch.setattr("boundby.integrations.transformers.callback.ProfilerManager", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path)), attach=attach) == bare
    assert [each.getMessage() for each in caplog.records] == [
        "the profiler of the training stays off: no profile today"
    ]


def test_a_torch_profiler_around_the_training_records_what_it_would_alone(tmp_path, bare):
    callback = ProfCallback(str(tmp_path), 1, 1, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        assert losses(tmp_path, callback) == bare
    theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
    names = [theirs.names[each] for theirs in [read_trace(tmp_path / "theirs.json")] for each in theirs.name.tolist()]
    assert names.count("Optimizer.step#SlowAdam.step") == 10
    assert given_up_in(tmp_path)["trace"] == AT_WORK
    assert not list(tmp_path.glob("iteration_*"))
    assert read_stage_times(tmp_path).last_step == 9


def test_marks_that_fail_are_a_remark(tmp_path, bare, monkeypatch):
    def broken(*_):
        raise KeyError("mark")

    monkeypatch.setattr("boundby.integrations.transformers.callback.HookMarks.substep_end", broken)
    monkeypatch.setattr("boundby.integrations.transformers.callback.HookMarks.optimizer_step", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)) == bare
    assert given_up_in(tmp_path) == {"callback": "KeyError: 'mark'"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_attached_callback_writes_everything_when_the_training_ends_early(error, tmp_path):
    callback = ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)
    trainer = make_trainer(tmp_path, model=Model(FakeNanoseconds(), fail_at=5, error=error))
    before, copies = state_of(trainer), accelerate.data_loader.send_to_device
    callback.attach(trainer)
    with pytest.raises(error, match="the model fails"):
        trainer.train()
    assert state_of(trainer) == before and accelerate.data_loader.send_to_device is copies
    times = read_stage_times(tmp_path)
    assert (times.status, times.error, times.last_step) == ("failed", f"{error.__name__}: the model fails", 3)
    assert times.remarks == () and times.open == ()
    assert (tmp_path / "iteration_3" / "rank0_trace.pt.trace.json").is_file()
    assert json.loads((tmp_path / "profiler_summary.json").read_text())["status"] == "failed"


def test_as_a_context_manager_the_callback_is_told_of_exceptions_too(tmp_path):
    callback = ProfCallback(str(tmp_path), 1, 1, 5, profile_memory=False, with_stack=False)
    model = Model(FakeNanoseconds(), fail_at=5)
    trainer = make_trainer(tmp_path, callback, model=model)
    with pytest.raises(RuntimeError, match="the model fails"), callback:
        trainer.train()
    times = read_stage_times(tmp_path)
    assert (times.error, times.remarks, times.open) == ("RuntimeError: the model fails", (), ())
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert (tmp_path / "iteration_4" / "rank0_trace.pt.trace.json").is_file(), "what was recorded up to there"
    assert "the loop ended inside it" in given_up_in(tmp_path)["trace"]


def test_a_hold_can_be_given_up_before_the_training(tmp_path):
    callback = ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)
    trainer = make_trainer(tmp_path)
    before = state_of(trainer)
    with callback.attach(trainer):
        assert "train" in vars(trainer)
    assert state_of(trainer) == before
    trainer.train()
    assert callback.manager is None


def state_of(trainer: Any) -> list[list[str]]:
    """Return the names of what the objects of a Trainer have of their own that can be called."""
    owners = (trainer, trainer.accelerator, trainer.callback_handler)
    return [[name for name in vars(each) if callable(getattr(each, name))] for each in owners]
