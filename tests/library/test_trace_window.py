"""Windows, steps, devices and findings of synthetic traces."""

from pathlib import Path

import pytest

from boundby.trace import analyze, read_trace
from tests.trace_truth.attempts import imbalance
from tests.traces import analysis_of, call, event, step, work, write


def kinds_of(folder: Path, *events: dict, **expected: object) -> dict[str, bool]:
    return {finding.kind: finding.is_fatal for finding in analysis_of(folder, *events, **expected).findings}


def test_steps_last_until_the_next_one_and_queued_work_runs_on_after_them(tmp_path):
    host = [step(3, 10, 15), step(4, 30, 20), call(12, 1, 70), call(45, 1, 71), call(55, 1, 72)]
    analysis = analysis_of(tmp_path, *host, work(15, 20, 70), work(60, 10, 71), work(70, 10, 72))
    (device,) = analysis.devices
    assert (analysis.start_ns, analysis.window_ns, analysis.step_numbers) == (0, 60_000, (3, 4))
    assert [(mark.start_ns, mark.duration_ns) for mark in device.steps] == [(0, 20_000), (20_000, 20_000)]
    assert [sum(mark.busy_ns.values()) for mark in device.steps] == [15_000, 5000]
    assert device.busy_ns == 30_000
    assert imbalance(analysis) is None


WAITING = [step(1, 0, 50), event("cudaStreamSynchronize", 20, 10, "cuda_runtime"), call(0, 1, 70), work(0, 10, 70)]


def test_a_gap_up_to_the_end_of_the_window_is_the_main_threads(tmp_path):
    (device,) = analysis_of(tmp_path, *WAITING).devices
    (gap,) = device.longest_gaps
    assert (gap.duration_ns, gap.cause, gap.ended_by) == (40_000, "launch", None)
    assert device.causes_ns["synchronisation"] == 10_000


@pytest.mark.parametrize("launch_thread", [1, 2])
def test_work_behind_the_window_ends_no_gap_in_it(tmp_path, launch_thread):
    later = [event("aten::mm", 0, 200, tid=2), call(120, 1, 71, tid=launch_thread), work(130, 10, 71)]
    lost = work(140, 10, 999)
    for beyond in (later, [lost, *later], [lost]):
        (device,) = analysis_of(tmp_path, *WAITING, *beyond).devices
        assert device.longest_gaps[0].ended_by is None
        assert (device.causes_ns["launch"], device.causes_ns["synchronisation"]) == (30_000, 10_000)


@pytest.mark.parametrize(
    ("numbers", "expected", "kinds"),
    [
        ((1, 2, 3), 3, {}),
        ((1, 2, 3), None, {}),
        ((1, 2, 3), 5, {"steps": True}),
        ((1, 3), None, {"steps": True}),
        ((1, 3), 3, {"steps": True}),
        ((), 3, {"steps": True}),
        ((), None, {}),
        ((9, 8, 7), 3, {}),  # in any order
    ],
)
def test_missing_steps_are_told(tmp_path, numbers, expected, kinds):
    marks = [step(number, 10 * index, 10) for index, number in enumerate(numbers)]
    launched = [call(1, 1, 70), work(2, 3, 70)]
    assert kinds_of(tmp_path, *marks, event("aten::mm", 0, 9), *launched, expected_steps=expected) == kinds


@pytest.mark.parametrize(
    ("marks", "numbers"),
    [
        ([step(1, 0, 10), step(1, 0, 12, tid=2), step(2, 12, 5), step(2, 14, 5, tid=2)], 0),  # once per thread
        ([step(1, 0, 10), step(2, 10, 5), step(2, 15, 5)], 1),
        ([step(1, 0, 10), step(2, 10, 10), step(1, 500, 10, tid=3), step(2, 510, 10), step(3, 520, 1)], 2),
    ],
)
def test_a_step_number_that_comes_again_later_is_told(tmp_path, marks, numbers):
    findings = analysis_of(tmp_path, *marks, event("aten::mm", 1, 5)).findings
    assert [(item.kind, item.is_fatal) for item in findings] == ([("steps", True)] if numbers else [])
    assert all(item.text.startswith(f"{numbers} step number(s)") for item in findings)


def test_step_quartiles_interpolate_between_the_steps(tmp_path):
    marks = [step(1, 0, 10), step(2, 10, 20), step(3, 30, 40)]
    (device,) = analysis_of(tmp_path, *marks, call(1, 1, 70), work(5, 10, 70)).devices
    duration, compute = device.step_quartiles["duration"], device.step_quartiles["compute"]
    assert (duration.first_ns, duration.median_ns, duration.third_ns) == (15_000, 20_000, 30_000)
    assert (compute.first_ns, compute.median_ns, compute.third_ns) == (2500, 5000, 5000)


