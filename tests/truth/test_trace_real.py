"""All recorded GPU traces against brute force from the same JSON, equal to the nanosecond.

python -m pytest -m truth tests/truth/test_trace_real.py
"""

import gzip
import json
from collections import Counter

import pytest

from boundby.trace import analyze, read_trace
from tests.trace_truth.comparison import difference
from tests.trace_truth.events import exact_times
from tests.traces import GPU_TRACES, REAL_NAMES

pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not GPU_TRACES.exists(), reason=f"no recorded GPU traces in {GPU_TRACES}"),
]


@pytest.mark.parametrize("name", REAL_NAMES)
def test_a_real_trace_is_read_and_analysed_as_by_brute_force(name: str) -> None:
    content, trace = gzip.decompress((GPU_TRACES / name).read_bytes()), read_trace(GPU_TRACES / name)
    start_ns, duration_ns = exact_times(content)
    assert (trace.start_ns + trace.base_ns).tolist() == start_ns
    assert (trace.duration_ns.tolist(), trace.faults) == (duration_ns, ())
    assert difference(analyze(trace), content) == []


def test_as_many_events_of_the_gpu_lack_launches_as_are_told() -> None:
    path = GPU_TRACES / "a100-rank0.pt.trace.json.gz"
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]
    launched = {event["args"]["correlation"] for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}
    work = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    orphaned = Counter(event["args"]["correlation"] for event in work if event["args"]["correlation"] not in launched)
    # 872 events, which carry 843 different correlations: 29 of them stand on a memset and a kernel at once.
    assert (orphaned.total(), len(orphaned)) == (872, 843)
    (finding,) = analyze(read_trace(path)).findings
    assert finding.kind == "backlog" and finding.text.startswith("the first 872 pieces of work of the device")
