"""What else used the machine while something was measured: a window of counters, and what in it disturbed the numbers.

The counters are the kernel's (proc(5), getrusage(2), cgroups) and NVML's, never the times that are judged, so that to
repeat a disturbed round does not choose among results. Where a kernel keeps a counter from this process, what it would
have shown is unknown and disturbs nothing.
"""

import contextlib
import functools
import operator
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Literal, Self

from boundby.machine.sampler import Source

Kind = Literal[
    "foreign_load", "stolen_time", "quota", "preemption", "slow_machine", "gpu_throttled", "gpu_shared", "capture"
]

CGROUP = Path("/sys/fs/cgroup")
TICK_S = 0.01  # the resolution of /proc/stat (USER_HZ is 100 on every Linux)
FOREIGN_CORES = 0.1  # beyond those this process leaves free; two quiet cores showed up to 0.05, one loaded 0.9 to 1.3
STOLEN_SHARE = 0.02  # of the time of the usable cores
THROTTLED_SHARE = 0.01  # of the time of the usable cores; the kernel adds it up by core
SWITCHES_PER_S = 250.0  # involuntary; two cores showed up to 223 undisturbed, one of them loaded 176 to 370
SLOWER = 1.5  # the reference work against its best in this session; shared cores alone showed up to 1.26
# Hardware slowdown, software thermal, hardware thermal, power brake. Not 0x4: every card is at its power limit under
# full load, and the ceilings are measured there, too.
NVML_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
POWER_CAP = 0x4
CLOCK_CHANGE = 0.05  # of a GPU's clock between two things compared; at its power limit it moves by 0.01 to 0.03


@dataclass(frozen=True)
class Disturbance:
    """One thing that disturbed a window. `is_passing` tells whether a repeat may escape it."""

    kind: Kind
    text: str
    is_passing: bool = True


@dataclass(frozen=True)
class Conditions:
    """What the counters say of one window; None is a counter that this machine does not give."""

    seconds: float
    cores: int
    foreign_cores: float | None = None
    stolen_share: float | None = None
    throttled_s: float | None = None
    switches_per_s: float | None = None
    slowdown: float | None = None
    gpu_clock_event_reasons: int | None = None
    gpu_processes: int | None = None
    gpu_sm_clock_mhz: tuple[float, ...] = ()
    gpu_temperature_c: tuple[float, ...] = ()

    def disturbances(self, threads: int) -> tuple[Disturbance, ...]:
        """Return what disturbed work on `threads` threads of the host, and its device, in this window."""
        return (*self._on_the_host(threads), *self.on_the_device())

    def with_gpu(self, readings: Mapping[str, Sequence[float]]) -> "Conditions":
        """Return the conditions with what was read of the GPU in the window, by quantity, beside what they have."""

        def all_of(name: str) -> list[int]:
            before = getattr(self, name)
            return [*([] if before is None else [before]), *map(int, readings.get(name, ()))]

        events = all_of("gpu_clock_event_reasons")
        return replace(
            self,
            gpu_clock_event_reasons=functools.reduce(operator.or_, events) if events else None,
            gpu_processes=max(all_of("gpu_processes"), default=None),
            gpu_sm_clock_mhz=(*self.gpu_sm_clock_mhz, *readings.get("gpu_sm_clock_mhz", ())),
            gpu_temperature_c=(*self.gpu_temperature_c, *readings.get("gpu_temperature_c", ())),
        )

    def _on_the_host(self, threads: int) -> list[Disturbance]:
        disturbances = []
        free = max(0, self.cores - threads)
        unsure = FOREIGN_CORES + 2 * TICK_S * self.cores / self.seconds  # a core's counter may be two ticks off
        if self.foreign_cores is not None and self.foreign_cores > free + unsure:
            text = f"other processes used {self.foreign_cores:.1f} of {self.cores} cores"
            disturbances.append(Disturbance("foreign_load", text))
        if self.stolen_share is not None and self.stolen_share > STOLEN_SHARE + TICK_S / self.seconds:
            text = f"the hypervisor kept {100 * self.stolen_share:.0f} % of the cores' time for others"
            disturbances.append(Disturbance("stolen_time", text))
        if self.throttled_s is not None and self.throttled_s > THROTTLED_SHARE * self.seconds * self.cores:
            share = 100 * self.throttled_s / (self.seconds * self.cores)
            text = f"the container's CPU quota stopped this process for {share:.0f} % of the time"
            disturbances.append(Disturbance("quota", text, is_passing=False))
        is_blind = self.foreign_cores is None  # else our own threads, which push one another, would raise a false alarm
        if is_blind and self.switches_per_s is not None and self.switches_per_s > SWITCHES_PER_S:
            text = f"this process was pushed off its core {self.switches_per_s:.0f} times a second"
            disturbances.append(Disturbance("preemption", text))
        if self.slowdown is not None and self.slowdown > SLOWER:
            text = f"a fixed piece of work took {self.slowdown:.1f} times as long as at its best in this session"
            disturbances.append(Disturbance("slow_machine", text))
        return disturbances

    def on_the_device(self) -> list[Disturbance]:
        """Return what disturbed work on the GPU in this window."""
        disturbances = []
        reasons = self.gpu_clock_event_reasons or 0
        if reasons & NVML_THROTTLED:
            text = f"the GPU slowed its clock down for heat or power (NVML clock events {reasons:#x})"
            disturbances.append(Disturbance("gpu_throttled", text))
        if self.gpu_processes:
            text = f"{self.gpu_processes} other process(es) held the GPU"
            disturbances.append(Disturbance("gpu_shared", text))
        return disturbances


