"""The life of a step: exit codes, one-line errors, receipts, resume, previous results, lock and log."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from boundby import files
from boundby.machine.sampler import DeviceLostError
from utils.command import artifacts, cli
from utils.command.console import Console, log_to, stop_logging
from utils.command.errors import EnvironmentLacksError, InputError
from utils.steps import estimate, step, steps

SETTINGS = """\
model:
  name: some/model
dataset:
  file: {data}
output:
  results_dir: {results}
"""


@pytest.fixture
def workplace(tmp_path):
    """A configuration whose dataset is a small file."""
    data, results = tmp_path / "texts.csv", tmp_path / "results"
    data.write_text("text,labels\nhello,0\n")
    config = tmp_path / "config.yaml"
    config.write_text(SETTINGS.format(data=data, results=results))
    return tmp_path


def run(workplace: Path, body, *flags: str, number: str = "02") -> int:
    body.__globals__["__doc__"] = body.__globals__["__doc__"] or "A step."
    return step(number)(body)(["--config", str(workplace / "config.yaml"), *flags])


def measure(run: cli.Run) -> None:
    """Stand in for step 02: leaves a metrics file."""
    files.write_json(run.layout.metrics, {"resumed": run.resuming})
    files.write_csv(run.layout.detailed_metrics, [{"batch_size": 1}], ["batch_size"])
    run.say("measured")


def interrupted(run: cli.Run) -> None:
    """Stand in for a step that a person stops."""
    raise KeyboardInterrupt


def incomplete(run: cli.Run) -> int:
    """Stand in for step 02 of which a point failed."""
    measure(run)
    return cli.INCOMPLETE


def results(workplace: Path) -> Path:
    return workplace / "results"


def record(workplace: Path) -> dict:
    return json.loads((results(workplace) / "run.json").read_text())


def test_finished_step_leaves_receipt_log_and_run_record(workplace, capsys):
    assert run(workplace, measure) == 0
    receipt = json.loads((results(workplace) / ".receipts" / "02.json").read_text())
    assert receipt["status"] == "ok"
    owned = [results(workplace) / name for name in ("baseline_metrics.json", "detailed_metrics.csv")]
    recorded = [{"path": str(path), "bytes": path.stat().st_size, "sha256": files.sha256(path)} for path in owned]
    assert receipt["outputs"] == recorded
    assert record(workplace)["steps"]["02"]["status"] == "ok"
    assert "measured" in (results(workplace) / "logs" / "02.log").read_text()
    assert capsys.readouterr().out == "measured\n"
    assert not (results(workplace) / ".receipts" / "02.started.json").exists()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InputError("column x is missing"), 2, "error: column x is missing"),
        (EnvironmentLacksError("no network"), 3, "error: no network"),
        (
            OSError(errno.ENOSPC, "No space left on device", "results/x.csv"),
            3,
            "error: results/x.csv: no space left on the disk at /",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "results/x.csv"),
            3,
            "error: results/x.csv: Read-only file system",
        ),
        (RuntimeError("boom"), 1, "error: RuntimeError: boom (--debug shows the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failure_is_one_message_with_its_exit_code(workplace, capsys, error, code, text):
    def fail(run: cli.Run) -> None:
        raise error

    assert run(workplace, fail) == code
    messages = capsys.readouterr().err.splitlines()
    assert messages[-1].startswith(text)
    assert not any("Traceback" in message for message in messages)
    assert record(workplace)["steps"]["02"]["exit_code"] == code
    assert not (results(workplace) / ".receipts" / "02.json").exists()


def test_debug_shows_the_traceback(workplace, capsys):
    def fail(run: cli.Run) -> None:
        raise RuntimeError("boom")

    run(workplace, fail, "--debug")
    assert "Traceback" in capsys.readouterr().err


def test_wrong_settings_run_nothing(workplace, capsys):
    assert run(workplace, measure, "profiling.batch_sizes=[0]") == 2
    assert "command line: profiling.batch_sizes[0]" in capsys.readouterr().err
    assert not results(workplace).exists()


def test_results_folder_that_is_a_file_is_explained(workplace, capsys):
    results(workplace).write_text("")
    assert run(workplace, measure) == 3
    assert "choose another output.results_dir" in capsys.readouterr().err


def test_a_results_folder_that_is_locked_or_no_folder_is_refused(workplace, capsys):
    results(workplace).mkdir()
    with FileLock(results(workplace) / ".lock"):
        assert run(workplace, measure) == 2
    assert "is writing there; wait for it" in capsys.readouterr().err
    if os.fork() == 0:
        FileLock(results(workplace) / ".lock").acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    assert run(workplace, measure) == 0


def resumed(workplace: Path) -> bool:
    """Tell whether step 02 has gone on with what an earlier attempt had left."""
    return json.loads((results(workplace) / "baseline_metrics.json").read_text())["resumed"]


def test_resume_keeps_a_finished_step_where_only_other_settings_changed(workplace, capsys):
    run(workplace, measure)
    assert run(workplace, measure, "--resume") == 0
    assert "step 02: kept (up to date)" in capsys.readouterr().err
    run(workplace, measure)
    run(workplace, measure, "--resume", "trace.stacks=false", "pod.price_per_hour=2")
    assert "kept" in capsys.readouterr().err


def test_without_resume_earlier_results_move_to_previous(workplace, monkeypatch):
    monkeypatch.setenv("BOUNDBY_RUN_STARTED", "20260101T000000Z")
    run(workplace, measure)
    first = (results(workplace) / "baseline_metrics.json").read_bytes()
    run(workplace, lambda run: files.write_text(run.layout.report, "old report"), number="04")
    run(workplace, measure)
    previous = results(workplace) / "previous" / "20260101T000000Z"
    assert (previous / "baseline_metrics.json").read_bytes() == first
    assert (previous / "baseline_summary_report.txt").read_text() == "old report"
    assert not (results(workplace) / "baseline_summary_report.txt").exists()
    run(workplace, measure)
    assert (results(workplace) / "previous" / "20260101T000000Z-2" / "baseline_metrics.json").exists()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("profiling.batch_sizes=[1,8]", "profiling.batch_sizes changed: None -> [1, 8]"),
        ("model.dtype=bfloat16", "model.dtype changed: auto -> bfloat16"),
        ("evaluation.limit=5", "evaluation.limit changed: None -> 5"),
    ],
)
def test_resume_runs_again_when_a_setting_changed_and_names_it(workplace, capsys, flag, reason):
    run(workplace, measure)
    assert run(workplace, measure, "--resume", flag) == 0
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "receipt"])
def test_resume_notices_damage(workplace, capsys, damage):
    run(workplace, measure)
    metrics, receipt = results(workplace) / "baseline_metrics.json", results(workplace) / ".receipts" / "02.json"
    if damage == "truncate":
        metrics.write_bytes(metrics.read_bytes()[:5])
    elif damage == "flip":
        metrics.write_bytes(metrics.read_bytes().replace(b"false", b"False"))
    elif damage == "delete":
        metrics.unlink()
    else:
        receipt.write_bytes(receipt.read_bytes()[:40])
    assert run(workplace, measure, "--resume") == 0
    assert "kept" not in capsys.readouterr().err
    assert json.loads(metrics.read_text())


def test_resume_runs_again_when_the_data_changed(workplace, capsys):
    dataset = workplace / "val_df.csv"
    dataset.write_text("a")
    run(workplace, measure, f"dataset.local_path={dataset}")
    before = files.sha256(dataset)
    dataset.write_text("b")
    run(workplace, measure, f"dataset.local_path={dataset}", "--resume")
    assert f"inputs.dataset changed: {before[:57]}... -> {files.sha256(dataset)[:57]}..." in capsys.readouterr().err


def test_resume_continues_an_interrupted_step_with_equal_settings(workplace, capsys):
    run(workplace, interrupted)
    assert run(workplace, measure, "--resume") == 0
    assert resumed(workplace)
    assert "step 02: continues (same settings, program, data and machine)" in capsys.readouterr().err


def test_resume_does_not_continue_work_of_other_settings(workplace):
    def interrupted(run: cli.Run) -> None:
        files.append_json_line(run.layout.visits("float32"), {"old": True})
        raise KeyboardInterrupt

    run(workplace, interrupted)
    run(workplace, measure, "--resume", "profiling.max_length=64")
    assert not resumed(workplace)
    assert not (results(workplace) / ".receipts" / "02-visits-float32.jsonl").exists()


def evaluated(workplace: Path, at: Path | None = None) -> Path:
    """Leave an evaluation as `scripts/evaluate.py` would, in the folder or, with a link there, in `at`."""
    folder = results(workplace) / "evaluation"
    results(workplace).mkdir(exist_ok=True)
    if at is not None:
        at.mkdir()
        folder.symlink_to(at)
    files.write_json(folder / "plan.json", {"fingerprint": "of a plan"})
    return folder


@pytest.mark.parametrize(
    "name",
    ["evaluation/metrics.json", "evaluation/model.py", "plots/mine.png", "report.html", "raw_samples.csv", "run.json"],
)
@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_what_no_receipt_proves_ours_is_neither_moved_nor_replaced(workplace, capsys, name, flags):
    users = results(workplace) / name
    files.write_text(users, "a user's own")
    assert run(workplace, measure, *flags) == 2
    assert f"error: {results(workplace) / Path(name).parts[0]}: " in capsys.readouterr().err
    assert users.read_text() == "a user's own"
    assert not (results(workplace) / "previous").exists()


def test_resume_leaves_the_evaluation_to_its_own_plan_whatever_has_changed(workplace):
    folder = evaluated(workplace)
    assert run(workplace, measure, "--resume") == 0  # of step 02 there was nothing
    assert (folder / "plan.json").exists()
    assert run(workplace, measure, "--resume", "profiling.max_length=64") == 0
    assert (folder / "plan.json").exists()
    assert len(list(results(workplace).glob("previous/*/baseline_metrics.json"))) == 1
    assert run(workplace, measure) == 0
    assert not folder.exists() and len(list(results(workplace).glob("previous/*/evaluation/plan.json"))) == 1


def test_results_behind_a_link_are_not_moved_without_their_link(workplace, tmp_path, capsys):
    folder = evaluated(workplace, tmp_path / "big")
    before = run(workplace, measure, "--resume"), (results(workplace) / "baseline_metrics.json").read_bytes()
    assert run(workplace, measure) == 2
    said = capsys.readouterr().err
    assert f"{folder}: is a link or a mounted disk ({tmp_path / 'big'})" in said and "Nothing was moved" in said
    assert before == (0, (results(workplace) / "baseline_metrics.json").read_bytes())
    assert not (results(workplace) / "previous").exists()
    assert record(workplace)["steps"]["02"]["exit_code"] == 2
    (folder / "plan.json").unlink()  # an empty folder behind the link has nothing to move
    assert run(workplace, measure) == 0
    assert folder.is_symlink() and folder.is_dir()


def test_results_on_a_mounted_disk_are_not_moved(workplace, monkeypatch, capsys):
    folder = evaluated(workplace)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == folder)
    assert run(workplace, measure) == 2
    assert f"{folder}: is a link or a mounted disk" in capsys.readouterr().err
    assert (folder / "plan.json").exists() and not (results(workplace) / "previous").exists()


def test_resume_under_another_file_name_runs_again(workplace):
    run(workplace, measure)
    assert run(workplace, measure, "--resume", "output.metrics_file=other.json") == 0
    assert (results(workplace) / "other.json").exists()


def test_a_kill_between_marker_and_receipt_leaves_something_to_continue(workplace, monkeypatch):
    run(workplace, incomplete)
    if os.fork() == 0:
        monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        run(workplace, measure, "--resume")
        os._exit(1)
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert run(workplace, measure, "--resume") == 0
    assert resumed(workplace)


def test_plain_start_after_an_interruption_says_that_resume_exists(workplace, capsys):
    run(workplace, interrupted)
    run(workplace, measure)
    assert "--resume would have continued it" in capsys.readouterr().err


def test_incomplete_step_keeps_its_results_and_runs_again_on_resume(workplace, capsys):
    assert run(workplace, incomplete) == 4
    assert run(workplace, measure, "--resume") == 0
    assert resumed(workplace)
    run(workplace, measure)
    run(workplace, measure, "--resume", "evaluation.limit=5", "targets.accuracy=0.5")
    assert resumed(workplace)
    assert "step 02: runs (evaluation.limit changed: None -> 5)" in capsys.readouterr().err


def test_full_disk_does_not_hide_the_error_and_earlier_results_stay_readable(workplace, monkeypatch, capsys):
    run(workplace, measure)
    before = (results(workplace) / "run.json").read_text()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("boundby.files.os.fsync", full)
    assert run(workplace, measure) == 3
    assert "no space left" in capsys.readouterr().err
    assert (results(workplace) / "run.json").read_text() == before


def test_control_characters_do_not_reach_the_terminal(workplace, capsys):
    def hostile(run: cli.Run) -> None:
        run.say("model \x1b]0;owned\x07 name")

    run(workplace, hostile)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed", ["scripts/02_step.py", "utils/deep/two.py", "boundby/table.toml", "utils/page.html.j2", "utils/new.py"]
)
def test_code_hash_is_that_of_the_script_and_of_both_packages_whole(tmp_path, changed):
    for name in ("scripts/02_step.py", "utils/deep/two.py", "boundby/table.toml", "utils/page.html.j2"):
        files.write_text(tmp_path / name, "before")
    first = steps.code_hash("02_step.py", tmp_path / "boundby", tmp_path)
    files.write_text(tmp_path / "scripts" / "03_other.py", "of another step")
    files.write_text(tmp_path / "utils" / "__pycache__" / "two.pyc", "made by Python")
    steps.code_hash.cache_clear()
    assert steps.code_hash("02_step.py", tmp_path / "boundby", tmp_path) == first
    files.write_text(tmp_path / changed, "after")
    steps.code_hash.cache_clear()
    assert steps.code_hash("02_step.py", tmp_path / "boundby", tmp_path) != first


def test_outputs_and_inputs_of_the_table_are_artefacts(tmp_path):
    layout = artifacts.Layout(*(tmp_path / name for name in ("results", "m.json", "m.csv", "data.csv")))
    for number, entry in steps.STEPS.items():
        assert all(isinstance(path, Path) for path in steps.outputs(number, layout))
        assert {name for name in entry.inputs if name not in steps.READINGS} <= set(dir(layout))
        assert set(entry.outdates) <= set(steps.STEPS)


def test_progress_without_a_terminal_is_plain_lines(capsys):
    now = [0.0]
    console = cli.Console()
    with console.progress(4, "sweep", clock=lambda: now[0]) as progress:
        now[0] = 20.0
        progress.advance(1, "batch 8: 10 samples/s")
        now[0] = 25.0
        progress.advance(1)
        now[0] = 51.0
        progress.advance(1)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["sweep 1/4 ETA 01:00 batch 8: 10 samples/s", "sweep 3/4 ETA 00:17"]


def test_total_and_time_left_are_what_the_work_says_last(capsys):
    console = cli.Console(clock=lambda: 0.0)
    with console.progress(None, "sweep") as progress:
        progress.advance(1, "a")
        progress.total, progress.left_s = 8, 90.0
        progress.advance(1, "b")
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()] == [
        "sweep 1 a", "sweep 2/8 ETA 01:30 b"
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_with_total_and_time_left():
    terminal, now = Terminal(), [0.0]
    console = cli.Console(terminal, terminal, clock=lambda: now[0])
    with console.progress(None, "sweep") as progress:
        progress.total, now[0] = 4, 20.0
        progress.advance(1, "batch 8: 10 samples/s")
        now[0] = 35.0
        console.beat()
    drawn = [line.strip() for line in terminal.getvalue().split("\r")]
    for left in ("01:00", "00:45"):
        assert any(re.fullmatch(rf"sweep 1/4 ETA {left} \|#+ +\| batch 8: 10 samples/s", line) for line in drawn), drawn


def test_nothing_is_silent_for_more_than_ten_seconds(capsys):
    now = [0.0]
    console = cli.Console(clock=lambda: now[0])
    console.note("loading")
    for now[0] in (5.0, 12.0, 15.0, 23.0):
        console.beat()
    with console.progress(4, "trials") as progress:
        now[0] = 43.0
        progress.advance(1, "one")
        now[0] = 60.0
        console.beat()
    said = [line.split(" ", 1)[-1] for line in capsys.readouterr().err.splitlines()]
    assert said[1:] == [
        "still running, 00:12 since the last line", "still running, 00:23 since the last line",
        "trials 1/4 ETA 01:00 one", "trials 1/4 ETA 00:43 (00:37 so far)",
    ]  # fmt: skip


def test_work_that_knows_its_seconds_counts_them_and_says_a_point_once(capsys):
    console = cli.Console(clock=lambda: 0.0)
    with console.progress(30, "replays and trials, seconds") as progress:
        for left_s, text in ((30.0, "replays"), (21.0, "replays"), (8.4, "trial: bfloat16"), (-2.0, "trial: bfloat16")):
            progress.left(left_s, text)
    said = [line.split(" ", 1)[-1] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "replays and trials, seconds 0/30 ETA 00:30 replays",
        "replays and trials, seconds 22/30 ETA 00:08 trial: bfloat16",
    ]


def test_heartbeat_ends_with_the_work():
    before = threading.active_count()
    with cli.Console().heartbeat():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_every_signal_to_stop_is_recorded_and_a_second_one_at_once_disturbs_nothing(workplace, name):
    def stopped(run: cli.Run) -> None:
        try:
            signal.raise_signal(signal.Signals[name])
        finally:
            signal.raise_signal(signal.SIGTERM)  # the runner has passed it on too

    before = signal.signal(signal.Signals[name], signal.SIG_DFL)
    assert run(workplace, stopped) == 143
    assert signal.signal(signal.Signals[name], before) == signal.SIG_DFL
    assert record(workplace)["steps"]["02"]["status"] == "interrupted"


def test_a_signal_that_is_ignored_stays_so(workplace):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
    assert run(workplace, lambda run: signal.raise_signal(signal.SIGHUP)) == 0
    signal.signal(signal.SIGHUP, before)


PROGRAM = """
import os, sys
from boundby import files
from utils.steps import step

