"""`scripts/profile_training.py`: its flags, its overrides, and what it refuses, without training anything."""

import importlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from boundby import files
from utils.settings.yaml_file import load
from utils.training import run as training
from utils.training import run_folder
from utils.training.settings import Plan, Training, TrainingSettings, plan_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "profile_training.py"
LOGS = {  # a file of a run: the same among the logs
    "trace.json": ("Model/rank0.16.pt.trace.json",),
    "trace_cycle2.json": ("Model/rank0.17.pt.trace.json", "Model/chrome_trace.json"),
    "rank1_trace.json": ("Model/rank1.18.pt.trace.json", "Model/rank1_chrome_trace.json"),
}


@pytest.fixture
def given(monkeypatch, capsys):
    """Return what runs the script with a training that only says what it was asked for."""

    def start(*arguments: str) -> tuple[int, tuple[Any, ...] | None, str]:
        asked = []
        monkeypatch.setattr(training, "run", lambda *what: asked.append(what))
        code = importlib.import_module("scripts.profile_training").main(list(arguments))
        return code, asked[0] if asked else None, capsys.readouterr().err

    return start


def flat(settings: TrainingSettings) -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for name, value in settings.model_dump().items():
        flattened |= (
            {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flattened


def test_the_schedule_of_the_specification_is_the_default_of_file_and_program():
    assert load(TrainingSettings, ROOT / "configs" / "training.yaml") == TrainingSettings()
    profiling = TrainingSettings().profiling
    assert (profiling.enabled, profiling.output_dir) == (False, "outputs/profiler_logs")
    assert (profiling.schedule_every_n_steps, profiling.wait_steps, profiling.warmup_steps) == (50, 1, 1)
    assert (profiling.active_steps, profiling.repeat_cycles) == (3, 2)
    plan = Plan(100, 44, 32, 2, 2)
    assert (plan.epochs, plan.samples_per_step, plan.rows_per_epoch) == (3, 128, 44 * 128)


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (["--profiler", "on"], "profiling.enabled", True),
        (["--profiler", "off", "profiling.enabled=true"], "profiling.enabled", False),
        (["--epochs", "5"], "training.max_epochs", 5),
        (["--steps-per-epoch", "20"], "training.steps_per_epoch", 20),
        (["--steps", "7"], "training.max_steps", 7),
        (["--model", "resnet"], "model", "resnet"),
        (["data.subsample_percentage=0.1"], "data.subsample_percentage", 0.1),
        (["profiling.output_dir=elsewhere/logs"], "profiling.output_dir", "elsewhere/logs"),
    ],
)
def test_every_flag_and_override_reaches_its_setting_and_no_other(given, arguments, key, expected):
    code, asked, _ = given(*arguments)
    assert code == 0
    assert flat(asked[0]) == flat(TrainingSettings()) | {key: expected}
    assert given("--run-id", "007", "--output", "1e3")[1][1:3] == ("007", Path("1e3"))  # taken as they are


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("model=vgg", "model: input should be 'baseline_cnn', 'resnet' or 'efficientnet' (got 'vgg')"),
        ("data.subsample_percentage=10", "data.subsample_percentage: input should be less than or equal to 1"),
        ("data.subsample_percentage=0", "data.subsample_percentage: input should be greater than 0"),
        ("training.batch_size=1", "training.batch_size: input should be greater than or equal to 2"),
        ("profiling.active_step=3", "unknown key, did you mean 'active_steps'?"),
        ("profiling.active_steps=0", "profiling.active_steps: input should be greater than 0"),
        ("device=cuda:1", None),
    ],
)
def test_a_wrong_setting_or_gpu_ends_with_2_and_says_which(given, argument, said):
    code, asked, err = given(*argument.split())
    assert (code, asked is None) == ((2, True) if said else (0, False)) and (said or "") in err


def test_one_gpu_for_several_processes_ends_with_2(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code = importlib.import_module("scripts.profile_training").main(["device=cuda:1"])
    assert code == 2 and "device: 'cuda:1' is one GPU for 2 processes" in capsys.readouterr().err


def test_a_missing_package_ends_with_3_and_the_command_that_installs_it(monkeypatch, capsys):
    find = training.importlib.util.find_spec
    monkeypatch.setattr(
        training.importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest)
    )
    code = importlib.import_module("scripts.profile_training").main(["profiling.tensorboard=true"])
    assert code == 3
    assert "error: tensorboard: not installed; bash setup_environment.sh --training" in capsys.readouterr().err


# How long a training is


@pytest.mark.parametrize(
    ("settings", "num_rows", "world_size", "expected"),
    [
        ({}, 1437, 1, Plan(88, 44, 32, 1, 1)),
        ({"max_epochs": 3, "steps_per_epoch": 5}, 1437, 1, Plan(15, 5, 32, 1, 1)),
        ({"max_steps": 100}, 1437, 1, Plan(100, 44, 32, 1, 1)),
        ({"max_steps": 3, "steps_per_epoch": 2, "accumulate_grad_batches": 2}, 1437, 1, Plan(3, 2, 32, 2, 1)),
        ({}, 1437, 2, Plan(44, 22, 32, 1, 2)),
        ({}, 7, 1, Plan(2, 1, 32, 1, 1)),
    ],
)
def test_plan_has_whole_steps_alone(settings, num_rows, world_size, expected):
    assert plan_for(Training(**settings), num_rows, world_size) == expected


