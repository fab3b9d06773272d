"""Real GPU traces: what they hold to the nanosecond, and that their parts add up; the larger ones in `make truth`."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from boundby.trace import analyze, read_trace, step_count
from tests.trace_truth.attempts import imbalance
from tests.trace_truth.comparison import difference
from tests.trace_truth.events import exact_times
from tests.traces import GPU_TRACES

NCCL, RANK0, RESNET = ("a100-nccl", "a100-rank0", "v100-resnet-ns")
STEPS = {NCCL: (4, 5, 6), RANK0: (550, 551, 552, 553, 554), RESNET: (101, 102, 103, 104, 105)}


def path_of(name: str) -> Path:
    path = GPU_TRACES / f"{name}.pt.trace.json.gz"
    if not path.exists():
        pytest.skip(f"no recorded GPU trace at {path}")
    return path


@pytest.mark.parametrize("name", [NCCL, *(pytest.param(name, marks=pytest.mark.truth) for name in (RANK0, RESNET))])
def test_a_real_trace_is_read_and_analysed_as_by_brute_force(name):
    content, trace = gzip.decompress(path_of(name).read_bytes()), read_trace(path_of(name))
    start_ns, duration_ns = exact_times(content)
    assert (trace.start_ns + trace.base_ns).tolist() == start_ns
    assert (trace.duration_ns.tolist(), trace.faults) == (duration_ns, ())
    assert difference(analyze(trace), content) == []


@pytest.mark.parametrize("name", STEPS)
def test_the_parts_of_a_real_trace_add_up(name):
    trace = read_trace(path_of(name))
    analysis = analyze(trace)
    assert (analysis.step_numbers, step_count(trace)) == (STEPS[name], len(STEPS[name]))
    assert imbalance(analysis) is None
    for device in analysis.devices:
        steps = [ns for step in device.steps for ns in (*step.busy_ns.values(), *step.idle_ns.values())]
        assert sum(steps) == sum(step.duration_ns for step in device.steps) <= device.window_ns


def test_the_work_of_a_real_trace_that_was_launched_before_it_began_is_called_so():
    path = path_of(RANK0)
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]
    launched = {event["args"]["correlation"] for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}
    work = [event["args"]["correlation"] for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    orphaned = Counter(correlation for correlation in work if correlation not in launched)
    # 872 events, which carry 843 different correlations: 29 of them stand on a memset and a kernel at once.
    assert (orphaned.total(), len(orphaned)) == (872, 843)
    analysis = analyze(read_trace(path))
    (finding,) = analysis.findings
    assert (finding.kind, finding.is_fatal, analysis.is_conclusive) == ("backlog", False, True)
    assert finding.text.startswith("the first 872 device operations")
    assert sum(stat.calls for stat in analysis.backlog) == 872
