"""The callback for the Hugging Face Trainer: its files, its stages on a fake clock, and what never changes.

python -m pytest tests/library/test_prof_callback.py
"""

import copy
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import accelerate.data_loader
import pytest
import torch

from boundby.capture import Naming
from boundby.integrations.transformers import ProfCallback
from boundby.trace import read_trace
from boundby.training import StageTimes, read_stage_times
from tests import trainer_runs
from tests.trainer_runs import Model, Plain, Watch, losses, losses_of, make_trainer, on_watch

RUN_FILES = [
    "manifest.json",
    "op_stats.csv",
    "profiler_summary.json",
    "stacks.txt",
    "stage_log.jsonl",
    "stage_times.json",
    "trace.json",
]
ITERATION_FILES = [
    "key_averages.txt",
    "rank0_memory-timeline.html",
    "rank0_stacks.txt",
    "rank0_trace.pt.trace.json",
]
EVALUATING = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 5}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def at_the_defaults(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("defaults")
    callback = ProfCallback(str(folder / "output"), run_folder=folder / "run")
    return folder, losses(folder, callback)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def manifest_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def given_up_in(folder: Path) -> dict[str, str]:
    return {each["what"]: each["reason"] for each in manifest_in(folder)["downgrades"]}


# The contract


def test_the_parameters_and_their_defaults_are_those_of_the_specification() -> None:
    parameters = inspect.signature(ProfCallback).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "output_dir": "./profiler_output",
        "wait_steps": 4,
        "warmup_steps": 4,
        "active_steps": 1,
        "num_cycles": 1,
        "profile_memory": True,
        "with_stack": True,
        "record_shapes": True,
        "export_memory_timeline": True,
        "export_stacks": True,
        "export_key_averages": True,
        "enable_nsight_systems": False,
        "nsight_systems_output_file": None,
        "run_folder": None,
    }
    assert [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY] == ["run_folder"]


def test_none_stands_for_the_default() -> None:
    callback = ProfCallback(None, None, None, None, None)
    assert (callback.output_dir, callback.run_folder) == (Path("profiler_output"), Path("profiler_output"))
    assert str(callback.schedule) == "1 x (4 wait + 4 warm-up + 1 active)"


def test_profiling_memory_switches_shapes_and_stacks_on() -> None:
    forced = ProfCallback(profile_memory=True, with_stack=False, record_shapes=False)
    free = ProfCallback(profile_memory=False, with_stack=False, record_shapes=False)
    assert (forced.with_stack, forced.record_shapes, forced.exports.stacks) == (True, True, True)
    assert (free.with_stack, free.record_shapes, free.exports.stacks) == (False, False, False)
    assert forced.exports.memory_timeline and not free.exports.memory_timeline


def test_a_schedule_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="active is 0; at least 1 is needed"):
        ProfCallback(active_steps=0)


# The files


def test_at_the_defaults_every_file_that_a_cpu_can_give_is_there(at_the_defaults: tuple[Path, list[float]]) -> None:
    folder, _ = at_the_defaults
    assert names_in(folder / "run") == RUN_FILES
    assert names_in(folder / "output") == ["iteration_9"], "the ninth step is the first one recorded"
    iteration = folder / "output" / "iteration_9"
    assert names_in(iteration) == ITERATION_FILES
    assert all(path.stat().st_size for path in (*iteration.iterdir(), *(folder / "run").iterdir()))
    stacks = (iteration / "rank0_stacks.txt").read_text().splitlines()
    assert any("trainer_runs.py" in line and "_forward" in line for line in stacks)
    manifest = manifest_in(folder / "run")
    assert [each["steps_recorded"] for each in manifest["cycles"]] == [1]
    assert {each["what"] for each in manifest["unavailable"]} == {"device events", "memory snapshot"}
    assert given_up_in(folder / "run") == {
        "trace": "the schedule has one cycle: its times hold the cost of recording stacks"
    }


def test_the_trace_is_the_same_under_both_names(at_the_defaults: tuple[Path, list[float]]) -> None:
    folder, _ = at_the_defaults
    trace = folder / "output" / "iteration_9" / "rank0_trace.pt.trace.json"
    assert trace.read_bytes() == (folder / "run" / "trace.json").read_bytes()
    assert "ProfilerStep#8" in read_trace(trace).names


