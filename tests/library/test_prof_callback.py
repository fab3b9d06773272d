"""The callback for the Hugging Face Trainer: its parameters and files, and whatever fails the training is the same."""

import copy
import csv
import inspect
import json
import re
from pathlib import Path
from typing import Any

import accelerate.data_loader
import pytest
import torch

from boundby.capture import Naming
from boundby.trace import read_trace
from boundby.training import read_stage_times
from boundby.training.transformers import ProfCallback
from tests.fakes import FakeNanoseconds
from tests.trainer_runs import (
    EVALUATING,
    Model,
    Plain,
    given_up_in,
    losses,
    losses_of,
    make_trainer,
    manifest_in,
    names_in,
)

RUN_FILES = ["manifest.json", "op_stats.csv", "profiler_summary.json", "stacks.txt"]
RUN_FILES += ["stage_log.jsonl", "stage_times.json", "trace.json"]
ITERATION_FILES = ["key_averages.txt", "rank0_memory-timeline.html", "rank0_stacks.txt", "rank0_trace.pt.trace.json"]
BARE = {"profile_memory": False, "with_stack": False}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return losses(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def at_the_defaults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defaults")
    callback = ProfCallback(str(folder / "output"), run_folder=folder / "run")
    return folder, losses(folder, callback)


def test_the_parameters_and_their_defaults_are_those_of_the_specification_and_none_stands_for_the_default():
    parameters = inspect.signature(ProfCallback).parameters
    counts = dict(zip(("wait_steps", "warmup_steps", "active_steps", "num_cycles"), (4, 4, 1, 1), strict=True))
    on = (
        "profile_memory",
        "with_stack",
        "record_shapes",
        "export_memory_timeline",
        "export_stacks",
        "export_key_averages",
    )
    ours = {"run_folder": None, "schedule_every_n_steps": 0, "max_trace_mb": 256, "say": None, "reports": True}
    nsight = {"enable_nsight_systems": False, "nsight_systems_output_file": None}
    expected = {"output_dir": "./profiler_output", **counts, **dict.fromkeys(on, True), **nsight, **ours}
    assert {name: parameter.default for name, parameter in parameters.items()} == expected
    assert [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY] == list(ours)
    callback = ProfCallback(None, None, None, None, None)
    assert callback.output_dir == callback.run_folder == Path("profiler_output")
    assert str(callback.schedule) == "1 x (4 wait + 4 warm-up + 1 active)"


def test_profiling_memory_switches_shapes_and_stacks_on():
    forced = ProfCallback(profile_memory=True, with_stack=False, record_shapes=False)
    free = ProfCallback(profile_memory=False, with_stack=False, record_shapes=False)
    assert (forced.with_stack, forced.record_shapes, forced.exports.stacks) == (True, True, True)
    assert (free.with_stack, free.record_shapes, free.exports.stacks) == (False, False, False)
    assert forced.exports.memory_timeline and not free.exports.memory_timeline


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"active_steps": 1.5}, "active_steps is 1.5; give an int of at least 1"),
        ({"num_cycles": 0}, "num_cycles is 0; give an int of at least 1 (0 means without end in torch's own schedule"),
        ({"schedule_every_n_steps": -1}, "schedule_every_n_steps is -1; give an int of at least 0"),
        *(({"max_trace_mb": mb}, f"max_trace_mb is {mb!r}; give a number") for mb in (0, 4295, "256", float("nan"))),
    ],
)
def test_what_cannot_be_is_refused_at_once_by_the_name_that_was_given(given, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        ProfCallback(**given)


def test_at_the_defaults_every_file_that_a_cpu_can_give_is_there_and_no_loss_is_another(at_the_defaults, bare):
    folder, step_losses = at_the_defaults
    assert step_losses == bare
    assert names_in(folder / "run") == RUN_FILES
    assert names_in(folder / "output") == ["iteration_9"], "the ninth step is the first one recorded"
    iteration = folder / "output" / "iteration_9"
    assert names_in(iteration) == ITERATION_FILES
    assert all(path.stat().st_size for path in (*iteration.iterdir(), *(folder / "run").iterdir()))
    stacks = (iteration / "rank0_stacks.txt").read_text().splitlines()
    assert any("trainer_runs.py" in line and "_forward" in line for line in stacks)
    manifest = manifest_in(folder / "run")
    assert [cycle["steps_recorded"] for cycle in manifest["cycles"]] == [1]
    assert {item["what"] for item in manifest["unavailable"]} == {"device events", "memory snapshot"}
    reason = "the schedule has one cycle: its times hold the cost of recording stacks"
    assert given_up_in(folder / "run") == {"trace": reason}
    trace = iteration / "rank0_trace.pt.trace.json"
    assert trace.read_bytes() == (folder / "run" / "trace.json").read_bytes()
    assert "ProfilerStep#8" in read_trace(trace).names
    lines = (iteration / "key_averages.txt").read_text().splitlines()
    assert lines[1].split() == ["operator", "calls", "ms", "CPU", "%", "total", "ms", "per", "call", "GFLOP/s"]
    row = next(number for number, line in enumerate(lines) if line.startswith("aten::addmm"))
    details = lines[row + 1 : row + 7]
    assert details[0].strip().startswith("[[16], [2, 8], [8, 16]"), "operators are told by shapes and stack"
    assert any("linear" in line for line in details) and all(line.startswith("    ") for line in details)


@pytest.mark.parametrize(
    ("settings", "files", "has_stacks"),
    [
        ({"record_shapes": False, **BARE}, ["key_averages.txt", "rank0_trace.pt.trace.json"], False),
        ({"export_key_averages": False}, ["rank0_memory-timeline.html", "rank0_trace.pt.trace.json"], True),
    ],
)
def test_what_is_switched_off_is_not_written(tmp_path, bare, settings, files, has_stacks):
    callback = ProfCallback(str(tmp_path), 0, 1, 1, export_stacks=False, **settings)
    assert losses(tmp_path, callback) == bare
    assert names_in(tmp_path / "iteration_2") == files and "stacks.txt" not in names_in(tmp_path)
    trace = read_trace(tmp_path / "trace.json")
    assert (
        ("python_function" in trace.categories) == has_stacks == bool(trace.shapes) == bool(len(trace.memory.start_ns))
    )


def test_every_cycle_has_a_folder_the_last_one_the_stacks_and_they_may_begin_far_apart(tmp_path):
    losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, 2, schedule_every_n_steps=6))
    assert [cycle["first_step"] for cycle in manifest_in(tmp_path)["cycles"]] == [2, 8]
    assert names_in(tmp_path / "iteration_9") == ITERATION_FILES
    assert names_in(tmp_path / "iteration_3") == [name for name in ITERATION_FILES if "stacks" not in name]
    assert given_up_in(tmp_path) == {}
    assert {"trace_cycle1.json", "trace_cycle2.json"} <= set(names_in(tmp_path))