# The Makefile


def make(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", "-C", str(ROOT), *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("silent_s", "status", "is_kept"),
    [(0, None, True), (0, "running", True), (0, "finished", False), (90_000, "running", False)],
)
def test_profile_clean_leaves_what_another_host_may_still_write(tmp_path, silent_s, status, is_kept):
    run = tmp_path / "run"
    run.mkdir()
    config = {"kind": "training_run", "pid": 2**30, "process_space": "another", "settings": {}}
    files.write_json(run / "config.json", config)
    if status:
        (run / "rank1_stage_times.json").write_text(f'{{"status": "{status}"}}')
    for path in (*run.iterdir(), run):
        os.utime(path, (time.time() - silent_s,) * 2)
    said = make("profile-clean", f"RUNS={tmp_path}").stdout
    assert run.exists() is is_kept and ("may run still on another machine" in said) is is_kept


@pytest.fixture
def run_with_logs(tmp_path, request) -> tuple[Path, Path]:
    """A run that has ended and its folder of logs, as the demo leaves them: links, or copies where there are none."""
    run, logs = tmp_path / "runs" / "ended", tmp_path / "my logs"
    run.mkdir(parents=True)
    (logs / "Model").mkdir(parents=True)
    settings = TrainingSettings.model_validate({"profiling": {"output_dir": str(logs)}})
    run_folder.describe(run, settings, plan_for(settings.training, 100))
    say_pid(run, os.getpid(), 2**30)
    for name, others in LOGS.items():
        (run / name).write_text(f"{name:20}")
        for other in others:
            request.param(run / name, logs / other)
    os.link(run / "trace.json", run / "trace_cycle1.json")
    return run, logs


def say_pid(run: Path, before: int, after: int) -> None:
    config = (run / "config.json").read_text()
    assert f'"pid": {before},' in config
    (run / "config.json").write_text(config.replace(f'"pid": {before},', f'"pid": {after},'))


@pytest.mark.parametrize("run_with_logs", [os.link, shutil.copyfile], indirect=True, ids=["links", "copies"])
def test_profile_clean_removes_the_traces_of_the_run_wherever_they_are(run_with_logs):
    run, logs = run_with_logs
    done = make("profile-clean", f"RUNS={run.parent}")
    assert done.returncode == 0 and f"removed {run}\n" in done.stdout and done.stderr == ""
    assert [*run.parent.iterdir()] == [] and not logs.exists()


@pytest.mark.parametrize("run_with_logs", [os.link], indirect=True)
def test_profile_clean_leaves_what_runs_and_what_is_not_ours_and_other_peoples_logs(run_with_logs):
    run, logs = run_with_logs
    theirs = {"Model/rank0.9.pt.trace.json", "Model/rank0_chrome_trace.json", "Model/notes.txt", "notes.txt"}
    for name in theirs:
        (logs / name).write_text(f"{name[-20:]:20}")  # as many bytes
    shutil.copyfile(run / "trace.json", logs / "Model" / "a copy of mine.json")
    for name, content in {"mine": "", "other": '{"kind": "model"}'}.items():
        (run.parent / name).mkdir()
        (run.parent / name / "config.json").write_text(content)
    say_pid(run, 2**30, os.getpid())
    before = sorted([*run.parent.rglob("*"), *logs.rglob("*")])
    assert f"{run}: process {os.getpid()} runs; it stays" in make("profile-clean", f"RUNS={run.parent}").stdout
    assert sorted([*run.parent.rglob("*"), *logs.rglob("*")]) == before
    say_pid(run, os.getpid(), 2**30)
    assert make("profile-clean", f"RUNS={run.parent}").returncode == 0
    assert {path.name for path in run.parent.iterdir()} == {"mine", "other"}
    left = {str(path.relative_to(logs)) for path in logs.rglob("*") if path.is_file()}
    assert left == {*theirs, "Model/a copy of mine.json"}


@pytest.mark.parametrize(
    ("target", "setup", "command"),
    [
        ("profile", "--training", "scripts/profile_training.py --profiler on --steps 7"),
        ("profile-train", "--training", "scripts/profile_training.py --profiler on --epochs 2"),
        ("monitor", "--monitor", 'scripts/monitor.py "elsewhere"'),
        ("profile-dashboard", "--monitor", 'scripts/monitor.py "elsewhere"'),
        ("profile-check", None, "elsewhere/ holds no run: make profile"),
    ],
)
def test_targets_set_up_what_they_need_first(target, setup, command):
    lines = make("--just-print", target, "STEPS=7", "RUNS=elsewhere").stdout.splitlines()
    if setup:
        first = next(number for number, line in enumerate(lines) if f"setup_environment.sh {setup} --quiet" in line)
        lines = [line for line in lines[first + 1 :] if not line.startswith("mkdir")][:1]
    assert any(command in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "processes", "said"),
    [
        (["--try"], 2, "--try times one process; start it without torchrun"),
        (["--try", "--", "python", "train.py"], 1, "a program of your own is recorded as it is"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_trained(monkeypatch, capsys, arguments, processes, said):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    code = importlib.import_module("scripts.profile_training").main(arguments)
    assert code == 2 and said in capsys.readouterr().err
