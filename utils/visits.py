"""A visit of the sweep, what it leaves on disk, and how it is found again after a kill."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from boundby import files
from boundby.stats import estimate
from boundby.sweep import Outcome

RAW_COLUMNS = (
    "session",
    "round",
    "batch_size",
    "index",
    "quantity",
    "seconds",
    "samples",
    "tokens_real",
    "tokens_padded",
    "dtype",
)

Quantity = Literal["cold", "isolated", "pipelined", "tokenize"]


@dataclass(frozen=True)
class Timing:
    """One reading of the clock: `index` is the batch within the visit; a pipelined block spans all of them."""

    quantity: Quantity
    index: int
    seconds: float
    samples: int
    tokens_real: int
    tokens_padded: int


@dataclass(frozen=True)
class Visit:
    """One round at one batch size: all timings, and what was seen beside them. The unit of commit and of resume."""

    dtype: str
    batch_size: int
    round: int
    status: Literal["ok", "oom", "failed"]
    session: str
    timings: tuple[Timing, ...] = ()
    measured_s: float = 0.0
    batches: int = 0
    warm_up: Mapping[str, Any] | None = None
    memory: Mapping[str, Any] | None = None
    gpu_utilization_pct: tuple[float, ...] = ()
    window_s: float = 0.0
    gpu_utilization_reason: str | None = None
    truncated: int | None = None
    message: str | None = None

    def of(self, quantity: Quantity) -> list[Timing]:
        """Return the timings of one quantity."""
        return [timing for timing in self.timings if timing.quantity == quantity]

    @property
    def isolated_s_per_sample(self) -> float | None:
        """Seconds per sample of calls timed alone: for each batch the median over its passes, summed."""
        return _per_sample(self.of("isolated"))

    @property
    def throughput_s_per_sample(self) -> float | None:
        """Seconds per sample of calls queued one after another; on a CPU that is the same as timed alone."""
        return _per_sample(self.of("pipelined")) or self.isolated_s_per_sample

    def outcome(self) -> Outcome:
        """Return what the stop rule needs to know."""
        return Outcome(self.batch_size, self.round, self.status, self.measured_s, self.throughput_s_per_sample)


def append(path: Path, visit: Visit) -> None:
    """Commit the visit: after this call a kill cannot lose it."""
    files.append_json_line(path, asdict(visit))


def read(path: Path) -> list[Visit]:
    """Return the committed visits in order; [] where there are none."""
    visits = {}
    for line in files.read_json_lines(path):
        timings = tuple(Timing(**timing) for timing in line.pop("timings"))
        utilization = tuple(line.pop("gpu_utilization_pct"))
        visit = Visit(**line, timings=timings, gpu_utilization_pct=utilization)
        visits[visit.batch_size, visit.round] = visit
    return list(visits.values())


def raw_rows(visits: Iterable[Visit]) -> Iterator[dict[str, Any]]:
    """Yield every timing as a row of `raw_samples.csv`."""
    for visit in visits:
        for timing in visit.timings:
            yield {
                **asdict(timing),
                "session": visit.session,
                "round": visit.round,
                "batch_size": visit.batch_size,
                "dtype": visit.dtype,
            }


def half_width(visits: Iterable[Visit]) -> float | None:
    """Return the half-width of the 95 % interval of the throughput, as a share of it; None below two rounds."""
    values = [value for visit in visits if (value := visit.throughput_s_per_sample) is not None]
    return estimate(values).half_width if values else None


def _per_sample(timings: list[Timing]) -> float | None:
    by_index: dict[int, list[Timing]] = {}
    for timing in timings:
        by_index.setdefault(timing.index, []).append(timing)
    if not by_index:
        return None
    seconds = sum(median([timing.seconds for timing in group]) for group in by_index.values())
    return seconds / sum(group[0].samples for group in by_index.values())
