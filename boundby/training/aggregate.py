"""Takes in one ended stage after the other: rings of the last rows, and summaries of bounded size over all of them."""

import math
import random
import struct
import threading
from collections.abc import Sequence
from typing import get_args

import numpy as np

from boundby.capture import Remarks
from boundby.timing import percentile
from boundby.training.records import (
    METRIC,
    NS_PER_S,
    OCCURRENCE,
    STEP,
    UNUSUAL,
    Kind,
    MetricSummary,
    Name,
    Occurrence,
    StageSummary,
    Statistics,
    Summaries,
)

SAMPLE = 1024  # values: p99 needs 299
CAPACITY = 65_536  # rows: 13,000 steps of five stages in 4 MiB
MOST_NAMES = 256  # of stages, and of metrics
OTHERS = "(others)"  # all names beyond
LONGEST_NAME = 200  # characters
LARGEST = 1e100  # value of a metric: a sum of larger ones might leave the range of numbers
STEP_ID = 0


class RunningStatistics:
    """Takes in one value after the other; its size does not grow beyond `SAMPLE` values.

    The sample is uniform over the whole stream (Li's algorithm L, 1994, which draws only when it takes a value) and
    its generator is its own, so that the random numbers of the program stay as they are.
    """

    __slots__ = ("_draw", "_sample", "_take_at", "_weight", "least", "most", "n", "total")

    def __init__(self) -> None:
        self.n = 0
        self.total: float = 0
        self.least = math.inf
        self.most = -math.inf
        self._sample: list[float] = []
        self._draw = random.Random(0).random
        self._weight = 1.0
        self._take_at = 1  # the number of the next value to keep

    def add(self, value: float) -> None:
        """Take in a finite value."""
        self.n += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value
        if self.n == self._take_at:
            self._keep(value)

    def _keep(self, value: float) -> None:
        if len(self._sample) < SAMPLE:
            self._sample.append(value)
        else:
            self._sample[int(self._draw() * SAMPLE)] = value
        self._take_at += 1
        if len(self._sample) == SAMPLE:
            self._weight *= math.exp(math.log(1 - self._draw()) / SAMPLE)
            self._take_at += int(math.log(1 - self._draw()) / math.log1p(-self._weight))

    def statistics(self, unit: float = 1) -> Statistics:
        """Return the summary in units of `unit`."""
        return _statistics(self.n, (self.total, self.least, self.most), list(self._sample), unit)


def joined(
    earlier: Statistics, later: Sequence[float] | np.ndarray, sample: Sequence[float] | np.ndarray
) -> Statistics:
    """Return the summary of a stream and of the values after it, with the quantiles of `sample`."""
    if not len(later):
        return earlier
    array = np.asarray(later, dtype=np.float64)
    total, least, most = float(array.sum()), float(array.min()), float(array.max())
    if not earlier.n or earlier.minimum is None or earlier.maximum is None:
        return _statistics(len(array), (total, least, most), array)
    bounds = (min(earlier.minimum, least), max(earlier.maximum, most))
    return _statistics(earlier.n + len(array), (earlier.total + total, *bounds), sample)


def _statistics(
    n: int, moments: tuple[float, float, float], sample: Sequence[float] | np.ndarray, unit: float = 1
) -> Statistics:
    if not n:
        return Statistics(0, 0.0)
    total, least, most = (value / unit for value in moments)
    values = np.asarray(sample, dtype=np.float64) / unit
    return Statistics(
        n=n,
        total=total,
        mean=total / n,
        minimum=least,
        maximum=most,
        median=float(np.median(values)) if len(values) else None,
        p90=percentile(values, 0.90),
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        sampled=len(values),
    )


class Ring:
    """The last `capacity` rows of one type; the first field of a row is its running index."""

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a ring is {capacity}; at least 1 row is needed")
        self.dtype = dtype
        self.capacity = capacity
        self.count = 0  # of all rows ever added
        formats = {"<i8": "q", "<i2": "h", "<f8": "d"}
        packing = struct.Struct("<" + "".join(formats[dtype[name].str] for name in dtype.names or ()))
        self.row_bytes = packing.size
        self.buffer = bytearray(packing.size * capacity)
        self.pack = packing.pack_into  # open to the aggregator: a call between costs as much as the row
        self._rows = np.frombuffer(self.buffer, dtype=dtype)

    def append(self, *fields: float) -> None:
        """Add a row, without its index."""
        index = self.count
        self.pack(self.buffer, index % self.capacity * self.row_bytes, index, *fields)
        self.count = index + 1

    def since(self, index: int) -> np.ndarray:
        """Return a copy of the rows from this index on, the oldest first; those overwritten are missing."""
        first = max(index, self.count - self.capacity, 0)
        return self._rows[np.arange(first, self.count) % self.capacity]


