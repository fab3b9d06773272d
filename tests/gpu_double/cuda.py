"""What `torch.cuda` answers while the card is plugged in: the same names, backed by the machine."""

import types
from collections.abc import Callable
from typing import Any

import torch

from . import tensors
from .machine import Capture, Machine

CYCLES_PER_S = 1e6  # of `_sleep`, by MHz of the clock


class Stream:
    """A stream of the card."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **_: Any) -> None:
        assert tensors.machine is not None
        self._machine = tensors.machine
        self.stream_id = self._machine.new_stream() if number is None else number
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.cuda_stream = self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def synchronize(self) -> None:
        self._machine.synchronize(self.stream_id)

    def query(self) -> bool:
        self._machine.check()
        return self._machine.queues[self.stream_id].free_at <= self._machine.read()

    def wait_stream(self, other: "Stream") -> None:
        mine, theirs = (self._machine.queues[stream.stream_id] for stream in (self, other))
        mine.free_at = max(mine.free_at, theirs.free_at)

    def wait_event(self, event: "Event") -> None:
        queue = self._machine.queues[self.stream_id]
        queue.free_at = max(queue.free_at, event.at or 0.0)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event: `at` is when the device passes it."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        assert tensors.machine is not None
        self._machine = tensors.machine
        self.is_timed = enable_timing
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        with _On(self._machine, stream):
            self.at = self._machine.mark()

    def query(self) -> bool:
        self._machine.check()
        return self.at is None or self.at <= self._machine.read()

    def synchronize(self) -> None:
        self._machine.check()
        self._machine.now = max(self._machine.now, self.at or 0.0)
        self._machine.check()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, end: "Event") -> float:
        self._machine.check()
        if not (self.is_timed and end.is_timed) or self.at is None or end.at is None:
            raise ValueError("Both events must be created with argument 'enable_timing=True' and be recorded")
        if max(self.at, end.at) > self._machine.now:
            raise RuntimeError("CUDA error: device not ready")
        return (end.at - self.at) * 1e3


class CUDAGraph:
    """A captured graph; a replay computes all of it again into the same tensors."""

    def __init__(self, keep_graph: bool = False) -> None:
        assert tensors.machine is not None
        self._machine = tensors.machine
        self._captured: Capture | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self._machine.check()
        if self._machine.capture is not None:
            raise RuntimeError("CUDA error: a capture is already under way")
        self._machine.capture = Capture()

    def capture_end(self) -> None:
        capture, self._machine.capture = self._machine.capture, None
        if capture is None:
            raise RuntimeError("CUDA error: no capture is under way")
        if capture.broken:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        self._captured = capture

    def replay(self) -> None:
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._machine.replay(self._captured)

    def reset(self) -> None:
        self._captured = None

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class _On:
    """The block in which launches go to a stream; one that is never left, as after a failed capture, stays for good."""

    def __init__(self, machine: Machine, stream: Stream | None) -> None:
        self._machine, self._stream = machine, stream

    def __enter__(self) -> None:
        self._before = self._machine.current
        self._machine.current = self._before if self._stream is None else self._stream.stream_id

    def __exit__(self, *_: object) -> None:
        self._machine.current = self._before


def current_stream(device: Any = None) -> Stream:
    """Return the stream that launches go to."""
    assert tensors.machine is not None
    return Stream(number=tensors.machine.current)


class Device:
    """`torch.cuda.device`: one card, so nothing changes."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def names(machine: Machine) -> dict[str, Any]:
    """Return what stands in `torch.cuda` while the card is plugged in."""
    card = machine.card

    def properties(device: Any = None) -> Any:
        _index(device)
        return types.SimpleNamespace(
            name=card.name, total_memory=card.memory_bytes, major=card.capability[0], minor=card.capability[1],
            multi_processor_count=card.multiprocessors, L2_cache_size=card.l2_bytes, warp_size=32,
            uuid="00000000-0000-0000-0000-00000000cafe", is_integrated=0, max_threads_per_multi_processor=2048,
            shared_memory_per_block=49152, regs_per_multiprocessor=65536, clock_rate=card.sm_clock_mhz * 1000,
            shared_memory_per_multiprocessor=228 * 1024, shared_memory_per_block_optin=227 * 1024,
        )  # fmt: skip

    def sleep(cycles: int) -> None:
        machine.launch("spin_kernel", cycles / (card.sm_clock_mhz * CYCLES_PER_S))

    def stats(device: Any = None) -> dict[str, int]:
        machine.check()
        return {
            "allocated_bytes.all.current": machine.allocated, "allocated_bytes.all.peak": machine.peak_allocated,
            "reserved_bytes.all.current": machine.reserved, "reserved_bytes.all.peak": machine.peak_reserved,
            "num_alloc_retries": 0, "num_ooms": 0,
        }  # fmt: skip

    def reset_peaks(device: Any = None) -> None:
        machine.check()
        machine.peak_allocated, machine.peak_reserved = machine.allocated, machine.reserved

    def reading(name: str) -> Callable[..., int]:
        def read(device: Any = None) -> int:
            return int(getattr(machine, name))

        return read

    def set_share(fraction: float, device: Any = None) -> None:
        machine.memory_share = fraction

    def stream_of(stream: Stream | None) -> Any:
        return _On(machine, stream)

    def set_stream(stream: Stream) -> None:
        machine.current = stream.stream_id

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return card.has_bfloat16 or including_emulation

    def nothing() -> Callable[..., None]:
        return lambda *_, **__: machine.check()  # one each: the compiler has a rule for every function of torch.cuda

    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_compiled": lambda: True,
        "_lazy_init": lambda: None, "init": lambda: None, "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": _index, "device": Device,
        "synchronize": lambda device=None: machine.synchronize(), "Stream": Stream, "Event": Event,
        "CUDAGraph": CUDAGraph, "stream": stream_of, "set_stream": set_stream, "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(number=0), "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: machine.capture is not None,
        "memory_allocated": reading("allocated"), "max_memory_allocated": reading("peak_allocated"),
        "memory_reserved": reading("reserved"), "max_memory_reserved": reading("peak_reserved"),
        "memory_stats": stats, "reset_peak_memory_stats": reset_peaks, "empty_cache": machine.empty_cache,
        "set_per_process_memory_fraction": set_share,
        "mem_get_info": lambda device=None: (machine.capacity - machine.reserved, card.memory_bytes),
        "get_device_properties": properties, "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability, "is_bf16_supported": is_bf16_supported,
        "is_tf32_supported": lambda: card.capability >= (8, 0), "_sleep": sleep, "ipc_collect": nothing(),
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90"], "manual_seed": nothing(), "manual_seed_all": nothing(),
        "seed": nothing(), "memory_snapshot": lambda *_, **__: [],
        "get_rng_state": lambda device="cuda": torch.get_rng_state(), "set_rng_state": nothing(),
        "get_rng_state_all": lambda: [torch.get_rng_state()], "set_rng_state_all": nothing(),
    }  # fmt: skip


def _index(device: Any = None) -> None:
    index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index
    if index not in (None, 0, -1):
        raise AssertionError(f"Invalid device id {index}")