def test_key_averages_tell_operators_by_shapes_and_stack(at_the_defaults: tuple[Path, list[float]]) -> None:
    folder, _ = at_the_defaults
    lines = (folder / "output" / "iteration_9" / "key_averages.txt").read_text().splitlines()
    assert lines[1].split() == ["operator", "calls", "ms", "CPU", "%", "total", "ms", "per", "call", "GFLOP/s"]
    row = next(place for place, line in enumerate(lines) if line.startswith("aten::addmm"))
    details = lines[row + 1 : row + 7]
    assert details[0].strip().startswith("[[16], [2, 8], [8, 16]")
    assert any("linear" in line for line in details) and all(line.startswith("    ") for line in details)


def test_what_is_switched_off_is_not_written(tmp_path: Path, bare: list[float]) -> None:
    small = ProfCallback(
        str(tmp_path), 2, 1, 1, 1, profile_memory=False, with_stack=False, record_shapes=False, export_stacks=False
    )
    assert losses(tmp_path, small) == bare
    assert names_in(tmp_path / "iteration_4") == ["key_averages.txt", "rank0_trace.pt.trace.json"]
    assert "stacks.txt" not in names_in(tmp_path)
    trace = read_trace(tmp_path / "trace.json")
    assert "python_function" not in trace.categories and not trace.shapes and not len(trace.memory.start_ns)


def test_stacks_may_stand_in_the_trace_alone(tmp_path: Path) -> None:
    callback = ProfCallback(str(tmp_path), 0, 1, 1, export_stacks=False, export_key_averages=False)
    losses(tmp_path, callback, max_steps=3)
    assert names_in(tmp_path / "iteration_2") == ["rank0_memory-timeline.html", "rank0_trace.pt.trace.json"]
    assert "python_function" in read_trace(tmp_path / "trace.json").categories
    assert "stacks.txt" not in names_in(tmp_path)


def test_every_cycle_has_a_folder_and_the_last_one_the_stacks(tmp_path: Path) -> None:
    losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, 2))
    assert names_in(tmp_path / "iteration_6") == ITERATION_FILES
    assert names_in(tmp_path / "iteration_3") == [each for each in ITERATION_FILES if "stacks" not in each]
    assert given_up_in(tmp_path) == {}
    assert {"trace_cycle1.json", "trace_cycle2.json"} <= set(names_in(tmp_path))


def test_a_file_that_cannot_be_written_hinders_no_other(
    tmp_path: Path, bare: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> str:
        raise OSError("disk full")

    monkeypatch.setattr("boundby.integrations.transformers.iteration.memory_page", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1)) == bare
    assert names_in(tmp_path / "iteration_3") == [each for each in ITERATION_FILES if "timeline" not in each]
    assert given_up_in(tmp_path)["iteration_3: memory timeline"] == "OSError: disk full"
    assert [each.getMessage() for each in caplog.records] == ["iteration_3: memory timeline: OSError: disk full"]


def test_ranks_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boundby.capture.naming_of_process", lambda: Naming(1, 2))
    losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1), max_steps=4)
    assert names_in(tmp_path / "iteration_3") == sorted(
        ["rank1_key_averages.txt", *(each.replace("rank0", "rank1") for each in ITERATION_FILES[1:])]
    )
    assert {f"rank1_{name}" for name in RUN_FILES} <= set(names_in(tmp_path))


# Stages, on a clock that only the parts of the training move


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
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    accumulate, is_attached = request.param
    folder, watch = tmp_path_factory.mktemp("run"), Watch()
    callback = ProfCallback(str(folder), profile_memory=False, with_stack=False)
    settings = EVALUATING | {"save_strategy": "no", "gradient_accumulation_steps": accumulate}
    with on_watch(watch):
        losses(folder, callback, attach=is_attached, watch=watch, **settings)
    return Run(read_stage_times(folder), accumulate, is_attached)


def test_forward_backward_clip_and_optimizer_are_told_apart(run: Run) -> None:
    assert run.per_step("forward") == [run.accumulate * trainer_runs.FORWARD] * 7
    assert run.per_step("optimizer") == [trainer_runs.OPTIMIZER] * 7
    backward, clip = run.accumulate * trainer_runs.BACKWARD, trainer_runs.CLIP
    if run.is_attached:
        assert (run.per_step("backward"), run.per_step("clip")) == ([backward] * 7, [clip] * 7)
    else:
        assert run.per_step("backward") == [backward + clip] * 7, "the events do not tell when clipping begins"


