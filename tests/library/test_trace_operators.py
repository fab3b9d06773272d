"""Operators and stacks of synthetic traces with known answers."""

from pathlib import Path

import pytest

from boundby.trace import OPERATOR_COLUMNS, OpStat, folded_stacks, op_stats, operator_rows, read_trace
from boundby.trace.operators import line_of
from boundby.trace.structure import Structure
from tests.traces import event, python_frame, write


def stats_of(folder: Path, *events: dict) -> dict[str, OpStat]:
    stats = op_stats(read_trace(write(folder, *events)))
    assert len({stat.name for stat in stats}) == len(stats)
    return {stat.name: stat for stat in stats}


def test_self_time_is_total_time_without_the_operators_inside(tmp_path):
    stats = stats_of(
        tmp_path,
        event("aten::linear", 0, 10),
        event("aten::addmm", 2, 6),
        event("aten::fill_", 3, 1),
        event("aten::linear", 20, 5),
    )
    assert (stats["aten::linear"].calls, stats["aten::linear"].cpu_total_ns) == (2, 15_000)
    assert [stats[name].cpu_self_ns for name in ("aten::linear", "aten::addmm", "aten::fill_")] == [9000, 5000, 1000]
    assert stats["aten::linear"].cpu_self_share == 9 / 15
    assert next(iter(stats)) == "aten::linear"


def test_an_operator_is_not_charged_for_one_on_another_thread(tmp_path):
    stats = stats_of(tmp_path, event("outer", 0, 10), event("elsewhere", 2, 3, tid=2))
    assert (stats["outer"].cpu_self_ns, stats["elsewhere"].cpu_self_ns) == (10_000, 3000)


def test_overlap_without_nesting_is_booked_on_the_later_operator_and_a_negative_duration_as_none(tmp_path):
    stats = stats_of(tmp_path, event("broken", 5, -3), event("good", 0, 10))
    assert (stats["broken"].cpu_total_ns, stats["broken"].cpu_self_ns, stats["good"].cpu_self_ns) == (0, 0, 10_000)
    stats = stats_of(tmp_path, event("early", 0, 10), event("late", 6, 9), event("inside late", 12, 1))
    assert [stats[name].cpu_self_ns for name in ("early", "late", "inside late")] == [6000, 8000, 1000]


def test_an_operator_that_dispatches_to_itself_is_one_call(tmp_path):
    events = [
        event("aten::mul", 0, 10, Input_Dims=[[4], []]),
        event("aten::mul", 2, 6, Input_Dims=[[4], [1]]),
        event("aten::mul", 3, 4, Input_Dims=[[4], [1]]),
        event("cudaLaunchKernel", 4, 1, "cuda_runtime", correlation=70),
        event("mul", 20, 5, "kernel", tid=7, correlation=70),
    ]
    (stat,) = op_stats(read_trace(write(tmp_path, *events)))
    assert (stat.input_shapes, stat.calls) == ("[[4], []]", 1)
    assert (stat.cpu_total_ns, stat.cpu_self_ns, stat.device_total_ns) == (10_000, 10_000, 5000)


def test_an_operator_that_calls_itself_twice_is_three_calls(tmp_path):
    (stat,) = stats_of(tmp_path, *(event("aten::cat", ts, dur) for ts, dur in ((0, 10), (1, 3), (5, 3)))).values()
    assert (stat.calls, stat.cpu_total_ns, stat.cpu_self_ns) == (3, 16_000, 10_000)


def test_frames_annotations_and_steps_are_no_operators(tmp_path):
    stats = stats_of(
        tmp_path,
        event("ProfilerStep#1", 0, 100),
        event("forward", 0, 90, "user_annotation"),
        python_frame("model.py(3): forward", 0, 80, 1, None),
        event("aten::add", 1, 2),
    )
    assert list(stats) == ["aten::add"]


