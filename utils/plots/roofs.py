"""What a roofline shows: a point for each batch size whose work is known, and the roofs of the dtypes in use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
NEW_MEMORY = "new memory"  # the level of boundby.ceilings that is a cost of allocating, no roof of what is there
CLEARLY = 1.05  # times the rate in use from which another setting is drawn


@dataclass(frozen=True)
class Point:
    """One measured batch size: FLOP per byte, FLOP/s with the ends of its interval, and what it is bound by."""

    row: Mapping[str, Any]
    intensity: float
    rate: float
    low: float
    high: float

    @property
    def dtype(self) -> str:
        """The dtype it ran in."""
        return self.row["dtype"]

    @property
    def name(self) -> str:
        """The batch size, as it is written beside the point."""
        return str(self.row["batch_size"])


@dataclass(frozen=True)
class Roof:
    """FLOP/s that one dtype reaches under a setting, which dtypes other than float32 have none of."""

    dtype: str
    rate: float
    setting: str
    is_configured: bool


class Roofs:
    """The ceilings that matter to these dtypes; `levels` are pairs of name and bytes/s, nearest memory first."""

    def __init__(self, ceilings: Mapping[str, Any], dtypes: Iterable[str]) -> None:
        self.compute = [roof for dtype in dtypes for roof in _roofs(ceilings["compute"], dtype)]
        known = sorted(ceilings["memory"], key=lambda each: each["working_set_bytes"])
        self.levels = [(each["level"], each["bytes_per_s"]) for each in known if each["level"] != NEW_MEMORY]
        self.fastest = max(rate for _, rate in self.levels)
        self.main_memory = self.levels[-1][1]

    def configured(self, dtype: str) -> Roof | None:
        """Return the roof of this dtype with the settings in use, None where it was not measured."""
        return next((roof for roof in self.compute if roof.dtype == dtype and roof.is_configured), None)

    def is_above(self, point: Point) -> bool:
        """Tell whether a point is faster than its own roof, or than the nearest memory could feed it."""
        own = self.configured(point.dtype)
        return point.rate > point.intensity * self.fastest or (own is not None and point.rate > own.rate)


def points(rows: Rows) -> list[Point]:
    """Return a point for every row whose FLOPs, bytes and FLOP/s are known."""
    found = []
    for row in rows:
        if row["flops_per_sec"] and row["flops_per_batch"] and row["bytes_per_batch"]:
            rate, mean = row["flops_per_sec"], row["latency_per_sample_ms_mean"]
            low, high = row["latency_per_sample_ms_ci_low"], row["latency_per_sample_ms_ci_high"]
            ends = (rate * mean / (high or mean), rate * mean / (low or mean))
            found.append(Point(row, row["flops_per_batch"] / row["bytes_per_batch"], rate, *ends))
    return found


def _roofs(compute: Rows, dtype: str) -> list[Roof]:
    """Return the roof in use and those of settings that reach clearly more, settings that reach the same as one."""
    own = [each for each in compute if each["dtype"] == dtype]
    in_use = next((each for each in own if each["is_configured"]), None)
    if in_use is None:
        return []
    setting = f"precision {in_use['precision']}" if in_use["precision"] else ""
    found = [Roof(dtype, in_use["flops_per_s"], setting, True)]
    others = sorted((each for each in own if not each["is_configured"]), key=lambda each: each["flops_per_s"])
    for each in others:
        rate, last = each["flops_per_s"], found[-1]
        if rate > CLEARLY * last.rate:
            found.append(Roof(dtype, rate, f"precision {each['precision']}", False))
        elif not last.is_configured:
            found[-1] = Roof(dtype, rate, f"{last.setting} or {each['precision']}", False)
    return found
