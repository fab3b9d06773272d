"""Synthetic traces whose idle time has a known cause."""

import gzip
import json
import sys

import numpy as np
import pytest
from msgspec.structs import asdict

from boundby.bound.trace_judgement import judge_trace
from boundby.trace import Trace, analyze, read_trace, source
from boundby.trace.intervals import Lanes
from boundby.trace.kernels import Collectives, least_wait_ns, waits_ns
from tests.trace_truth.large import launching_threads
from tests.trace_truth.programs import cases
from tests.trace_truth.recorder import text
from tests.trace_truth.simulator import played
from tests.traces import analysis_of, call, causes_of, event, step, work
from utils.tracing.traces import examine

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
SYNC = "cudaStreamSynchronize"
WAIT = event(SYNC, 5, 10, "cuda_runtime")


def one_gap(*events: dict, launched: float = 40, call_us: float = 5) -> list[dict]:
    return [
        step(1, 0, 100),
        call(0, 1, 70, "cudaLaunchKernel", tid=3),
        work(0, 10, 70),
        call(launched, call_us, 71),
        work(60, 40, 71),
        *events,
    ]


def test_splits_a_gap_exactly_where_its_end_was_launched(tmp_path):
    assert causes_of(tmp_path, *one_gap()) == {"launch": 30, "launch_latency": 15, "untraced": 5}


@pytest.mark.parametrize(
    ("launched", "causes"),
    [
        (5, {"launch_latency": 10, "untraced": 40}),  # while the device still worked: only ten µs are latency
        (10, {"launch_latency": 15, "untraced": 35}),
        (11, {"launch": 1, "launch_latency": 15, "untraced": 34}),
        (45, {"launch": 35, "launch_latency": 15}),
        (59, {"launch": 49, "launch_latency": 1}),
        (60, {"launch": 50}),
        (70, {"launch": 50}),  # after its own work: the clocks disagree
    ],
)
def test_a_launch_at_any_moment_divides_host_and_device(tmp_path, launched, causes):
    assert causes_of(tmp_path, *one_gap(launched=launched)) == causes


@pytest.mark.parametrize(
    ("name", "category", "cause"),
    [
        (LOADER, "user_annotation", "input"),
        ("torch/utils/data/dataloader.py(733): __next__", "python_function", "input"),
        *(
            (name, "cuda_runtime", "synchronisation")
            for name in (SYNC, "cudaDeviceSynchronize", "hipEventSynchronize", "cudaMemcpy")
        ),
        *((name, "cpu_op", "synchronisation") for name in ("aten::item", "aten::_local_scalar_dense")),
        *((name, "cuda_runtime", "allocator") for name in ("cudaMalloc", "cudaFree", "cudaHostAlloc", "hipMalloc")),
        ("cuMemMap", "cuda_driver", "allocator"),
        ("entire_frame_compile (dynamo_timed)", "cpu_op", "compile"),
        ("cuModuleLoadData", "cuda_driver", "loading"),
        ("tokenize", "user_annotation", "tokenizing"),
        ("load_batch", "user_annotation", "input"),
        ("gc.collect", "user_annotation", "garbage_collection"),
        ("save_checkpoint", "user_annotation", "saving"),
        ("aten::add", "cpu_op", "launch"),
        *((name, "cuda_runtime", "launch") for name in ("cudaMemcpyAsync", "cudaMemsetAsync")),
        ("cuMemcpyHtoDAsync_v2", "cuda_driver", "launch"),
        ("train.py(3): step", "python_function", "launch"),
    ],
)
def test_what_the_launching_thread_does_names_the_cause(tmp_path, name, category, cause):
    causes = causes_of(tmp_path, *one_gap(event(name, 15, 20, category)))
    assert causes.pop("launch", 0) + causes.pop(cause, 0) == 30
    assert causes == {"launch_latency": 15, "untraced": 5}
    inside = causes_of(tmp_path, *one_gap(event(name, 15, 20, category), event("aten::copy_", 20, 5)))
    without = causes_of(tmp_path, *one_gap(event("aten::copy_", 20, 5)))
    assert inside.get(cause, 0) - without.get(cause, 0) == (20 if cause != "launch" else 0)