def changed_clock(one: Sequence[float], other: Sequence[float]) -> str | None:
    """Return in words how the GPU's clock, in MHz, differs between two things compared; None where it does not.

    A lower clock is no disturbance: at its power limit a loaded card always has one. Two clocks make two cards.
    """
    if not (one and other):
        return None
    first, second = median(one), median(other)
    if min(first, second) >= (1 - CLOCK_CHANGE) * max(first, second):
        return None
    return f"the GPU's clock was {first:,.0f} MHz in one and {second:,.0f} MHz in the other"


@dataclass(frozen=True)
class _Counters:
    at: float
    own_s: float
    switches: int
    busy_s: float | None
    stolen_s: float | None
    throttled_s: float | None


@dataclass
class HostCounters:
    """The counters of this host for the cores that this process may use."""

    proc: Path = Path("/proc")
    cgroup: Path = CGROUP
    cpus: Sequence[int] = field(default_factory=lambda: sorted(usable_cpus()))
    clock: Callable[[], float] = time.monotonic
    usage: Callable[[], tuple[float, int]] = field(default_factory=lambda: _own_usage)

    def read(self) -> _Counters:
        """Return all counters as of now."""
        own_s, switches = self.usage()
        busy_s, stolen_s = self._stat()
        return _Counters(self.clock(), own_s, switches, busy_s, stolen_s, self._throttled())

    def between(self, start: _Counters, end: _Counters) -> Conditions:
        """Return what happened between two readings."""
        seconds = max(end.at - start.at, 1e-9)
        cores = len(self.cpus)
        foreign = stolen = None
        if start.busy_s is not None and end.busy_s is not None:
            foreign = max(0.0, end.busy_s - start.busy_s - (end.own_s - start.own_s)) / seconds
        if start.stolen_s is not None and end.stolen_s is not None:
            stolen = (end.stolen_s - start.stolen_s) / (seconds * cores)
        throttled = None
        if start.throttled_s is not None and end.throttled_s is not None:
            throttled = end.throttled_s - start.throttled_s
        switches_per_s = (end.switches - start.switches) / seconds
        return Conditions(seconds, cores, foreign, stolen, throttled, switches_per_s)

    def _stat(self) -> tuple[float | None, float | None]:
        """Return the seconds in which these cores were busy, and in which the hypervisor ran others instead."""
        try:
            lines = (self.proc / "stat").read_text().splitlines()
        except OSError:
            return None, None
        wanted = {f"cpu{number}" for number in self.cpus}
        rows = [[int(value) for value in line.split()[1:]] for line in lines if line.partition(" ")[0] in wanted]
        if not rows or any(len(row) < 8 for row in rows):
            return None, None
        # user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user
        busy = sum(row[0] + row[1] + row[2] + row[5] + row[6] for row in rows)
        return busy * TICK_S, sum(row[7] for row in rows) * TICK_S

    def _throttled(self) -> float | None:
        """Return the seconds for which the quota of the cgroup stopped this process: version 2, or version 1."""
        for path, name, unit in (
            (self.cgroup / "cpu.stat", "throttled_usec", 1e-6),
            (self.cgroup / "cpu" / "cpu.stat", "throttled_time", 1e-9),
        ):
            try:
                pairs = dict(line.split() for line in path.read_text().splitlines())
            except (OSError, ValueError):
                continue
            if name in pairs:
                return int(pairs[name]) * unit
        return None