def test_the_limit_of_a_trace_is_the_user_s(tmp_path):
    lean = {"export_memory_timeline": False, "export_key_averages": False, "export_stacks": False}
    losses(tmp_path, ProfCallback(str(tmp_path / "low"), 0, 1, 1, max_trace_mb=0.01, **lean))
    losses(tmp_path, ProfCallback(str(tmp_path / "high"), 0, 1, 1, max_trace_mb=100, **lean))
    cycles = {name: manifest_in(tmp_path / name)["cycles"] for name in ("low", "high")}
    assert [cycle["stacks"] for cycle in cycles["low"]] == [True, False, False], "less and less of it is tried"
    assert [(cycle["stacks"], cycle["steps_recorded"]) for cycle in cycles["high"]] == [(True, 1)]


def test_a_file_that_cannot_be_written_hinders_no_other(tmp_path, bare, monkeypatch, caplog):
    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr("boundby.training.transformers.memory_page", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1)) == bare
    assert names_in(tmp_path / "iteration_3") == [name for name in ITERATION_FILES if "timeline" not in name]
    assert given_up_in(tmp_path)["iteration_3: memory timeline"] == "OSError: disk full"
    remark, report = [record.getMessage() for record in caplog.records]
    assert remark == "iteration_3: memory timeline: OSError: disk full"
    table, _, verdict = report.partition("What:")
    summary = json.loads((tmp_path / "profiler_summary.json").read_text())
    assert "whole step" in table, "what it found is said once, at the end"
    assert f"What:{verdict}".splitlines() == summary["verdict"]["text"]


def test_ranks_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("boundby.capture.naming_of_process", lambda: Naming(1, 2))
    losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1), max_steps=4)
    expected = [name.replace("rank0", "rank1") for name in ["rank0_key_averages.txt", *ITERATION_FILES[1:]]]
    assert names_in(tmp_path / "iteration_3") == sorted(expected)
    assert {f"rank1_{name}" for name in RUN_FILES} <= set(names_in(tmp_path))


