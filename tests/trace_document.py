"""Documents of step 03 on traces that never ran: a training loop on a GPU, and a loop on a CPU."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from boundby import files
from boundby.trace import analyze, read_trace
from tests import traces
from tests.traces import call, event, memory_change, step, work
from utils.command.artifacts import Layout
from utils.tracing import trace_document as documents
from utils.tracing.traces import Examination, Examined

STEPS = 4
STEP_US = 10_000.0
LEAK_BYTES = 4000  # of every step of both traces
HELD_BYTES = 900_000_000  # on the GPU, before the trace


def gpu(**changes: Any) -> dict[str, Any]:
    """Return the trace of a loop that waits for its DataLoader most of the time, with other keys by `changes`."""
    return {**_traces("gpu")[0], **changes}


def cpu(**changes: Any) -> dict[str, Any]:
    """Return the trace of a loop on a CPU, most of whose time is in matrix products."""
    return {**_traces("cpu")[0], **changes}


def document(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the content of trace_analysis.json for these traces; the first is the slowest."""
    return {**documents.of(_examination("cpu")), "traces": list(entries), "slowest": 0, **changes}


def store(layout: Layout, *entries: dict[str, Any], **changes: Any) -> None:
    """Write what step 03 leaves."""
    files.write_json(layout.trace_analysis, document(*entries, **changes))


def verdict(trace: dict[str, Any], **changes: Any) -> dict[str, Any]:
    kinds = {"doubt_kinds": [doubt.partition(":")[0] for doubt in changes["doubts"]]} if "doubts" in changes else {}
    return {**trace, "verdict": {**trace["verdict"], **changes, **kinds}}


def write(path: Path, kind: str) -> None:
    """Write the trace itself: of the loop on a GPU ("gpu"), or on a CPU ("cpu")."""
    path.write_text(json.dumps(traces.document(*(_gpu_events() if kind == "gpu" else _cpu_events()))))


def _traces(kind: str) -> list[dict[str, Any]]:
    return documents.of(_examination(kind))["traces"]


@cache
def _examination(kind: str) -> Examination:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write(path, kind)
        analysis = analyze(read_trace(path), expected_steps=STEPS)
    return Examination((Examined.of(analysis),), (), "name")


def _gpu_events() -> list[dict]:
    events = []
    for number in range(STEPS):
        start = number * STEP_US
        events += [
            step(number, start, STEP_US),
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, 6000, "user_annotation"),
            event("aten::mm", start + 6000, 500),
            call(start + 6100, 20, 10 * number + 1),
            work(start + 6125, 2400, 10 * number + 1, name="ampere_sgemm"),
            call(start + 6200, 20, 10 * number + 2, "cudaMemcpyAsync"),
            work(start + 8600, 200, 10 * number + 2, name="Memcpy HtoD", category="gpu_memcpy"),
            call(start + 6300, 20, 10 * number + 3),
            work(start + 8000, 1400, 10 * number + 3, name="ncclDevKernel_AllReduce", stream=20),
            _change(start + 6050, number, LEAK_BYTES, HELD_BYTES + (number + 1) * LEAK_BYTES, device=0),
            _change(start + 6060, 99, 64_000_000, HELD_BYTES + (number + 1) * LEAK_BYTES + 64_000_000, device=0),
            _change(start + 9000, 99, -64_000_000, HELD_BYTES + (number + 1) * LEAK_BYTES, device=0),
        ]
    return events


def _cpu_events() -> list[dict]:
    events = []
    for number in range(STEPS):
        start = number * STEP_US
        events += [
            step(number, start, STEP_US),
            event("aten::addmm", start + 500, 6000),
            event("aten::gelu", start + 7000, 1500),
            _change(start + 600, number, LEAK_BYTES, None),
            _change(start + 610, 99, 3_000_000, None),
            _change(start + 7100, 98, 1_000_000, None),
            _change(start + 8900, 98, -1_000_000, None),
            _change(start + 9000, 99, -3_000_000, None),
        ]
    return events


def _change(ts: float, address: int, size: int, allocated: int | None, device: int | None = None) -> dict:
    return memory_change(ts, address, size, allocated, device, None if allocated is None else 1_000_000_000)
