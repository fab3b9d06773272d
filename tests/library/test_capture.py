"""Captures of small models on the CPU, and what happens when the profiler or the model fails."""

import gc
import gzip
import json
import os
import re
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, schedule

from boundby import files
from boundby.capture import CaptureManifest, CaptureOptions, capture, session
from boundby.capture.session import AT_WORK
from boundby.trace import op_stats, read_trace
from tests.rival_profilers import STEPS as RIVAL_STEPS

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
LAYERS, STEPS = 2, 3
PROBE = 1  # step that is recorded alone to learn its size


def small_step(number: int) -> None:
    torch.ones(4, 4) @ torch.ones(4, 4)


def bulky_step(number: int) -> None:
    ones = torch.ones(2, 2)
    for _ in range(200):
        ones.add(ones)


def growing_step(number: int) -> None:
    for _ in range(2 if number > PROBE else 1):  # from the first recorded step on
        bulky_step(number)


def record(folder: Path, step=small_step, *, steps=STEPS, warmup=1, **options) -> CaptureManifest:
    path = folder / "trace.json.gz"
    return capture(step, device=CPU, steps=steps, warmup=warmup, trace_path=path, options=CaptureOptions(**options))


def whats(manifest: CaptureManifest) -> list[str]:
    return [remark.what for remark in manifest.downgrades]


def trace_in(manifest: CaptureManifest) -> bytes:
    return gzip.decompress(manifest.trace_path.read_bytes())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    model = nn.Sequential(nn.Embedding(50, 8), *(Layer() for _ in range(LAYERS)), nn.Linear(8, 3)).eval()
    tokens = torch.ones(4, 64, dtype=torch.long)
    folder = tmp_path_factory.mktemp("captured")
    with torch.inference_mode():
        return record(folder, lambda number: model(tokens), stacks_path=folder / "stacks.txt")


def test_a_good_capture_has_no_remarks_a_trace_for_viewers_and_stacks_through_the_model(captured):
    assert (captured.steps_expected, captured.steps_recorded, captured.activities) == (STEPS, STEPS, ("CPU",))
    assert (captured.downgrades, captured.warnings) == ((), ())
    assert captured.trace_bytes == captured.trace_path.stat().st_size
    assert json.loads(files.encode_json(captured))["trace_path"] == str(captured.trace_path)
    assert [remark.what for remark in captured.unavailable] == ["device events", "memory snapshot"]  # on a CPU
    assert sorted(path.name for path in captured.trace_path.parent.iterdir()) == ["stacks.txt", "trace.json.gz"]
    complete = [event for event in json.loads(trace_in(captured))["traceEvents"] if event["ph"] == "X"]
    assert all({"ph", "name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
    marks = {event["name"] for event in complete if event["name"].startswith("ProfilerStep")}
    assert marks == {f"ProfilerStep#{PROBE + number}" for number in (1, 2, 3)}
    assert b"[memory]" in trace_in(captured) and not any(item["cat"] == "python_function" for item in complete)
    down = [stat for stat in op_stats(read_trace(captured.trace_path)) if stat.input_shapes == "[[256, 16], [16, 8]]"]
    assert [(stat.name, stat.calls) for stat in down] == [("aten::mm", LAYERS * STEPS)]
    lines = captured.stacks_path.read_text().splitlines()
    assert all(re.fullmatch(r"\S+ [1-9]\d*", line) for line in lines)
    for frame in ("nn.Module:_Layer_1", "test_capture.py", "built-in_function_linear"):
        assert any(frame in line for line in lines), frame
    assert not any("torch/profiler/profiler.py" in line for line in lines)


def test_calls_and_times_equal_the_table_of_torch(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(4, 8)).sum().backward()
    table = {row.key: row for row in profile.key_averages() if not row.is_user_annotation}
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    stats = {stat.name: stat for stat in op_stats(read_trace(tmp_path / "trace.json"))}
    assert {name: row.count for name, row in table.items()} == {name: stat.calls for name, stat in stats.items()}
    for name, stat in stats.items():
        assert stat.cpu_self_ns == pytest.approx(1000 * table[name].self_cpu_time_total, abs=1), name
        assert stat.cpu_total_ns == pytest.approx(1000 * table[name].cpu_time_total, abs=1), name


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_is_what_torch_wrote_and_its_suffix_decides_compression(tmp_path, monkeypatch, name):
    written = []
    export = torch.profiler.profile.export_chrome_trace

    def noted(profile, path):
        export(profile, path)
        written.append(Path(path).read_bytes())

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", noted)
    content = capture(small_step, device=CPU, steps=2, warmup=1, trace_path=tmp_path / name).trace_path.read_bytes()
    assert (gzip.decompress(content) if name.endswith(".gz") else content) == written[-1]
    assert b'"traceEvents"' in written[-1] and b"ProfilerStep#" in written[-1]


def test_the_events_of_a_recording_are_let_go_without_a_collection_of_garbage(tmp_path, monkeypatch):
    held = []
    stop = torch.profiler.profile.stop
    monkeypatch.setattr(
        torch.profiler.profile, "stop", lambda profile: held.append(weakref.ref(profile.profiler)) or stop(profile)
    )
    gc.disable()
    try:
        record(tmp_path, steps=1)
        assert [reference() for reference in held] == [None]
    finally:
        gc.enable()


def test_shapes_and_memory_can_be_left_out_and_steps_are_numbered_on_through_everything(tmp_path):
    numbers = []

    def noted_step(number):
        numbers.append(number)
        small_step(number)

    stacks = tmp_path / "stacks.txt"
    manifest = record(tmp_path, noted_step, warmup=2, stacks_path=stacks, shapes=False, memory=False)
    assert {stat.input_shapes for stat in op_stats(read_trace(manifest.trace_path))} == {None}
    assert b"[memory]" not in trace_in(manifest)
    assert numbers == list(range(PROBE + (2 + 3) + (2 + 1)))


@pytest.mark.parametrize(
    ("name", "steps", "warmup", "fault"),
    [("trace.txt", 1, 1, r"trace\.txt.*\.json"), ("t.json", 0, 1, "steps is 0"), ("t.json", 1, -1, "warmup is -1")],
)
def test_refuses_what_cannot_be_recorded(tmp_path, name, steps, warmup, fault):
    with pytest.raises(ValueError, match=fault):
        capture(small_step, device=CPU, steps=steps, warmup=warmup, trace_path=tmp_path / name)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5])  # the probe; before, at the start of and inside the trace; the stacks
