"""`scripts/check_profile.py` on training runs: each artefact broken in turn is named; what is missing is no error."""

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from boundby.capture import Recorder, Schedule
from boundby.training import ManagerOptions, ProfilerManager, TimerOptions
from utils.training import run_folder
from utils.training.progress import Progress
from utils.training.settings import Plan, TrainingSettings

PLAN = Plan(8, 4, 2, 1, 1)
LIVING, DEAD = os.getpid(), 2**30  # above the largest number that Linux gives a process


def train(folder: Path, *, profiled: bool = True, trace: bool = True, plan: Plan = PLAN, rank: int = 0) -> None:
    """Leave in the folder what one process of a plain loop of eight steps leaves there."""
    settings = TrainingSettings.model_validate({"profiling": {"enabled": profiled}})
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.describe(folder, settings, plan)
    progress = Progress(None if rank else folder / "metrics.json", plan, print)
    options = ManagerOptions(TimerOptions(rank=rank, world_size=plan.world_size, in_background=False), trace=trace)
    manager = ProfilerManager(
        folder, device=torch.device("cpu"), schedule=Schedule(1, 1, 2), options=options, enabled=profiled
    )
    progress.on_loss = lambda step, loss: manager.metrics({"loss": loss}, step)
    model = torch.nn.Linear(4, 1)
    progress.begin()
    with manager:
        for step in range(PLAN.steps):
            with manager.stage("forward"):
                loss = model(torch.full((2, 4), float(step))).square().mean()
            with manager.stage("backward"):
                loss.backward()
            progress.end_step(loss.detach())
            if step % 4 == 3:
                progress.end_epoch(0.5)
            manager.step()
    progress.end(None)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    train(folder)
    return folder


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def check(capsys, folder: Path, *more: str) -> tuple[int, str]:
    code = importlib.import_module("scripts.check_profile").main([str(folder), *more])
    return code, " ".join(capsys.readouterr().out.split())


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_sound_run_is_fine_and_json_has_the_verdict(run, tmp_path, capsys):
    code, out = check(capsys, run, "--analysis", "--report", str(tmp_path / "report.txt"))
    assert code == 0 and "FINE: 6 artefact(s), no fault" in out, out
    assert "ok metrics.json: 8 steps, 2 epochs" in out
    assert "ok stage_times.json: 5 undisturbed steps" in out
    assert " ".join((tmp_path / "report.txt").read_text().split()) == out and "What to do about the stages" in out
    training = json.loads(check(capsys, run, "--analysis", "--json")[1])["training"]
    assert training["text"][0].startswith("What: ") and training["verdict"]["bound"]


FILES = ("metrics.json", "stage_times.json", "profiler_summary.json", "manifest.json", "trace.json", "op_stats.csv")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_fault(run, capsys, name):
    (run / name).unlink()
    code, out = check(capsys, run)
    assert code == 1 and f"fault {name}: it is missing" in out


@pytest.mark.parametrize("name", ["config.json", *FILES[:4]])
def test_a_damaged_file_is_a_fault_and_no_error(run, capsys, name):
    for content in ("", "[]", '{"a": NaN}', "\udcff"):
        (run / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        code, out = check(capsys, run, "--analysis")
        assert code == 1 and f"fault {name}: " in out
        assert "Stages of the training" in out and "forward" in out  # the times then come from the log


@pytest.mark.parametrize(
    ("pid", "code", "text"),
    [
        (LIVING, 0, "note stage_times.json: it runs still; the last step that has ended is 7"),
        (DEAD, 1, "fault stage_times.json: the training was killed; the last step that has ended is 7"),
    ],
    ids=["living", "dead"],
)
def test_a_run_that_has_not_ended_runs_still_or_was_killed(run, capsys, pid, code, text):
    edit(run / "stage_times.json", lambda document: document.update(status="running", pid=pid))
    edit(run / "metrics.json", lambda document: document.update(status="running"))
    for name in ("profiler_summary.json", "manifest.json", "op_stats.csv", "trace.json"):
        (run / name).unlink()  # they come later
    result, out = check(capsys, run)
    assert result == code and text in out and "it is missing" not in out


def test_a_run_that_wanted_no_profiler_or_trace_is_fine_and_says_so(tmp_path, capsys):
    train(tmp_path / "run", profiled=False)
    code, out = check(capsys, tmp_path / "run", "--analysis")
    assert code == 0 and "note config.json: profiling.enabled was false: the run was not recorded" in out
    edit(tmp_path / "run" / "config.json", lambda document: document["settings"]["profiling"].update(enabled=True))
    code, out = check(capsys, tmp_path / "run")
    assert code == 1 and "fault config.json: stage times of 0 of 1 process(es) are here" in out
    train(tmp_path / "untraced", trace=False)
    code, out = check(capsys, tmp_path / "untraced", "--analysis")
    assert code == 0 and "no trace was wanted: ManagerOptions.trace is False; with True a few steps" in out
    assert "FINE: " in out and "Stages of the training" in out and "Analysis of the trace" in out


def test_a_run_without_a_trace_is_fine_under_nsight_and_a_fault_where_it_was_wanted(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as nsight:
        nsight.setenv("NSYS_PROFILING_SESSION_ID", "1")
        train(tmp_path / "run")
    code, out = check(capsys, tmp_path / "run")
    assert code == 0 and "no trace was wanted: NSYS_PROFILING_SESSION_ID shows a Nsight session" in out
    assert "run without Nsight for a trace" in out
    monkeypatch.setattr(Recorder, "__init__", lambda *_, **__: [][0])
    train(tmp_path / "broken")
    code, out = check(capsys, tmp_path / "broken")
    assert code == 1 and "fault manifest.json: there is no trace (profiler: IndexError: list index out of range)" in out


def test_earlier_processes_are_left_out_and_a_loop_of_the_users_own_needs_no_configuration(run, capsys):
    times = json.loads((run / "stage_times.json").read_text())
    earlier = times | {"rank": 3, "world_size": 4, "started_unix_s": times["started_unix_s"] - 1.0}
    (run / "rank3_stage_times.json").write_text(json.dumps(earlier))
    code, out = check(capsys, run)
    assert code == 0 and "rank3" not in out
    for name in ("config.json", "metrics.json", "rank3_stage_times.json"):
        (run / name).unlink()
    code, out = check(capsys, run)
    assert code == 0 and "FINE: 4 artefact(s)" in out


def test_the_processes_of_a_run_are_checked_and_one_that_left_nothing_is_a_fault(tmp_path, capsys, monkeypatch):
    folder, plan = tmp_path / "run", Plan(8, 4, 2, 1, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        train(folder, plan=plan, rank=rank)
    code, out = check(capsys, folder)
    assert code == 0 and "ok profiler_summary.json: all processes in sum" in out, out
    for path in folder.glob("rank1_*"):
        path.unlink()
    code, out = check(capsys, folder)
    assert code == 1 and "fault config.json: stage times of 1 of 2 process(es) are here" in out
