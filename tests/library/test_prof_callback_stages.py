"""The stages of a Trainer's steps, on a clock that only the training moves; what its events mean; and Nsight."""

import json
import shlex
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from boundby.training import StageTimer, StageTimes, read_stage_times
from boundby.training.transformers import ProfCallback, nsight_command
from boundby.training.transformers_hooks import HookMarks
from tests import trainer_runs
from tests.fakes import FakeNanoseconds
from tests.trainer_runs import EVALUATING, losses, on_watch


class Run(NamedTuple):
    times: StageTimes
    accumulate: int
    is_attached: bool

    def per_step(self, name: str) -> list[int]:
        """Return the ns of a stage in each step that is like any other: the loader reads one batch ahead."""
        rows = self.times.rows_of(name)
        return [int(rows["host_ns"][rows["step"] == step].sum()) for step in range(1, 8)]


@pytest.fixture(
    scope="module",
    params=[(1, False), (2, False), (1, True), (2, True)],
    ids=["alone", "alone, 2 micro-batches", "attached", "attached, 2 micro-batches"],
)
def run(request, tmp_path_factory):
    accumulate, is_attached = request.param
    folder, watch = tmp_path_factory.mktemp("run"), FakeNanoseconds()
    callback = ProfCallback(str(folder), profile_memory=False, with_stack=False)
    settings = EVALUATING | {"save_strategy": "no", "gradient_accumulation_steps": accumulate}
    with on_watch(watch):
        losses(folder, callback, attach=is_attached, watch=watch, **settings)
    return Run(read_stage_times(folder), accumulate, is_attached)


def test_forward_backward_clip_and_optimizer_are_told_apart_and_so_are_callbacks_when_attached(run):
    assert run.per_step("forward") == [run.accumulate * trainer_runs.FORWARD] * 7
    assert run.per_step("optimizer") == [trainer_runs.OPTIMIZER] * 7
    assert run.per_step("callbacks" if run.is_attached else "logging") == [trainer_runs.CALLBACK] * 7
    backward, clip = run.accumulate * trainer_runs.BACKWARD, trainer_runs.CLIP
    if run.is_attached:
        assert (run.per_step("backward"), run.per_step("clip")) == ([backward] * 7, [clip] * 7)
    else:
        assert run.per_step("backward") == [backward + clip] * 7, "the events do not tell when clipping begins"


def test_data_holds_the_copies_to_the_device_which_an_attached_callback_knows(run):
    copies = run.accumulate * trainer_runs.TRANSFER
    data = run.accumulate * trainer_runs.LOAD + copies
    assert run.per_step("data") == [data] * 7
    if run.is_attached:
        assert run.per_step("h2d") == [copies] * 7
        assert set(run.times.rows_of("data")["self_ns"][1:8].tolist()) == {data - copies}


def test_evaluations_are_in_no_step_and_not_in_forward_and_nothing_is_out_of_order(run):
    evaluated = 2 * (trainer_runs.EVALUATE + trainer_runs.LOAD + trainer_runs.TRANSFER)
    assert run.times.rows_of("evaluation", "excluded")["host_ns"].tolist() == [evaluated] * 3
    steps = run.times.rows_of("step", "step")
    micro_batch = trainer_runs.LOAD + trainer_runs.TRANSFER + trainer_runs.FORWARD + trainer_runs.BACKWARD
    whole = run.accumulate * micro_batch + trainer_runs.CLIP + trainer_runs.OPTIMIZER + trainer_runs.CALLBACK
    assert steps["host_ns"][1:8].tolist() == [whole] * 7
    assert run.times.remarks == () and run.times.open == ()
    assert run.times.status == "finished" and run.times.last_step == 9
    assert {stage.name for stage in run.times.stages if stage.kind == "span"} == {"epoch"}


ARGS = SimpleNamespace(n_gpu=0, torch_compile=False, eval_on_start=False)