def test_the_innermost_telling_event_wins(tmp_path):
    events = event(LOADER, 10, 30, "user_annotation"), event("cudaMalloc", 20, 4, "cuda_runtime")
    assert causes_of(tmp_path, *one_gap(*events)) == {"input": 26, "allocator": 4, "launch_latency": 15, "untraced": 5}


@pytest.mark.parametrize(
    ("events", "causes"),
    [
        ([WAIT], {"synchronisation": 5 + 5, "launch": 20}),
        (
            [WAIT, event(LOADER, 16, 8, "user_annotation"), event("cudaMalloc", 30, 2, "cuda_runtime")],
            {"synchronisation": 5 + 5, "input": 8, "allocator": 2, "launch": 10},
        ),
        ([event(SYNC, 0, 35, "cuda_runtime")], {"synchronisation": 30}),
        ([event(SYNC, 12, 10, "cuda_runtime")], {"launch": 20, "synchronisation": 10}),
    ],
    ids=["as long as it had waited", "only what was launching", "it had waited longer", "it begins after the gap"],
)
def test_issuing_work_after_a_wait_counts_to_it_for_as_long_as_it_had_kept_the_host_from_it(tmp_path, events, causes):
    assert causes_of(tmp_path, *one_gap(*events)) == causes | {"launch_latency": 15, "untraced": 5}


def test_a_copy_to_pageable_memory_waits(tmp_path):
    def copied(name, by="cudaMemcpyAsync"):
        copy = call(12, 20, 90, by), work(70, 1, 90, name=name, category="gpu_memcpy")
        return causes_of(tmp_path, *one_gap(*copy, launched=50))

    waits = {"launch": 20, "synchronisation": 20, "launch_latency": 10}
    assert copied("Memcpy DtoH (Device -> Pageable)") == waits
    assert copied("Memcpy DtoH (Device -> Pinned)", by="hipMemcpyWithStream") == waits
    assert copied("Memcpy DtoH (Device -> Pinned)") == {"launch": 40, "launch_latency": 10}


def test_an_autograd_thread_launches_while_the_main_thread_loads(tmp_path):
    backward = [
        step(1, 0, 100),
        event(LOADER, 10, 25, "user_annotation"),
        call(0, 1, 70),
        work(0, 10, 70),
        event("autograd::engine::evaluate_function: MmBackward0", 30, 20, tid=2),
        call(40, 5, 71, tid=2),
        work(60, 40, 71),
    ]
    # Until 30 µs the autograd thread is in nothing, so the main thread tells; afterwards it launches itself.
    assert causes_of(tmp_path, *backward) == {"input": 20, "launch": 10, "launch_latency": 15, "untraced": 5}


def test_the_main_thread_is_in_python_from_its_first_to_its_last_event(tmp_path):
    events = event("aten::mm", 0, 5), call(1, 1, 70), work(2, 8, 70), call(40, 5, 71), work(50, 10, 71)
    assert causes_of(tmp_path, *events) == {"launch": 1 + 30, "launch_latency": 11}
    late = call(400, 5, 72), work(410, 10, 72)
    assert causes_of(tmp_path, *events, *late) == {"launch": 1 + 30, "python": 340, "launch_latency": 11 + 10}
    beyond = event("aten::mm", 800, 100, tid=9)
    assert causes_of(tmp_path, *events, *late, beyond)["untraced"] == 480


def test_python_is_named_from_a_length_on_that_lies_between_no_two_operators(tmp_path):
    def causes_after(length: float) -> dict[str, int]:
        return causes_of(
            tmp_path,
            step(1, 0, 1000),
            call(0, 1, 70),
            work(1, 9, 70),
            event("aten::mm", 10, 5),
            call(15 + length, 5, 71),
            work(25 + length, 975 - length, 71),
        )

    assert causes_after(199) == {"launch": 5 + 199, "launch_latency": 1 + 10}
    assert causes_after(200) == {"launch": 5, "python": 200, "launch_latency": 1 + 10}


@pytest.mark.parametrize("name", ["metrics", "DistributedDataParallel.forward"])
def test_a_range_of_the_user_with_nothing_in_it_is_python_by_its_name(tmp_path, name):
    mark = event(name, 15, 20, "user_annotation")
    assert causes_of(tmp_path, *one_gap(mark))["python"] == 20
    assert "python" not in causes_of(tmp_path, *one_gap(mark, event("aten::add", 20, 5)))


