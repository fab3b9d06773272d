"""How long a device computes for a call, however many launches it is: behind a backlog, as a graph, in chunks.

A backlog holds the device until the host has issued a call, but a GPU queues about 1,024 launches. A longer call is
captured and replayed as a graph, else issued in chunks with a backlog each. Where a call waits for the device itself,
its kernels are added up from a profile.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from boundby.capture import is_another_at_work, quiet_kineto
from boundby.formatting import first_line
from boundby.machine import raise_if_lost
from boundby.timing import CHUNK, MOST_HELD, QUEUE_DEPTH, DeviceQueue, DeviceTime, Timer, Way, Work
from boundby.work import operators

PROBE_BYTES = 64 * 2**20  # which the allocator asks for by itself and gives back as a whole
LEFTOVER = "a graph could not be captured and left the process in an unknown state"
WAITS = "the call waits for the device itself"
FULL = "the queue of launches was full: the call is about {:,}, and the queue holds about {:,}"
aten = torch.ops.aten
INDEXES = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class CaptureLeftoverError(RuntimeError):
    """A graph could not be captured, and what the attempt left in the process could not be undone."""


@dataclass(frozen=True)
class Launches:
    """What a call gives a device: about how many launches, and whether the host waits in it for what was computed."""

    number: int
    waits: bool

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways in which the device's time may be taken, in the order to try them."""
        if self.waits:
            return ("kernels",)
        if self.number > MOST_HELD:
            return ("graph", "chunks", "kernels")
        return ("backlog", "chunks") if self.number > CHUNK else ("backlog",)


@dataclass
class DeviceTimer:
    """Takes the device's own time for calls in the first way that gives one; a graph that failed is not tried again.

    `leftover` says so where a capture that failed left something in the process that could not be undone.
    """

    timer: Timer
    queue: DeviceQueue
    leftover: str | None = None
    _seen: dict[Hashable, Launches] = field(default_factory=dict)
    _captures: bool = True

    def times(self, work: Work, enqueue_s: float, number: int = 1, like: Hashable = None) -> list[DeviceTime]:
        """Return so many times of the device for a call that the host needs `enqueue_s` to issue, or one without time.

        Calls of one `like` are taken to make the same launches. An error of the call passes through.
        """
        if like not in self._seen:
            self._seen[like] = launches(work)
        seen = self._seen[like]
        reasons = [WAITS] if seen.waits else [FULL.format(seen.number, QUEUE_DEPTH)] if seen.number > MOST_HELD else []
        for way in seen.ways:
            if way == "graph" and not self._captures:
                continue
            take = self._way(way, work, enqueue_s)
            first = take()
            if first.seconds is not None:
                return [first, *(take() for _ in range(number - 1))]
            reasons += [first.reason] if first.reason else []
        return [DeviceTime(None, reasons[0])]

    def _way(self, way: Way, work: Work, enqueue_s: float) -> Callable[[], DeviceTime]:
        """Return what takes a time in this way."""
        if way == "graph":
            return self._as_graph(work)
        if way == "chunks":
            chunked = functools.partial(_in_chunks, work)
            return functools.partial(self.timer.in_chunks, chunked, self.queue, self.timer.enqueue_chunks(chunked))
        if way == "kernels":
            return functools.partial(_of_kernels, work, self.timer)
        return functools.partial(self.timer.on_device, work, self.queue, enqueue_s)

    def _as_graph(self, work: Work) -> Callable[[], DeviceTime]:
        try:
            graph = captured(work, warm_ups=1)
        except Exception as error:  # of the model, of its memory, or of torch: what follows needs no graph
            raise_if_lost(error)
            self._captures = False
            self.leftover = LEFTOVER if isinstance(error, CaptureLeftoverError) else None
            reason = f"no graph could be captured ({first_line(error)})"
            return lambda: DeviceTime(None, reason)
        graph.replay()  # the first one brings it to the device
        replay_s = self.timer.enqueue(graph.replay)
        return lambda: replace(self.timer.on_device(graph.replay, self.queue, replay_s), by="graph")


