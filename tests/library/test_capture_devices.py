"""What only a GPU has: memory snapshots, NVTX ranges and Nsight sessions, with torch's doors to them replaced."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boundby.capture import CaptureManifest, CaptureOptions, Naming, Recorder, Schedule, capture
from boundby.capture.session import activities_on, with_configuration

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CYCLES = Schedule(0, 1, 2, 2)


def drive(folder: Path, cuda, device: torch.device, step=None, warmup=1, **options: Any) -> CaptureManifest:
    given = {"steps": 1, "warmup": warmup, "trace_path": folder / "trace.json", "options": CaptureOptions(**options)}
    return capture(step or cuda.calls.append, device=device, **given)


def follow(folder: Path, cuda, device: torch.device, steps: int = 6, **options: Any) -> CaptureManifest:
    given = {"options": CaptureOptions(**options), "naming": Naming()}
    recorder = Recorder(CYCLES, folder / "trace.json", device=device, **given)
    recorder.start()
    for number in range(steps):
        cuda.calls.append(number)
        recorder.step()
    return recorder.stop()


def of(manifest: CaptureManifest, what: str) -> list[str]:
    return [remark.reason for remark in (*manifest.downgrades, *manifest.unavailable) if remark.what == what]


def test_a_snapshot_is_taken_in_a_step_of_its_own_or_in_the_steps_of_the_last_cycle_of_a_recorder(tmp_path, cuda):
    manifest = drive(tmp_path, cuda, CUDA, snapshot_path=tmp_path / "memory.pickle")
    assert cuda.calls == [0, 1, "on", 2, "dump", "off"]
    assert manifest.snapshot_path.read_bytes() == b"snapshot"
    assert of(manifest, "memory snapshot") == []
    cuda.calls.clear()
    manifest = follow(tmp_path, cuda, CUDA, snapshot_path=tmp_path / "memory.pickle")
    assert cuda.calls == [0, 1, 2, 3, "on", 4, 5, "dump", "off"]
    assert manifest.snapshot_path == tmp_path / "memory.pickle"


def test_beside_a_profiler_that_has_failed_the_history_alone_slows_the_steps(tmp_path, monkeypatch, cuda):
    def failing(*_):
        raise RuntimeError("no profiler today")

    monkeypatch.setattr(torch.profiler.profile, "start", failing)
    options = CaptureOptions(snapshot_path=tmp_path / "memory.pickle")
    recorder = Recorder(Schedule(1, 2, 2), tmp_path / "trace.json", device=CUDA, options=options, naming=Naming())
    recorder.start()
    slowed = []
    for _ in range(6):
        slowed.append(recorder.is_at_work)
        recorder.step()
    recorder.stop()
    assert slowed == [False, False, False, True, True, False]


def test_the_history_is_switched_off_when_writing_it_or_the_program_fails(tmp_path, cuda):
    def step(number):
        cuda.calls.append(number)
        if number == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drive(tmp_path, cuda, CUDA, step, snapshot_path=tmp_path / "memory.pickle")
    assert cuda.calls == [0, 1, "on", 2, "off"]
    cuda.broken = ("dump",)
    manifest = drive(tmp_path, cuda, CUDA, snapshot_path=tmp_path / "memory.pickle")
    assert (cuda.calls[-1], manifest.snapshot_path) == ("off", None)
    assert of(manifest, "memory snapshot") == ["RuntimeError: dump is broken"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_history_that_the_program_keeps_is_left_alone(tmp_path, monkeypatch, cuda):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    manifest = drive(tmp_path, cuda, CUDA, snapshot_path=tmp_path / "memory.pickle")
    assert cuda.calls == [0, 1, 2]
    assert of(manifest, "memory snapshot") == ["RuntimeError: the program keeps the history of the allocator itself"]


def test_a_cpu_has_no_snapshot_and_runs_no_step_for_it_and_a_torch_without_nvtx_says_so_once(tmp_path, cuda):
    manifest = drive(tmp_path, cuda, CPU, snapshot_path=tmp_path / "memory.pickle")
    assert cuda.calls == [0, 1]
    assert "CUDA and XPU only, not for cpu" in of(manifest, "memory snapshot")[0]
    cuda.broken = ("step_0",)
    for door in (drive, follow):
        manifest = door(tmp_path, cuda, CPU, nvtx=True)
        assert of(manifest, "NVTX ranges") == ["RuntimeError: step_0 is broken"] and manifest.trace_path is not None


def test_every_step_has_its_range_which_ends_when_it_fails(tmp_path, cuda):
    drive(tmp_path, cuda, CPU, nvtx=True)
    assert cuda.calls == ["step_0", 0, "pop", "step_1", 1, "pop"]
    cuda.calls.clear()
    follow(tmp_path, cuda, CPU, steps=2, nvtx=True)
    assert cuda.calls == ["step_0", 0, "pop", "step_1", 1, "pop", "step_2", "pop"]
    cuda.calls.clear()
    with pytest.raises(ZeroDivisionError):
        drive(tmp_path, cuda, CPU, lambda _: 1 / 0, nvtx=True)
    assert cuda.calls == ["step_0", "pop"]


@pytest.mark.usefixtures("nsys")
def test_nsight_gets_the_recorded_steps_in_place_of_a_trace(tmp_path, cuda):
    manifest = drive(tmp_path, cuda, CUDA, stacks_path=tmp_path / "stacks.txt")
    assert cuda.calls == ["step_0", 0, "pop", "start", "step_1", 1, "pop", "stop"]
    assert (manifest.trace_path, manifest.activities, manifest.cycles) == (None, (), ())
    cuda.calls.clear()
    manifest = follow(tmp_path, cuda, CUDA, stacks_path=tmp_path / "stacks.txt")
    without_ranges = [call for call in cuda.calls if call != "pop" and not str(call).startswith("step_")]
    assert without_ranges == [0, "start", 1, 2, "stop", 3, "start", 4, 5, "stop"]
    assert (manifest.trace_path, manifest.cycles) == (None, ())
    [remark] = manifest.downgrades
    assert remark.what == "trace" and "NSYS_PROFILING_SESSION_ID" in remark.reason


@pytest.mark.usefixtures("nsys")
def test_the_range_of_nsight_ends_when_the_loop_ends_early_or_the_program_fails(tmp_path, cuda):
    follow(tmp_path, cuda, CUDA, steps=2)
    assert cuda.calls.count("start") == cuda.calls.count("stop") == 1
    cuda.calls.clear()
    with pytest.raises(ZeroDivisionError):
        drive(tmp_path, cuda, CUDA, lambda _: 1 / 0, warmup=0)
    assert cuda.calls == ["start", "step_0", "pop", "stop"]


@pytest.mark.usefixtures("nsys")
def test_nsight_gets_a_range_for_each_operator_of_the_recorded_steps(tmp_path, monkeypatch, cuda):
    class Ranges:
        def __init__(self, **_):
            pass

        def __enter__(self):
            cuda.calls.append("operators")

        def __exit__(self, *_):
            cuda.calls.append("no operators")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", Ranges)
    drive(tmp_path, cuda, CUDA)
    assert cuda.calls[3:] == ["start", "operators", "step_1", 1, "pop", "no operators", "stop"]


@pytest.mark.usefixtures("nsys")
def test_nsight_around_a_program_without_cuda_is_a_remark(tmp_path, cuda):
    cuda.broken = ("start", "step_0")
    manifest = drive(tmp_path, cuda, CPU)
    assert cuda.calls == [0, 1]
    assert of(manifest, "Nsight range") == ["RuntimeError: start is broken"]
    assert of(manifest, "NVTX ranges") == ["RuntimeError: step_0 is broken"]


def test_the_device_of_the_program_decides_what_is_recorded(monkeypatch, cuda):
    cpu, cuda, xpu = (SimpleNamespace(name=name) for name in ("CPU", "CUDA", "XPU"))
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: [xpu, cuda, cpu])
    assert activities_on(CUDA) == [cpu, cuda]  # not XPU, which the torch of an Intel GPU may list beside CUDA
    assert activities_on(CPU) == [cpu]


def test_settings_that_this_torch_does_not_know_are_left_out(monkeypatch):
    def configuration(*, enable_cuda_sync_events):
        return f"sync={enable_cuda_sync_events}"

    monkeypatch.setattr(torch._C._profiler, "_ExperimentalConfig", configuration)
    assert with_configuration({"with_stack": True}) == {"with_stack": True, "experimental_config": "sync=True"}
    monkeypatch.delattr(torch._C._profiler, "_ExperimentalConfig")
    assert with_configuration({"with_stack": True}) == {"with_stack": True}


def test_a_device_whose_events_are_missing_is_noted(tmp_path, monkeypatch, cuda):
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    monkeypatch.setattr("boundby.capture.engine.activities_on", lambda device: both)
    manifest = drive(tmp_path, cuda, CUDA)
    assert of(manifest, "device events") == ["the trace holds none; run with KINETO_LOG_LEVEL=0 to see why"]