def test_an_error_of_the_program_passes_and_leaves_no_file(tmp_path, at):
    def step(number):
        if number == at:
            raise ZeroDivisionError("the model")

    with pytest.raises(ZeroDivisionError, match="the model"):
        record(tmp_path, step, stacks_path=tmp_path / "stacks.txt")
    assert [path.name for path in tmp_path.iterdir()] == (["trace.json.gz"] if at == 5 else [])
    assert record(tmp_path).downgrades == ()


def test_warnings_of_the_program_reach_its_user(tmp_path):
    with pytest.warns(UserWarning, match="from the model"):
        record(tmp_path, lambda number: warnings.warn("from the model", stacklevel=1), steps=1)


def failing(*args: object, **kwargs: object) -> None:
    raise RuntimeError("!stack.empty() INTERNAL ASSERT FAILED\nframe #0: c10::Error")


@pytest.mark.parametrize("method", ["__init__", "start", "step", "start_trace", "stop_trace", "export_chrome_trace"])
def test_a_failing_profiler_does_not_stop_the_program(tmp_path, monkeypatch, method):
    numbers = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, method, failing)
        manifest = record(tmp_path, numbers.append)
    if method == "stop_trace":  # nothing else would switch torch's profiler off
        autograd_profiler._disable_profiler()
        autograd_profiler._run_on_profiler_stop()
    assert numbers == list(range(PROBE + 1 + STEPS))
    assert whats(manifest) == ["size estimate", "trace"]
    assert manifest.downgrades[0].reason == "RuntimeError: !stack.empty() INTERNAL ASSERT FAILED"
    assert manifest.estimated_bytes is None
    assert (manifest.trace_path, manifest.trace_bytes, manifest.steps_recorded) == (None, None, 0)
    assert list(tmp_path.iterdir()) == []
    assert record(tmp_path).steps_recorded == STEPS