def launches(work: Work) -> Launches:
    """Return what one call gives the device, by the operators that torch shows."""
    seen = _Launching()
    with seen:
        work()
    return Launches(seen.number, seen.waits)


class _Launching(TorchDispatchMode):
    """Counts the operators that launch something, those that composite ones are made of."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number, self.waits = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_plain = isinstance(func, OpOverload)
        if is_plain and operators.is_composite(func):
            with self:
                return operators.run_parts(func, args, kwargs)
        if not is_plain or operators.does_work(func):
            self.number += 1
            self.waits = self.waits or (is_plain and _waits(func, args, kwargs))
        return func(*args, **kwargs)


def _in_chunks(work: Work, begin: Callable[[], None]) -> None:
    """Call `begin` before the first operator, and before every further chunk of them."""
    with _Chunking(begin):
        work()


class _Chunking(TorchDispatchMode):
    """Calls `begin` before every chunk of operators. What it takes for each keeps the device held for longer."""

    supports_higher_order_operators = True

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number, self._begin = 0, begin

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _launches(func):
            if self._number % CHUNK == 0:
                self._begin()
            self._number += 1
        return func(*args, **(kwargs or {}))


@functools.cache
def _launches(func: Any) -> bool:
    return not isinstance(func, OpOverload) or operators.does_work(func)


def _waits(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the host waits in this operator for what a device has computed, by torch's tags.

    A copy between devices waits unless it is told not to, and an index waits where it is a mask.
    """
    given = [tensor.device for tensor in operators.tensors_in([args, list(kwargs.values())])]
    if func._overloadpacket in (aten.copy_, aten._to_copy):
        other = kwargs.get("device") or given[-1]
        return not (kwargs.get("non_blocking") or args[2:3] == (True,)) and torch.device(other) != given[0]
    if all(device.type == "cpu" for device in given):
        return False
    if func._overloadpacket in INDEXES:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in operators.tensors_in(args[1]))
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _of_kernels(work: Work, timer: Timer) -> DeviceTime:
    """Return the seconds of all kernels of one call, added up; those that overlap count twice."""
    if is_another_at_work():
        return DeviceTime(None, "another torch profiler is at work")
    try:
        with quiet_kineto(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            timer.synchronize()
        events = [event for event in profile.events() if event.device_type.name != "CPU"]
        seconds = sum(event.time_range.elapsed_us() for event in events if not event.is_user_annotation) / 1e6
    except Exception as error:  # of the profiler: what the device's times are for is not lost with them
        raise_if_lost(error)
        return DeviceTime(None, f"the profiler recorded no kernels ({first_line(error)})")
    return DeviceTime(seconds, by="kernels") if seconds else DeviceTime(None, "the profiler recorded no kernels")


def captured(work: Work, warm_ups: int = 3, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Return the graph of one call with static inputs, on the current device, after `warm_ups` calls.

    `pool` is the memory of graphs that are replayed one after another; None: one of its own. Raises RuntimeError where
    the call reads from the device; the stream is then set back and the memory pool closed, which torch leaves open.
    """
    device, pool = torch.cuda.current_device(), pool or torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                work()
            torch.cuda.current_stream().synchronize()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
    except Exception as error:
        del graph
        raise_if_lost(error)
        _clean_up(device, pool, error)
        raise
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _clean_up(device: int, pool: Any, error: Exception) -> None:
    """Close the pool of a broken capture. Raises CaptureLeftoverError unless memory and work are then as before."""
    end, release = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
    with suppress(RuntimeError):  # the pool was closed, since the capture itself ended
        if end is not None:
            end(device, pool)
            if release is not None:
                release(device, pool)
    try:
        torch.cuda.synchronize(device)  # a broken capture is over before anything else is timed
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the stream still captures")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        torch.empty(PROBE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device)).random_()  # its generator, too
        torch.cuda.empty_cache()
        if torch.cuda.memory_reserved(device) > before:
            raise RuntimeError("memory is no longer given back")
    except RuntimeError as left:
        raise CaptureLeftoverError(f"{first_line(error)}; after it: {first_line(left)}") from error
