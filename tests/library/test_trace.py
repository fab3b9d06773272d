"""Traces with known answers, real GPU traces against brute force, and files that are no traces.

python -m pytest tests/library/test_trace.py
"""

import bisect
import collections
import gzip
import itertools
import json
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from boundby.trace import (
    OPERATOR_COLUMNS,
    OpStat,
    Trace,
    folded_stacks,
    op_stats,
    operator_rows,
    read_trace,
    step_count,
)

REPOSITORY = Path(__file__).parents[2]
GPU_TRACES = REPOSITORY.parent / "shared" / "data" / "gpu-traces"
NAMES = ["a100-nccl.pt.trace.json.gz", "a100-rank0.pt.trace.json.gz", "v100-resnet-ns.pt.trace.json.gz"]


def event(name: str, ts: float, dur: float, category: str = "cpu_op", tid: int = 1, **args: object) -> dict:
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": named}


def python_frame(name: str, ts: float, dur: float, number: int, parent: int | None) -> dict:
    return event(name, ts, dur, "python_function", Python_id=number, Python_parent_id=parent)


def write(folder: Path, *events: dict) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def stats_of(folder: Path, *events: dict) -> dict[str, OpStat]:
    stats = op_stats(read_trace(write(folder, *events)))
    assert len({stat.name for stat in stats}) == len(stats)
    return {stat.name: stat for stat in stats}


# Reading


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".trace"])
def test_reads_plain_and_gzip_whatever_the_suffix(tmp_path: Path, suffix: str) -> None:
    content = write(tmp_path, event("aten::add", 5, 2)).read_bytes()
    path = tmp_path / f"other{suffix}"
    path.write_bytes(gzip.compress(content, mtime=0) if suffix != ".json" else content)
    trace = read_trace(path)
    assert (trace.names, trace.base_ns, trace.start_ns.tolist(), trace.duration_ns.tolist()) == (
        ("aten::add",),
        5000,
        [0],
        [2000],
    )


@pytest.mark.parametrize("start", ["1712195495519689.047", "4503599627370.497", "4458676522690.655", "17.25", "-3.001"])
def test_neighbouring_timestamps_stay_one_nanosecond_apart(tmp_path: Path, start: str) -> None:
    path = tmp_path / "trace.json"
    times = [Decimal(start) + Decimal(k) / 1000 for k in range(300)]
    events = ",".join(f'{{"ph": "X", "name": "op", "ts": {time}, "dur": 0.001}}' for time in times)
    path.write_text(f'{{"traceEvents": [{events}]}}')
    trace = read_trace(path)
    assert trace.base_ns == int(Decimal(start) * 1000)
    assert trace.start_ns.tolist() == list(range(300))
    assert set(trace.duration_ns.tolist()) == {1}


def test_keeps_complete_events_only_and_takes_numbers_written_as_text(tmp_path: Path) -> None:
    numeric_text = event("op", 1, 1) | {"ts": "1.5", "dur": "2.5", "args": {"External id": "7", "correlation": 8}}
    flow = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 4, "cat": "ac2g", "name": "ac2g"}
    label = {"ph": "M", "name": "process_name", "pid": "Spans", "tid": "x", "args": {"name": "python", "extra": [{}]}}
    bare = {"ph": "X", "name": "bare", "ts": 3.5, "dur": 1}
    trace = read_trace(write(tmp_path, numeric_text, flow, label, bare))
    assert trace.names == ("op", "bare")
    assert trace.start_ns.tolist() == [0, 2000]
    assert trace.external_id.tolist() == [7, -1]
    assert trace.correlation.tolist() == [8, -1]


def test_an_empty_trace_gives_empty_tables(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path))
    assert (op_stats(trace), folded_stacks(trace), step_count(trace)) == ([], [], 0)