class _RunningStage:
    """The running summary of one name, in nanoseconds."""

    __slots__ = ("device", "gap", "host", "self_ns", "unusual")

    def __init__(self) -> None:
        self.host = RunningStatistics()
        self.device = RunningStatistics()
        self.gap = RunningStatistics()
        self.self_ns = 0
        self.unusual = 0

    def summary(self, name: Name, whole_ns: float) -> StageSummary:
        return StageSummary(
            name=name.name,
            kind=name.kind,
            host_s=self.host.statistics(NS_PER_S),
            self_total_s=self.self_ns / NS_PER_S,
            share=share_of(name.kind, self.self_ns, whole_ns),
            device_s=self.device.statistics(NS_PER_S) if self.device.n else None,
            starvation_s=self.gap.statistics(NS_PER_S) if self.gap.n else None,
            unusual=self.unusual,
        )


class Aggregator:
    """Keeps the last rows, and summaries over all of them. One thread at a time may add."""

    def __init__(self, capacity: int, remarks: Remarks) -> None:
        self.base_ns = 0  # of the clock, at the start of the run
        self.stages = Ring(OCCURRENCE, capacity)
        self.metrics = Ring(METRIC, capacity)
        self.names: list[Name] = []
        self.metric_names: list[str] = []
        self._remarks = remarks
        self._running: list[_RunningStage] = []
        self._running_metrics: list[RunningStatistics] = []
        self._non_finite: list[int] = []
        self.ids: dict[Kind, dict[str, int]] = {kind: {} for kind in get_args(Kind)}  # places in `names`
        self._metric_ids: dict[str, int] = {}
        self._naming = threading.Lock()
        self.id_of(STEP, "step")

    def id_of(self, name: str, kind: Kind) -> int:
        """Return the place of a name in `names`; the names beyond the limit have one place together."""
        index = self.ids[kind].get(name)
        if index is not None:
            return index
        readable = _readable(name)
        if readable != name:
            return self.id_of(readable, kind)
        if len(self.names) >= MOST_NAMES and name != OTHERS:
            self._remarks.add("names of stages", f"more than {MOST_NAMES}; the further ones are summed as {OTHERS}")
            return self.id_of(OTHERS, kind)
        with self._naming:
            if name not in self.ids[kind]:
                self._running.append(_RunningStage())
                self.names.append(Name(name, kind))
                self.ids[kind][name] = len(self.names) - 1
        return self.ids[kind][name]

    def add(self, ended: Occurrence, device_ns: int, gap_ns: int) -> None:
        """Take in one occurrence, with its times on the device."""
        host, step = ended.host, ended.step
        own = host - ended.inside
        flags = ended.flags if ended.is_span else ended.flags | step.flags
        ring = self.stages
        ring.pack(
            ring.buffer,
            ring.count % ring.capacity * ring.row_bytes,
            ring.count,
            step.number,
            ended.began - self.base_ns,
            host,
            own,
            device_ns,
            gap_ns,
            ended.stage,
            ended.parent,
            ended.thread,
            flags,
        )
        ring.count += 1
        running = self._running[ended.stage]
        if flags & UNUSUAL:
            running.unusual += 1
            return
        running.host.add(host)
        running.self_ns += own
        if device_ns >= 0:
            running.device.add(device_ns)
        if gap_ns >= 0:
            running.gap.add(gap_ns)

    def add_metric(self, step: int, name: str, value: float) -> None:
        """Take in the value of a metric, from one thread at a time; NaN and huge values are counted alone."""
        index = self._metric_ids.get(name)
        if index is None:
            name = _readable(name)
            index = self._metric_ids.get(name)
        if index is None:
            index = self._new_metric(name)
        self.metrics.append(step, index, value)
        if abs(value) <= LARGEST:
            self._running_metrics[index].add(value)
        else:
            self._non_finite[index] += 1

    def summaries(self) -> Summaries:
        """Return the summaries of every name that has occurred, and of every metric; other threads may be adding."""
        whole_ns = self._running[STEP_ID].host.total
        stages = zip(list(self.names), list(self._running), strict=False)
        metrics = zip(list(self.metric_names), list(self._running_metrics), list(self._non_finite), strict=False)
        return Summaries(
            tuple(stage.summary(name, whole_ns) for name, stage in stages if stage.host.n or stage.unusual),
            tuple(MetricSummary(name, metric.statistics(), non_finite) for name, metric, non_finite in metrics),
        )

    def _new_metric(self, name: str) -> int:
        if len(self.metric_names) >= MOST_NAMES:
            raise ValueError(f"there are more than {MOST_NAMES} metrics; {name!r} and further ones are left out")
        self._running_metrics.append(RunningStatistics())
        self._non_finite.append(0)
        self.metric_names.append(name)
        self._metric_ids[name] = index = len(self.metric_names) - 1
        return index


def share_of(kind: Kind, self_total: float, whole: float) -> float | None:
    """Return the share of the time of all steps, None for what is no part of a step or while there is none."""
    return self_total / whole if kind in ("step", "stage") and whole else None


def _readable(name: str) -> str:
    """Return the name as it is written; raise TypeError if it is no text."""
    if not isinstance(name, str):
        raise TypeError(f"a name is text, not {type(name).__name__}")
    return name.encode("utf-8", "replace").decode("utf-8")[:LONGEST_NAME]