def test_calls_with_other_input_shapes_are_counted_apart(tmp_path):
    events = [
        event("aten::mm", 0, 1, Input_Dims=[[2, 3], [3, 4]]),
        event("aten::mm", 2, 5, Input_Dims=[[8, 3], [3, 4]]),
        event("aten::mm", 8, 1, Input_Dims=[[2, 3], [3, 4]]),
        event("aten::mm", 10, 1),
    ]
    stats = op_stats(read_trace(write(tmp_path, *events)))
    result = [(stat.input_shapes, stat.calls) for stat in stats]
    assert result == [("[[8, 3], [3, 4]]", 1), ("[[2, 3], [3, 4]]", 2), (None, 1)]
    ((stat),) = op_stats(read_trace(write(tmp_path, *events[:3])), ())
    assert (stat.calls, stat.input_shapes) == (3, None)


def test_without_device_events_the_device_time_is_unknown(tmp_path):
    (stat,) = stats_of(tmp_path, event("aten::add", 0, 1)).values()
    assert (stat.device_total_ns, stat.device_share) == (None, None)


def test_device_time_goes_to_the_operators_around_the_launch(tmp_path):
    stats = stats_of(
        tmp_path,
        event("aten::linear", 0, 10),
        event("aten::addmm", 1, 8),
        event("cudaLaunchKernel", 2, 1, "cuda_runtime", correlation=70),
        event("aten::relu", 12, 5),
        event("cudaGraphLaunch", 13, 1, "cuda_runtime", correlation=71),
        event("gemm", 30, 20, "kernel", tid=7, correlation=70),
        event("relu", 50, 4, "kernel", tid=7, correlation=71),
        event("Memset (Device)", 54, 1, "gpu_memset", tid=7, correlation=71),
        event("cudaLaunchKernel", 30, 1, "cuda_runtime", correlation=72),
        event("outside of operators", 60, 25, "kernel", tid=7, correlation=72),
    )
    result = {name: (stat.device_total_ns, stat.device_self_ns) for name, stat in stats.items()}
    assert result == {"aten::linear": (20_000, 0), "aten::addmm": (20_000, 20_000), "aten::relu": (5000, 5000)}
    assert stats["aten::relu"].device_share == 5 / 50


def test_a_kernel_without_its_launch_is_joined_by_external_id(tmp_path):
    stats = stats_of(
        tmp_path,
        event("aten::mm", 0, 10, External_id=5),
        event("aten::add", 20, 10, External_id=6),
        event("gemm", 30, 20, "kernel", tid=7, correlation=900, External_id=5),
        event("repeats its correlation", 50, 4, "kernel", tid=7, correlation=6, External_id=6),
        event("carries no id", 60, 4, "kernel", tid=7),
    )
    assert (stats["aten::mm"].device_total_ns, stats["aten::add"].device_total_ns) == (20_000, 0)


def test_rows_are_in_milliseconds_and_leave_the_unknown_empty(tmp_path):
    rows = operator_rows(op_stats(read_trace(write(tmp_path, event("outer", 0, 2500), event("inner", 0, 500)))))
    known = {"name": "outer", "calls": 1, "cpu_total_ms": 2.5, "cpu_self_ms": 2.0, "cpu_self_pct": 80.0}
    assert {name: value for name, value in rows[0].items() if value is not None} == known
    assert tuple(rows[0]) == OPERATOR_COLUMNS


def test_groups_calls_by_the_module_around_them(tmp_path):
    events = [
        python_frame("nn.Module: Net_0", 0, 100, 1, None),
        python_frame("nn.Module: Linear_0", 10, 20, 2, 1),
        event("aten::linear", 11, 10),
        python_frame("nn.Module: Linear_1", 40, 20, 3, 1),
        *(event("aten::linear", ts, dur) for ts, dur in ((41, 4), (70, 2), (200, 1))),
    ]
    trace = read_trace(write(tmp_path, *events))
    result = {(stat.module, stat.calls, stat.cpu_total_ns) for stat in op_stats(trace, ("module",))}
    assert result == {("Linear_0", 1, 10_000), ("Linear_1", 1, 4000), ("Net_0", 1, 2000), (None, 1, 1000)}