def test_data_holds_the_copies_to_the_device_which_an_attached_callback_knows(run: Run) -> None:
    copies = run.accumulate * trainer_runs.TRANSFER
    data = run.accumulate * trainer_runs.LOAD + copies
    assert run.per_step("data") == [data] * 7
    if run.is_attached:
        assert run.per_step("h2d") == [copies] * 7
        rows = run.times.rows_of("data")
        assert set(rows["self_ns"][1:8].tolist()) == {data - copies}


def test_callbacks_of_others_have_a_stage_when_attached_and_else_count_to_what_follows(run: Run) -> None:
    assert run.per_step("callbacks" if run.is_attached else "logging") == [trainer_runs.CALLBACK] * 7


def test_evaluations_are_in_no_step_and_not_in_forward(run: Run) -> None:
    evaluations = run.times.rows_of("evaluation", "excluded")
    assert (
        evaluations["host_ns"].tolist() == [2 * (trainer_runs.EVALUATE + trainer_runs.LOAD + trainer_runs.TRANSFER)] * 3
    )
    steps = run.times.rows_of("step", "step")
    micro_batch = trainer_runs.LOAD + trainer_runs.TRANSFER + trainer_runs.FORWARD + trainer_runs.BACKWARD
    whole = run.accumulate * micro_batch + trainer_runs.CLIP + trainer_runs.OPTIMIZER + trainer_runs.CALLBACK
    assert steps["host_ns"][1:8].tolist() == [whole] * 7


def test_nothing_is_out_of_order(run: Run) -> None:
    assert run.times.remarks == () and run.times.open == ()
    assert run.times.status == "finished" and run.times.last_step == 9
    assert {each.name for each in run.times.stages if each.kind == "span"} == {"epoch"}


def test_stages_follow_one_another_as_in_the_training(run: Run) -> None:
    rows = run.times.rows_of("step", "step")
    start, end = rows["start_ns"][2], rows["start_ns"][2] + rows["host_ns"][2]
    every = run.times.occurrences
    names = [run.times.names[each].name for each in every["stage"]]
    inside = (every["start_ns"] >= start) & (every["start_ns"] < end) & (every["parent"] < 0)
    found = [name for name, is_inside in zip(names, inside, strict=True) if is_inside and name != "step"]
    found = [name for name in dict.fromkeys(found) if name not in ("logging", "callbacks", "scheduler")]
    attached = ["data", "h2d", "forward", "backward", "clip", "optimizer"]
    assert found == (attached if run.is_attached else ["data", "forward", "backward", "optimizer"])


# The training is the same, whatever happens


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_losses_are_the_same_to_the_last_bit(tmp_path: Path, attach: bool) -> None:
    expected = losses(tmp_path / "bare", gradient_accumulation_steps=2, bf16=True, **EVALUATING)
    callback = ProfCallback(str(tmp_path / "profile"), 2, 1, 1)
    settings = EVALUATING | {"gradient_accumulation_steps": 2, "bf16": True}
    assert losses(tmp_path / "profiled", callback, attach=attach, **settings) == expected
    assert len(expected) == 10
    times = read_stage_times(tmp_path / "profile")
    assert {"data", "forward", "backward", "optimizer", "checkpoint", "logging"} <= {each.name for each in times.stages}
    logged = next(each for each in times.metrics if each.name == "loss")
    assert logged.values.n == 10 and logged.values.total == pytest.approx(sum(expected))


def test_the_defaults_change_no_loss(at_the_defaults: tuple[Path, list[float]], bare: list[float]) -> None:
    assert at_the_defaults[1] == bare


@pytest.mark.parametrize("method", ["start", "step", "stop", "export_chrome_trace"])
def test_a_failing_profiler_is_said_once_and_changes_nothing(
    method: str, tmp_path: Path, bare: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(torch.profiler.profile, method)

    def failing(self: Any, *args: Any) -> None:
        if method == "stop":
            original(self, *args)
        raise RuntimeError(f"{method} is broken")

    monkeypatch.setattr(torch.profiler.profile, method, failing)
    assert losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)) == bare
    assert any(f"{method} is broken" in reason for reason in given_up_in(tmp_path).values())
    assert read_stage_times(tmp_path).step.host_s.n > 0
    assert not [name for name in names_in(tmp_path) if name.startswith("iteration")]


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_a_callback_that_cannot_begin_stays_off(
    attach: bool, tmp_path: Path, bare: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no profile today")

    monkeypatch.setattr("boundby.integrations.transformers.callback.ProfilerManager", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path)), attach=attach) == bare
    assert [each.getMessage() for each in caplog.records] == [
        "the profiler of the training stays off: no profile today"
    ]


