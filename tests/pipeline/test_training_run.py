"""Demo trainings from end to end: the same result with and without the profiler, and a folder that passes its check."""

import csv
import errno
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from boundby.bound.verdict import Fix, Trial, Tried, Untried
from boundby.training import read_stage_times
from boundby.work.roofline import Interval
from utils.settings.yaml_file import load
from utils.training import loop, tasks
from utils.training.run import run
from utils.training.settings import ModelName, TrainingSettings

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "profile_training.py"
SMALL = ["--epochs", "2", "--steps-per-epoch", "6", "data.subsample_percentage=0.2"]
RECORDED = ["--profiler", "on", "profiling.active_steps=2", "profiling.repeat_cycles=2"]
CYCLES = ["profiling.schedule_every_n_steps=5"]
FILES = {
    "config.json", "metrics.json", "profiler_summary.json", "stage_times.json", "op_stats.csv", "trace.json",
    "manifest.json",
}  # fmt: skip
STAGES = {"data", "forward", "backward", "optimizer"}

Train = Callable[..., tuple[int, str, str]]


@pytest.fixture
def train(monkeypatch, capfd, tmp_path) -> Train:
    """Return what runs the script in an empty folder and gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def start(*arguments: Any) -> tuple[int, str, str]:
        code = importlib.import_module("scripts.profile_training").main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return start


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, str]:
    """Return the folder of a recorded run, with its logs beside it, and what it said."""
    folder = tmp_path_factory.mktemp("recorded")
    said: list[str] = []
    overrides = ["profiling.enabled=true", "training.steps_per_epoch=6", *RECORDED[2:], *CYCLES, *SMALL[4:]]
    overrides.append(f"profiling.output_dir={folder / 'logs'}")
    settings = load(TrainingSettings, ROOT / "configs" / "training.yaml", overrides)
    run(settings, None, folder / "run", said.append, said.append)
    return folder / "run", "\n".join(said)


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "metrics.json").read_text())["steps"]["loss"]


def check(capsys, folder: Path) -> tuple[int, str]:
    code = importlib.import_module("scripts.check_profile").main([str(folder), "--analysis"])
    return code, " ".join(capsys.readouterr().out.split())


def test_every_file_is_there_passes_the_check_and_tells_of_the_same_steps(recorded, capsys):
    folder, said = recorded
    there = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    assert set(there) >= FILES and all(there.values())
    with (folder / "op_stats.csv").open(newline="") as file:
        assert {"aten::convolution", "aten::addmm"} <= {row["name"] for row in csv.DictReader(file)}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [cycle["first_step"] for cycle in manifest["cycles"]] == [2, 7]
    metrics, times = json.loads((folder / "metrics.json").read_text()), read_stage_times(folder)
    assert (times.status, times.last_step, metrics["status"]) == ("finished", 11, "finished")
    assert metrics["steps"]["step"] == list(range(12)) and None not in metrics["steps"]["loss"]
    assert [(epoch["steps"], 0 < epoch["accuracy"] <= 1) for epoch in metrics["epochs"]] == [(6, True)] * 2
    assert len(times.rows_of("evaluation", "excluded")) == 2
    assert {stage.name for stage in times.stages if stage.kind == "stage"} >= STAGES
    code, out = check(capsys, folder)
    assert code == 0 and "ok config.json: " in out and "1 process(es)" in out, out
    assert "Stages of the training" in out and re.search(r"What to do about the stages -+ 1\. ", out)
    assert [word for word in ("whole step", "What: ", "Why: ", "Next: ", f"in {folder}: ") if word not in said] == []


def test_traces_of_the_plain_loop_have_the_names_that_their_viewers_look_for(recorded):
    folder, _ = recorded
    logs, cycles = folder.parent / "logs" / "BaselineCNN", [folder / f"trace_cycle{number}.json" for number in (1, 2)]
    assert [path.read_bytes() for path in sorted(logs.glob("rank0.*.json"))] == [path.read_bytes() for path in cycles]
    assert (logs / "chrome_trace.json").read_bytes() == cycles[1].read_bytes()


@pytest.mark.parametrize(("steps", "epochs"), [(4, [3, 1]), (2, [2])])
def test_a_short_last_epoch_is_evaluated_like_the_others(train, tmp_path, steps, epochs):
    code, said, notes = train(
        *("--steps", steps, "--steps-per-epoch", 3, "data.subsample_percentage=0.1"),
        *("--profiler", "on", "profiling.wait_steps=9", "--output", tmp_path / "run"),
    )
    assert code == 0, notes
    epochs_written = json.loads((tmp_path / "run" / "metrics.json").read_text())["epochs"]
    assert [(epoch["steps"], epoch["accuracy"] is not None) for epoch in epochs_written] == [
        (epoch, True) for epoch in epochs
    ]
    times = read_stage_times(tmp_path / "run")
    assert (times.status, len(times.rows_of("evaluation", "excluded"))) == ("finished", len(epochs))
    assert f"accuracy {epochs_written[-1]['accuracy']:.3f}" in said


def test_the_loss_curve_is_the_same_to_the_last_bit_without_the_profiler(recorded, train, tmp_path):
    folder, _ = recorded
    code, said, notes = train("--profiler", "off", *SMALL, "--output", tmp_path / "bare")
    assert code == 0, notes
    assert losses(tmp_path / "bare") == losses(folder)
    assert {path.name for path in (tmp_path / "bare").iterdir()} == {"config.json", "metrics.json"}
    assert not (tmp_path / "outputs").exists() and "What:" not in said


def test_an_interrupt_ends_with_130_and_leaves_what_was_recorded(train, monkeypatch, tmp_path):
    forward, calls = tasks.BaselineCNN.forward, []

    def interrupted(self, pixel_values: Any, labels: Any = None) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return forward(self, pixel_values, labels)

    monkeypatch.setattr(tasks.BaselineCNN, "forward", interrupted)
    code, _, notes = train("--profiler", "on", *SMALL, "--output", tmp_path / "run")
    assert (code, notes.splitlines()[-1]) == (130, "interrupted")
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["status"] == "interrupted"
    times = read_stage_times(tmp_path / "run")
    assert (times.status, times.last_step) == ("failed", 3)
    assert "KeyboardInterrupt" in times.error


@pytest.mark.parametrize("name", ["resnet", "efficientnet"])
def test_every_model_learns(name: ModelName):
    task = tasks.prepare(name, 0.2, seed=0)
    batches = [default_collate(task.split.training[start : start + 16]) for start in (0, 16)]
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    losses = []
    task.model.train()
    for _ in range(6):
        loss = sum(task.model(**batch)["loss"] for batch in batches) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert task.model(**batches[0])["logits"].shape == (16, task.model.config.num_labels)


def test_subsample_and_split_hold_each_row_once_and_depend_on_the_seed_alone():
    whole, part = tasks.digits(8, 1.0, seed=0), tasks.digits(8, 0.1, seed=0)
    assert (len(whole.training), len(whole.evaluation)) == (1438, 359)
    assert (len(part.training), len(part.evaluation)) == (144, 36)
    again, other = tasks.digits(8, 0.1, seed=0), tasks.digits(8, 0.1, seed=1)
    first = [split.training[0]["pixel_values"] for split in (part, again, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def test_accumulated_batches_give_the_update_of_one_batch_of_their_size():
    from boundby.training import ProfilerManager
    from utils.training.progress import Progress
    from utils.training.settings import Plan

    task = tasks.prepare("baseline_cnn", 0.1, seed=0)
    rows = task.split.training[:8]
    after = []
    for accumulate in (1, 4):
        torch.manual_seed(0)
        model = tasks.BaselineCNN()
        model.features[-1].p = 0.0  # dropout would draw other numbers
        plan = Plan(1, 1, 8 // accumulate, accumulate, 1)
        batches = torch.utils.data.DataLoader(rows, batch_size=plan.batch_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        work = loop.Work(model, optimizer, batches, None, torch.device("cpu"))
        progress = Progress(None, plan, print)
        loop.fit(work, plan, ProfilerManager("never", enabled=False), progress)
        after.append(model.classifier.weight.detach())
        assert progress.steps == 1
    assert torch.allclose(after[0], after[1], atol=1e-6)


def test_stages_are_in_the_order_of_the_loop_by_batch_and_updates_by_accumulated_step(train, tmp_path):
    code, _, notes = train(
        *("--profiler", "on", "--steps", "3", "training.accumulate_grad_batches=2", "training.evaluate=false"),
        *("data.subsample_percentage=0.1", "--output", tmp_path / "run", "profiling.output_dir=logs"),
    )
    assert code == 0, notes
    times = read_stage_times(tmp_path / "run")
    micro_batch = ["data", "h2d", "forward", "backward"]
    rows = times.occurrences[times.occurrences["step"] == 1]
    order = [times.names[row["stage"]].name for row in sorted(rows, key=lambda row: row["start_ns"])]
    expected = [*micro_batch * 2, "optimizer", "zero_grad", "logging"]
    assert [name for name in order if name != "step"] == expected
    assert len(times.rows_of("evaluation", "excluded")) == 0


def test_neither_workers_of_the_loader_nor_a_profiler_that_is_broken_change_a_loss(train, monkeypatch, tmp_path):
    def broken(*_: Any) -> None:
        raise RuntimeError("the profiler is broken")

    monkeypatch.setattr(torch.profiler.profile, "start", broken)
    recording = ["--profiler", "on", *(f"profiling.{setting}" for setting in ("wait_steps=0", "active_steps=1"))]
    for number, more in ((0, []), (1, recording)):
        arguments = ["--steps", "3", "data.subsample_percentage=0.1", f"data.num_workers={number}", *more]
        code, *said = train(*arguments, "training.evaluate=false", "--output", tmp_path / str(number))
        assert code == 0 and "".join(said).count("trace: RuntimeError: the profiler is broken") == number
    assert losses(tmp_path / "0") == losses(tmp_path / "1")


def test_scalars_of_the_stages_are_written_for_tensorboard(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = ["--profiler", "on", "--steps", "6", "data.subsample_percentage=0.1", "profiling.tensorboard=true"]
    code, said, notes = train(*arguments, "--output", tmp_path / "run")
    assert code == 0, notes
    assert f"tensorboard --logdir {tmp_path / 'run' / 'tensorboard'}" in said
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    times = read_stage_times(tmp_path / "run")
    usual = [row for row in times.rows_of("forward") if not row["flags"]]
    scalars = [(scalar.step, round(scalar.value, 6)) for scalar in events.Scalars("stage_s/forward")]
    assert scalars == [(row["step"], round(row["host_ns"] / 1e9, 6)) for row in usual] and scalars


# The folder


@pytest.mark.parametrize("name", ["../x", "a/b", "/tmp/x", "", ".", "..", ".hidden", "a\\b", "x" * 101, "a b"])
def test_a_run_id_that_is_no_plain_name_is_refused(train, tmp_path, name):
    code, _, notes = train("--run-id", name)
    assert code == 2 and f"--run-id {name!r}: letters, digits" in notes and "no path" in notes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("runs/mine/config.json", "runs/mine: holds an earlier run; nothing is overwritten: give another --run-id"),
        ("runs/mine/mine.txt", "runs/mine: holds other files; nothing is overwritten: give another --run-id"),
        ("runs/mine", "runs/mine: is no folder; give another --run-id or --output"),
    ],
)
def test_what_is_in_place_of_the_folder_is_never_overwritten(train, tmp_path, content, what):
    (tmp_path / content).parent.mkdir(parents=True)
    (tmp_path / content).write_text('{"kind": "training_run"}')
    code, _, notes = train("--run-id", "mine")
    assert code == 2 and what in notes
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / content]


def test_a_folder_that_cannot_be_made_is_a_lack_of_the_environment(train, monkeypatch):
    def full(self, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "mkdir", full)
    code, _, notes = train()
    assert code == 3 and "cannot be written: No space left on device; give another --output, or make room" in notes


def test_a_training_that_fails_ends_with_1_and_its_profile_can_be_read(train, monkeypatch, tmp_path, capfd):
    def broken(*args: Any) -> float:
        raise RuntimeError("the evaluation is broken")

    monkeypatch.setattr(loop, "accuracy_of", broken)
    code, _, notes = train("--profiler", "on", *SMALL, "--output", tmp_path / "run")
    assert code == 1 and "error: RuntimeError: the evaluation is broken" in notes
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["status"] == "failed"
    code, out = check(capfd, tmp_path / "run")
    assert "note stage_times.json: the training failed: RuntimeError: the evaluation is broken" in out
    assert "note metrics.json: the training was failed" in out


@pytest.mark.timeout(600)  # three processes that import torch
def test_two_ranks_write_files_of_their_own_and_one_summary(tmp_path, capsys):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    arguments = [*SMALL, *RECORDED, "--output", str(tmp_path / "run"), f"profiling.output_dir={tmp_path / 'logs'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {f"rank{rank}_{name}" for rank in (0, 1) for name in FILES - {"config.json", "metrics.json"}}
    assert names >= {"config.json", "metrics.json", "profiler_summary.json"} and "stage_times.json" not in names
    assert done.stdout.count("What: ") == 1 and "Stages of rank 0 of 2" in done.stdout
    code, out = check(capsys, tmp_path / "run")
    assert code == 0 and "ok profiler_summary.json: " in out, out


def test_after_a_run_with_try_each_fix_has_a_row_with_what_was_predicted_and_measured(train, monkeypatch):
    trials = [
        Trial(Fix("autocast"), Interval(1.5, 1.4, 1.6), Interval(1.4, 1.2, 1.7), 3.0),
        Trial(Fix("fused_optimizer"), Interval(1.3, 1.25, 1.35), Interval(1.05, 1.0, 1.1), 1.2),
    ]
    tried = Tried(tuple(trials), (Untried(Fix("pin_memory"), "not_possible", "it is pinned for copies to a GPU"),))
    steps = []

    def try_fixes(recipe, timer, **options):
        model, batches = recipe.model(), list(recipe.batches(0, False))
        assert torch.isfinite(recipe.loss(model, recipe.move(batches[0])))
        steps.append(len(batches))
        return tried

    monkeypatch.setattr("utils.training.fixes.try_fixes", try_fixes)
    code, out, _ = train("--try", *SMALL, "--run-id", "one")
    said = " ".join(out.split())
    assert code == 0 and f"in rounds of {steps[0]} steps" in said
    assert "bfloat16 autocast 1.40 [1.20, 1.70] 3.00 1.50 [1.40, 1.60] yes" in said
    assert "fused optimizer 1.05 [1.00, 1.10] 1.20 1.30 [1.25, 1.35] above the bound" in said
    assert "pinned memory - - - not tried: it is pinned for copies to a GPU" in said
    assert "compute in bfloat16 (torch.autocast): 1.50 [1.40, 1.60] times the speed; check the loss curve" in said
    written = json.loads(Path("runs/one/trials.json").read_text())
    assert [len(written[name]) for name in ("trials", "untried", "doubts")] == [2, 1, 0]
