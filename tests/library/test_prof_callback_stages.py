"""The stages of a Trainer's steps, on a clock that only the training moves; what its events mean; and Nsight."""

import json
import shlex
import sys
from typing import NamedTuple

import pytest

from boundby.training import StageTimes, read_stage_times
from boundby.training.transformers import ProfCallback, nsight_command
from tests import trainer_runs
from tests.fakes import FakeNanoseconds
from tests.trainer_runs import EVALUATING, losses, on_watch


class Run(NamedTuple):
    times: StageTimes
    accumulate: int

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
    accumulate, attach = request.param
    folder, watch = tmp_path_factory.mktemp("run"), FakeNanoseconds()
    callback = ProfCallback(str(folder), profile_memory=False, with_stack=False)
    settings = EVALUATING | {"save_strategy": "no", "gradient_accumulation_steps": accumulate}
    with on_watch(watch):
        losses(folder, callback, attach=attach, watch=watch, **settings)
    return Run(read_stage_times(folder), accumulate)


def test_forward_backward_clip_optimizer_and_callbacks_are_told_apart(run):
    assert run.per_step("forward") == [run.accumulate * trainer_runs.FORWARD] * 7
    assert run.per_step("optimizer") == [trainer_runs.OPTIMIZER] * 7
    assert run.per_step("callbacks") == [trainer_runs.CALLBACK] * 7
    assert run.per_step("backward") == [run.accumulate * trainer_runs.BACKWARD] * 7
    assert run.per_step("clip") == [trainer_runs.CLIP] * 7


def test_data_holds_the_copies_to_the_device(run):
    copies = run.accumulate * trainer_runs.TRANSFER
    data = run.accumulate * trainer_runs.LOAD + copies
    assert run.per_step("data") == [data] * 7
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
        assert calls.count(f"begin {name}") == calls.count(f"end {name}")
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