def test_a_long_launching_call_is_loading_at_first_and_then_a_driver_that_is_held(tmp_path):
    usual = [item for k in range(9) for item in (call(10 * k, 5, k), work(10 * k + 6, 3, k))]
    slow = [call(100, 505, 50), work(610, 10, 50, name="conv")]
    again = [call(700, 505, 51), work(1210, 10, 51, name="conv")]
    held = [event("cudaHostAlloc", 690, 510, "cuda_runtime", tid=5)]
    analysis = analysis_of(tmp_path, step(1, 0, 1220), *usual, *slow, *again, *held)
    (device,) = analysis.devices
    assert (device.causes_ns["loading"], device.causes_ns["driver"]) == (500_000, 500_000)
    assert (device.contributors["loading"].name, device.contributors["driver"].name) == ("conv", "cudaHostAlloc")


def test_the_call_that_starts_the_device_is_no_allocation(tmp_path):
    start = event("cudaFree", 10, 60_000, "cuda_runtime")
    causes = causes_of(tmp_path, step(1, 0, 60_100), start, call(60_020, 5, 70), work(60_030, 70, 70))
    assert causes == {"loading": 60_000, "launch": 20, "launch_latency": 10}


def test_overlapping_streams_are_busy_once(tmp_path):
    (device,) = analysis_of(
        tmp_path,
        step(1, 0, 100),
        call(0, 1, 70),
        work(10, 30, 70),
        call(1, 1, 71),
        work(20, 40, 71, stream=20, name="ncclDevKernel_AllReduce_Sum"),
        call(2, 1, 72),
        work(50, 20, 72, stream=0, name="Memcpy HtoD (Pageable -> Device)", category="gpu_memcpy"),
        call(3, 1, 73),
        work(65, 10, 73, stream=0, name="Memset (Device)", category="gpu_memset"),
    ).devices
    assert (device.busy_ns, device.idle_ns, device.gaps) == (65_000, 35_000, 2)
    assert device.by_kind_ns == {"compute": 30_000, "communication": 40_000, "memcpy": 20_000, "memset": 10_000}
    assert device.exposed_ns == {"compute": 30_000, "communication": 20_000, "memcpy": 10_000, "memset": 5000}
    assert device.communication_overlap == 0.5


def waiting(*events: dict) -> list[dict]:
    return [
        step(1, 0, 100),
        call(0, 1, 70),
        work(0, 10, 70, stream=20),
        call(2, 1, 71),
        work(2, 8, 71, stream=7),
        call(6, 2, 72),
        work(60, 40, 72, stream=20),
        *events,
    ]


WAIT_RECORD = event("Stream Wait Event", 4, 0.5, "cuda_sync", 20, stream=20, device=0) | {"pid": 0}


@pytest.mark.parametrize(
    ("wait", "cause"),
    [
        (event("cudaStreamWaitEvent", 4, 1, "cuda_runtime"), "stream_wait"),
        (event("hipStreamWaitEvent", 4, 1, "cuda_runtime"), "stream_wait"),
        (WAIT_RECORD, "stream_wait"),
        (event("cudaStreamWaitEvent", 4, 1, "cuda_runtime", tid=9), "untraced"),  # of another thread
        (event("cudaStreamWaitEvent", 7, 1, "cuda_runtime"), "untraced"),  # after the launch
        (WAIT_RECORD | {"args": {"stream": 7, "device": 0}}, "untraced"),  # of another stream
        (WAIT_RECORD | {"ts": 6.5}, "untraced"),
    ],
)
def test_a_wait_for_another_stream_is_told_where_the_trace_tells_of_it(tmp_path, wait, cause):
    assert causes_of(tmp_path, *waiting(wait)) == {"launch_latency": 10, cause: 40}


def test_a_wait_before_the_work_before_it_was_launched_is_over(tmp_path):
    early = event("cudaStreamWaitEvent", 0.5, 0.25, "cuda_runtime")
    late = [call(5, 0.5, 75), work(10, 0.5, 75, stream=20)]
    causes = causes_of(tmp_path, *waiting(early))
    assert causes == {"launch_latency": 10, "stream_wait": 40}
    (device,) = analysis_of(tmp_path, *waiting(early), *late).devices
    assert device.causes_ns["stream_wait"] == 0


