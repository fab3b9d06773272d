"""A training loop under the manager: its result is the same, and its folder complete, whatever fails."""

import atexit
import csv
import errno
import gc
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from boundby import files
from boundby.capture import CaptureOptions, Naming, Recorder, Schedule
from boundby.capture.engine import Engine
from boundby.trace import OPERATOR_COLUMNS, read_trace
from boundby.training import ManagerOptions, ProfilerManager, StageTimer, TimerOptions, read_stage_times
from boundby.training.manager import Readings
from boundby.training.recorder import CudaMarks, StageRecorder
from boundby.training.records import DISTURBED
from tests.fakes import FakeClock

CPU = torch.device("cpu")
STEPS = 8
FILES = ["manifest.json", "op_stats.csv", "profiler_summary.json", "stage_log.jsonl", "stage_times.json", "trace.json"]


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_open():
    """Let a file or a thread that a run left open be an error here; once, since it takes a second."""
    yield
    gc.collect()


def manager_in(folder: Path, *, schedule: Schedule | None = None, said: list[str] | None = None, **options):
    return ProfilerManager(
        folder,
        device=CPU,
        schedule=schedule or Schedule(1, 1, 2),
        options=ManagerOptions(TimerOptions(in_background=False), **options),
        say=None if said is None else said.append,
    )


