"""The book of a run: rings, names and summaries of bounded size that take in one ended stage after the other."""

import threading
from typing import get_args

from boundby.training.records import STEP, Kind, MetricSummary, Name, StageSummary
from boundby.training.remarks import Remarks
from boundby.training.ring import METRIC, OCCURRENCE, UNUSUAL, Ring
from boundby.training.stack import Occurrence
from boundby.training.tally import Tally

MOST_NAMES = 256  # of stages, and of metrics
OTHERS = "(others)"  # all names beyond
LONGEST_NAME = 200  # characters
LARGEST = 1e100  # value of a metric: a sum of larger ones might leave the range of numbers
NS_PER_S = 10**9
STEP_ID = 0


class StageTally:
    """The running summary of one name, in nanoseconds."""

    __slots__ = ("device", "gap", "host", "self_ns", "unusual")

    def __init__(self) -> None:
        self.host = Tally()
        self.device = Tally()
        self.gap = Tally()
        self.self_ns = 0
        self.unusual = 0


class Book:
    """Keeps the last rows, and summaries over all of them. One thread at a time may add."""

    def __init__(self, capacity: int, remarks: Remarks) -> None:
        self.base_ns = 0  # of the clock, at the start of the run
        self.stages = Ring(OCCURRENCE, capacity)
        self.metrics = Ring(METRIC, capacity)
        self.names: list[Name] = []
        self.metric_names: list[str] = []
        self._remarks = remarks
        self._tallies: list[StageTally] = []
        self._metric_tallies: list[Tally] = []
        self._non_finite: list[int] = []
        self.ids: dict[Kind, dict[str, int]] = {kind: {} for kind in get_args(Kind)}  # places in `names`
        self._metric_ids: dict[str, int] = {}
        self._naming = threading.Lock()
        self.id_of(STEP, "step")

    def id_of(self, name: str, kind: Kind) -> int:
        """Return the place of a name in `names`; the names beyond the limit have one place together."""
        found = self.ids[kind].get(name)
        if found is not None:
            return found
        readable = _readable(name)
        if readable != name:
            return self.id_of(readable, kind)
        if len(self.names) >= MOST_NAMES and name != OTHERS:
            self._remarks.add("names of stages", f"more than {MOST_NAMES}; the further ones are summed as {OTHERS}")
            return self.id_of(OTHERS, kind)
        with self._naming:
            if name not in self.ids[kind]:
                self._tallies.append(StageTally())
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
        tally = self._tallies[ended.stage]
        if flags & UNUSUAL:
            tally.unusual += 1
            return
        tally.host.add(host)
        tally.self_ns += own
        if device_ns >= 0:
            tally.device.add(device_ns)
        if gap_ns >= 0:
            tally.gap.add(gap_ns)

    def add_metric(self, step: int, name: str, value: float) -> None:
        """Take in the value of a metric, from one thread at a time; NaN and huge values are counted alone."""
        place = self._metric_ids.get(name)
        if place is None:
            name = _readable(name)
            place = self._metric_ids.get(name)
        if place is None:
            place = self._new_metric(name)
        self.metrics.append(step, place, value)
        if abs(value) <= LARGEST:
            self._metric_tallies[place].add(value)
        else:
            self._non_finite[place] += 1

    def stage_summaries(self) -> tuple[StageSummary, ...]:
        """Return the summary of every name that has occurred."""
        whole_ns = self._tallies[STEP_ID].host.total
        named = zip(list(self.names), list(self._tallies), strict=False)
        return tuple(_summary(name, each, whole_ns) for name, each in named if each.host.n or each.unusual)

    def metric_summaries(self) -> tuple[MetricSummary, ...]:
        """Return the summary of every metric."""
        parts = zip(list(self.metric_names), list(self._metric_tallies), list(self._non_finite), strict=False)
        return tuple(MetricSummary(name, each.statistics(), non_finite) for name, each, non_finite in parts)

    def _new_metric(self, name: str) -> int:
        if len(self.metric_names) >= MOST_NAMES:
            raise ValueError(f"there are more than {MOST_NAMES} metrics; {name!r} and further ones are left out")
        self._metric_tallies.append(Tally())
        self._non_finite.append(0)
        self.metric_names.append(name)
        self._metric_ids[name] = place = len(self.metric_names) - 1
        return place


def share_of(kind: Kind, self_total: float, whole: float) -> float | None:
    """Return the share of the time of all steps, None for what is no part of a step or while there is none."""
    return self_total / whole if kind in ("step", "stage") and whole else None


def _readable(name: str) -> str:
    """Return the name as it is written; raise TypeError if it is no text."""
    if not isinstance(name, str):
        raise TypeError(f"a name is text, not {type(name).__name__}")
    return name.encode("utf-8", "replace").decode("utf-8")[:LONGEST_NAME]


def _summary(name: Name, tally: StageTally, whole_ns: float) -> StageSummary:
    return StageSummary(
        name=name.name,
        kind=name.kind,
        host_s=tally.host.statistics(NS_PER_S),
        self_total_s=tally.self_ns / NS_PER_S,
        share=share_of(name.kind, tally.self_ns, whole_ns),
        device_s=tally.device.statistics(NS_PER_S) if tally.device.n else None,
        starvation_s=tally.gap.statistics(NS_PER_S) if tally.gap.n else None,
        unusual=tally.unusual,
    )
