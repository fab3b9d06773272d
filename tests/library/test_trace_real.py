"""Real GPU traces against brute force from the same JSON, equal to the nanosecond.

python -m pytest tests/library/test_trace_real.py
"""

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from boundby.trace import Analysis, Trace, analyze, read_trace, source, step_count
from tests.trace_truth.comparison import difference
from tests.traces import GPU_TRACES, REAL_NAMES

STEPS = {"a100-nccl": (4, 5, 6), "a100-rank0": (550, 551, 552, 553, 554), "v100-resnet-ns": (101, 102, 103, 104, 105)}


def content_of(name: str) -> bytes:
    path = GPU_TRACES / name
    if not path.exists():
        pytest.skip(f"no recorded GPU trace at {path}")
    return gzip.decompress(path.read_bytes())


@pytest.fixture(scope="module", params=REAL_NAMES)
def real(request: pytest.FixtureRequest) -> tuple[Trace, Analysis, bytes]:
    content = content_of(request.param)
    trace = read_trace(GPU_TRACES / request.param)
    return trace, analyze(trace), content


def test_real_timestamps_are_exact(real: tuple[Trace, Analysis, bytes]) -> None:
    trace, _, content = real
    events = [each for each in json.loads(content, parse_float=Decimal)["traceEvents"] if each["ph"] == "X"]
    assert (trace.start_ns + trace.base_ns).tolist() == [int(each["ts"] * 1000) for each in events]
    assert trace.duration_ns.tolist() == [int(each["dur"] * 1000) for each in events]
    assert trace.faults == ()


def test_the_analysis_of_a_real_trace_equals_brute_force(real: tuple[Trace, Analysis, bytes]) -> None:
    _, analysis, content = real
    assert difference(analysis, content) == []


def test_the_parts_of_a_real_trace_add_up(real: tuple[Trace, Analysis, bytes]) -> None:
    trace, analysis, _ = real
    assert analysis.step_numbers == STEPS[trace.path.name.partition(".")[0]]
    assert step_count(trace) == len(analysis.step_numbers)
    for device in analysis.devices:
        assert device.busy_ns + device.idle_ns == device.window_ns > 0
        assert sum(device.causes_ns.values()) == device.idle_ns
        assert sum(device.exposed_ns.values()) == device.busy_ns
        steps = [ns for step in device.steps for ns in (*step.busy_ns.values(), *step.idle_ns.values())]
        assert sum(steps) == sum(step.duration_ns for step in device.steps) <= device.window_ns
        line = [
            ns for part in (device.timeline.busy_ns, device.timeline.idle_ns) for row in part.values() for ns in row
        ]
        assert sum(line) == device.window_ns
        assert min([*device.by_kind_ns.values(), *device.causes_ns.values(), *steps, *line]) >= 0


def test_calls_out_the_real_trace_whose_gpu_events_lack_launches() -> None:
    content = content_of("a100-rank0.pt.trace.json.gz")
    events = [each for each in json.loads(content)["traceEvents"] if each["ph"] == "X"]
    launched = {each["args"]["correlation"] for each in events if each["cat"] in ("cuda_runtime", "cuda_driver")}
    work = [each for each in events if each["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    orphaned = Counter(each["args"]["correlation"] for each in work if each["args"]["correlation"] not in launched)
    # 872 events, which carry 843 different correlations: 29 of them stand on a memset and a kernel at once.
    assert (sum(orphaned.values()), len(orphaned)) == (872, 843)
    analysis = analyze(read_trace(GPU_TRACES / "a100-rank0.pt.trace.json.gz"))
    (finding,) = analysis.findings
    assert (finding.kind, finding.is_fatal, analysis.is_conclusive) == ("orphaned", True, False)
    assert finding.text.startswith(f"872 of {analysis.launches.work} pieces of work of the device")


def test_a_real_trace_in_many_pieces_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content_of("a100-nccl.pt.trace.json.gz"))
    whole = read_trace(path)
    monkeypatch.setattr(source, "PIECE_BYTES", 30_011)
    pieces = read_trace(path)
    assert (pieces.names, pieces.shapes, pieces.faults) == (whole.names, whole.shapes, ())
    for column in (
        "name",
        "category",
        "start_ns",
        "duration_ns",
        "correlation",
        "external_id",
        "stream",
        "input_shapes",
    ):
        assert getattr(pieces, column).tolist() == getattr(whole, column).tolist()


def test_a_real_trace_cut_short_is_inconclusive(tmp_path: Path) -> None:
    content = content_of("a100-nccl.pt.trace.json.gz")
    path = tmp_path / "cut.json"
    for share in (0.2, 0.5, 0.99):
        path.write_bytes(content[: int(share * len(content))])
        analysis = analyze(read_trace(path))
        assert analysis.events > 1000
        assert not analysis.is_conclusive
