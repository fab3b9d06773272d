"""A folder that is used again holds the newest run alone, and a profiler that has ended stays off."""

import json
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch

from boundby import files
from boundby.capture import CaptureOptions, Schedule
from boundby.capture.export import Exported
from boundby.training import ManagerOptions, ProfilerManager, StageTimer, TimerOptions
from boundby.training.results import RunFiles, remove_earlier

CPU = torch.device("cpu")
STAGES = ["manifest.json", "profiler_summary.json", "stage_log.jsonl", "stage_times.json"]
NOBODY = 2**30  # above the largest number that Linux gives a process


def manager_in(folder: Path, schedule: Schedule | None = None, said: list[str] | None = None, **options):
    given = ManagerOptions(TimerOptions(in_background=False), **options)
    say = None if said is None else said.append
    return ProfilerManager(folder, device=CPU, schedule=schedule or Schedule(1, 1, 1), options=given, say=say)


def train(manager: ProfilerManager | StageTimer, steps: int = 6) -> None:
    for _ in range(steps):
        with manager.stage("forward"):
            torch.ones(4).sum()
        manager.step()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def manifest_in(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    options = CaptureOptions(stacks_path=folder / "my_stacks.txt")
    with manager_in(folder, Schedule(0, 1, 1, 2), capture=options) as manager:
        train(manager)
    (folder / "notes.txt").write_text("mine")
    recording = ["my_stacks.txt", "op_stats.csv", "trace.json", "trace_cycle1.json", "trace_cycle2.json"]
    assert names_in(folder) == sorted([*STAGES, *recording, "notes.txt"])
    return folder


@pytest.fixture
def recorded(made, tmp_path):
    """A folder with the recording of a run of two cycles with stacks, and a file of the user's."""
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(made), str(folder)))
    return folder


def test_a_run_without_a_trace_leaves_nothing_of_an_earlier_recording(recorded):
    with manager_in(recorded, trace=False) as manager:
        train(manager)
    assert names_in(recorded) == sorted([*STAGES, "notes.txt"])
    manifest = manifest_in(recorded)
    assert (manifest["trace_wanted"], manifest["trace_path"], manifest["steps_recorded"]) == (False, None, 0)
    assert "ManagerOptions.trace is False" in manifest["trace_reason"]
    summary = json.loads((recorded / "profiler_summary.json").read_text())
    assert (summary["trace_verdict"], summary["status"]) == (None, "finished")
    assert "manifest.json" in summary["trace_reason"]


def test_a_recording_of_fewer_cycles_leaves_nothing_of_an_earlier_one_which_has_gone_at_the_first_step(recorded):
    with manager_in(recorded) as manager:
        assert names_in(recorded) == ["notes.txt", "stage_log.jsonl", "stage_times.json"]
        train(manager)
    assert names_in(recorded) == sorted([*STAGES, "notes.txt", "op_stats.csv", "trace.json"])
    assert manifest_in(recorded)["trace_wanted"] and manifest_in(recorded)["trace_reason"] is None


def test_files_elsewhere_that_a_manifest_names_stay(tmp_path, recorded):
    elsewhere = tmp_path / "notes.txt"
    elsewhere.write_text("mine too")
    files.write_json(recorded / "manifest.json", manifest_in(recorded) | {"stacks_path": str(elsewhere)})
    assert remove_earlier(RunFiles(recorded, 0, 1)) is None
    assert elsewhere.exists() and (recorded / "notes.txt").exists() and not (recorded / "trace.json").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"cycles": 3}', '{"cycles": [3]}', '{"trace_path": 3}'])
def test_a_damaged_manifest_hinders_nothing(recorded, content):
    (recorded / "manifest.json").write_text(content)
    assert remove_earlier(RunFiles(recorded, 0, 1)) is None
    assert names_in(recorded) == ["my_stacks.txt", "notes.txt", "stage_log.jsonl", "stage_times.json"]


def test_a_process_removes_what_is_its_own_and_the_first_also_the_sum(tmp_path):
    names = [f"rank{rank}_{name}" for rank in (0, 1) for name in ("manifest.json", "trace.json", "trace_cycle2.json")]
    for name in [*names, "profiler_summary.json", "rank1_profiler_summary.json", "trace.json"]:
        (tmp_path / name).write_text("{}")
    remove_earlier(RunFiles(tmp_path, 1, 2))
    assert names_in(tmp_path) == sorted([*names[:3], "profiler_summary.json", "trace.json"])
    remove_earlier(RunFiles(tmp_path, 0, 2))
    assert names_in(tmp_path) == ["trace.json"]  # of a run of one process, which `ranks_in` tells apart