VALID = json.dumps({"traceEvents": [event("op", 1, 1)]}).encode()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "truncated"),
        (b"not a trace", "malformed"),
        (VALID[:-4], "truncated"),
        (b'{"events": []}', "traceEvents"),
        (b'{"traceEvents": 3}', "array"),
        (b'{"traceEvents": [3]}', "object"),
        (b'{"traceEvents": [{"ph": "X", "name": 3}]}', "str"),
        (b'{"traceEvents": [{"ph": "X", "name": "op", "dur": 1}]}', "'op' has no usable ts"),
        (b'{"traceEvents": [{"ph": "X", "name": "op", "ts": 1}]}', "'op' has no usable dur"),
        (b'{"traceEvents": [{"ph": "X", "name": "op", "ts": 1e300, "dur": 1}]}', "'op' has no usable ts"),
        (b'{"traceEvents": [{"ph": "X", "name": "op", "ts": NaN, "dur": 1}]}', "malformed"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "args": {"correlation": 18446744073709551616}}]}', "large"),
        (b'{"traceEvents": [{"name": "\xff"}]}', "utf-8"),
        (b'{"traceEvents": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        (gzip.compress(VALID, mtime=0)[:-12], "damaged gzip"),
        (gzip.compress(VALID, mtime=0)[:12] + b"\xff" * 40, "damaged gzip"),
    ],
)
def test_names_the_file_and_the_fault_of_what_is_no_trace(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json is .*" + fault):
        read_trace(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        read_trace(tmp_path / "absent.json")


def test_counts_each_step_once_though_the_gpu_repeats_its_mark(tmp_path: Path) -> None:
    marks = [event(f"ProfilerStep#{k}", 10 * k, 9, "user_annotation") for k in (2, 3)]
    again = event("ProfilerStep#3", 31, 9, "gpu_user_annotation", tid=7)
    assert step_count(read_trace(write(tmp_path, *marks, again, event("ProfilerStep", 50, 1)))) == 2


def test_loads_neither_torch_nor_pandas() -> None:
    code = "import boundby.trace, sys; print({'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# Operators


def test_self_time_is_total_time_without_the_operators_inside(tmp_path: Path) -> None:
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


def test_an_operator_is_not_charged_for_one_on_another_thread(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, event("outer", 0, 10), event("elsewhere", 2, 3, tid=2))
    assert (stats["outer"].cpu_self_ns, stats["elsewhere"].cpu_self_ns) == (10_000, 3000)


def test_overlap_without_nesting_is_booked_on_the_later_operator(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, event("early", 0, 10), event("late", 6, 9), event("inside late", 12, 1))
    assert [stats[name].cpu_self_ns for name in ("early", "late", "inside late")] == [6000, 8000, 1000]


def test_a_negative_duration_counts_as_none(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, event("broken", 5, -3), event("good", 0, 10))
    assert (stats["broken"].cpu_total_ns, stats["broken"].cpu_self_ns, stats["good"].cpu_self_ns) == (0, 0, 10_000)


@pytest.mark.parametrize("seed", range(20))
def test_self_times_of_any_overlap_add_up_to_the_union(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    spans = [(choose.randrange(60), choose.randrange(25), choose.randrange(3)) for _ in range(choose.randrange(1, 40))]
    events = [event(f"op {i}", ts, dur, tid=tid) for i, (ts, dur, tid) in enumerate(spans)]
    stats = op_stats(read_trace(write(tmp_path, *events)))
    covered = {(tid, moment) for ts, dur, tid in spans for moment in range(ts, ts + dur)}
    assert sum(stat.cpu_self_ns for stat in stats) == 1000 * len(covered)
    assert min(stat.cpu_self_ns for stat in stats) >= 0
    assert all(stat.cpu_self_ns <= stat.cpu_total_ns for stat in stats)


def test_an_operator_that_dispatches_to_itself_is_one_call(tmp_path: Path) -> None:
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


def test_an_operator_that_calls_itself_twice_is_three_calls(tmp_path: Path) -> None:
    (stat,) = stats_of(tmp_path, *(event("aten::cat", ts, dur) for ts, dur in ((0, 10), (1, 3), (5, 3)))).values()
    assert (stat.calls, stat.cpu_total_ns, stat.cpu_self_ns) == (3, 16_000, 10_000)


def test_frames_annotations_and_steps_are_no_operators(tmp_path: Path) -> None:
    stats = stats_of(
        tmp_path,
        event("ProfilerStep#1", 0, 100),
        event("forward", 0, 90, "user_annotation"),
        python_frame("model.py(3): forward", 0, 80, 1, None),
        event("aten::add", 1, 2),
    )
    assert list(stats) == ["aten::add"]


def test_calls_with_other_input_shapes_are_counted_apart(tmp_path: Path) -> None:
    events = [
        event("aten::mm", 0, 1, Input_Dims=[[2, 3], [3, 4]]),
        event("aten::mm", 2, 5, Input_Dims=[[8, 3], [3, 4]]),
        event("aten::mm", 8, 1, Input_Dims=[[2, 3], [3, 4]]),
        event("aten::mm", 10, 1),
    ]
    stats = op_stats(read_trace(write(tmp_path, *events)))
    assert [(stat.input_shapes, stat.calls) for stat in stats] == [
        ("[[8, 3], [3, 4]]", 1),
        ("[[2, 3], [3, 4]]", 2),
        (None, 1),
    ]


def test_without_device_events_the_device_time_is_unknown(tmp_path: Path) -> None:
    (stat,) = stats_of(tmp_path, event("aten::add", 0, 1)).values()
    assert (stat.device_total_ns, stat.device_share) == (None, None)


def test_device_time_goes_to_the_operators_around_the_launch(tmp_path: Path) -> None:
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
    assert {name: stat.device_total_ns for name, stat in stats.items()} == {
        "aten::linear": 20_000,
        "aten::addmm": 20_000,
        "aten::relu": 5000,
    }
    assert stats["aten::relu"].device_share == 5 / 50


def test_a_kernel_without_its_launch_is_joined_by_external_id(tmp_path: Path) -> None:
    stats = stats_of(
        tmp_path,
        event("aten::mm", 0, 10, External_id=5),
        event("aten::add", 20, 10, External_id=6),
        event("gemm", 30, 20, "kernel", tid=7, correlation=900, External_id=5),
        event("repeats its correlation", 50, 4, "kernel", tid=7, correlation=6, External_id=6),
        event("carries no id", 60, 4, "kernel", tid=7),
    )
    assert (stats["aten::mm"].device_total_ns, stats["aten::add"].device_total_ns) == (20_000, 0)


def test_rows_are_in_milliseconds_and_leave_the_unknown_empty(tmp_path: Path) -> None:
    rows = operator_rows(op_stats(read_trace(write(tmp_path, event("outer", 0, 2500), event("inner", 0, 500)))))
    assert rows[0] == {
        "name": "outer",
        "input_shapes": None,
        "calls": 1,
        "cpu_total_ms": 2.5,
        "cpu_self_ms": 2.0,
        "cpu_self_pct": 80.0,
        "device_total_ms": None,
        "device_pct": None,
    }
    assert tuple(rows[0]) == OPERATOR_COLUMNS


# Stacks


def test_folds_frames_with_their_own_time(tmp_path: Path) -> None:
    trace = read_trace(
        write(
            tmp_path,
            python_frame("main.py(1): <module>", 0, 100, 1, None),
            python_frame("nn.Module: Linear_0", 10, 40, 2, 1),
            python_frame("<built-in method linear of type object at 0x7f01>", 12, 30, 3, 2),
            python_frame("nn.Module: Linear_0", 60, 20, 4, 1),
            python_frame("<built-in method linear of type object at 0x7f02>", 60, 20, 5, 4),
        )
    )
    assert folded_stacks(trace) == [
        "main.py(1):_<module>;nn.Module:_Linear_0;<built-in_method_linear_of_type_object> 50000",
        "main.py(1):_<module> 40000",
        "main.py(1):_<module>;nn.Module:_Linear_0 10000",
    ]


def test_leaves_the_profiler_itself_out_of_the_stacks(tmp_path: Path) -> None:
    trace = read_trace(
        write(
            tmp_path,
            python_frame("main.py(1): run", 0, 100, 1, None),
            python_frame("torch/profiler/profiler.py(1227): step", 10, 60, 2, 1),
            python_frame("enum.py(1230): __hash__", 20, 5, 3, 2),
        )
    )
    assert folded_stacks(trace) == ["main.py(1):_run 40000"]


def test_a_circle_of_callers_ends(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, python_frame("a", 0, 9, 1, 2), python_frame("b", 0, 5, 2, 1)))
    (line,) = folded_stacks(trace)
    assert line.endswith(";b;a 4000")


def test_of_a_very_deep_stack_the_inner_frames_are_kept(tmp_path: Path) -> None:
    frames = [python_frame(f"f{k}", k, 2000 - 2 * k, k, k - 1 or None) for k in range(1, 1000)]
    lines = folded_stacks(read_trace(write(tmp_path, *frames)))
    assert len(lines) == 999
    innermost = next(line for line in lines if ";f999 " in line)
    assert innermost.split(" ")[0].split(";") == [f"f{k}" for k in range(744, 1000)]


# Real traces of GPUs


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> tuple[Trace, list[dict]]:
    path = GPU_TRACES / request.param
    if not path.exists():
        pytest.skip(f"no recorded GPU trace at {path}")
    raw = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    complete = [e for e in raw if e["ph"] == "X"]
    for e in complete:
        e["start"], e["length"] = int(e["ts"] * 1000), int(e["dur"] * 1000)
    return read_trace(path), complete


def operators(events: list[dict]) -> list[dict]:
    return [e for e in events if e["cat"] == "cpu_op"]


def test_real_timestamps_are_exact(real: tuple[Trace, list[dict]]) -> None:
    trace, events = real
    assert (trace.start_ns + trace.base_ns).tolist() == [e["start"] for e in events]
    assert trace.duration_ns.tolist() == [e["length"] for e in events]


def test_real_self_times_add_up_to_the_union_of_each_thread(real: tuple[Trace, list[dict]]) -> None:
    trace, events = real
    spans_of = collections.defaultdict(list)
    for e in operators(events):
        spans_of[e["tid"]].append((e["start"], e["start"] + e["length"]))
    union = 0
    for spans in spans_of.values():
        reached = 0
        for start, end in sorted(spans):
            union += max(end - max(start, reached), 0)
            reached = max(reached, end)
    stats = op_stats(trace)
    assert sum(stat.cpu_self_ns for stat in stats) == union
    assert min(stat.cpu_self_ns for stat in stats) >= 0


def names_never_inside_themselves(events: list[dict]) -> set[str]:
    reached: collections.Counter[tuple] = collections.Counter()
    nested = set()
    for e in sorted(operators(events), key=lambda e: (e["start"], -e["length"])):
        if e["length"] and e["start"] < reached[e["tid"], e["name"]]:
            nested.add(e["name"])
        reached[e["tid"], e["name"]] = e["start"] + e["length"]
    return {e["name"] for e in operators(events)} - nested


def test_real_calls_and_total_times_equal_a_plain_sum(real: tuple[Trace, list[dict]]) -> None:
    trace, events = real
    stats = op_stats(trace)
    simple = names_never_inside_themselves(events)
    assert len(simple) > 0.8 * len({stat.name for stat in stats})
    expected: collections.Counter[tuple] = collections.Counter()
    for e in operators(events):
        expected[e["name"], "calls"] += 1
        expected[e["name"], "ns"] += e["length"]
    found: collections.Counter[tuple] = collections.Counter()
    for stat in stats:
        found[stat.name, "calls"] += stat.calls
        found[stat.name, "ns"] += stat.cpu_total_ns
    assert {key: n for key, n in found.items() if key[0] in simple} == {
        key: n for key, n in expected.items() if key[0] in simple
    }
    assert found <= expected


def test_real_device_times_equal_a_search_by_launch_time(real: tuple[Trace, list[dict]]) -> None:
    trace, events = real
    device_ns: collections.Counter[int] = collections.Counter()
    for e in events:
        if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            device_ns[e["args"]["correlation"]] += e["length"]
    calls_of: dict[int, list[tuple[int, int]]] = {e["tid"]: [] for e in operators(events)}
    for e in sorted((e for e in events if e["cat"] == "cuda_runtime"), key=lambda e: e["start"]):
        calls_of.setdefault(e["tid"], []).append((e["start"], device_ns[e["args"]["correlation"]]))
    starts = {tid: [start for start, _ in calls] for tid, calls in calls_of.items()}
    until = {tid: [0, *itertools.accumulate(ns for _, ns in calls)] for tid, calls in calls_of.items()}
    simple = names_never_inside_themselves(events)
    expected = dict.fromkeys(simple, 0)
    for op in operators(events):
        if op["name"] in simple:
            first, last = (bisect.bisect_left(starts[op["tid"]], op["start"] + part) for part in (0, op["length"]))
            expected[op["name"]] += until[op["tid"]][last] - until[op["tid"]][first]
    found = dict.fromkeys(simple, 0)
    for stat in op_stats(trace):
        if stat.name in simple:
            found[stat.name] += stat.device_total_ns
    assert sum(expected.values()) > 0
    assert found == expected