def test_a_graph_launch_is_the_call_of_all_its_kernels(tmp_path):
    analysis = analysis_of(
        tmp_path,
        step(1, 0, 100),
        event("aten::mm", 0, 10),
        call(2, 4, 70, "cudaGraphLaunch"),
        work(20, 5, 70),
        work(25, 5, 70, name="relu"),
        work(50, 5, 70, name="sum"),
    )
    assert (analysis.launches.calls, analysis.launches.calls_without_work) == (1, 0)
    assert (analysis.launches.work, analysis.launches.work_without_call) == (3, 0)
    assert (analysis.launches.delay.median_ns, analysis.launches.delay.max_ns) == (23_000, 48_000)
    assert {kernel.operator for kernel in analysis.kernels} == {"aten::mm"}
    assert analysis.operators[0].device_total_ns == 15_000
    (device,) = analysis.devices
    # 0 to 20: launched at 2; 30 to 50: the device pauses between kernels of one graph; 55 to 100: the host does nothing
    assert {k: v for k, v in device.causes_ns.items() if v} == {
        "launch": 2000 + 45_000,
        "launch_latency": 14_000,
        "untraced": 4000,
        "graph_pause": 20_000,
    }


def test_what_nobody_recorded_between_the_kernels_of_a_graph_is_no_pause_and_is_told_how_to_record(tmp_path):
    graph = [call(2, 4, 70, "cudaGraphLaunch"), work(10, 5, 70), work(900, 100, 70)]
    analysis = analysis_of(tmp_path, step(1, 0, 1000), event("aten::mm", 0, 10), *graph)
    assert analysis.devices[0].causes_ns["untraced"] == 885_000
    verdict = judge_trace(analysis)
    assert verdict.bound == "inconclusive"
    assert "alone on the device" in verdict.doubts[0].text and "Python stacks" not in verdict.doubts[0].text


def test_queue_depth_counts_what_is_launched_and_not_begun(tmp_path):
    calls = [call(10 * k, 2, 70 + k) for k in range(4)]
    begun = [work(50 + 5 * k, 5, 70 + k) for k in range(4)]
    launches = analysis_of(tmp_path, step(1, 0, 100), *calls, *begun).launches
    assert launches.deepest_queue == 4
    assert launches.mean_queue == (50 + 45 + 40 + 35) / 100
    assert launches.empty_queue_share == 0.35
    assert (launches.call.median_ns, launches.delay.median_ns, launches.delay.max_ns) == (2000, 45_000, 50_000)
    assert launches.shorter_than_call == 0


LAUNCHING_CALLS = (
    *("cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchCooperativeKernel"),
    *("cudaGraphLaunch", "cuGraphLaunch", "cudaMemcpy2DAsync", "cuMemcpyDtoDAsync_v2", "cudaLaunchKernel_ptsz"),
)


@pytest.mark.parametrize("name", LAUNCHING_CALLS)
def test_knows_the_launching_calls_of_cuda(tmp_path, name):
    analysis = analysis_of(tmp_path, step(1, 0, 20), call(1, 1, 70, name), work(5, 5, 70))
    assert (analysis.launches.calls, analysis.launches.calls_without_work) == (1, 0)


def test_neither_waits_nor_allocations_are_launching_calls(tmp_path):
    names = (SYNC, "cudaMalloc", "cudaStreamWaitEvent", "cudaEventRecord", "hipFree", "cudaMemGetInfo", "cudaLaunchX")
    others = [call(2 * k, 1, 80 + k, name) for k, name in enumerate(names)]
    assert analysis_of(tmp_path, step(1, 0, 20), *others, call(1, 1, 70), work(5, 5, 70)).launches.calls == 1


@pytest.mark.parametrize(("name", "ranks", "slow"), [("a slow rank", 4, 2), ("two processes with gloo", 2, 1)])
def test_the_others_are_told_to_wait_for_the_slow_rank_and_that_one_is_not(tmp_path, name, ranks, slow):
    machine = played(cases()[name].program)
    for rank in range(ranks):
        (tmp_path / f"rank{rank}.json").write_text(text(machine, rank))
    examination = examine([tmp_path])
    assert examination.slowest == slow
    for rank, trace in enumerate(examination.traces):
        kinds = [gain.fix.kind for gain in trace.verdict.gains]
        if rank == slow:
            assert "wait_less" not in kinds and trace.waits_ns == 0
        else:
            first = trace.verdict.gains[0]
            assert (first.fix.kind, dict(first.fix.settings)) == ("wait_less", {"rank": slow})
            true = machine.length(rank) / played(cases()[name].program, "straggler").length(rank)
            assert first.at_most >= 0.95 * true