def main(run):
    for name in ("say", "note", "say"):
        getattr(run, name)("x" * 10_000)
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    assert not any(str(run.layout.results) in each for each in streams), streams  # else what is printed lands in a file
    files.write_json(run.layout.metrics, {})
    files.write_csv(run.layout.detailed_metrics, [{"batch_size": 1}], ["batch_size"])

main.__globals__["__doc__"] = "A step."
sys.exit(step("02")(main)())
"""


@pytest.mark.parametrize("streams", [">/dev/full", "2>/dev/full", ">&- 2>&-", "<&- >&-"])
def test_a_stream_that_dies_ends_no_measurement(workplace, streams):
    command = ["bash", "-c", f'exec "$0" -c "$1" --config "$2" {streams}', sys.executable, PROGRAM]
    done = subprocess.run([*command, str(workplace / "config.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((results(workplace) / "baseline_metrics.json").read_text()) == {}


class Dead(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_closed_and_a_log_on_a_full_disk_end_nothing(tmp_path, monkeypatch, capsys):
    console = Console(Dead(), Dead())
    handler = log_to(tmp_path / "log")
    monkeypatch.setattr(handler, "stream", Dead())
    console.say("result")
    console.note("doubt")
    with console.progress(3, "rows") as progress:
        progress.advance(1, "one")
    monkeypatch.undo()
    stop_logging(handler)
    assert "".join(capsys.readouterr()) == ""


def test_a_python_without_our_packages_is_told_in_one_line_how_to_get_them():
    script = str(cli.ROOT / "scripts" / "02_baseline_inference.py")
    done = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "") and "Traceback" not in done.stderr
    assert "msgspec: not installed for " in done.stderr and "setup_environment.sh" in done.stderr


class Noon(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return datetime(2026, 1, 1, 12, 0, 0, tzinfo=tz)


class Counter:
    """The joules that the GPUs of a machine have taken, or why nobody can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *joules: float | None) -> None:
        self._joules = list(joules)
        monkeypatch.setattr(steps, "gpu_energy", lambda: self)

    def joules(self) -> float:
        joules = self._joules.pop(0) if len(self._joules) > 1 else self._joules[0]
        if joules is None:
            raise OSError("NVML: GPU is lost")
        return joules