class Events:
    """The events of a training, each one 10 ns after the one before, on marks of their own."""

    def __init__(self, *, model: nn.Module | None = None, eval_on_start: bool = False) -> None:
        self.watch = FakeNanoseconds()
        self.timer = StageTimer(clock=self.watch)
        self.marks = HookMarks(self.timer)
        self.model = model or nn.Linear(1, 1)
        self.control = SimpleNamespace(should_log=False, should_evaluate=False, should_save=False)
        self.timer.start()
        self.marks.train_begin(SimpleNamespace(**{**vars(ARGS), "eval_on_start": eval_on_start}), self.model)

    def tell(self, *events: str, **flags: bool) -> None:
        vars(self.control).update(flags)
        for event in events:
            self.watch.wait(10)
            if event == "call":
                self.model(torch.ones(1))
            elif event == "evaluation_call":
                with torch.no_grad():
                    self.model.eval()(torch.ones(1))
                self.model.train()
            elif event == "step_end":
                self.marks.step_end()
                self.timer.step()
                self.marks.between_steps(self.control)
            else:
                takes = event in ("logged", "evaluated", "saved", "epoch_end")
                getattr(self.marks, event)(*([self.control] if takes else []))

    def spent(self) -> dict[str, list[int]]:
        """Return the ns of every occurrence, by name."""
        self.marks.train_end()
        self.timer.stop()
        times = self.timer.snapshot()
        ns_by_name: dict[str, list[int]] = {}
        for row in times.occurrences:
            ns_by_name.setdefault(times.names[row["stage"]].name, []).append(int(row["host_ns"]))
        return ns_by_name

    def remarks(self) -> dict[str, str]:
        return {remark.what: remark.reason for remark in self.timer.remarks.all()}


STEP = ("step_begin", "call", "pre_optimizer_step", "optimizer_step", "step_end")


def test_an_ordinary_epoch_has_a_wait_for_data_before_each_step_and_none_after_the_last():
    events = Events()
    events.tell("epoch_begin", *STEP, *STEP, "epoch_end")
    spent = events.spent()
    assert spent == {
        "step": [60, 50],
        "data": [10, 10],
        "forward": [0, 0],
        "backward": [10, 10],
        "optimizer": [10, 10],
        "scheduler": [10, 10],
        "epoch": [110],
    }
    assert events.remarks() == {}


def test_what_follows_a_step_is_told_by_what_the_trainer_has_decided():
    events = Events()
    events.tell("epoch_begin", *STEP[:-1])
    events.tell("step_end", should_log=True, should_evaluate=True, should_save=True)
    events.tell("logged", should_log=False)
    events.tell("prediction_step", "logged")  # an evaluation logs too
    events.tell("evaluated", should_evaluate=False)
    events.tell("saved", should_save=False)
    events.tell(*STEP[:-1])
    events.tell("step_end", should_evaluate=True)
    events.tell("evaluated", should_evaluate=False)
    events.tell("saved", *STEP)  # which the evaluation has decided on
    spent = events.spent()
    assert (spent["logging"], spent["evaluation"], spent["checkpoint"]) == ([10], [30, 10], [10])
    assert (spent["data"], events.remarks()) == ([10, 10, 10], {})
    assert spent["step"] == [60, 70, 60], "the evaluations are in no step"


def marked(*steps, **settings):
    """Return the ns of every occurrence and the remarks of an epoch whose events are these."""
    events = Events(**settings)
    for step in steps:
        events.tell(*([step] if isinstance(step, str) else step))
    return events.spent(), events.remarks()


def test_an_evaluation_is_excluded_whether_announced_or_not():
    spent, _ = marked("epoch_begin", STEP, "prediction_step", "prediction_step", "evaluated", STEP)
    assert (spent["evaluation"], spent["data"], spent["step"]) == ([20], [10, 10], [60, 60])
    spent, _ = marked("prediction_step", "evaluated", "epoch_begin", STEP, eval_on_start=True)
    assert (spent["evaluation"], spent["step"]) == ([20], [60])
    assert marked("epoch_begin", STEP, "call")[0]["forward"] == [0], "a call outside of a step is none"


def test_a_model_called_twice_in_a_micro_batch_is_said():
    spent, remarks = marked("epoch_begin", "step_begin", "call", "call", STEP[2:])
    assert spent["backward"] == [10, 10]
    assert "called more than once" in remarks["backward"]


def test_an_evaluation_in_a_step_that_an_exception_has_ended_is_no_part_of_it():
    evaluation = ("evaluation_call", "prediction_step", "evaluation_call", "prediction_step", "logged", "evaluated")
    spent, remarks = marked("epoch_begin", STEP, "step_begin", "call", evaluation)
    assert (spent["forward"], spent["backward"], spent.get("evaluation"), remarks) == ([0, 0], [10], None, {})


def test_calls_for_no_gradient_in_a_step_count_to_what_they_lie_in():
    spent, remarks = marked("epoch_begin", "step_begin", "call", "evaluation_call", STEP[2:])
    assert (spent["forward"], spent["backward"], remarks) == ([0], [20], {})