def collected(*steps: tuple[int, ...]) -> Collectives:
    durations = np.array([duration for step in steps for duration in step])
    location = np.array([index for index, step in enumerate(steps) for _ in step])
    return Collectives(("all_reduce",), np.zeros(len(durations), dtype=np.int64), location, durations)


def test_the_shortest_of_all_ranks_is_the_transfer():
    assert waits_ns([collected((5, 9), (5, 9)), collected((20, 8), (30, 10))]) == (0 + 1 + 0 + 0, 15 + 0 + 25 + 1)
    assert waits_ns([collected((5, 9)), collected((5,))]) is None
    assert waits_ns([collected((5, 9))]) is None


def test_one_rank_alone_tells_what_differs_from_step_to_step():
    assert least_wait_ns(collected((5, 90), (25, 90), (5, 100))) == 20 + 10
    assert least_wait_ns(collected((5, 90))) is None
    assert least_wait_ns(collected((5, 90), (5,))) is None


# When something happens last, in µs. Years later, eight threads one behind another are more than an int64 holds, and
# without another way out those of the ninth would lie among those of the first.
NEAR, FAR = 20, 2**61 // 1000 - 3
MOMENTS = np.array([5, 3, 9, 3])


@pytest.mark.parametrize("scale", [1, 2**58])
def test_places_are_in_the_order_of_threads_and_then_of_moments(scale):
    threads = [-1, 0, 1, 2**20 - 1]
    moments = np.array([-1, 0, 3, 4, 5, 8, 9, 10]) * scale
    lanes = Lanes(2**20, MOMENTS * scale)
    positions = [lanes.position(thread, moments) for thread in threads]
    assert all((np.diff(position) >= 0).all() for position in positions)
    assert all(before.max() < after.min() for before, after in zip(positions, positions[1:], strict=False))
    for position in positions[1:]:
        known = lanes.moments(position[[2, 4, 6]])
        assert known.tolist() == [3 * scale, 5 * scale, 9 * scale]
        assert position[2] <= position[3] < position[4] <= position[5] < position[6] == position[7]


OTHERS = [event("other", 1, 1, tid=100 + k) for k in range(20)]


@pytest.mark.parametrize("last", [NEAR, FAR])
def test_threads_are_told_apart_however_far_apart_their_events_are(tmp_path, last):
    events = [event("outer", 0, 10, tid=1), event("inner", 2, 3, tid=1), event("alone", 1, 10, tid=2)]
    events += [event("last", last, 4.5, tid=3)]
    stats = {
        operator.name: (operator.calls, operator.cpu_self_ns)
        for operator in analysis_of(tmp_path, *events, *OTHERS).operators
    }
    expected = {"outer": (1, 7000), "inner": (1, 3000), "alone": (1, 10_000), "last": (1, 4500)}
    assert stats == expected | {"other": (20, 20_000)}


@pytest.mark.parametrize("last", [NEAR, FAR])
def test_one_thread_whose_events_overlap_leaves_the_others_as_they_are(tmp_path, last):
    events = [event("outer", 0, 10, tid=1), event("inner", 2, 3, tid=1)]
    events += [event("early", 1, 5, tid=2), event("late", 4, 6, tid=2), event("last", last, 4.5, tid=3)]
    stats = {operator.name: operator.cpu_self_ns for operator in analysis_of(tmp_path, *events, *OTHERS).operators}
    assert stats == {"outer": 7000, "inner": 3000, "early": 3000, "late": 6000, "last": 4500, "other": 20_000}


@pytest.mark.parametrize("last", [NEAR, FAR])
def test_what_a_launching_thread_does_not_tell_the_main_one_does(tmp_path, last):
    events = [work(0, 1, 70), call(0, 0.5, 70, tid=2), work(100, 1, 71), call(99, 0.5, 71, tid=2)]
    events += [event("enumerate(DataLoader)#_SingleProcess.__next__", 10, 40, tid=1), event("aten::mm", 30, 60, tid=2)]
    events += [event("aten::add", last + 100 - 0.5 * k, 0.1, tid=1) for k in range(9)]
    (device,) = analysis_of(tmp_path, *events, *OTHERS).devices
    assert (99_000, "launch") in [(gap.duration_ns, gap.cause) for gap in device.longest_gaps]
    assert device.causes_ns["input"] == 20_000