def test_trainings_with_one_folder_leave_one_another_s_iterations_alone_though_of_one_callback(tmp_path):
    lean = {"run_folder": tmp_path / "run", "export_key_averages": False, **BARE}
    one, two = (ProfCallback(str(tmp_path / "shared"), 1, 1, 1, cycles, **lean) for cycles in (1, 2))
    traces, managers = [{}], []
    for steps, callback, iterations in (
        (4, one, {"iteration_3"}),
        (6, two, {"iteration_3_run2", "iteration_6_run2"}),
        (5, one, {"iteration_3_run3"}),
    ):
        losses(tmp_path, callback, max_steps=steps)
        files = (tmp_path / "shared").glob("*/*.pt.trace.json")
        traces.append({path.parent.name: path.read_bytes() for path in files})
        assert set(traces[-1]) == set(traces[-2]) | iterations and traces[-1].items() >= traces[-2].items()
        managers.append(callback.manager)
        times = read_stage_times(tmp_path / "run")
        assert (times.status, times.last_step) == ("finished", steps - 1)
    assert managers[0] is not managers[2]


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_an_evaluation_between_recorded_steps_is_no_part_of_them(attach, tmp_path):
    callback = ProfCallback(str(tmp_path), 1, 1, 3, **BARE)
    losses(tmp_path, callback, attach=attach, eval_strategy="steps", eval_steps=3, max_steps=5)
    trace = read_trace(tmp_path / "trace.json")
    ranges = [trace.names[index] for index in trace.name.tolist()]
    assert ranges.count("excluded: evaluation") == 1
    assert ranges.count("aten::addmm") == 3 * 2 + 2 * 2, "of three steps and an evaluation of two batches"
    rows = csv.DictReader((tmp_path / "op_stats.csv").read_text().splitlines())
    assert sum(int(row["calls"]) for row in rows if row["name"] == "aten::addmm") == 3 * 2
    table = (tmp_path / "iteration_5" / "key_averages.txt").read_text().splitlines()
    assert sum(int(line.split()[1]) for line in table if line.startswith("aten::addmm")) == 3 * 2


def test_a_resumed_training_counts_on(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    expected = losses(tmp_path, **saving)
    callback = ProfCallback(str(tmp_path / "profile"), 1, 1, 1, **BARE)
    trainer = make_trainer(tmp_path, callback, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "results" / "checkpoint-4"))
    assert losses_of(trainer) == expected
    times = read_stage_times(tmp_path / "profile")
    assert (times.first_step, times.last_step) == (4, 9)
    assert "ProfilerStep#6" in read_trace(tmp_path / "profile" / "iteration_7" / "rank0_trace.pt.trace.json").names


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_a_compiled_model_is_split_like_any_other(attach, tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 4}
    callback = ProfCallback(str(tmp_path / "profile"), 1, 1, 1, **BARE)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Plain()
    expected = losses(tmp_path, model=copy.deepcopy(model), **compiled)
    assert losses(tmp_path, callback, attach=attach, model=model, **compiled) == expected
    times = read_stage_times(tmp_path / "profile")
    assert {"forward", "backward"} <= {stage.name for stage in times.stages}
    assert given_up_in(tmp_path / "profile").keys() <= {"trace"}


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
    assert {"data", "forward", "backward", "optimizer", "checkpoint", "logging"} <= {
        stage.name for stage in times.stages
    }
    logged = next(metric for metric in times.metrics if metric.name == "loss")
    assert logged.values.n == 10 and logged.values.total == pytest.approx(sum(expected))


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_a_callback_that_cannot_begin_stays_off(attach, tmp_path, bare, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no profile today")

    monkeypatch.setattr("boundby.training.transformers.ProfilerManager", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path)), attach=attach) == bare
    assert [record.getMessage() for record in caplog.records] == [
        "the profiler of the training stays off: no profile today"
    ]


def test_a_callback_that_fails_is_a_remark_and_without_a_trainer_it_stays_off(tmp_path, bare, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("mark")

    monkeypatch.setattr(ProfCallback, "log", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, **BARE)) == bare
    assert given_up_in(tmp_path) == {"callback": "KeyError: 'mark'"}
    callback = ProfCallback(str(tmp_path), 1, 1, 1, **BARE)
    callback.on_train_begin(None, None, None)
    assert callback.manager is None and "stays off: no Trainer of transformers calls" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_attached_callback_writes_everything_when_the_training_ends_early(error, tmp_path):
    callback = ProfCallback(str(tmp_path), 1, 1, 1, **BARE)
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
    callback = ProfCallback(str(tmp_path), 1, 1, 5, **BARE)
    model = Model(FakeNanoseconds(), fail_at=5)
    trainer = make_trainer(tmp_path, callback, model=model)
    before = state_of(trainer)
    with pytest.raises(RuntimeError, match="the model fails"), callback:
        trainer.train()
    assert state_of(trainer) == before
    times = read_stage_times(tmp_path)
    assert (times.error, times.remarks, times.open) == ("RuntimeError: the model fails", (), ())
    assert (tmp_path / "iteration_4" / "rank0_trace.pt.trace.json").is_file(), "what was recorded up to there"
    assert "the loop ended inside it" in given_up_in(tmp_path)["trace"]


def test_a_hold_can_be_given_up_before_the_training(tmp_path):
    callback = ProfCallback(str(tmp_path), 1, 1, 1, **BARE)
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
    return [[name for name in vars(owner) if callable(getattr(owner, name))] for owner in owners]
