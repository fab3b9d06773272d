"""A visit of the sweep, what it leaves on disk, and how it is found again after a kill."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, TypedDict

import msgspec

from boundby import files
from boundby.disturbance import Conditions, Disturbance
from boundby.stats import estimate
from boundby.sweep import Outcome
from boundby.timer import WarmUp

LEAST_ROUNDS = 5  # below five rounds two runs cannot be told apart by a rank test at 5 %

Quantity = Literal["cold", "isolated", "pipelined", "device", "enqueue", "transfer", "tokenize"]


@dataclass(frozen=True)
class Timing:
    """One reading of the clock: `index` is the batch within the visit; a pipelined block spans all of them."""

    quantity: Quantity
    index: int
    seconds: float
    samples: int
    tokens_real: int
    tokens_padded: int


class Memory(TypedDict, total=False):
    """The fields of `boundby.memory.MemoryUse`, in bytes; what this device cannot give is None, and `reasons` say why.

    A comparison reads visits where no torch need be.
    """

    device_allocated_bytes: int | None
    device_reserved_bytes: int | None
    device_peak_allocated_bytes: int | None
    device_peak_reserved_bytes: int | None
    device_total_bytes: int | None
    device_before_bytes: int | None
    process_bytes: int
    process_peak_bytes: int | None
    reasons: Sequence[str]
    doubts: Sequence[str]


class RawRow(TypedDict):
    """One row of `raw_samples.csv`."""

    session: str
    round: int
    batch_size: int
    index: int
    quantity: Quantity
    seconds: float
    samples: int
    tokens_real: int
    tokens_padded: int
    dtype: str
    disturbed: int


RAW_COLUMNS = tuple(RawRow.__annotations__)


@dataclass(frozen=True)
class Visit:
    """One round at one batch size: all timings, and what was seen beside them. The unit of commit and of resume.

    `repeats` counts the attempts that were thrown away because something disturbed them; `disturbances` is what
    disturbed the one that was kept, found in `conditions`.
    """

    dtype: str
    batch_size: int
    round: int
    status: Literal["ok", "oom", "failed"]
    session: str
    timings: tuple[Timing, ...] = ()
    measured_s: float = 0.0
    batches: int = 0
    warm_up: WarmUp | None = None
    memory: Memory | None = None
    readings: Mapping[str, Sequence[float]] = field(default_factory=dict)
    reading_reasons: Mapping[str, str] = field(default_factory=dict)
    window_s: float = 0.0
    conditions: Conditions | None = None
    disturbances: tuple[Disturbance, ...] = ()
    repeats: int = 0
    device_reason: str | None = None
    truncated: int | None = None
    message: str | None = None

    def of(self, quantity: Quantity) -> list[Timing]:
        """Return the timings of one quantity."""
        return [timing for timing in self.timings if timing.quantity == quantity]

    def seconds_per_batch(self, quantity: Quantity) -> float | None:
        """Seconds of the mean batch: for each batch the median over its passes; None where it was not timed."""
        medians = _medians(self.of(quantity))
        return sum(medians.values()) / len(medians) if medians else None

    @property
    def isolated_s_per_sample(self) -> float | None:
        """Seconds per sample of calls timed alone: for each batch the median over its passes, summed."""
        return _per_sample(self.of("isolated"))

    @property
    def throughput_s_per_sample(self) -> float | None:
        """Seconds per sample of calls queued one after another; on a CPU that is the same as timed alone."""
        return _per_sample(self.of("pipelined")) or self.isolated_s_per_sample

    @property
    def is_disturbed(self) -> bool:
        """Whether something used the machine in this visit that other visits may have escaped."""
        return any(disturbance.is_passing for disturbance in self.disturbances)

    def outcome(self) -> Outcome:
        """Return what the stop rule needs to know; a disturbed visit has no value for it, so that more are made."""
        value = None if self.is_disturbed else self.throughput_s_per_sample
        return Outcome(self.batch_size, self.round, self.status, self.measured_s, value)


def append(path: Path, visit: Visit) -> None:
    """Commit the visit: after this call a kill cannot lose it."""
    files.append_json_line(path, asdict(visit))


def read(path: Path) -> list[Visit]:
    """Return the committed visits in order; [] where there are none."""
    visits = {}
    for line in files.read_json_lines(path):
        visit = msgspec.convert(line, Visit)
        visits[visit.batch_size, visit.round] = visit
    return list(visits.values())


def usable(visits: Sequence[Visit]) -> list[Visit]:
    """Return the visits of one batch size that count: those that nothing disturbed, where they are enough, else all.

    What disturbs a visit is found in counters of the machine, not in its times, so that leaving it out is no choice
    among results.
    """
    undisturbed = [visit for visit in visits if not visit.is_disturbed]
    return undisturbed if len(undisturbed) >= LEAST_ROUNDS else list(visits)


def isolated_rounds(visits: Sequence[Visit]) -> list[float]:
    """Return the seconds per sample of each visit of one batch size, of calls timed alone.

    A visit often times each batch once, and one forward that the machine held up would shift its sum. So each batch has
    its typical time, the median over all visits, and a visit is as slow as the median of its timings against those.
    """
    typical = _medians([timing for visit in visits for timing in visit.of("isolated")])
    samples = {timing.index: timing.samples for visit in visits for timing in visit.of("isolated")}
    if not typical:
        return []
    per_sample = sum(typical.values()) / sum(samples.values())
    return [
        per_sample * median([timing.seconds / typical[timing.index] for timing in timings])
        for visit in visits
        if (timings := visit.of("isolated"))
    ]


def throughput_rounds(visits: Sequence[Visit]) -> list[float]:
    """Return the seconds per sample of each visit of one batch size, of calls queued one after another.

    On a CPU, where nothing is queued, they are those of calls timed alone.
    """
    queued = [value for visit in visits if (value := _per_sample(visit.of("pipelined"))) is not None]
    return queued or isolated_rounds(visits)


def raw_rows(visits: Iterable[Visit]) -> Iterator[RawRow]:
    """Yield every timing as a row of `raw_samples.csv`."""
    for visit in visits:
        for timing in visit.timings:
            yield {
                **asdict(timing),
                "session": visit.session,
                "round": visit.round,
                "batch_size": visit.batch_size,
                "dtype": visit.dtype,
                "disturbed": int(visit.is_disturbed),
            }


def half_width(visits: Iterable[Visit]) -> float | None:
    """Return the half-width of the 95 % interval of the throughput, as a share of it; None below two rounds."""
    values = [value for visit in visits if (value := visit.throughput_s_per_sample) is not None]
    return estimate(values).half_width if values else None


def _per_sample(timings: list[Timing]) -> float | None:
    if not timings:
        return None
    samples = {timing.index: timing.samples for timing in timings}
    return sum(_medians(timings).values()) / sum(samples.values())


def _medians(timings: list[Timing]) -> dict[int, float]:
    """Return the median seconds of each batch over its passes, by its index."""
    by_index: dict[int, list[float]] = {}
    for timing in timings:
        by_index.setdefault(timing.index, []).append(timing.seconds)
    return {index: median(seconds) for index, seconds in by_index.items()}
