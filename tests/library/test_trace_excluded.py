"""An evaluation between two recorded steps: marked in the trace, and no part of what the analysis says."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from boundby.bound.verdict import values_of
from boundby.capture import Schedule
from boundby.trace import Analysis, analyze, read_trace
from boundby.trace.windows import without_excluded
from boundby.training import ManagerOptions, ProfilerManager
from tests import traces
from tests.traces import call, event, memory_change, python_frame, step, work

CUT_US, LENGTH_US = 1500.0, 700.0  # where the evaluation is, and how long it takes


def steps() -> list[dict]:
    """Return two steps of 1 ms, on the host and on a device, inside one Python frame."""
    events = [python_frame("train.py(1): train", 0, 2000, 1, None), step(1, 0, 1000), step(2, 1000, 1000)]
    for number, begin in enumerate((0.0, 1000.0)):
        events += [
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, 200, "user_annotation"),
            event("aten::mm", begin + 300, 100),
            call(begin + 350, 10, number + 1),
            work(begin + 400, 80, number + 1),
            event("aten::add", begin + 600, 50),
        ]
    return events


def with_evaluation() -> list[dict]:
    """Return the same steps with an evaluation in the second one, inside which a forward runs."""
    later = [mark | {"ts": mark["ts"] + LENGTH_US} if mark["ts"] >= CUT_US else mark for mark in steps()]
    held = []
    for item in later:
        holds = item["ts"] < CUT_US < item["ts"] + item["dur"]
        held.append(item | {"dur": item["dur"] + LENGTH_US} if holds else item)
    evaluation = [
        event("excluded: evaluation", CUT_US, LENGTH_US, "user_annotation"),
        event("aten::mm", CUT_US + 100, 300),
        call(CUT_US + 150, 10, 9),
        work(CUT_US + 200, 400, 9),
    ]
    return held + evaluation


def comparable(analysis: Analysis) -> dict[str, Any]:
    return {**values_of(analysis), "path": ""}


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_the_analysis_is_that_of_the_same_steps_without_it(tmp_path, on_device):
    def analysis_of(events):
        chosen = [record for record in events if on_device or record["cat"] not in ("kernel", "cuda_runtime")]
        return analyze(read_trace(traces.write(tmp_path, *chosen)))

    expected = analysis_of(steps())
    assert comparable(analysis_of(with_evaluation())) == comparable(expected)
    assert expected.window_ns == 2_000_000


@pytest.mark.parametrize(("length", "category"), [(0, "user_annotation"), (50, "cpu_op")], ids=["empty", "an operator"])
def test_a_trace_without_a_mark_is_left_as_it_is(tmp_path, length, category):
    trace = read_trace(traces.write(tmp_path, *steps(), event("excluded: evaluation", 10, length, category)))
    assert without_excluded(trace) is trace


def test_marks_inside_one_another_are_cut_once(tmp_path):
    inner = event("excluded: sampling", CUT_US + 100, 200, "user_annotation")
    trace = without_excluded(read_trace(traces.write(tmp_path, *with_evaluation(), inner)))
    assert int((trace.start_ns + trace.duration_ns).max()) == 2_000_000
    assert len(trace.name) == len(steps())


def test_what_reaches_into_a_range_keeps_what_is_outside_of_it(tmp_path):
    odd = [event("before", CUT_US - 50, 100), event("behind", CUT_US + 650, 100), event("broken", CUT_US + 800, -5)]
    trace = without_excluded(read_trace(traces.write(tmp_path, *with_evaluation(), *odd)))
    rows = {trace.names[name]: row for row, name in enumerate(trace.name.tolist())}
    spans = {name: (trace.start_ns[row], trace.duration_ns[row]) for name, row in rows.items() if name[0] == "b"}
    assert spans == {"before": (1_450_000, 50_000), "behind": (1_500_000, 50_000), "broken": (1_600_000, -5_000)}


def test_memory_that_changes_in_a_range_is_left_out(tmp_path):
    changes = [memory_change(ts, 1, 8, 8) for ts in (CUT_US - 10, CUT_US + 10, CUT_US + LENGTH_US + 10)]
    trace = without_excluded(read_trace(traces.write(tmp_path, *with_evaluation(), *changes)))
    assert trace.memory.start_ns.tolist() == [1_490_000, 1_510_000]


def forward() -> None:
    torch.ones(4, 4) @ torch.ones(4, 4)


def evaluate() -> None:
    for _ in range(50):
        torch.ones(4, 4).cos()


def loop(folder: Path, between: Callable[[ProfilerManager], None]) -> ProfilerManager:
    """Run four steps, of which the second and the third are recorded, with something behind each of them."""
    options = ManagerOptions(readings=False)
    manager = ProfilerManager(folder, device=torch.device("cpu"), schedule=Schedule(0, 1, 2), options=options)
    with manager:
        for _ in range(4):
            with manager.stage("forward"):
                forward()
            manager.step()
            between(manager)
    return manager


def excluded_by_marks(manager: ProfilerManager) -> None:
    manager.timer.begin("evaluation", "excluded")
    evaluate()
    manager.timer.end("evaluation")


def excluded_twice(manager: ProfilerManager) -> None:
    with manager.excluded("evaluation"):
        with manager.excluded("evaluation"):
            evaluate()
        with manager.stage("evaluation"):
            evaluate()
        evaluate()


def in_stages(manager: ProfilerManager) -> None:
    for name in ("evaluation", "callbacks"):
        with manager.stage(name):
            evaluate()


def calls_of(folder: Path) -> dict[str, int]:
    return {operator.name: operator.calls for operator in analyze(read_trace(folder / "trace.json")).operators}


@pytest.mark.parametrize("between", [excluded_by_marks, excluded_twice])
def test_what_a_loop_excludes_stands_in_its_trace_and_in_no_operator(tmp_path, between):
    loop(tmp_path, between)
    trace = read_trace(tmp_path / "trace.json")
    marks = [name for name in trace.names if name.startswith("excluded: ")]
    assert len(marks) == 1 and trace.name.tolist().count(trace.names.index(marks[0])) == 2
    assert "aten::cos" in trace.names
    calls = calls_of(tmp_path)
    assert calls["aten::mm"] == 2 and "aten::cos" not in calls


def test_a_stage_that_is_only_called_evaluation_stays_in_its_step(tmp_path):
    loop(tmp_path, in_stages)
    assert not any(name.startswith("excluded: ") for name in read_trace(tmp_path / "trace.json").names)
    assert calls_of(tmp_path)["aten::cos"] == 200


def test_an_exclusion_that_never_ends_ends_with_its_step(tmp_path):
    loop(tmp_path, lambda manager: manager.timer.begin("evaluation", "excluded"))
    trace = read_trace(tmp_path / "trace.json")
    ends = {trace.names[name]: end for name, end in zip(trace.name, trace.start_ns + trace.duration_ns, strict=True)}
    assert ends["excluded: evaluation"] <= ends["ProfilerStep#2"]
    assert [trace.names[item] for item in trace.name].count("excluded: evaluation") == 2


def test_what_another_thread_excludes_is_no_part_of_the_loop_that_is_cut(tmp_path):
    def between(manager):
        thread = threading.Thread(target=lambda: excluded_by_marks(manager))
        thread.start()
        thread.join()

    loop(tmp_path, between)
    assert not [name for name in read_trace(tmp_path / "trace.json").names if name.startswith("excluded: ")]


def test_no_hook_of_ours_is_told_of_stages_outside_of_a_recording(tmp_path):
    manager = ProfilerManager(tmp_path, device=torch.device("cpu"), schedule=Schedule(1, 1, 1))
    watched = []
    assert manager.timer.hooks.watch_stages is False
    with manager:
        for _ in range(5):
            watched.append(manager.timer.hooks.watch_stages)
            forward()
            manager.step()
    assert watched == [False, True, True, False, False]