def test_nothing_of_a_run_that_goes_on_is_removed(recorded):
    running = manager_in(recorded)
    running.start()
    train(running)
    before = {name: content for name, content in contents_of(recorded).items() if not name.startswith("stage_")}
    assert {"trace.json", "op_stats.csv", "manifest.json"} <= set(before)
    said: list[str] = []
    second = manager_in(recorded, said=said)
    second.start()
    assert contents_of(recorded).items() >= before.items()
    assert len(said) == 1 and "another profiler of this process still writes there" in said[0]
    second.stop()
    running.stop()


@pytest.mark.parametrize(
    ("pid", "started_after_s", "is_kept"),
    [(os.getppid(), 10.0, True), (os.getppid(), -10.0, False), (NOBODY, 10.0, False), (None, 10.0, False)],
    ids=["alive", "a later process with its number", "killed", "unknown"],
)
def test_a_run_of_another_process_goes_on_while_that_process_lives(recorded, pid, started_after_s, is_kept):
    path = recorded / "stage_times.json"
    began = psutil.Process(os.getppid()).create_time() + started_after_s
    files.write_json(path, json.loads(path.read_text()) | {"status": "running", "pid": pid, "started_unix_s": began})
    reason = remove_earlier(RunFiles(recorded, 0, 1))
    assert (recorded / "trace.json").exists() is is_kept
    assert (f"process {pid} still writes there" in reason) if is_kept else reason is None


@pytest.mark.parametrize(
    ("host", "silent_s", "is_kept"),
    [("another", 3600.0, True), ("another", 2 * files.SILENT_S, False)],
    ids=["elsewhere", "elsewhere and silent"],
)
def test_a_run_that_another_host_may_still_write_is_alive_until_proven_dead(recorded, host, silent_s, is_kept):
    path = recorded / "stage_times.json"
    written = {"status": "running", "pid": NOBODY, "host": host, "written_unix_s": time.time() - silent_s}
    files.write_json(path, json.loads(path.read_text()) | written)
    reason = remove_earlier(RunFiles(recorded, 0, 1))
    assert (recorded / "trace.json").exists() is is_kept
    assert ("of another machine still writes there" in reason) if is_kept else reason is None


def test_a_folder_that_does_not_let_go_is_a_remark(recorded, monkeypatch):
    def refuses(*_, **__):
        raise PermissionError("read-only")

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuses)
        manager = manager_in(recorded, said=said)
        manager.start()
    train(manager)
    manager.stop()
    assert "earlier run: PermissionError: read-only" in said
    assert manifest_in(recorded)["steps_recorded"] == 1


@pytest.mark.parametrize("what", ["profiler", "stage timer"])
def test_what_has_ended_stays_off_and_says_so_and_what_is_off_says_nothing(tmp_path, what):
    said: list[str] = []
    whole = StageTimer(tmp_path, say=said.append, options=TimerOptions(in_background=False))
    if what == "profiler":
        whole = manager_in(tmp_path, said=said)
    whole.stop()  # it has not begun
    with whole:
        train(whole)
        whole.start()  # while it runs, this is nothing
    whole.stop()
    assert said == []
    before = contents_of(tmp_path)
    for _ in range(2):
        with whole:
            train(whole)
    assert contents_of(tmp_path) == before
    assert said == [f"{what}: it has ended; make a new one for another loop: nothing of this one is recorded"]
    assert {remark.what: remark.count for remark in whole.snapshot().remarks}.get(what) == 2
    assert whole.snapshot().last_step == 5
    off = ProfilerManager(tmp_path / "off", enabled=False, say=said.append)
    for _ in range(2):
        with off:
            train(off)
    assert len(said) == 1 and not (tmp_path / "off").exists()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_follows_from_settings_and_loop_is_written_and_not_said_but_steps_that_are_lost(
    tmp_path, monkeypatch, steps
):
    said: list[str] = []
    with manager_in(tmp_path, Schedule(1, 0, 3), said, capture=CaptureOptions(stacks=True)) as manager:
        train(manager, steps)
    downgrades = manifest_in(tmp_path)["downgrades"]
    assert said == [] and {"warm-up", "trace"} <= {downgrade["what"] for downgrade in downgrades}
    assert all(downgrade["is_foreseen"] for downgrade in downgrades)
    monkeypatch.setattr(Exported, "steps", 1)
    with manager_in(tmp_path, Schedule(1, 1, 2), said) as manager:
        train(manager)
    assert said == ["steps: 1 of 2 are in the trace"]