def train(manager: ProfilerManager | None) -> list[float]:
    """Return the losses of a tiny model with dropout, whose noise and shuffling draw from the global generator."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(2 * STEPS, 4), torch.randn(2 * STEPS, 1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    manager = manager or ProfilerManager("never", enabled=False)
    losses = []
    for x, y in manager.timed(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)):
        with manager.stage("forward"):
            loss = torch.nn.functional.mse_loss(model(x), y)
        with manager.stage("backward"):
            loss.backward()
        with manager.stage("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        manager.metrics({"loss": loss, "samples": len(x)})
        manager.step()
    return losses


@pytest.fixture(scope="module")
def bare():
    return train(None)


def summary_in(folder: Path) -> dict:
    return json.loads((folder / "profiler_summary.json").read_text())


def disturbed_in(folder: Path) -> list[int]:
    return [row["step"] for row in read_stage_times(folder).rows_of("step", "step") if row["flags"] == DISTURBED]


def test_the_losses_are_the_same_and_every_file_is_there(tmp_path, bare):
    said: list[str] = []
    with manager_in(tmp_path, said=said) as manager:
        assert train(manager) == bare
    assert disturbed_in(tmp_path) == [1, 2, 3], "with the profiler at work"
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert all(path.stat().st_size for path in tmp_path.iterdir())
    with (tmp_path / "op_stats.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == OPERATOR_COLUMNS
    assert {"aten::addmm", "aten::mul"} <= {row["name"] for row in rows}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["steps_recorded"], manifest["downgrades"]) == (2, [])
    assert [item["what"] for item in manifest["unavailable"]] == ["device events", "memory snapshot"]
    summary = summary_in(tmp_path)
    assert (summary["status"], summary["last_step"], summary["given_up"]) == ("finished", STEPS - 1, [])
    assert summary["verdict"]["bound"] and summary["step_s"]["n"] == STEPS - 3
    shares = [stage["share"] for stage in summary["stages"]] + [summary["in_no_stage_share"]]
    assert sum(shares) == pytest.approx(1)
    assert [stage["name"] for stage in summary["stages"]] == ["data", "forward", "backward", "optimizer"]
    counted = {metric["name"]: metric["values"]["n"] for metric in summary["metrics"]}
    assert counted["loss"] == counted["samples"] == STEPS and counted["process_bytes"] >= 1
    assert said == []


@pytest.mark.parametrize(
    ("method", "stacks", "disturbed"),
    [
        ("start", False, []),
        ("start", True, []),  # and those of the cycle that is tried again without
        ("step", False, [1]),
        ("step", True, [1, 5]),
        ("stop", False, [1, 2, 3]),
    ],
)
def test_steps_after_the_profiler_has_failed_are_like_any_other(method, stacks, disturbed, tmp_path, monkeypatch):
    original = getattr(torch.profiler.profile, method)

    def failing(profile):
        if method == "stop":
            original(profile)
        raise RuntimeError(f"{method} is broken")

    monkeypatch.setattr(torch.profiler.profile, method, failing)
    with manager_in(tmp_path, capture=CaptureOptions(stacks=stacks)) as manager:
        train(manager)
    assert disturbed_in(tmp_path) == disturbed
    assert summary_in(tmp_path)["step_s"]["n"] == STEPS - len(disturbed)


def test_a_profiler_of_the_program_that_ours_has_given_way_to_disturbs_the_steps(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), manager_in(tmp_path) as manager:
        train(manager)
    assert {1, 2, 3} <= set(disturbed_in(tmp_path))


def test_a_short_resumed_run_is_recorded_as_far_as_it_goes_and_its_trace_bears_its_step_numbers(tmp_path):
    manager = manager_in(tmp_path, schedule=Schedule(50, 2, 2))
    manager.start(total_steps=STEPS, first_step=100)
    train(manager)
    manager.stop()
    trace = read_trace(tmp_path / "trace.json")
    assert {name for name in trace.names if name.startswith("ProfilerStep")} == {"ProfilerStep#106", "ProfilerStep#107"}
    assert json.loads((tmp_path / "manifest.json").read_text())["cycles"][0]["first_step"] == 106
    assert [remark["what"] for remark in summary_in(tmp_path)["given_up"]] == ["schedule"]
    assert read_stage_times(tmp_path).last_step == 100 + STEPS - 1


def test_of_several_cycles_the_first_is_the_trace_and_options_of_the_recording_reach_it(tmp_path):
    cycles = []
    options = CaptureOptions(stacks_path=tmp_path / "stacks.txt")
    with manager_in(tmp_path, schedule=Schedule(0, 1, 1, 2), capture=options) as manager:
        manager.register(
            "trace_ready", lambda cycle: cycles.append((cycle.number, (tmp_path / "manifest.json").exists()))
        )
        train(manager)
    assert cycles == [(1, True), (2, True)]
    assert (tmp_path / "trace.json").read_bytes() == (tmp_path / "trace_cycle1.json").read_bytes()
    assert "test_training_manager.py" in (tmp_path / "stacks.txt").read_text()
    assert Naming() == Naming(manager.snapshot().rank, manager.snapshot().world_size)


def test_a_disabled_manager_leaves_nothing_and_loads_no_torch(tmp_path):
    code = (
        "import sys; from boundby.training import ProfilerManager\n"
        f"with ProfilerManager({str(tmp_path / 'run')!r}, enabled=False) as manager:\n"
        "    with manager.stage('forward'): pass\n"
        "    manager.step()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert not (tmp_path / "run").exists()


def test_ranks_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ProfilerManager(tmp_path, device=CPU, schedule=Schedule(1, 1, 2)) as manager:
        train(manager)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank1_{name}" for name in FILES]
    assert read_stage_times(tmp_path, 1).world_size == 2


def raising(*_: object, **__: object) -> None:
    raise RuntimeError("broken")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


PROFILING = ("start", "step", "stop", "export_chrome_trace")
MARKS = ("begin", "end", "end_step", "settle", "restart_step", "disturb", "__init__")


@pytest.mark.parametrize(
    "fault",
    [
        *((torch.profiler.profile, method, raising, "trace") for method in PROFILING),
        *((Engine, "open", raising, "recorder"), (Recorder, "__init__", raising, "profiler")),
        *((StageRecorder, method, raising, "stage times") for method in MARKS),
        *((files, "append_json_line", full, "log of stage times"), (files, "write_bytes", full, "stage_times.json")),
        *((files, "write_csv", full, "op_stats.csv"), (files, "write_json", full, "manifest.json")),
    ],
)
def test_whatever_fails_the_training_goes_on_and_the_rest_is_written(tmp_path, bare, monkeypatch, fault):
    owner, name, broken, what = fault
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with manager_in(tmp_path, said=said) as manager:
            assert train(manager) == bare
    if owner is not files or name in ("append_json_line", "write_csv"):
        summary = summary_in(tmp_path)
        assert what in [remark["what"] for remark in summary["given_up"]]
    if owner is not StageRecorder:
        assert manager.snapshot().stage("forward").host_s.n
    assert len([text for text in said if text.startswith(f"{what}: ")]) == 1


def test_a_run_that_nobody_stopped_is_complete_at_exit(tmp_path, monkeypatch):
    at_exit: list = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    manager = manager_in(tmp_path)
    manager.start()
    train(manager)
    for function in reversed(at_exit):
        function()
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert summary_in(tmp_path)["error"] == "RuntimeError: the program ended without stopping its profiler"


class Event:
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: "Stream") -> None:
        self.at_ms = stream.reached_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


class Stream:
    cuda_stream = 7
    reached_ms = 0.0


def test_cuda_events_are_pooled_and_none_stands_in_a_captured_graph(monkeypatch):
    stream, is_capturing = Stream(), False
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", raising)
    Event.made = 0
    with StageTimer(marks=CudaMarks(torch.device("cuda", 0))) as timer:
        for step in range(10):
            is_capturing = step == 4
            with timer.stage("forward"):
                stream.reached_ms += 2
            timer.step()
        times = timer.snapshot()
    assert times.rows_of("forward")["device_ns"].tolist() == [2_000_000] * 4 + [-1] + [2_000_000] * 5
    assert Event.made <= 4


def test_the_machine_is_read_once_a_second_between_two_steps():
    clock = FakeClock()
    source = SimpleNamespace(reason=None, reasons={}, read=lambda: {"process_bytes": clock.now})
    readings, values = Readings(source, clock), []
    for clock.now in (5.0, 5.5, 5.99, 6.0, 6.9, 9.0, 9.5):
        values.append(readings.due().get("process_bytes"))
    assert values == [5.0, None, None, 6.0, None, 9.0, None]


def test_a_source_that_fails_is_a_remark_and_no_end_of_the_run(tmp_path, monkeypatch):
    def fails(source):
        raise OSError("the driver is gone")

    monkeypatch.setattr("boundby.machine.sampler.PsutilSource.read", fails)
    with ProfilerManager(tmp_path, device=CPU, options=ManagerOptions(trace=False)) as manager:
        manager.step()
    times = read_stage_times(tmp_path)
    assert times.last_step == 0 and [remark.what for remark in times.remarks] == ["readings"]
    assert "the driver is gone" in times.remarks[0].reason


def test_a_collection_of_garbage_is_a_stage_inside_the_one_in_which_it_falls(tmp_path, monkeypatch):
    monkeypatch.setattr("boundby.training.manager.SHORT_COLLECTION_NS", 0)
    with manager_in(tmp_path, trace=False) as manager:
        for _ in range(3):
            with manager.stage("forward"):
                gc.collect()
            manager.step()
    gc.collect()
    times = read_stage_times(tmp_path)
    rows = times.rows_of("garbage_collection")
    assert len(rows) >= 3 and {times.names[row["parent"]].name for row in rows} >= {"forward"}
    assert len(times.rows_of("forward")) == 3 and not times.remarks


def test_stages_stand_in_the_trace_and_its_wait_for_data_is_the_input(tmp_path):
    with manager_in(tmp_path) as manager:
        train(manager)
    names = set(read_trace(tmp_path / "trace.json").names)
    assert {"stage: data", "stage: forward", "stage: backward", "stage: optimizer"} <= names