def test_every_device_has_its_own_idle_time_and_the_busiest_comes_first(tmp_path):
    host = [step(1, 0, 100), call(0, 5, 70), call(20, 5, 71)]
    analysis = analysis_of(tmp_path, *host, work(10, 20, 70, device=0), work(30, 60, 71, device=3))
    assert [device.device for device in analysis.devices] == [3, 0]
    assert [(item.busy_ns, item.idle_ns) for item in analysis.devices] == [(60_000, 40_000), (20_000, 80_000)]
    assert [item.causes_ns["launch"] for item in analysis.devices] == [20_000 + 10_000, 70_000]
    assert imbalance(analysis) is None


def test_the_process_stands_for_a_device_that_is_not_recorded(tmp_path):
    kernels = [work(10 * k, 5, 70 + k, device=k) for k in range(2)]
    for kernel in kernels:
        kernel["args"].pop("device")
    analysis = analysis_of(tmp_path, step(1, 0, 50), *kernels)
    assert {device.device for device in analysis.devices} == {0, 1}


def test_a_trace_of_the_host_alone_counts_operators_as_work(tmp_path):
    analysis = analysis_of(
        tmp_path,
        step(1, 0, 100),
        event("aten::mm", 10, 30),
        event("aten::add", 20, 5),
        event("aten::relu", 70, 10, tid=2),
        event("enumerate(DataLoader)#_X.__next__", 50, 10, "user_annotation"),
    )
    (device,) = analysis.devices
    assert (device.device, device.busy_ns, device.by_kind_ns) == (None, 40_000, {"operators": 40_000})
    assert device.causes_ns["input"] == 10_000
    assert sum(device.causes_ns.values()) == 60_000
    assert (analysis.kernels, analysis.launches.work, analysis.operators[0].device_total_ns) == ((), 0, None)
    assert analysis.is_conclusive


# Findings

SOUND = [step(1, 0, 100), *(call(k, 1, k) for k in range(1, 31)), *(work(3 * k, 2, k) for k in range(1, 31))]


@pytest.mark.parametrize(
    ("events", "kinds"),
    [
        ([], {}),
        ([event("aten::mm", 5, -2)], {"negative": True}),
        ([work(95, -2, 900), call(90, 1, 900)], {"negative": True, "zero": False}),
        ([work(95, 0, 900), call(90, 1, 900)], {"zero": False}),
        ([work(95, 1, 999)], {"orphaned": False}),
        ([work(90 + k, 0.5, 990 + k, stream=20) for k in range(5)], {"orphaned": True}),
        ([call(90, 1, 999)], {}),
        ([call(60 + k, 0.5, 990 + k) for k in range(5)], {"lost": False}),
        ([call(60 + k, 0.5, 990 + k) for k in range(30)], {"lost": True}),
        ([call(97, 1, 900), work(96, 1, 900)], {"clocks": True}),
        ([work(95, 200, 999)], {"orphaned": False}),
        ([call(90, 1, 900), work(90.5, 2, 900)], {"overlap": False}),
        ([call(90, 1, 900), work(90.5, 2, 900, stream=20)], {}),
        ([call(90, 1, 900), work(91.5, 2, 900)], {}),  # rounding
        ([call(90, 1, 900, "cudaLaunchKernelExC"), work(90.5, 2, 900)], {}),  # dependent launches do
        ([call(90, 1, 900, "cudaGraphLaunch"), work(90.5, 2, 900)], {}),
        ([{"ph": "X", "name": "no time", "pid": 1, "tid": 1}], {"damaged": True}),
    ],
)
def test_finds_what_is_wrong_and_nothing_else(tmp_path, events, kinds):
    assert kinds_of(tmp_path, *SOUND, *events) == kinds


def test_stacks_that_were_asked_for_and_are_missing_and_an_empty_trace_are_told(tmp_path):
    assert kinds_of(tmp_path, *SOUND, stacks_expected=True) == {"stacks": False}
    assert kinds_of(tmp_path) == {"empty": True}


def test_a_gpu_without_any_work_is_told(tmp_path):
    path = write(tmp_path, step(1, 0, 100), event("aten::mm", 1, 5), deviceProperties=[{"name": "NVIDIA H100"}])
    (finding,) = analyze(read_trace(path)).findings
    assert (finding.kind, finding.is_fatal) == ("device", False)
    assert "NVIDIA H100" in finding.text


def test_kernels_without_a_stream_on_two_devices_do_not_overlap(tmp_path):
    kernels = [work(10, 30, 70, device=0), work(20, 30, 71, device=1)]
    for kernel in kernels:
        kernel["args"].pop("stream")
    assert kinds_of(tmp_path, step(1, 0, 100), call(1, 1, 70), call(3, 1, 71), *kernels) == {}
