"""What a played program looks like as a Chrome trace of torch.profiler: of CUDA, of ROCm, or of the host alone."""

import json
from collections.abc import Iterator
from typing import Any

from tests.trace_truth.simulator import BASE_US, MAIN, Machine, Row, Work

ROCM = {
    "cudaLaunchKernel": "hipLaunchKernel",
    "cudaLaunchKernelExC": "hipExtModuleLaunchKernel",
    "cudaMemsetAsync": "hipMemsetAsync",
    "cudaHostAlloc": "hipHostMalloc",
}
ROCM_COPIES = {
    "HtoD": "CopyHostToDevice",
    "DtoH": "CopyDeviceToHost",
    "DtoD": "CopyDeviceToDevice",
}
LAUNCHING = ("cudaLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")
CBID = {"cudaLaunchKernel": 211, "cudaMemcpyAsync": 41, "cudaStreamSynchronize": 131, "cudaDeviceSynchronize": 165}


def trace(machine: Machine, rank: int = 0) -> dict[str, Any]:
    """Return the document that the profiler of one rank would have written."""
    return {
        "schemaVersion": 1,
        **_header(machine, rank),
        "traceEvents": [*_processes(machine, rank), *_events(machine, rank)],
        "traceName": "/tmp/trace.json",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1711964646000000000,
    }


def text(machine: Machine, rank: int = 0) -> str:
    return json.dumps(trace(machine, rank))


def _header(machine: Machine, rank: int) -> dict[str, Any]:
    header: dict[str, Any] = {}
    if machine.program.has_device:
        name = "AMD Instinct MI300X" if machine.program.is_rocm else "NVIDIA A100-SXM4-80GB"
        header["deviceProperties"] = [{"id": 0, "name": name, "totalGlobalMem": 84_990_623_744, "numSms": 108}]
    ranks = 1 + max(item for item, _, _ in machine.program.threads)
    if ranks > 1 or ("transfer", None) in machine.spent:
        backend = "nccl" if machine.program.has_device else "gloo"
        header["distributedInfo"] = {"backend": backend, "rank": rank, "world_size": max(2, ranks), "pg_count": 1}
    return header


def _processes(machine: Machine, rank: int) -> Iterator[dict[str, Any]]:
    for pid, label in ((MAIN + rank, "CPU"), *(((0, "GPU 0"),) if machine.program.has_device else ())):
        for name, value in (("name", "python3"), ("labels", label), ("sort_index", pid)):
            key = f"process_{name}"
            yield {"name": key, "ph": "M", "ts": BASE_US, "pid": pid, "tid": 0, "args": {name: value}}


def _events(machine: Machine, rank: int) -> Iterator[dict[str, Any]]:
    program = machine.program
    since = min(begun for number, begun, _ in machine.steps[rank] if number >= program.first_step)
    external = 0
    where: dict[int, Row] = {}
    for row in machine.rows:
        if row.rank != rank or row.start < since:
            continue
        is_call = row.category == "cuda_runtime"
        args: dict[str, Any] = dict(row.args)
        if is_call:
            where[row.args["correlation"]] = row
            args = {"External id": row.args["correlation"], "cbid": CBID.get(row.name, 0), **row.args}
        elif row.category != "python_function":
            external += 1
            args = {"External id": external, "Record function id": external, "Ev Idx": external - 1, **row.args}
        name = row.name
        if is_call and program.is_rocm:
            args["cid"] = args.pop("cbid")
            name = "hipMemcpyWithStream" if row.waits else _rocm(name)
            if row.name.startswith(LAUNCHING):
                args |= {"stream": "0x0", "kernel": ""}
        yield _event(name, row.category, MAIN + rank, row.tid + rank, row.start, row.end, args)
    for work in machine.works:
        assert work.start is not None and work.end is not None, work.name
        if work.rank != rank or work.category is None or work.start < since:
            continue
        yield from _work(work, where.get(work.correlation), program.is_rocm)
    end = max(row.end for row in machine.rows if row.rank == rank)
    yield _event("PyTorch Profiler (0)", "Trace", "Spans", "PyTorch Profiler", since, end, {"Op count": 0})
    stamp = {"ts": (BASE_US * 1000 + end) / 1000, "pid": "Traces", "tid": "Trace PyTorch Profiler"}
    yield {"name": "Record Window End", "ph": "i", "s": "g", **stamp}


def _work(work: Work, launched: Row | None, is_rocm: bool) -> Iterator[dict[str, Any]]:
    assert work.start is not None and work.end is not None and work.category is not None
    name, stream = work.name, work.stream
    args = {"External id": work.correlation, "device": 0, "context": 1, "stream": stream}
    args |= {"correlation": work.correlation, **work.args}
    if work.category == "kernel":
        shape = {"registers per thread": 64, "shared memory": 0, "grid": [432, 1, 1], "block": [256, 1, 1]}
        args |= {"queued": 0, "blocks per SM": 4.0, "warps per SM": 32.0, **shape}
    elif is_rocm:
        name = next((name for kind, name in ROCM_COPIES.items() if kind in work.name), work.name)
    yield _event(name, work.category, 0, stream, work.start, work.end, args)
    if launched is not None:
        common = {"id": work.correlation, "cat": "ac2g", "name": "ac2g"}
        yield {"ph": "s", **common, "pid": MAIN + work.rank, "tid": launched.tid, "ts": _stamp(launched.start)}
        yield {"ph": "f", **common, "pid": 0, "tid": stream, "ts": _stamp(work.start), "bp": "e"}


def _event(name: str, category: str, pid: Any, tid: Any, start: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": _stamp(start), "dur": (end - start) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def _stamp(nanoseconds: int) -> float:
    return (BASE_US * 1000 + nanoseconds) / 1000


def _rocm(name: str) -> str:
    return ROCM.get(name) or name.replace("cuda", "hip", 1)
