"""Energy per call from a counter of joules: NVML's total, or the CPU package's where the kernel lets us read it.

The counter moves in ticks, so a window begins right after one and spans many of them. Polled power is no substitute: on
A100 and H100 the power sensor sees a quarter of the run time (arXiv 2312.02741).
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from boundby.machine import environment
from boundby.machine.sampler import DeviceLostError, DriverSource, nvml_source
from boundby.timing import Timer, Work

LEAST_WINDOW_S = 5.0
LEAST_TICKS = 50
LONGEST_TICK_S = 1.0
MOST_W = 1e5  # of a machine: a counter that jumps, or runs backwards, tells nothing


class EnergyCounter(Protocol):
    """Joules since some moment in the past."""

    def joules(self) -> float:
        """Return the counter; raises OSError where it cannot be read."""
        ...


class RaplCounter:
    """The energy of all CPU packages (Linux powercap); most kernels show it to root alone."""

    def __init__(self, powercap: Path = Path("/sys/class/powercap")) -> None:
        zones = sorted(powercap.glob("intel-rapl:*"))  # subzones have a second colon, and psys holds the packages
        self._packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
        self._wrapped = [0.0] * len(self._packages)
        self._last: list[float] | None = None
        if not self._packages:
            raise OSError(f"{powercap} has no intel-rapl package")
        self.joules()

    def joules(self) -> float:
        """Return the sum over the packages, made good for counters that began anew at their maximum."""
        now = [int((package / "energy_uj").read_text()) / 1e6 for package in self._packages]
        for index, (before, value) in enumerate(zip(self._last or now, now, strict=True)):
            if value < before:
                self._wrapped[index] += int((self._packages[index] / "max_energy_range_uj").read_text()) / 1e6
        self._last = now
        return sum(now) + sum(self._wrapped)


class GpuEnergy:
    """The energy of several GPUs by the library of their driver. Raises OSError where one of them cannot be read."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._sources: list[DriverSource] = []
        for source in map(nvml_source, uuids):
            if not isinstance(source, DriverSource):
                raise OSError(source.reason)
            self._sources.append(source)
        if not self._sources:
            raise OSError("there is no GPU")

    def joules(self) -> float:
        """Return the sum since the driver was loaded; raises OSError where one has no such counter."""
        try:
            return sum(source.joules() for source in self._sources)
        except DeviceLostError as lost:  # who measures on it is told by itself
            raise OSError(str(lost)) from lost


@functools.cache
def gpu_energy() -> GpuEnergy:
    """Return the energy of the GPUs that this process may use, found without torch. Raises OSError with the reason."""
    gpus, chosen = environment.machine()["gpus"], os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [gpu["uuid"] or "" for gpu in gpus]
    if chosen is not None:
        wanted = [name.strip() for name in chosen.split(",") if name.strip()]
        if any(name.isdecimal() for name in wanted) and len({gpu["name"] for gpu in gpus}) > 1:
            raise OSError("CUDA_VISIBLE_DEVICES numbers GPUs that differ, in an order that only CUDA knows")
        names = [dict(enumerate(names)).get(int(name), "") if name.isdecimal() else name for name in wanted]
    return GpuEnergy(names)


@dataclass(frozen=True)
class EnergyUse:
    """What a window took: joules by the counter, seconds, calls made in it."""

    joules: float
    seconds: float
    calls: int

    @property
    def joules_per_call(self) -> float:
        """Everything the counter saw, by call."""
        return self.joules / self.calls

    def net_joules_per_call(self, idle_w: float) -> float:
        """What the calls took beyond a machine that idles."""
        return (self.joules - idle_w * self.seconds) / self.calls


class EnergyMeter:
    """Measure windows of one counter. Raises OSError where it cannot be read or does not move."""

    def __init__(self, counter: EnergyCounter, timer: Timer, sleep: Callable[[float], None] = time.sleep) -> None:
        self._counter, self._timer, self._sleep = counter, timer, sleep
        self._next_tick()  # begin right after one
        self.tick_s = self._next_tick()

    @property
    def least_window_s(self) -> float:
        """The shortest window in which one counter tick is at most 2 %."""
        return max(LEAST_WINDOW_S, LEAST_TICKS * self.tick_s)

    def of(self, work: Work) -> EnergyUse:
        """Return the energy of calls made in a row for at least `least_window_s`."""
        self._timer.synchronize()
        self._next_tick()
        start, joules, calls = self._timer.clock(), self._counter.joules(), 0
        while self._timer.clock() - start < self.least_window_s:
            work()
            self._timer.synchronize()
            calls += 1
        seconds = self._timer.clock() - start
        return EnergyUse(self._since(joules, seconds), seconds, calls)

    def idle_w(self) -> float:
        """Return the watts of the idle machine, over one window."""
        self._next_tick()
        start, joules = self._timer.clock(), self._counter.joules()
        self._sleep(self.least_window_s)
        seconds = self._timer.clock() - start
        return self._since(joules, seconds) / seconds

    def _since(self, before: float, seconds: float) -> float:
        """Return the joules of the last seconds. Raises OSError where no machine takes so few, or so many."""
        joules = self._counter.joules() - before
        if not 0 < joules <= MOST_W * seconds:
            raise OSError(f"the energy counter moved by {joules:g} J in {seconds:.1f} s, as no machine does")
        return joules

    def _next_tick(self) -> float:
        """Wait until the counter moves and return the seconds that took."""
        start, before = self._timer.clock(), self._counter.joules()
        while self._counter.joules() == before:
            if self._timer.clock() - start > LONGEST_TICK_S:
                raise OSError(f"the energy counter did not move within {LONGEST_TICK_S:g} s")
        return self._timer.clock() - start