def test_another_profiler_at_work_is_a_downgrade(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as others:
        manifest = record(tmp_path)
    reasons = [(downgrade.what, downgrade.reason) for downgrade in manifest.downgrades]
    assert reasons == [("size estimate", AT_WORK), ("trace", AT_WORK)]
    assert "aten::mm" in {event.name for event in others.events()}


def test_failing_stacks_do_not_cost_the_trace_and_warnings_of_the_profiler_are_kept(tmp_path, monkeypatch):
    start = torch.profiler.profile.start_trace

    def warning(profile):
        warnings.warn("CUPTI stopped early", stacklevel=1)
        failing() if profile.with_stack else start(profile)

    monkeypatch.setattr(torch.profiler.profile, "start_trace", warning)
    manifest = record(tmp_path, stacks_path=tmp_path / "stacks.txt")
    assert (manifest.warnings, manifest.steps_recorded) == (("CUPTI stopped early",), STEPS)
    assert (whats(manifest), manifest.stacks_path) == (["stacks"], None)


def test_a_recording_without_warmup_and_one_of_one_step_say_what_that_costs(tmp_path):
    manifest = record(tmp_path, warmup=0)
    assert (whats(manifest), manifest.steps_recorded) == (["warm-up"], STEPS)
    numbers = []
    manifest = record(tmp_path, numbers.append, steps=1)
    assert numbers == [0, 1]
    assert manifest.estimated_bytes is None and manifest.estimate_reason.startswith("one step")


def test_the_size_of_one_step_tells_that_of_all(tmp_path):
    manifest = record(tmp_path, bulky_step, steps=4)
    size = len(trace_in(manifest))
    assert manifest.estimate_reason is None
    assert size <= manifest.estimated_bytes < 1.2 * size  # the header is counted 4 times
    assert manifest.cycles[0].json_bytes == size


@pytest.mark.parametrize(
    ("step", "verb", "windows"),
    [(bulky_step, "would make about", PROBE + 1 + 2), (growing_step, "made", PROBE + 1 + 4 + 1 + 2)],
    ids=["by the estimate", "by the trace"],
)
def test_a_trace_above_the_limit_has_fewer_steps(tmp_path, step, verb, windows):
    numbers = []
    limit = len(trace_in(record(tmp_path / "whole", step, steps=4))) * 3 // 5
    manifest = record(
        tmp_path / "part", lambda number: numbers.append(number) or step(number), steps=4, max_trace_bytes=limit
    )
    assert (manifest.steps_expected, manifest.steps_recorded) == (4, 2)
    assert numbers == list(range(windows))  # where the estimate tells, no step is recorded in vain
    assert whats(manifest) == ["steps"]
    assert re.fullmatch(rf"4 step\(s\) {verb} .* above the limit of .*; 2 instead", manifest.downgrades[0].reason)
    assert len(trace_in(manifest)) <= limit


def test_a_limit_that_nothing_meets_leaves_no_trace(tmp_path):
    manifest = record(tmp_path, steps=2, max_trace_bytes=10, stacks_path=tmp_path / "stacks.txt")
    assert whats(manifest) == ["steps", "shapes and memory", "trace", "stacks"]
    assert (manifest.trace_path, manifest.stacks_path, list(tmp_path.iterdir())) == (None, None, [])


PROGRAM = """
import os, sys, torch
from pathlib import Path
from boundby.capture import capture
def step(number):
    os.write(2, b"the model speaks\\n")
    torch.ones(2) + 1
capture(step, device=torch.device("cpu"), steps=1, warmup=1, trace_path=Path(sys.argv[1]))
print(os.environ.get("KINETO_LOG_LEVEL"))
"""


def test_the_terminal_belongs_to_the_program(tmp_path):  # the level is read once in a process
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "trace.json")],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("None\n", "the model speaks\n" * 2)


