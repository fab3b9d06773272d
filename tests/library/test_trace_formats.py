"""Traces as others write, pack and merge them: nothing is refused that can be told, and the rest is said by name."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from boundby.bound.trace_judgement import judge_trace
from boundby.trace import NotATrace, Trace, analyze, read_trace, source
from boundby.trace.linking import by_process
from tests.traces import analysis_of, call, event, step, work, write

EVENTS = [step(1, 0, 100), event("aten::mm", 1, 8), call(2, 1, 70), work(10, 20, 70), call(40, 1, 71), work(60, 20, 71)]
TEXT = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}).encode()
NAMES = [record["name"] for record in EVENTS]


def names_of(trace: Trace) -> list[str]:
    return [trace.names[name] for name in trace.name.tolist()]


def read(folder: Path, content: bytes, name: str = "trace.json") -> Trace:
    (folder / name).write_bytes(content)
    return read_trace(folder / name)


FORMATS = {
    "plain": TEXT,
    "bare list": json.dumps(EVENTS).encode(),
    "gzip": gzip.compress(TEXT, mtime=0),
    "two members of gzip": gzip.compress(TEXT[:300], mtime=0) + gzip.compress(TEXT[300:], mtime=0) + b"\0" * 8,
    "gzip with something behind it": gzip.compress(TEXT, mtime=0) + b"something else",
}


@pytest.mark.parametrize("piece", [source.PIECE_BYTES, 40])
@pytest.mark.parametrize("name", FORMATS)
def test_every_packing_gives_the_same_trace(tmp_path, monkeypatch, name, piece):
    monkeypatch.setattr(source, "PIECE_BYTES", piece)
    trace = read(tmp_path, FORMATS[name])
    assert (names_of(trace), trace.faults) == (NAMES, ())


def test_zstd_is_read_where_a_library_for_it_is_at_hand_and_else_the_way_out_is_named(tmp_path):
    packed = b"\x28\xb5\x2f\xfd\x20" + bytes([len(b"[]")]) + b"\x11\x00\x00[]"  # one raw block
    try:
        assert len(read(tmp_path, packed).name) == 0
    except ValueError as error:
        assert "zstd -d" in str(error) and not isinstance(error, NotATrace)


def test_what_is_whole_of_a_packed_file_that_was_cut_short_is_told(tmp_path):
    many = json.dumps([event(f"op {number * 7919 % 1000:x}", number, 1) for number in range(20_000)]).encode()
    packed = gzip.compress(many, mtime=0)
    trace = read(tmp_path, packed[: len(packed) * 9 // 10])
    assert 0 < len(trace.name) < 20_000
    assert {fault.kind for fault in trace.faults} == {"cut_short"}
    assert not analyze(trace).is_conclusive


def sound(count: int) -> Iterable[dict]:
    yield step(1, 0, 10 * count)
    for number in range(count):
        yield call(10 * number, 2, number)
        yield event("aten::mm", 10 * number, 3)
        yield work(10 * number + 3, 4, number)


@pytest.mark.parametrize("odd", [{"ph": "X", "name": "no time", "pid": 1, "tid": 1}, {"ph": "X", "ts": 1}, {"a": 1}])
@pytest.mark.parametrize(("count", "is_fatal"), [(10, True), (100, False)])
def test_a_damaged_event_is_a_share_of_all(tmp_path, odd, count, is_fatal):
    (finding,) = analysis_of(tmp_path, *sound(count), odd).findings
    assert (finding.kind, finding.is_fatal) == ("damaged", is_fatal)
    assert finding.text.startswith("1 event(s)")


ARGUMENTS = [
    *({field: odd} for field in ("stream", "device", "bytes", "External id") for odd in ("0x0", "x", [1], {}, 1.5)),
    *({"Python id": "x"}, {"correlation": 70, "grid": [1, 2], "stream": None}),
]


@pytest.mark.parametrize("args", ARGUMENTS, ids=repr)
@pytest.mark.parametrize(
    "odd", [call(30, 1, 72), work(30, 1, 72), event("aten::mul", 30, 1)], ids=lambda odd: odd["cat"]
)
def test_a_bad_argument_never_costs_the_event(tmp_path, odd, args):
    trace = read_trace(write(tmp_path, *EVENTS, odd | {"args": odd["args"] | args}))
    assert (len(trace.name), trace.faults) == (len(EVENTS) + 1, ())


@pytest.mark.parametrize("field", [{"args": 3}, {"args": "x"}, {"args": [1]}, {"cat": None}, {"pid": 1.5}, {"tid": []}])
def test_neither_does_a_field_that_an_event_may_lack(tmp_path, field):
    trace = read_trace(write(tmp_path, *EVENTS, event("odd", 5, 1) | field))
    assert (names_of(trace), trace.faults) == ([*NAMES, "odd"], ())


def test_streams_that_are_told_by_addresses_stay_apart(tmp_path):
    kernels = [work(10 * k, 20, 70 + k) for k in range(3)]
    for kernel, stream in zip(kernels, ("0x0", 2**47, 2**48), strict=True):
        kernel["args"]["stream"] = stream
    trace = read_trace(write(tmp_path, *kernels))
    assert len(set(trace.stream.tolist())) == 3
    assert not [finding for finding in analyze(trace).findings if finding.kind == "overlap"]


# ROCm


HIP_LAUNCHES = (
    *("hipLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel", "hipExtLaunchKernel", "hipGraphLaunch"),
    *("hipLaunchKernelExC", "hipLaunchCooperativeKernel", "hipLaunchCooperativeKernelMultiDevice", "hipLaunchByPtr"),
    *("hipExtLaunchMultiKernelMultiDevice", "hipHccModuleLaunchKernel", "hipLaunchKernel_spt", "hipMemcpyAsync"),
    *("hipMemcpyWithStream", "hipMemsetAsync", "hipMemcpy2DAsync", "hipMemcpyHtoDAsync"),
)


@pytest.mark.parametrize("name", HIP_LAUNCHES)
@pytest.mark.parametrize("category", ["cuda_runtime", "hip_runtime"])
def test_a_trace_of_rocm_is_told_as_one_of_cuda(tmp_path, name, category):
    def launch(ts: float, number: int) -> dict:
        return event(name, ts, 2, category, correlation=number, stream="0x0", kernel="Cijk_Ailk", ptr="0x7f00")

    sync = event("hipStreamSynchronize", 50, 30, category, stream="0x0")
    events = [step(1, 0, 100), launch(5, 1), work(10, 20, 1), launch(40, 2), work(45, 30, 2), sync]
    analysis = analysis_of(tmp_path, *events, event("aten::mm", 4, 4))
    assert (analysis.is_conclusive, analysis.findings) == (True, ())
    assert (analysis.launches.calls, analysis.launches.work_without_call, analysis.launches.calls_without_work) == (
        2,
        0,
        0,
    )
    (device,) = analysis.devices
    assert (device.device, device.busy_ns, device.causes_ns["untraced"]) == (0, 50_000, 0)


# What the recording lacks


def backlogged(lost: int) -> Iterable[dict]:
    yield step(1, 0, 1000)
    yield event("aten::mm", 1, 400)
    for number in range(lost):
        yield work(10 * number, 10, 900 + number, name="early")
    for number in range(30):
        yield call(5 * number, 2, number)
        yield work(10 * (lost + number), 10, number)


def test_work_from_before_the_recording_is_named_so_and_not_fatal(tmp_path):
    analysis = analysis_of(tmp_path, *backlogged(20))
    (finding,) = analysis.findings
    assert (finding.kind, finding.is_fatal) == ("backlog", False)
    assert finding.text.startswith("the first 20 device operations")
    assert [(item.name, item.calls, item.total_ns) for item in analysis.backlog] == [("early", 20, 200_000)]


def test_work_without_its_launch_in_the_midst_of_a_trace_is_no_backlog(tmp_path):
    lost = [work(600 + 10 * number, 5, 900 + number) for number in range(10)]
    analysis = analysis_of(tmp_path, *backlogged(0), *lost)
    assert [(finding.kind, finding.is_fatal) for finding in analysis.findings] == [("orphaned", True)]
    assert analysis.backlog == ()


def test_without_any_launch_nothing_is_called_backlog(tmp_path):
    analysis = analysis_of(tmp_path, step(1, 0, 100), event("aten::mm", 1, 2), work(5, 10, 1), work(20, 10, 2))
    assert [(finding.kind, finding.is_fatal) for finding in analysis.findings] == [("orphaned", True)]


def test_a_recording_without_steps_is_read(tmp_path):
    analysis = analysis_of(tmp_path, *(item for item in sound(20) if "Step" not in item["name"]))
    assert (analysis.step_numbers, analysis.findings, analysis.is_conclusive) == ((), (), True)
    assert analysis.devices[0].busy_ns == 80_000


@pytest.mark.parametrize("category", ["mtia_ccp_events", "hpu_op", "glow_runtime", "an accelerator of tomorrow"])
def test_of_an_accelerator_that_is_not_understood_no_verdict_is_made(tmp_path, category):
    odd = [event("work", 10 * number, 5, category, tid=9) for number in range(30)]
    analysis = analysis_of(tmp_path, *odd, event("aten::mm", 0, 300))
    (finding,) = analysis.findings
    assert (finding.kind, finding.is_fatal) == ("not_understood", True)
    assert finding.text.startswith(f"30 event(s) are of kinds that are not understood here (30 {category})")
    assert judge_trace(analysis).bound == "inconclusive"


def test_odd_events_beside_work_that_is_understood_are_only_counted(tmp_path):
    (finding,) = analysis_of(tmp_path, *sound(20), event("mine", 0, 5, "my_category")).findings
    assert (finding.kind, finding.is_fatal) == ("not_understood", False)


def test_a_trace_without_operators_gets_no_verdict(tmp_path):
    analysis = analysis_of(tmp_path, event("train.py(3): loop", 0, 100, "python_function"))
    (finding,) = analysis.findings
    assert (finding.kind, finding.is_fatal) == ("operators", True)
    assert "ProfilerActivity.CPU" in finding.text


def test_a_recording_of_the_device_alone_says_so(tmp_path):
    analysis = analysis_of(tmp_path, *(work(10 * number, 5, number) for number in range(10)))
    assert {finding.kind: finding.is_fatal for finding in analysis.findings} == {"operators": False, "orphaned": True}


# Several processes in one file


def ranks(*, shift: float, correlations: int, device_of_rank: Iterable[int] = (0, 1)) -> list[dict]:
    events = []
    for rank, device in enumerate(device_of_rank):
        for number in range(20):
            at, correlation = 100 * number + rank * shift, number + rank * correlations
            host = [event("aten::mm", at, 10), call(at + 2, 3, correlation)]
            events += [item | {"pid": 4000 + rank} for item in host]
            events.append(work(at + 20, 30 + 10 * rank, correlation, device=device))
    return events


def test_processes_in_one_file_are_told_apart_where_their_launches_are(tmp_path):
    trace = read_trace(write(tmp_path, *ranks(shift=5, correlations=1000)))
    assert trace.processes == (4000, 4001)
    apart = by_process(trace)
    assert [item.process for item in apart] == [4000, 4001]
    result = [analyze(item) for item in apart]
    assert [item.devices[0].busy_ns for item in result] == [600_000, 800_000]
    assert [(len(item.devices), item.process, item.findings) for item in result] == [(1, 4000, ()), (1, 4001, ())]


def test_processes_without_a_device_are_told_apart(tmp_path):
    host = [rank for rank in ranks(shift=5, correlations=0) if rank["cat"] == "cpu_op"]
    result = [analyze(item) for item in by_process(read_trace(write(tmp_path, *host)))]
    assert [(item.process, item.events) for item in result] == [(4000, 20), (4001, 20)]


@pytest.mark.parametrize("device_of_rank", [(0, 1), (0, 0)])
def test_processes_that_cannot_be_told_apart_are_named_and_not_judged(tmp_path, device_of_rank):
    trace = read_trace(write(tmp_path, *ranks(shift=0, correlations=0, device_of_rank=device_of_rank)))
    assert len(by_process(trace)) == 1
    finding = next(item for item in analyze(trace).findings if item.kind == "processes")
    assert finding.is_fatal and "2 processes (4000, 4001)" in finding.text


def test_one_process_with_several_devices_and_threads_is_one_trace(tmp_path):
    events = [*ranks(shift=5, correlations=1000), event("aten::add", 5, 1, tid=8)]
    for record in events:
        record["pid"] = 4000 if record["cat"] != "kernel" else record["pid"]
    assert len(by_process(read_trace(write(tmp_path, *events)))) == 1