def test_marks_that_fail_are_a_remark(tmp_path: Path, bare: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("mark")

    monkeypatch.setattr("boundby.integrations.transformers.callback.HookMarks.substep_end", broken)
    monkeypatch.setattr("boundby.integrations.transformers.callback.HookMarks.optimizer_step", broken)
    assert losses(tmp_path, ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)) == bare
    assert given_up_in(tmp_path) == {"callback": "KeyError: 'mark'"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_attached_callback_writes_everything_when_the_training_ends_early(
    error: type[BaseException], tmp_path: Path
) -> None:
    callback = ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)
    trainer = make_trainer(tmp_path, model=Model(Watch(), fail_at=5, error=error))
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


def test_as_a_context_manager_the_callback_is_told_of_exceptions_too(tmp_path: Path) -> None:
    callback = ProfCallback(str(tmp_path), 1, 1, 5, profile_memory=False, with_stack=False)
    model = Model(Watch(), fail_at=5)
    trainer = make_trainer(tmp_path, callback, model=model)
    with pytest.raises(RuntimeError, match="the model fails"), callback:
        trainer.train()
    times = read_stage_times(tmp_path)
    assert (times.error, times.remarks, times.open) == ("RuntimeError: the model fails", (), ())
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert (tmp_path / "iteration_4" / "rank0_trace.pt.trace.json").is_file(), "what was recorded up to there"
    assert "the loop ended inside it" in given_up_in(tmp_path)["trace"]


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_nothing_is_left_on_trainer_model_and_loader(attach: bool, tmp_path: Path) -> None:
    callback = ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)
    trainer = make_trainer(tmp_path, callback)
    before, copies = state_of(trainer), accelerate.data_loader.send_to_device
    if attach:
        callback.attach(trainer)
        assert state_of(trainer) != before
    trainer.train()
    assert state_of(trainer) == before and accelerate.data_loader.send_to_device is copies
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks
    assert "step" not in vars(trainer.optimizer) or "attachment" not in trainer.optimizer.step.__code__.co_filename


def test_a_hold_can_be_given_up_before_the_training(tmp_path: Path) -> None:
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


# What the Trainer may do


def test_a_training_shorter_than_the_schedule_is_recorded_as_far_as_it_goes(tmp_path: Path) -> None:
    losses(tmp_path, ProfCallback(str(tmp_path), profile_memory=False, with_stack=False), max_steps=3)
    assert given_up_in(tmp_path)["schedule"] == (
        "1 x (4 wait + 4 warm-up + 1 active) takes 9 steps and the loop has 3; "
        "1 x (0 wait + 2 warm-up + 1 active) instead"
    )
    assert (tmp_path / "iteration_3" / "rank0_trace.pt.trace.json").is_file()


def test_a_resumed_training_counts_on(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    expected = losses(tmp_path, **saving)
    callback = ProfCallback(str(tmp_path / "profile"), 1, 1, 1, profile_memory=False, with_stack=False)
    trainer = make_trainer(tmp_path, callback, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "results" / "checkpoint-4"))
    assert losses_of(trainer) == expected
    times = read_stage_times(tmp_path / "profile")
    assert (times.first_step, times.last_step) == (4, 9)
    assert "ProfilerStep#6" in read_trace(tmp_path / "profile" / "iteration_7" / "rank0_trace.pt.trace.json").names


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
def test_a_compiled_model_is_split_by_an_attached_callback_alone(attach: bool, tmp_path: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 4}
    callback = ProfCallback(str(tmp_path / "profile"), 1, 1, 1, profile_memory=False, with_stack=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Plain()
    expected = losses(tmp_path, model=copy.deepcopy(model), **compiled)
    assert losses(tmp_path, callback, attach=attach, model=model, **compiled) == expected
    times = read_stage_times(tmp_path / "profile")
    names = {each.name for each in times.stages}
    assert ({"forward", "backward"} <= names, "forward_backward" in names) == (attach, not attach)
    assert ("forward" in given_up_in(tmp_path / "profile")) is not attach


def test_a_second_training_of_the_same_callback_begins_anew(tmp_path: Path) -> None:
    callback = ProfCallback(str(tmp_path), 1, 1, 1, profile_memory=False, with_stack=False)
    losses(tmp_path, callback, max_steps=4)
    first = callback.manager
    losses(tmp_path, callback, max_steps=5)
    assert callback.manager is not first
    times = read_stage_times(tmp_path)
    assert (times.status, times.last_step) == ("finished", 4)
