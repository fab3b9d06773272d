"""How the monitor finds and reads runs: whole, half-written, broken, hostile; and that nothing leads out of RUNS."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.injection import injected
from tests.monitor_runs import HOSTILE, Loop, write_run
from utils.command.errors import EnvironmentLacksError, InputError
from utils.training.monitor import runs, server, text
from utils.training.monitor.runs import Index, Processes, Reader, RunFolder

NOW = 2e9


def known(root: Path) -> dict[str, runs.RunEntry]:
    return {run.path: run for run in Index(root).runs()}


def test_runs_are_found_below_the_folder_and_in_it_the_newest_first_and_every_process_is_read(tmp_path):
    write_run(tmp_path / "one", 30)
    for rank in (0, 1):
        write_run(tmp_path / "model" / "two", 5 + rank, rank=rank, world_size=2)
    (tmp_path / "model" / "two" / "rank1_stage_times.json").write_text("{")  # the log is enough
    for name in ("no run/inside", ".hidden/run"):
        (tmp_path / name).mkdir(parents=True)
    write_run(tmp_path / ".hidden" / "run", 2)
    for path, seconds in ((tmp_path / "one", 200), (tmp_path / "model" / "two", 100)):
        for file in path.iterdir():
            os.utime(file, (seconds, seconds))
    result = known(tmp_path)
    assert list(result) == ["one", "model/two"]
    assert (result["one"].status, result["one"].last_step, result["one"].ranks) == ("finished", 29, 1)
    assert result["one"].step_s == pytest.approx(0.0104)
    assert known(tmp_path / "one")["."].last_step == 29
    run = RunFolder(tmp_path, "model/two")
    assert [process.last_step for process in run.processes().ranks] == [4, 5]
    (tmp_path / "model" / "two" / "rank1_stage_log.jsonl").unlink()
    processes = run.processes()
    assert [rank.last_step for rank in processes.ranks] == [4] and "rank1" in processes.faults[0]


def test_a_page_of_many_runs_opens_only_the_files_that_have_changed_since_the_last_one(tmp_path):
    first = write_run(tmp_path / "run", 3)
    for number in range(100):
        shutil.copytree(first, tmp_path / f"run-{number}")
    here = Index(tmp_path)

    def opened() -> list[str]:
        with injected(tmp_path) as done:
            assert len(here.runs()) == 101
        return sorted({Path(path).parent.name for what, path in done if what == "open"})

    assert len(opened()) == 101 and opened() == []
    Loop(tmp_path / "run-7").steps(4).timer.stop()
    assert opened() == ["run-7"] and {run.path: run.last_step for run in here.runs()}["run-7"] == 3
    assert opened() == []


def test_a_run_that_goes_on_is_running_and_one_that_writes_no_more_is_silent(tmp_path):
    loop = Loop(tmp_path / "run").steps(3)
    loop.timer.flush()
    entry = known(tmp_path)["run"]
    assert entry.state(entry.changed_unix_s + 120) == "running"
    assert entry.state(entry.changed_unix_s + 121) == "silent"
    loop.timer.stop()
    assert known(tmp_path)["run"].state(NOW) == "finished"


def test_half_written_and_broken_files_are_named_with_their_reason(tmp_path):
    write_run(tmp_path / "good", 2)
    for name, content in {
        "cut": (tmp_path / "good" / "stage_times.json").read_bytes()[:100],
        "empty": b"",
        "binary": bytes(range(256)),
        "other": b"[1, 2]",
        "version": b'{"schema_version": 99}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage_times.json").write_bytes(content)
    result = known(tmp_path)
    assert result.pop("good").fault is None
    assert len(result) == 5
    for entry in result.values():
        assert entry.state(NOW) == "unreadable" and entry.fault and str(tmp_path) not in entry.fault
    processes = RunFolder(tmp_path, "cut").processes()
    assert processes.ranks == () and "stage_times.json" in processes.faults[0]


def test_links_are_not_followed_and_no_path_leads_out_of_the_folder(tmp_path):
    outside = write_run(tmp_path / "outside", 2)
    (outside / "secret.txt").write_text("secret")
    root = tmp_path / "runs"
    inside = write_run(root / "run", 2)
    (root / "link").symlink_to(outside)
    (inside / "linked.txt").symlink_to(outside / "secret.txt")
    (inside / "folder").symlink_to(outside)
    (root / "fake").mkdir()
    (root / "fake" / "stage_times.json").symlink_to(outside / "stage_times.json")
    result = known(root)
    assert set(result) == {"run", "fake"} and "links are not followed" in (result["fake"].fault or "")
    assert RunFolder(root, "fake").processes().ranks == ()
    for path, said in (
        ("link", "behind a link"),
        *((path, "outside") for path in ("..", "../outside", "/etc", "run/../../outside")),
    ):
        with pytest.raises(ValueError, match=said):
            RunFolder(root, path)
    run = RunFolder(root, "run")
    assert {file.path for file in run.files()}.isdisjoint({"linked.txt", "folder/secret.txt"})
    for path in ("linked.txt", "folder/secret.txt", "../../outside/secret.txt", str(outside / "secret.txt")):
        with pytest.raises((OSError, ValueError)):
            run.read(path)


def test_a_pipe_in_place_of_a_file_does_not_hang_the_page(tmp_path):
    write_run(tmp_path / "run", 2)
    (tmp_path / "run" / "config.json").unlink()
    os.mkfifo(tmp_path / "run" / "config.json")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "stage_times.json")
    assert "no plain file" in (known(tmp_path)["pipe"].fault or "")
    assert RunFolder(tmp_path, "run").document("config.json") == ({}, "config.json: config.json is no plain file")


def test_files_are_listed_and_read_whole(tmp_path):
    run = RunFolder(tmp_path, write_run(tmp_path / "run", 2).name)
    (run.folder / ".tmp-1-2-x.json").write_text("half")
    (run.folder / "tensorboard").mkdir()
    (run.folder / "tensorboard" / "rank0_trace.json").write_text("{}")
    paths = {file.path for file in run.files()}
    assert {"stage_times.json", "tensorboard/rank0_trace.json"} <= paths and ".tmp-1-2-x.json" not in paths
    assert json.loads(run.read("metrics.json"))["loss"] == [1.0, 0.5]
    with pytest.raises(ValueError, match="more than 0 MiB"):
        run.read("metrics.json", 4)
    assert run.read("metrics.json", 4, is_cut=True) == run.read("metrics.json")[:4]


def test_a_run_is_read_no_more_often_than_is_cheap(tmp_path, monkeypatch):
    clock, reads = FakeClock(), []

    def slow(self):
        clock.advance(2.0)
        reads.append(clock.now)
        return Processes((), ())

    monkeypatch.setattr(RunFolder, "processes", slow)
    write_run(tmp_path / "run", 2)
    run, reader = RunFolder(tmp_path, "run"), Reader(clock)
    reader.processes(run)
    clock.advance(100.0)
    reader.processes(run)
    assert len(reads) == 1  # nothing has changed
    write_run(tmp_path / "run", 3)
    reader.processes(run)
    assert len(reads) == 2
    write_run(tmp_path / "run", 4)
    clock.advance(19.0)
    reader.processes(run)
    assert len(reads) == 2  # reading takes 2 s, so it waits 20
    clock.advance(1.0)
    reader.processes(run)
    assert len(reads) == 3


def test_names_cannot_steer_the_page_and_the_server_is_for_this_machine_alone(tmp_path):
    assert text.plain("a\x1b[31m\u202eb\nc\td") == "a[31mb c d"
    assert text.plain("x" * 500) == "x" * 117 + "..."
    assert text.plain("\udcff") == "?"
    assert text.plain(HOSTILE) == HOSTILE
    assert text.distinct(["a", "b", "a"]) == ["a", "b", "a (2)"]
    command = server.command(tmp_path, 8501, 30.0)
    assert "--server.address=127.0.0.1" in command and "--browser.gatherUsageStats=false" in command
    assert "--client.showErrorDetails=none" in command and "--server.headless=true" in command
    assert command[-3:] == ["--", str(tmp_path), "30.0"]


def test_what_the_server_cannot_do_is_said_before_it_starts(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind((server.ADDRESS, 0))
        taken.listen()
        for path, port, stall_s, said in (
            ("none", 8501, 30.0, "is not there"),
            ("file", 8501, 30.0, "is no folder"),
            (".", 0, 30.0, "--port"),
            (".", 65536, 30.0, "--port"),
            (".", 8501, float("nan"), "--stall-after"),
            (".", taken.getsockname()[1], 30.0, "choose another"),
        ):
            with pytest.raises(InputError, match=said):
                server.check(tmp_path / path, port, stall_s)
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacksError, match=r"bash setup_environment.sh --monitor"):
        server.check(tmp_path, 8501, 30.0)


def test_no_data_reaches_a_renderer_of_markup():
    """`unsafe_allow_html` and `st.markdown`, `st.html`, `st.table` stand nowhere: data is text, table or drawing."""
    for path in (Path(server.__file__).parent).rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for forbidden in ("unsafe_allow_html", "st.markdown", "st.html", "st.write", "st.table", "components"):
            assert forbidden not in source, path