def test_as_many_calls_are_made_for_a_thousand_launching_threads_as_for_ten(tmp_path):
    counts = {}
    for threads in (10, 1000):
        trace = read_trace(launching_threads(tmp_path, threads, 2000))
        counts[threads] = calls_of(lambda trace=trace: analyze(trace))
    assert counts[1000] < 1.2 * counts[10]


def calls_of(action: object) -> int:
    count = 0

    def note(_: object, happening: str, __: object) -> None:
        nonlocal count
        count += happening in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


HEADER = {
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}, {"id": 1, "name": "NVIDIA A100"}],
    "otherData": {"list": [{"a": 1}, {"b": [{"c": 2}, {"d": '},{"'}]}], "text": '"traceEvents": ['},
}
EVENTS = (
    step(4, 0, 50),
    step(5, 50, 40),
    event("aten::mm", 1, 9, Input_Dims=[[2, 3], [3, 4]], External_id=3),
    event('a name with },{" and \\ and "quotes" and }, {', 2, 1),
    event("é ö 漢字 🎲 \u2028", 3, 1),
    event("nested", 4, 1, extra=[{"a": 1}, {"b": [{"c": "},{"}, {"d": [[]]}]}]),
    call(5, 1, 70),
    work(20, 10, 70),
    {"ph": "M", "name": "process_labels", "args": {"labels": [{}, {}]}},
    event("[memory]", 6, 0, Bytes=64, Device_Type=1, Device_Id=0) | {"ph": "i"},
    event("aten::add", 12, 3, tid="a thread"),
    call(40, 5, 71, "cudaMemcpyAsync"),
    work(60, 1.25, 71, name="Memcpy HtoD (Pinned -> Device)", category="gpu_memcpy", stream=0),
)


def layouts() -> dict[str, bytes]:
    before = json.dumps(HEADER | {"traceEvents": EVENTS})
    after = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS} | HEADER, indent=1)
    packed = gzip.compress(before.encode(), mtime=0)
    members = gzip.compress(before.encode()[:700], mtime=0) + gzip.compress(before.encode()[700:], mtime=0)
    return {
        "header first": before.encode(),
        "header last": after.encode(),
        "array": json.dumps(EVENTS, indent=2, ensure_ascii=False).encode(),
        "gzip": packed,
        "gzip of two members": members,
    }


def rows_of(trace: Trace) -> list[tuple]:
    """Return what the trace says of each event."""
    texts = {
        "name": trace.names,
        "category": trace.categories,
        "thread": trace.threads,
        "input_shapes": (*trace.shapes, None),
    }
    columns = [
        [texts[name][value] if name in texts else value for value in getattr(trace, name).tolist()]
        for name in trace.__struct_fields__
        if isinstance(getattr(trace, name), np.ndarray)
    ]
    return sorted(zip(*columns, strict=True), key=repr)


def whole_of(trace: Trace) -> tuple:
    memory = {name: column.tolist() for name, column in asdict(trace.memory).items() if name != "thread"}
    facts = trace.base_ns, trace.rank, trace.world_size, trace.device_names, trace.faults
    return facts, memory, rows_of(trace)


@pytest.mark.parametrize("layout", layouts())
def test_says_the_same_in_whatever_pieces_the_file_is_read(tmp_path, monkeypatch, layout):
    path = tmp_path / "trace.json"
    path.write_bytes(layouts()[layout])
    whole = read_trace(path)
    assert (whole.faults, len(whole.name)) == ((), 11)
    wanted = whole_of(whole)
    if layout != "array":
        assert (whole.rank, whole.world_size, whole.device_names) == (3, 8, ("NVIDIA A100", "NVIDIA A100"))
    wrong = {}
    for piece in (*range(1, 64, 6), *range(64, len(layouts()[layout]) + 2, 47)):
        monkeypatch.setattr(source, "PIECE_BYTES", piece)
        trace = read_trace(path)
        if whole_of(trace) != wanted:
            wrong[piece] = (len(trace.name), trace.rank, trace.faults)
    assert wrong == {}