@pytest.fixture
def under_way(workplace, monkeypatch):
    """A run that began five minutes ago and has the steps 02 to 05 left."""
    monkeypatch.setenv("BOUNDBY_RUN_STARTED", "20260101T115500Z")
    monkeypatch.setenv("BOUNDBY_RUN_LEFT", "02 03 04 05")
    monkeypatch.setattr(estimate, "datetime", Noon)
    return workplace


def nothing(run: cli.Run) -> None:
    """Stand in for a step that leaves nothing."""


QUICK = ["evaluation.enabled=false", "layers.max_seconds=30", "variants.max_seconds=60"]


def said_at_the_end(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_step_ends_with_the_time_of_the_run_and_about_how_much_is_left(under_way, capsys):
    assert run(under_way, measure, *QUICK) == 0
    left = estimate.LOADING_S + estimate.TRACE_S + 30 + 10 + estimate.LOADING_S + 60
    assert said_at_the_end(capsys) == f"step 02: 5 min 00 s since the start; about {estimate.minutes(left)} left"


def test_the_last_step_ends_with_the_time_of_the_run_alone_and_a_step_by_itself_with_none(
    under_way, capsys, monkeypatch
):
    assert run(under_way, nothing, number="05") == 0
    assert said_at_the_end(capsys) == "step 05: 5 min 00 s since the start"
    monkeypatch.delenv("BOUNDBY_RUN_LEFT")
    assert run(under_way, measure) == 0
    assert "since the start" not in capsys.readouterr().err


def test_what_is_not_known_of_what_is_left_is_named(under_way, capsys, monkeypatch):
    monkeypatch.setenv("BOUNDBY_RUN_LEFT", "00 01 02")
    run(under_way, nothing, number="00")
    assert "; at least " in (line := said_at_the_end(capsys))
    assert line.endswith(" left (not counted: step 01, the evaluation of step 02)")


def test_a_resumed_run_counts_nothing_for_a_step_that_is_kept(under_way, capsys, monkeypatch):
    monkeypatch.setenv("BOUNDBY_RUN_LEFT", "02 04")
    run(under_way, measure, *QUICK)
    before = said_at_the_end(capsys)
    monkeypatch.setattr(steps, "decide", lambda number, *_: steps.Decision(number == "02", ""))
    assert run(under_way, measure, *QUICK, "--resume") == 0
    assert (before[-15:], said_at_the_end(capsys)[-15:]) == ("about 10 s left", " about 0 s left")


def test_the_energy_so_far_is_what_the_counter_has_moved_by_in_each_step(under_way, capsys, monkeypatch):
    Counter(monkeypatch, 7200.0, 9000.0, 1.0, 1801.0)  # between two steps the driver may begin anew
    run(under_way, nothing, *QUICK, number="00")
    run(under_way, measure, *QUICK)
    assert "since the start, 1.00 Wh by the GPU's counter; about" in said_at_the_end(capsys)
    assert record(under_way)["energy"]["joules"] == 3600.0


def test_a_step_under_way_counts_what_it_has_taken_so_far(under_way, monkeypatch):
    Counter(monkeypatch, 0.0, 1800.0, 0.0, 1800.0, 9000.0)
    run(under_way, nothing, *QUICK, number="00")
    said = []

    def looks(run: cli.Run) -> None:
        said.append(estimate.standing("02", run.config, run.layout, False, 60.0))

    run(under_way, looks, *QUICK)
    assert "since the start, 1.00 Wh by" in said[0] and "; about 3 min 30 s left" in said[0]


@pytest.mark.parametrize(
    ("joules", "reason"),
    [
        ([None], "NVML: GPU is lost"),
        ([5.0, None], "NVML: GPU is lost"),
        ([None, 5.0], "NVML: GPU is lost"),
        ([5.0, 4.0], "the counter stands still or began anew"),
        ([5.0], "the counter stands still or began anew"),
    ],
)
def test_energy_that_nobody_can_tell_is_null_with_a_reason_for_the_rest_of_the_run(
    under_way, capsys, monkeypatch, joules, reason
):
    Counter(monkeypatch, *joules)
    assert run(under_way, measure, *QUICK) == 0
    assert "Wh" not in said_at_the_end(capsys)
    energy = record(under_way)["energy"]
    assert (energy["joules"], energy["reason"]) == (None, reason)
    Counter(monkeypatch, 1.0, 2.0)
    assert run(under_way, nothing, number="03") == 0
    assert "Wh" not in said_at_the_end(capsys) and record(under_way)["energy"]["joules"] is None


def test_a_gpu_that_is_lost_for_the_counter_ends_no_step(under_way, monkeypatch):
    def lost() -> float:
        raise DeviceLostError("NVML: GPU is lost")

    monkeypatch.setattr(steps, "gpu_energy", lambda: SimpleNamespace(joules=lost))
    assert run(under_way, measure, *QUICK) == 0
    assert record(under_way)["energy"]["reason"] == "NVML: GPU is lost"


def test_the_card_that_step_02_has_drawn_is_ours_though_step_04_has_not_run(workplace, capsys):
    def draws(run: cli.Run) -> None:
        measure(run)
        files.write_text(run.layout.card, "a card")
        raise KeyboardInterrupt

    assert run(workplace, draws) == 130
    assert run(workplace, measure, "--resume") == 0
    assert run(workplace, nothing, number="04") == 0
    assert run(workplace, measure) == 0
    assert not (results(workplace) / "card.txt").exists(), "it has moved away with what it tells of"
    files.write_text(results(workplace) / "elsewhere" / "card.txt", "another's")
    assert run(workplace, measure, f"output.results_dir={results(workplace) / 'elsewhere'}") == 2
    assert "no receipt says that a step made it" in capsys.readouterr().err
