"""The card at work: a host clock that moves by what is done, queues of launches, events, an allocator and failures.

Needs no torch but to raise its errors. All times are seconds of the stand-in's own clock; nothing here waits.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .card import Card

READ_S = 2e-7  # of the host, to read the clock: two readings are never equal
LATENCY_S = 3e-6  # from the end of a launch to the start of its kernel on an idle device
GRAPH_LAUNCH_S, GRAPH_KERNEL_GAP_S = 12e-6, 0.5e-6
SAMPLE_S = 1 / 6  # of NVML
MALLOC_S = 3e-4  # of cudaMalloc, which waits for the device
BLOCK_BYTES, SEGMENT_BYTES = 512, 2 * 2**20  # what the caching allocator rounds to
CONTEXT_BYTES = 500 * 2**20
FAILURES = {
    "assert": "CUDA error: device-side assert triggered",
    "illegal": "CUDA error: an illegal memory access was encountered",
    "lost": "CUDA error: unspecified launch failure",
}


@dataclass(frozen=True)
class Kernel:
    """What the device ran, and when: for the traces of step 03. `launched_at` is None within a graph."""

    name: str
    start: float
    seconds: float
    stream: int
    launched_at: float | None
    correlation: int


@dataclass
class Queue:
    """The launches of one stream that the device has not finished: the times at which it will have."""

    number: int
    free_at: float = 0.0
    pending: deque[float] = field(default_factory=deque)


@dataclass
class Capture:
    """What a stream has been given since the capture began: kernels with their seconds, and the calls to repeat."""

    kernels: list[tuple[str, float]] = field(default_factory=list)
    calls: list[Callable[[], None]] = field(default_factory=list)
    broken: str | None = None


class Machine:
    """A host with one card."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.now = 1000.0
        self.queues = {0: Queue(0)}
        self.current = 0
        self.capture: Capture | None = None
        self.launches = 0
        self.host_reads = 0
        self.blocked_s = 0.0  # in which the host waited for room in the queue
        self.copied_bytes = 0
        self.busy_s = 0.0
        self._asked, self._utilization_pct = (self.now, 0.0), 0.0
        self.broken: str | None = None
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.memory_share = 1.0  # that this process may take
        self.timeline: list[Kernel] | None = None  # kept while a profiler is at work
        self.on_launch: Callable[[], None] | None = None  # called then before and after each launch
        self._numbers = itertools.count(1)
        self._correlations = itertools.count(1)
        self.began = self.now
        self._alarms: dict[int, tuple[float, float, Callable[[], None]]] = {}  # interval, when it is due, what it does

    def read(self) -> float:
        """Return the host's clock; what was to be done at intervals is done first, once."""
        self.now += READ_S
        due = [key for key, (_, at, _) in self._alarms.items() if at <= self.now]
        for key in due:
            interval, _, action = self._alarms[key]
            self._alarms[key] = (interval, self.now + interval, action)
            action()
        return self.now

    def every(self, interval: float, key: int, action: Callable[[], None]) -> None:
        """Have this done at intervals of the clock, as far as somebody reads it, until `never`."""
        self._alarms[key] = (interval, self.now + interval, action)

    def never(self, key: int) -> None:
        """Have it done no more."""
        self._alarms.pop(key, None)

    def sleep(self, seconds: float) -> None:
        """Let the host do nothing for a while."""
        self.now += max(0.0, seconds)

    @property
    def clock_share(self) -> float:
        """Return the share of its clock at which the device runs now."""
        after = self.card.throttles_after_s
        return self.card.throttled_share if after is not None and self.now - self.began >= after else 1.0

    # The queue

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        number = next(self._numbers)
        self.queues[number] = Queue(number)
        return number

    def launch(self, name: str, seconds: float, call: Callable[[], None] | None = None) -> None:
        """Queue a kernel of that many seconds; `call` repeats its arithmetic when a graph is replayed."""
        self.check()
        if self.capture is not None:
            self.now += self.card.launch_s / 2
            self.capture.kernels.append((name, seconds))
            if call is not None:
                self.capture.calls.append(call)
            return
        self.launches += 1
        if self.card.fails_at is not None and self.launches >= self.card.fails_at:
            self.broken = FAILURES[self.card.failure]
        launched_at = self.now
        if self.on_launch:
            self.on_launch()
        self._enter(self.card.launch_s)
        self._run(name, seconds / self.clock_share, launched_at)
        if self.on_launch:
            self.on_launch()

    def _enter(self, host_s: float) -> Queue:
        """Spend the host's time on a launch, and wait for room where the queue is full."""
        queue = self.queues[self.current]
        self.now += host_s
        while queue.pending and queue.pending[0] <= self.now:
            queue.pending.popleft()
        if len(queue.pending) >= self.card.queue_depth:
            room_at = queue.pending.popleft()
            self.blocked_s += room_at - self.now
            self.now = room_at
        return queue

    def _run(self, name: str, seconds: float, launched_at: float | None, number: int | None = None) -> None:
        queue = self.queues[self.current]
        start = max(self.now + LATENCY_S, queue.free_at)
        queue.free_at = start + seconds
        queue.pending.append(queue.free_at)
        self.busy_s += seconds
        if self.timeline is not None:
            correlation = number or next(self._correlations)
            self.timeline.append(Kernel(name, start, seconds, self.current, launched_at, correlation))

    def replay(self, capture: Capture) -> None:
        """Queue all kernels of a capture in one go."""
        self.check()
        launched_at = self.now
        queue = self._enter(GRAPH_LAUNCH_S)
        number = next(self._correlations)
        for name, seconds in capture.kernels:
            start = max(self.now + LATENCY_S, queue.free_at + GRAPH_KERNEL_GAP_S)
            queue.free_at = start + seconds / self.clock_share
            self.busy_s += seconds / self.clock_share
            if self.timeline is not None:
                self.timeline.append(Kernel(name, start, seconds / self.clock_share, self.current, launched_at, number))
        queue.pending.append(queue.free_at)
        for call in capture.calls:
            call()

    def mark(self) -> float:
        """Queue an event; return when the device passes it."""
        self.check()
        if self.capture is not None:
            self._break("operation not permitted when stream is capturing")
        queue = self._enter(self.card.launch_s / 4)
        queue.free_at = max(self.now, queue.free_at)
        queue.pending.append(queue.free_at)
        return queue.free_at

    def synchronize(self, stream: int | None = None) -> None:
        """Let the host wait for one stream, or for all."""
        self.check()
        if self.capture is not None:
            self._break("operation not permitted when stream is capturing")
        queues = self.queues.values() if stream is None else [self.queues[stream]]
        self.now = max([self.now, *(queue.free_at for queue in queues)])
        for queue in queues:
            queue.pending.clear()
        self.check()

    def host_read(self) -> None:
        """Wait for the current stream, as everything does that brings a value to the host."""
        self.host_reads += 1
        self.synchronize(self.current)

    def copy(self, name: str, size: int, *, is_pinned: bool, is_async: bool, to_host: bool = False) -> None:
        """Copy that many bytes between host and device."""
        self.copied_bytes += size
        rate = self.card.pcie_bytes_per_s * (1.0 if is_pinned else 0.5)
        self.launch(name, self.card.kernel_s + size / rate)
        if to_host and not is_async:
            self.host_reads += 1
        if not (is_async and is_pinned) and self.capture is None:
            self.synchronize(self.current)

    # Failures

    def check(self) -> None:
        """Raise what has broken the card; from then on every call to it does."""
        if self.broken is None:
            return
        import torch

        raise torch.AcceleratorError(
            f"{self.broken}\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
            "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        )

    def _break(self, text: str) -> None:
        import torch

        assert self.capture is not None
        self.capture.broken = text
        raise torch.AcceleratorError(f"CUDA error: {text}")

    # Memory

    @property
    def capacity(self) -> int:
        """Return the bytes that tensors may have."""
        return min(self.card.memory_bytes - CONTEXT_BYTES, int(self.memory_share * self.card.memory_bytes))

    def allocate(self, size: int) -> int:
        """Take a block; return its bytes. Raises torch.OutOfMemoryError."""
        self.check()
        rounded = -(-max(size, 1) // BLOCK_BYTES) * BLOCK_BYTES
        if self.allocated + rounded > self.capacity:
            import torch

            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {rounded / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.card.memory_bytes / 2**30:.2f} GiB of which "
                f"{max(0, self.capacity - self.allocated) / 2**20:.2f} MiB is free."
            )
        self.allocated += rounded
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        if self.allocated > self.reserved:
            self.reserved = min(-(-self.allocated // SEGMENT_BYTES) * SEGMENT_BYTES, self.capacity)
            self.now += MALLOC_S
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return rounded

    def free(self, rounded: int) -> None:
        """Give a block back to the cache."""
        self.allocated -= rounded

    def empty_cache(self) -> None:
        """Give the cache back to the device."""
        self.check()
        self.synchronize()
        self.reserved = -(-self.allocated // SEGMENT_BYTES) * SEGMENT_BYTES

    # What NVML reads

    def utilization_pct(self) -> float:
        """Return the share of time in which a kernel ran since the last answer, a sixth of a second ago or more."""
        at, busy_s = self._asked
        if self.now - at >= SAMPLE_S:
            self._utilization_pct = min(100.0, 100.0 * (self.busy_s - busy_s) / (self.now - at))
            self._asked = self.now, self.busy_s
        return self._utilization_pct

    def energy_j(self) -> float:
        """Return the counter of NVML: it grows while the card idles, too."""
        return self.card.idle_w * (self.now - self.began) + self.busy_s * (
            self.card.power_limit_w * 0.9 - self.card.idle_w
        )

    def watts(self) -> float:
        """Return the power that its utilisation asks for."""
        return self.card.idle_w + (self.card.power_limit_w * 0.9 - self.card.idle_w) * self.utilization_pct() / 100
