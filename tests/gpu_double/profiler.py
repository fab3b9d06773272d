"""Traces of the card: torch's profiler records the host as ever, and the kernels are added when it is exported.

The host's events come with the real clock. Every launch notes both clocks, and between two launches the one is mapped
to the other in a straight line, so that a launch in the trace lies inside the operator that made it.
"""

import bisect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .machine import Kernel, Machine

DEVICE_PID, HOST_THREAD = 0, "launches"


class _Recording:
    """The kernels since a profiler started, and pairs of the real and the machine's clock."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.kernels: list[Kernel] = []
        self.real: list[float] = []
        self.ours: list[float] = []
        machine.timeline = self.kernels
        machine.on_launch = self.pair
        self.pair()

    def pair(self) -> None:
        """Note what both clocks say now."""
        self.real.append(time.time_ns() / 1e3)
        self.ours.append(self._machine.now * 1e6)

    def stop(self) -> None:
        """Record no more."""
        self.pair()
        self._machine.timeline = None
        self._machine.on_launch = None

    def mapped(self, at: float) -> float:
        """Return the machine's microseconds at these real ones."""
        index = bisect.bisect_right(self.real, at)
        if index == 0:
            return self.ours[0] - (self.real[0] - at)
        if index == len(self.real):
            return self.ours[-1] + (at - self.real[-1])
        left, right = self.real[index - 1], self.real[index]
        share = (at - left) / (right - left) if right > left else 0.0
        return self.ours[index - 1] + share * (self.ours[index] - self.ours[index - 1])


def put_in(put: Callable[[Any, str, Any], None], machine: Machine) -> None:
    """Let torch's profiler say that it records the card, and add the kernels to what it exports."""
    profile = torch.profiler.profile
    start, stop, export = profile.start_trace, profile.stop_trace, profile.export_chrome_trace
    supported = set(torch.profiler.supported_activities()) | {torch.profiler.ProfilerActivity.CUDA}
    prepare = profile.prepare_trace

    def start_trace(self: Any) -> Any:
        self._of_card = _Recording(machine)
        return start(self)

    def stop_trace(self: Any) -> Any:
        if getattr(self, "_of_card", None):
            self._of_card.stop()
        return stop(self)

    def export_chrome_trace(self: Any, path: str) -> Any:
        answer = export(self, path)
        if getattr(self, "_of_card", None):
            _add(Path(path), self._of_card, machine)
        return answer

    def prepare_trace(self: Any) -> Any:
        self.activities = set(self.activities) - {torch.profiler.ProfilerActivity.CUDA}
        self.use_device = None
        return prepare(self)

    put(profile, "start_trace", start_trace)
    put(profile, "stop_trace", stop_trace)
    put(profile, "prepare_trace", prepare_trace)
    put(profile, "export_chrome_trace", export_chrome_trace)
    put(torch.profiler, "supported_activities", lambda: supported)


def _add(path: Path, recording: _Recording, machine: Machine) -> None:
    document = json.loads(path.read_text())
    base = float(document.get("baseTimeNanoseconds", 0)) / 1e3
    events, host_pid, host_tid = document["traceEvents"], 0, 0
    for event in events:
        if "ts" not in event or event.get("ph") == "M":
            continue
        start = event["ts"] + base
        event["ts"] = recording.mapped(start)
        if "dur" in event:
            event["dur"] = max(0.0, recording.mapped(start + event["dur"]) - event["ts"])
        if event.get("cat") == "cpu_op":
            host_pid, host_tid = event["pid"], event["tid"]
    for kernel in recording.kernels:
        events += _events(kernel, machine, host_pid, host_tid)
    document["deviceProperties"] = [
        {
            "id": 0,
            "name": machine.card.name,
            "totalGlobalMem": machine.card.memory_bytes,
            "numSms": machine.card.multiprocessors,
        }
    ]
    document["baseTimeNanoseconds"] = 0
    path.write_text(json.dumps(document))


def _events(kernel: Kernel, machine: Machine, pid: int, tid: int) -> list[dict[str, Any]]:
    is_copy = kernel.name.startswith("Memcpy")
    device = {
        "ph": "X", "cat": "gpu_memcpy" if is_copy else "kernel", "name": kernel.name, "pid": DEVICE_PID,
        "tid": 7 + kernel.stream, "ts": kernel.start * 1e6, "dur": kernel.seconds * 1e6,
        "args": {"device": 0, "stream": 7 + kernel.stream, "correlation": kernel.correlation},
    }  # fmt: skip
    if kernel.launched_at is None:
        return [device]
    launch = {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync" if is_copy else "cudaLaunchKernel", "pid": pid,
        "tid": tid, "ts": kernel.launched_at * 1e6, "dur": machine.card.launch_s * 1e6,
        "args": {"correlation": kernel.correlation},
    }  # fmt: skip
    flow = {"cat": "ac2g", "name": "ac2g", "id": kernel.correlation}
    return [
        launch, device,
        {**flow, "ph": "s", "pid": pid, "tid": tid, "ts": kernel.launched_at * 1e6},
        {**flow, "ph": "f", "bp": "e", "pid": DEVICE_PID, "tid": 7 + kernel.stream, "ts": kernel.start * 1e6},
    ]  # fmt: skip
