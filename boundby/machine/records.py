"""What is measured of a machine, as it is written, read and reasoned with: its ceilings, and memory in use.

Loads no torch: a report and a comparison read these.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from boundby.work import Interval, Limits

T = TypeVar("T")
NEW = "new memory"


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at the end of a block and at its peak. A field that this device cannot give is None; `reasons` say why."""

    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_allocated_bytes: int | None = None
    device_peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    device_before_bytes: int | None = None
    process_bytes: int | None = None
    process_peak_bytes: int | None = None
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


class ComputeCeiling(msgspec.Struct, frozen=True):
    """FLOP/s of matmuls in one dtype under one setting; `relative_error` is against float64.

    On a GPU they are what it sustains for a second, `burst_flops_per_s` what it reaches before it is warm, and the
    clock and NVML's bit mask of what lowered it are those of that second; None where they are not known.
    """

    dtype: str
    precision: str | None
    is_configured: bool
    flops_per_s: float
    low: float
    size: int
    relative_error: float
    burst_flops_per_s: float | None = None
    sm_clock_mhz: float | None = None
    clock_event_reasons: int | None = None


class MemoryCeiling(msgspec.Struct, frozen=True):
    """Bytes/s, read and written, while everything touched has `working_set_bytes`.

    The level `new memory` is what writing to memory reaches that was just asked from the system, page after page.
    """

    level: str
    working_set_bytes: int
    bytes_per_s: float
    low: float
    operation: str


class SharedCache(msgspec.Struct, frozen=True):
    """The bytes of a CPU's last cache: as the machine reports it, and beyond which bytes/s really drop.

    A virtual machine reports the host's, of which it has a share. `measured_bytes` is None where nothing drops.
    """

    reported_bytes: int
    measured_bytes: int | None


class Ceilings(msgspec.Struct, frozen=True):
    """All limits of one machine under one number of threads.

    `ladder` has bytes/s by growing working sets beyond the private caches, from which the levels in `memory` and
    `shared_cache` are read; none on a GPU. `cut` names what the budget left out.
    """

    device: dict[str, Any]
    compute: tuple[ComputeCeiling, ...]
    memory: tuple[MemoryCeiling, ...]
    dispatch_s: float
    dispatch_high_s: float
    seconds: float
    doubts: tuple[str, ...] = ()
    ladder: tuple[MemoryCeiling, ...] = ()
    shared_cache: SharedCache | None = None
    cut: tuple[str, ...] = ()

    def configured(self, dtype: str) -> ComputeCeiling | None:
        """Return the limit in this dtype with the settings in use, or None where it was not measured."""
        return next((ceiling for ceiling in self.compute if ceiling.dtype == dtype and ceiling.is_configured), None)

    def best(self, dtype: str | None = None) -> ComputeCeiling:
        """Return the highest limit in this dtype, or in any."""
        return max(
            (ceiling for ceiling in self.compute if dtype in (None, ceiling.dtype)),
            key=lambda ceiling: ceiling.flops_per_s,
        )

    def limits(self, dtype: str) -> Limits | None:
        """Return what a verdict compares with: the limits of this dtype with the settings in use, None without any.

        A higher limit at reduced precision is none for work that must not use it.
        """
        matmul = self.configured(dtype)
        if matmul is None:
            return None
        new = next((_interval(ceiling) for ceiling in self.memory if ceiling.level == NEW), None)
        return Limits(
            flops_per_s=Interval(matmul.flops_per_s, matmul.low, matmul.flops_per_s),
            bytes_per_s=tuple(self._by_size()),
            dispatch_s=Interval(self.dispatch_s, self.dispatch_s, self.dispatch_high_s),
            new_bytes_per_s=new,
        )

    def _by_size(self) -> Iterator[tuple[int, Interval]]:
        """Yield bytes/s by size: what a larger working set reaches, a smaller one does."""
        levels = [ceiling for ceiling in self.memory if ceiling.level != NEW]
        known = [*levels[:1], *self.ladder] if self.ladder else levels
        for index, ceiling in enumerate(known):
            yield ceiling.working_set_bytes, _interval(max(known[index:], key=lambda level: level.bytes_per_s))

    def joined(self, again: "Ceilings") -> "Ceilings":
        """Return what two measurements say: the one that nothing disturbed, else the higher of both for each limit."""
        if not again.doubts:
            return again
        return msgspec.structs.replace(
            again,
            compute=_higher(
                self.compute,
                again.compute,
                lambda ceiling: (ceiling.dtype, ceiling.precision),
                lambda ceiling: ceiling.flops_per_s,
            ),
            memory=_higher(
                self.memory, again.memory, lambda ceiling: ceiling.level, lambda ceiling: ceiling.bytes_per_s
            ),
            ladder=_higher(
                self.ladder,
                again.ladder,
                lambda ceiling: ceiling.working_set_bytes,
                lambda ceiling: ceiling.bytes_per_s,
            ),
            dispatch_s=min(self.dispatch_s, again.dispatch_s),
            dispatch_high_s=min(self.dispatch_high_s, again.dispatch_high_s),
            seconds=self.seconds + again.seconds,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


def _interval(ceiling: MemoryCeiling) -> Interval:
    return Interval(ceiling.bytes_per_s, ceiling.low, ceiling.bytes_per_s)


def _higher(
    first: Sequence[T], second: Sequence[T], name: Callable[[T], object], rate: Callable[[T], float]
) -> tuple[T, ...]:
    """Return the higher of both for each name, in the order of the first; what only one has is its own."""
    best: dict[object, T] = {}
    for ceiling in (*first, *second):
        best[name(ceiling)] = max((best.get(name(ceiling), ceiling), ceiling), key=rate)
    return tuple(best.values())