class Recursive(nn.Module):
    def forward(self, x, depth=1):
        return self(x, depth - 1) if depth else x


@pytest.mark.parametrize(
    ("gradients", "model"), [(False, nn.Linear(1, 1)), (True, nn.Linear(1, 1).eval()), (True, Recursive())]
)
def test_a_model_in_eval_mode_without_gradients_or_called_by_itself_has_one_forward(gradients, model):
    with torch.set_grad_enabled(gradients):
        spent, remarks = marked("epoch_begin", STEP, model=model)
    assert (spent["forward"], remarks) == ([0], {})


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (torch.compile(nn.Linear(1, 1), backend="eager"), {}, "compiled"),
        (nn.Linear(1, 1), {"torch_compile": True}, "compiled"),
        (nn.Linear(1, 1), {"n_gpu": 2}, "copied to several GPUs"),
        (None, {}, "not known"),
    ],
)
def test_a_model_that_cannot_be_watched_has_one_stage_for_forward_and_backward(model, settings, reason):
    events = Events()
    events.marks = HookMarks(events.timer)
    events.marks.train_begin(SimpleNamespace(**{**vars(ARGS), **settings}), model)
    events.tell("epoch_begin", "step_begin", "substep_end", *STEP[2:])
    spent = events.spent()
    assert spent["forward_backward"] == [10, 10] and "forward" not in spent
    assert reason in events.remarks()["forward"]
    assert model is None or not (model._forward_hooks or model._forward_pre_hooks)


@pytest.mark.usefixtures("nsys")
def test_under_nsight_the_recorded_steps_are_collected_and_every_stage_has_a_range(tmp_path, cuda):
    losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, 2, enable_nsight_systems=True), max_steps=7)
    calls = cuda.calls
    steps = [call for call in calls if call in ("start", "stop") or call.startswith("step_")]
    assert steps == [
        *("step_0", "step_1", "start", "step_2", "stop"),
        *("step_3", "step_4", "start", "step_5", "stop", "step_6", "step_7"),
    ]
    assert calls.count("pop") == 8
    collected = calls[calls.index("start") : calls.index("stop")]
    order = ["begin data", "begin forward", "begin backward", "begin optimizer", "begin scheduler"]
    assert [call for call in collected if call in order] == order
    for name in ("data", "forward", "backward", "optimizer", "epoch"):
        assert calls.count(f"begin {name}") == calls.count(f"end {name}") + (name == "data")
    assert not list(tmp_path.glob("iteration_*")) and not (tmp_path / "trace.json").exists()
    steps = read_stage_times(tmp_path).step
    assert (steps.host_s.n, steps.unusual) == (3, 4), "those in which Nsight collects, or is about to, are kept apart"


def test_without_nsight_the_command_is_said_and_only_stages_are_timed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train", "--name", "two words"])
    callback = ProfCallback(str(tmp_path), 1, 1, 1, 2, enable_nsight_systems=True)
    losses(tmp_path, callback, max_steps=7)
    record, _ = [record for record in caplog.records if record.name.startswith("boundby")]
    said, _, command = record.getMessage().partition("Start it with: ")
    assert said.startswith("Nsight Systems: this program does not run under it")
    assert shlex.split(command) == [
        *("nsys", "profile", "-t", "cuda,nvtx,osrt", "-c", "cudaProfilerApi", "--capture-range-end=repeat:2"),
        *("--cuda-graph-trace=node", "-o", str(tmp_path / "nsys_profile.nsys-rep")),
        *("python", "-m", "train", "--name", "two words"),
    ]
    assert not list(tmp_path.glob("iteration_*")) and not (tmp_path / "trace.json").exists()
    assert read_stage_times(tmp_path).step.host_s.n == 7
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["trace_wanted"] is False and "enable_nsight_systems" in manifest["trace_reason"]


def test_the_command_counts_the_cycles_and_its_report_is_in_the_output_folder_unless_it_is_named():
    assert "--capture-range-end=stop " in nsight_command("report", 1, ["python", "train.py"])
    assert "--capture-range-end=repeat:3 " in nsight_command("report", 3, ["python", "train.py"])
    default = ProfCallback(enable_nsight_systems=True)
    named = ProfCallback(enable_nsight_systems=True, nsight_systems_output_file="mine.nsys-rep")
    assert (default.nsight.report, named.nsight.report) == ("profiler_output/nsys_profile.nsys-rep", "mine.nsys-rep")