def test_a_log_level_set_by_the_user_is_left_alone(tmp_path, monkeypatch):
    seen = []
    start = torch.profiler.profile.start
    monkeypatch.setenv("KINETO_LOG_LEVEL", "4")
    monkeypatch.setattr(
        torch.profiler.profile, "start", lambda profile: seen.append(os.environ["KINETO_LOG_LEVEL"]) or start(profile)
    )
    record(tmp_path, steps=1)
    assert (seen, os.environ["KINETO_LOG_LEVEL"]) == (["4"], "4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
def test_a_gpu_gives_device_times(tmp_path):
    device = torch.device("cuda:0")
    matrix = torch.ones(512, 512, device=device)
    path = tmp_path / "trace.json.gz"
    manifest = capture(lambda number: matrix @ matrix, device=device, steps=STEPS, warmup=2, trace_path=path)
    assert (manifest.activities, manifest.downgrades, manifest.unavailable) == (("CPU", "CUDA"), (), ())
    stats = {stat.name: stat for stat in op_stats(read_trace(path))}
    assert stats["aten::mm"].calls == STEPS
    assert stats["aten::mm"].device_total_ns > 0


ROOT = Path(__file__).resolve().parents[2]
HOST_ONLY = [ProfilerActivity.CPU]
HINDERED, BEGUN = f"trace: {session.AT_WORK}", f"trace: {session.BEGUN}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return a folder with what each case came to, in a process that a fault would end."""
    folder = tmp_path_factory.mktemp("rivals")
    command = [sys.executable, "-m", "tests.rival_profilers", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, f"{sorted(path.name for path in folder.iterdir())}\n{ended.stderr}"
    return folder


@pytest.mark.parametrize(
    ("case", "theirs", "ours", "text"),
    [
        ("alone", [1], 2, None),  # it ended before ours began
        ("around", [RIVAL_STEPS], 0, HINDERED),
        ("warm_before", [2], 0, HINDERED),
        ("begun_in_warm_up", [2], 2, BEGUN),  # in a later cycle
        ("begun_in_recording", [3], 0, BEGUN),
        ("warm_in_recording", [2], 0, BEGUN),
        ("in_turns", [2, 2, 0], 0, HINDERED),
        ("of_another_thread", [1], 0, BEGUN),
        ("before_in_another_thread", [1], 0, HINDERED),
    ],
)
def test_theirs_records_every_step_of_its_own_and_ours_gives_way(outcomes, case, theirs, ours, text):
    document = json.loads((outcomes / f"{case}.json").read_text())
    assert (document["theirs"], document["ours"], document["traced"]) == (theirs, ours, ours)
    assert [downgrade for downgrade in document["downgrades"] if downgrade in (HINDERED, BEGUN)] == [
        item for item in [text] if item
    ]
    assert document["later"] == 1, "a profiler that comes later records as if nothing had been"


@pytest.mark.filterwarnings("ignore:.*Profiler")
def test_a_profiler_is_at_work_from_its_warm_up_to_its_end():
    class Derived(profile):
        pass

    seen = [session.is_another_at_work()]
    with Derived(activities=HOST_ONLY, schedule=schedule(wait=1, warmup=1, active=1, repeat=1)) as theirs:
        for _ in range(4):
            seen.append(session.is_another_at_work())
            theirs.step()
    with profile(activities=HOST_ONLY, schedule=schedule(wait=0, warmup=2, active=1)) as stopped:  # in its warm-up
        seen.append(session.is_another_at_work())
    stopped.step_rec_fn = object()  # as torch 2.11 leaves it
    assert [*seen, session.is_another_at_work()] == [False, False, True, True, False, True, False]


def test_a_thread_that_no_step_answers_goes_on_after_a_while(monkeypatch):
    monkeypatch.setattr(session, "LONGEST_WAIT_S", 0.0)
    prepared: list[str] = []
    monkeypatch.setattr(session.autograd_profiler, "_prepare_profiler", prepared.append)
    watch = session.Watch(lambda: prepared.append("ours has ended"))
    watch.on()
    thread = threading.Thread(target=lambda: session.autograd_profiler._prepare_profiler("theirs"))
    thread.start()
    thread.join()
    watch.answer()
    watch.off()
    assert prepared == ["theirs", "ours has ended"]


def test_what_is_ours_ends_nothing_and_nothing_of_torch_stays_replaced():
    def functions():
        return session.autograd_profiler._prepare_profiler, session.autograd_profiler._run_on_profiler_start

    before = functions()
    ended: list[str] = []
    watch = session.Watch(lambda: ended.append("ours"))
    watch.on()
    watch.own(lambda: torch.profiler.profile(activities=HOST_ONLY).__enter__().stop())
    assert ended == []
    watch.off()
    assert functions() == before