def test_groups_calls_by_the_innermost_five_frames(tmp_path):
    frames = [python_frame(f"f{k}", k, 100 - 2 * k, k, k - 1 or None) for k in range(1, 8)]
    trace = read_trace(write(tmp_path, *frames, event("aten::mm", 20, 5), event("aten::mm", 200, 1)))
    result = {(stat.stack, stat.calls) for stat in op_stats(trace, ("stack",))}
    assert result == {("f3;f4;f5;f6;f7", 1), (None, 1)}


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 4]], 48),
        ("aten::bmm", [[5, 2, 3], [5, 3, 4]], 240),
        ("aten::addmm", [[4], [2, 3], [3, 4], [], []], 48),
        ("aten::linear", [[7, 2, 3], [4, 3], [4]], 336),
        ("aten::mm", [[2, 3], [5, 4]], None),
        ("aten::mm", [[2, 3]], None),
        ("aten::mm", [3, "x"], None),
        ("aten::mm", {"a": []}, None),
        ("aten::mm", [["2", 3], [3, 4]], None),
        ("aten::mm", [["2", 3], [3, 10**12]], None),
        ("aten::mm", [["2", 3], [3, 10**30]], None),
        ("aten::mm", [[2, 3], [3, -4]], None),
        ("aten::mm", [[1e300, 3], [3, 4]], None),
        ("aten::add", [[2, 3], [2, 3]], None),
    ],
)
def test_counts_the_flops_of_two_calls_where_the_shapes_fit(tmp_path, name, shapes, flops):
    events = [event(name, ts, 2, Input_Dims=shapes) for ts in (0, 5)]
    (stat,) = op_stats(read_trace(write(tmp_path, *events)))
    assert (stat.flops, stat.flops_per_s) == (None, None) if flops is None else (2 * flops, 2 * flops / 4e-6)


def test_folds_frames_with_their_own_time(tmp_path):
    linear = "<built-in method linear of type object at 0x7f0{}>"
    events = [
        python_frame("main.py(1): <module>", 0, 100, 1, None),
        python_frame("nn.Module: Linear_0", 10, 40, 2, 1),
        python_frame(linear.format(1), 12, 30, 3, 2),
        python_frame("nn.Module: Linear_0", 60, 20, 4, 1),
        python_frame(linear.format(2), 60, 20, 5, 4),
    ]
    trace = read_trace(write(tmp_path, *events))
    assert folded_stacks(trace) == [
        "main.py(1):_<module>;nn.Module:_Linear_0;<built-in_method_linear_of_type_object> 50000",
        "main.py(1):_<module> 40000",
        "main.py(1):_<module>;nn.Module:_Linear_0 10000",
    ]


def test_leaves_the_profiler_itself_out_of_the_stacks(tmp_path):
    frames = [
        python_frame("main.py(1): run", 0, 100, 1, None),
        python_frame("torch/profiler/profiler.py(1227): step", 10, 60, 2, 1),
        python_frame("enum.py(1230): __hash__", 20, 5, 3, 2),
    ]
    trace = read_trace(write(tmp_path, *frames))
    assert folded_stacks(trace) == ["main.py(1):_run 40000"]


def test_the_line_of_the_program_is_none_of_those_that_mark_its_stages(tmp_path):
    frames = [
        python_frame("boundby/train.py(3): step", 0, 100, 1, None),
        python_frame("boundby/training/transformers.py(555): _begin_stage", 10, 60, 2, 1),
    ]
    trace = read_trace(write(tmp_path, *frames))
    assert line_of(Structure(trace), 1) == "train.py:3"


def test_a_circle_of_callers_ends(tmp_path):
    trace = read_trace(write(tmp_path, python_frame("a", 0, 9, 1, 2), python_frame("b", 0, 5, 2, 1)))
    (line,) = folded_stacks(trace)
    assert line.endswith(";b;a 4000")


def test_of_a_very_deep_stack_the_inner_frames_are_kept(tmp_path):
    frames = [python_frame(f"f{k}", k, 2000 - 2 * k, k, k - 1 or None) for k in range(1, 1000)]
    lines = folded_stacks(read_trace(write(tmp_path, *frames)))
    assert len(lines) == 999
    innermost = next(line for line in lines if ";f999 " in line)
    assert innermost.split(" ")[0].split(";") == [f"f{k}" for k in range(744, 1000)]
