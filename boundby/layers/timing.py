"""The time runs: with a probe on every forward, on the host in turn with runs without, and on the device.

Every run with probes has one without beside it. On a busy machine (two shared cores, 50 runs of a MiniLM classifier)
the median of the ratios within pairs varied by 0.4 %, the ratio of the two medians by 2.6 %.

The device is held back while the host issues a run, so its time holds no waiting for the host; which of the two is
slower the host's own runs say. A run that the queue does not hold is issued in chunks that begin where a layer does;
what lies between two chunks is in no layer's time. Marks in the queue are reused.

The clock of a CPU counts while a thread computes: what it lacks beside the wall clock was spent waiting, for a disk, a
lock, or the core. It is read around every run, and around every layer in a few runs of their own.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn

from boundby.layers.probes import (
    Call,
    CallLog,
    CallTimes,
    CallTree,
    Clock,
    Run,
    Targets,
    attached,
    find_targets,
    noting_probe,
    timing_probe,
)
from boundby.timing import Backlogs, DeviceQueue, Timer

CPU_EVERY = 5  # rounds have one run by the clock of the CPU
CALIBRATION_RUNS = 50
CALIBRATION_CALLS = 200
SIDE_STREAM = "it issues work to another stream than the model, whose time no pair of marks sees"


@dataclass
class HostTimes:
    """Times runs on the host, where `synchronize` waits for the device; `cpu` is the clock of the CPU, where read.

    Of every run it has the nanoseconds end to end without probes and, in the same place, with them and by call path.
    """

    run: Run
    tree: CallTree
    targets: Targets
    now: Clock
    synchronize: Callable[[], None]
    cpu: Clock | None = None
    reference_ns: list[int] = field(default_factory=list)
    instrumented_ns: list[int] = field(default_factory=list)
    runs: list[dict[Call, CallTimes]] = field(default_factory=list)
    waited_ns: list[int] = field(default_factory=list)  # of each run with probes; none without a clock of the CPU
    cpu_runs: list[dict[Call, tuple[int, int]]] = field(default_factory=list)  # in itself, by the wall and by the CPU

    @property
    def overhead(self) -> float:
        """Time with probes over that without, minus one, as the median over neighbouring runs."""
        pairs = zip(self.instrumented_ns, self.reference_ns, strict=True)
        return median(probed / plain for probed, plain in pairs) - 1

    def add_pair(self) -> None:
        """Time one run without and one with probes, in the other order every second time."""
        if len(self.runs) % 2:
            self._run_with_probes()
            self.reference_ns.append(self._elapsed_ns())
        else:
            self.reference_ns.append(self._elapsed_ns())
            self._run_with_probes()
        if self.cpu is not None and len(self.runs) % CPU_EVERY == 1:
            self._run_by_the_cpu(self.cpu)

    def _elapsed_ns(self) -> int:
        self.synchronize()
        start = self.now()
        self.run()
        self.synchronize()
        return self.now() - start

    def _run_with_probes(self) -> None:
        log: CallLog = {}
        with attached(self.targets, timing_probe(log, self.now)):
            computed = -self.cpu() if self.cpu else 0
            elapsed = self._elapsed_ns()
            computed += self.cpu() if self.cpu else 0
        self.instrumented_ns.append(elapsed)
        self.waited_ns += [max(0, elapsed - computed)] if self.cpu else []
        self.runs.append(self.tree.times(log))

    def _run_by_the_cpu(self, cpu: Clock) -> None:
        def read(*_: Any) -> tuple[int, int]:
            return self.now(), cpu()

        log: CallLog = {}
        with attached(self.targets, noting_probe(log, read, read)):
            self.run()
        wall: Counter[Call] = Counter()
        busy: Counter[Call] = Counter()
        for call, (began, cpu_began), (ended, cpu_ended) in self.tree.ended(log):
            wall[call] += ended - began
            busy[call] += cpu_ended - cpu_began
        self.cpu_runs.append(
            {call: (_own(wall, call), max(0, min(_own(wall, call), _own(busy, call)))) for call in wall}
        )


def _own(ns: Counter[Call], call: Call) -> int:
    return ns[call] - sum(ns[callee] for callee in call.callees.values())


def time_runs(
    run: Run, tree: CallTree, targets: Targets, num_runs: int, now: Clock, synchronize: Callable[[], None]
) -> HostTimes:
    """Return the times of `num_runs` runs without and as many with probes."""
    host = HostTimes(run, tree, targets, now, synchronize)
    for _ in range(num_runs):
        host.add_pair()
    return host


def corrected(times: dict[Call, CallTimes], cost_ns: float) -> tuple[dict[Call, float], dict[Call, float]]:
    """Return self and inclusive nanoseconds of each call path of a run, less what the probes inside cost.

    A probe works outside of the window that it times, so its cost is in the self time of the caller. Callers come
    before callees.
    """
    selves = {call: max(0.0, spent.self_ns - spent.inner_calls * cost_ns) for call, spent in times.items()}
    inclusive = dict(selves)
    for call in reversed(selves):
        if call.caller in inclusive:
            inclusive[call.caller] += inclusive[call]
    return selves, inclusive


def probe_cost_ns(now: Clock) -> float:
    """Return the nanoseconds that a probe adds to a call, measured on layers that do next to nothing."""
    fan = _Fan().eval()
    targets = find_targets(fan)
    with torch.no_grad():
        times = time_runs(fan, CallTree(targets.names), targets, CALIBRATION_RUNS, now, lambda: None)
    pairs = zip(times.instrumented_ns, times.reference_ns, strict=True)
    return max(0.0, median(probed - plain for probed, plain in pairs) / (CALIBRATION_CALLS + 1))


class _Fan(nn.Module):
    """Calls many small layers of several kinds: amid their operators a probe costs twice what it costs in a row."""

    def __init__(self) -> None:
        super().__init__()
        makers: tuple[Callable[[], nn.Module], ...] = (lambda: nn.Linear(4, 4), nn.ReLU, lambda: nn.LayerNorm(4))
        self.inner = nn.ModuleList(makers[number % len(makers)]() for number in range(CALIBRATION_CALLS))
        self.values = torch.ones(1, 4)

    def forward(self) -> None:
        for layer in self.inner:
            layer(self.values)


class DeviceMarks(DeviceQueue, Protocol):
    """The queue of a device whose marks can be used again, with a name for the stream that is in use."""

    def stream(self) -> Hashable:
        """Return an identifier of the stream that work goes to now."""
        ...

    def reuse(self, mark: Any) -> None:
        """Take back a mark that nothing needs any more."""
        ...


@dataclass
class DeviceTimes:
    """Times runs on the device by its marks; `now` is the clock of the host, `synchronize` waits for the device.

    Of every run it has the seconds of the device by call path, calls inside included.
    """

    run: Run
    tree: CallTree
    targets: Targets
    now: Clock
    synchronize: Callable[[], None]
    marks: DeviceMarks
    unknown: dict[Call, str]  # call paths whose time no marks give: why
    calls_per_chunk: int = sys.maxsize  # of modules: so many go behind one backlog
    runs: list[dict[Call, float]] = field(default_factory=list)
    late_runs: int = 0  # in which the device reached a chunk before the host had issued all of it
    _enqueue_s: Sequence[float] | None = None  # of each chunk

    def selves(self, number: int) -> dict[Call, float]:
        """Return the seconds of each call path in no call inside, for one run; without those that cannot be known."""
        seconds = self.runs[number]
        return {
            call: max(0.0, spent - sum(seconds.get(callee, 0.0) for callee in call.callees.values()))
            for call, spent in seconds.items()
            if call not in self.unknown and not any(callee in self.unknown for callee in call.callees.values())
        }

    def inclusive(self, number: int) -> dict[Call, float]:
        """Return the seconds of each call path, for one run; without those that cannot be known."""
        return {call: spent for call, spent in self.runs[number].items() if call not in self.unknown}

    def add_run(self) -> None:
        """Time one run; before the first, another one tells how long the host issues each chunk."""
        timer = Timer(lambda: self.now() / 1e9, self.synchronize)
        if self._enqueue_s is None:
            unread = lambda: self.marks.reuse(self.marks.mark())  # noqa: E731
            self._enqueue_s = timer.enqueue_chunks(lambda begin: self._issue(begin, CallLog(), unread))
        log, backlogs = CallLog(), Backlogs(self.marks, self.synchronize, self._enqueue_s)
        self._issue(backlogs.begin, log, lambda: (self.marks.stream(), len(backlogs.chunks), self.marks.mark()))
        backlogs.finish()
        self.late_runs += backlogs.was_late
        self.runs.append(self._seconds(log, backlogs.chunks))
        for mark in itertools.chain(*backlogs.chunks):
            self.marks.reuse(mark)

    def _issue(self, begin: Callable[[], None], log: CallLog, note: Callable[[], Any]) -> None:
        """Issue one run, with a note at the begin and the end of every call; `begin` comes before every chunk."""
        calls, home = itertools.count(), get_ident()

        def enter(*_: Any) -> Any:
            if get_ident() == home and next(calls) % self.calls_per_chunk == 0:
                begin()
            return note()

        with attached(self.targets, noting_probe(log, enter, lambda _: note())):
            self.run()

    def _seconds(self, log: CallLog, chunks: Sequence[tuple[Any, Any]]) -> dict[Call, float]:
        """Return the seconds between the marks of each call path; calls whose stream changes are unknown.

        A mark lies so far into the device's work as its chunk had come, with all chunks before.
        """
        calls = list(self.tree.ended(log))
        home = next((stream for call, (stream, *_), _ in calls if call.caller is self.tree.top), None)
        for call, (stream, *_), (last, *_) in calls:
            if stream != home or last != stream:
                self.unknown[call] = SIDE_STREAM
        lengths = (self.marks.seconds_between(*chunk) for chunk in chunks)
        before = list(itertools.accumulate(lengths, initial=0.0))
        seconds: dict[Call, float] = {}
        for call, (_, first, start), (_, last, end) in calls:
            if call not in self.unknown:
                begun, ended = (
                    before[chunk] + self.marks.seconds_between(chunks[chunk][0], mark)
                    for chunk, mark in ((first, start), (last, end))
                )
                seconds[call] = seconds.get(call, 0.0) + ended - begun
            self.marks.reuse(start)
            self.marks.reuse(end)
        return seconds


def spanning(tree: CallTree, devices: Mapping[int, set[torch.device]], home: torch.device) -> dict[Call, str]:
    """Return the call paths whose modules lie on other devices than the model's first: why marks cannot time them."""
    reasons = {}
    for call in tree.walk():
        others = sorted(
            str(device) for device in devices.get(call.index, set()) if device.type == home.type and device != home
        )
        if others:
            reasons[call] = f"it lies on {', '.join(others)} too, and marks of two devices have no common clock"
    return reasons