class Reference:
    """A fixed piece of work beside the measurement; it shows whether the machine has become slower.

    It catches what no counter shows: a neighbour on the same physical core, a lower clock.
    """

    REPEATS = 3

    def __init__(self, work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> None:
        self._work, self._clock = work, clock
        self._best = float("inf")

    def seconds(self) -> float:
        """Return what the work takes now, the best of a few repeats."""
        times = []
        for _ in range(self.REPEATS):
            start = self._clock()
            self._work()
            times.append(self._clock() - start)
        self._best = min(self._best, *times)
        return min(times)

    def slowdown(self, seconds: float) -> float:
        """Return how much longer `seconds` are than the best so far; at least 1."""
        return seconds / self._best if self._best > 0 else 1.0


class Watch:
    """Watch one window: `start()`, the work, `stop()`. `source` reads the GPU while it is warm."""

    def __init__(
        self,
        counters: HostCounters | None = None,
        reference: Reference | None = None,
        source: Source | None = None,
    ) -> None:
        self._counters = counters or HostCounters()
        self._reference = reference
        self._source = source if source is not None and source.reason is None else None
        self._start: _Counters | None = None
        self._seconds: float | None = None

    def start(self) -> Self:
        """Begin the window."""
        self._seconds = self._reference.seconds() if self._reference else None
        self._start = self._counters.read()
        return self

    def stop(self) -> Conditions:
        """Return the conditions of the window; the reference counts as the slower of its two ends."""
        if self._start is None:
            raise RuntimeError("the window was not started; call start() first")
        end = self._counters.read()
        conditions = self._counters.between(self._start, end)
        if self._source is not None:
            with contextlib.suppress(OSError):
                conditions = conditions.with_gpu({name: [value] for name, value in self._source.read().items()})
        if self._reference is None or self._seconds is None:
            return conditions
        slower = max(self._seconds, self._reference.seconds())
        return replace(conditions, slowdown=self._reference.slowdown(slower))


def usable_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _own_usage() -> tuple[float, int]:
    """Return the CPU seconds of this process and its children, and how often it was switched out against its will."""
    usage, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    own_s = usage.ru_utime + usage.ru_stime + ended.ru_utime + ended.ru_stime
    return own_s + sum(map(_cpu_s, _children(os.getpid()))), usage.ru_nivcsw


def _children(of: int) -> Iterator[int]:
    """Yield the processes that this one started, and those that they started; none where the system does not tell."""
    for path in Path(f"/proc/{of}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _children(child)


def _cpu_s(process: int) -> float:
    """Return the CPU seconds of a process and of those it has waited for; 0 where it has just ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * TICK_S
