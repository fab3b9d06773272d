"""Builders of synthetic traces for the tests; times in µs, as a trace writes them."""

import json
from pathlib import Path
from typing import Any

from boundby.trace import Analysis, analyze, read_trace

REPOSITORY = Path(__file__).parents[1]
GPU_TRACES = REPOSITORY.parent / "shared" / "data" / "gpu-traces"
REAL_NAMES = ("a100-nccl.pt.trace.json.gz", "a100-rank0.pt.trace.json.gz", "v100-resnet-ns.pt.trace.json.gz")


def event(name: str, ts: float | str, dur: float, category: str = "cpu_op", tid: Any = 1, **args: object) -> dict:
    """Return an event with a duration; `_` in the names of `args` stands for the space that Kineto writes."""
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": named}


def python_frame(name: str, ts: float, dur: float, number: int, parent: int | None) -> dict:
    return event(name, ts, dur, "python_function", Python_id=number, Python_parent_id=parent)


def step(number: int, ts: float, dur: float, tid: int = 1) -> dict:
    return event(f"ProfilerStep#{number}", ts, dur, "user_annotation", tid)


def call(ts: float | str, dur: float, correlation: int, name: str = "cudaLaunchKernel", tid: int = 1) -> dict:
    return event(name, ts, dur, "cuda_runtime", tid, correlation=correlation)


def work(
    ts: float | str,
    dur: float,
    correlation: int,
    *,
    name: str = "gemm",
    stream: int = 7,
    device: int = 0,
    category: str = "kernel",
) -> dict:
    args = {"correlation": correlation, "stream": stream, "device": device}
    return event(name, ts, dur, category, stream, **args) | {"pid": device}


def memory_change(  # noqa: PLR0913  (what Kineto writes of one)
    ts: float,
    address: int | None,
    size: int,
    allocated: int | None = None,
    device: int | None = None,
    reserved: int | None = None,
    tid: int = 1,
) -> dict:
    """Return a change of the memory of the host, or of a device; what is None is not recorded."""
    where = {"Device Type": int(device is not None), "Device Id": -1 if device is None else device}
    args = {"Addr": address, "Bytes": size, "Total Allocated": allocated, "Total Reserved": reserved, **where}
    known = {name: value for name, value in args.items() if value is not None}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": tid, "ts": ts, "args": known}


def document(*events: dict, **header: Any) -> dict:
    return header | {"traceEvents": list(events)}


def write(folder: Path, *events: dict, **header: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps(document(*events, **header)))
    return path


def analysis_of(folder: Path, *events: dict, **expected: Any) -> Analysis:
    return analyze(read_trace(write(folder, *events)), **expected)


def causes_of(folder: Path, *events: dict) -> dict[str, int]:
    """Return the causes that have any time, in µs, of the only device."""
    (device,) = analysis_of(folder, *events).devices
    assert sum(device.causes_ns.values()) == device.idle_ns
    assert all(nanoseconds % 1000 == 0 for nanoseconds in device.causes_ns.values())
    return {cause: nanoseconds // 1000 for cause, nanoseconds in device.causes_ns.items() if nanoseconds}
