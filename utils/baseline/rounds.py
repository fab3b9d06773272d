"""A visit of the sweep, what it leaves on disk, and what visits say together of the whole dataset."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from boundby import files
from boundby.machine import Conditions, Disturbance, MemoryUse
from boundby.timing import Outcome, Timed, Totals, WarmUp, seconds_per_sample

LEAST_ROUNDS = 5  # below five rounds two runs cannot be told apart by a rank test at 5 %
MOST_ROUNDS, ROUNDS_PER_S = 15, 2  # that a budget buys, in all or by its seconds: whichever is more

Quantity = Literal["cold", "largest", "reference", "isolated", "pipelined", "device", "enqueue", "transfer", "tokenize"]


@dataclass(frozen=True)
class Timing:
    """One reading of the clock.

    `index` is the batch's place among those that the dataset makes in order of arrival; a pipelined block spans all
    batches of the visit and has the index 0, like the tokenizer.
    """

    quantity: Quantity
    index: int
    seconds: float
    samples: int
    tokens_real: int
    tokens_padded: int

    @property
    def batch(self) -> Totals:
        """What the batch holds, where the timing is of one."""
        return Totals.one(self.samples, self.tokens_padded, self.tokens_real)


RAW_COLUMNS = (  # of `raw_samples.csv`
    *("session", "round", "batch_size", "index", "quantity", "seconds"),
    *("samples", "tokens_real", "tokens_padded", "dtype", "disturbed"),
)


@dataclass(frozen=True)
class Visit:
    """One round at one batch size: all timings, and what was seen beside them. The unit of commit and of resume.

    `whole` is what the dataset holds in batches of this size; None where that is not recorded. `spent_s` is all that
    the visit took, cold call, warm-up and repeats included. `device_by` is the way in which times of the device were
    taken (`boundby.timing.timer.Way`), and `device_reason` why there are none.
    `repeats` counts the attempts that were thrown away because something disturbed them; `disturbances` is what
    disturbed the one that was kept, found in `conditions`.
    """

    dtype: str
    batch_size: int
    round: int
    status: Literal["ok", "oom", "failed"]
    session: str
    timings: tuple[Timing, ...] = ()
    spent_s: float = 0.0
    batches: int = 0
    warm_up: WarmUp | None = None
    memory: MemoryUse | None = None
    readings: Mapping[str, Sequence[float]] = field(default_factory=dict)
    reading_reasons: Mapping[str, str] = field(default_factory=dict)
    window_s: float = 0.0
    conditions: Conditions | None = None
    disturbances: tuple[Disturbance, ...] = ()
    repeats: int = 0
    device_by: str | None = None
    device_reason: str | None = None
    truncated: int | None = None
    whole: Totals | None = None
    message: str | None = None

    def of(self, quantity: Quantity) -> list[Timing]:
        """Return the timings of one quantity."""
        return [timing for timing in self.timings if timing.quantity == quantity]

    @property
    def is_disturbed(self) -> bool:
        """Whether something used the machine in this visit that other visits may have escaped."""
        return any(disturbance.is_passing for disturbance in self.disturbances)


def named(batch_size: int, dtype: str) -> str:
    """Return what a visit is of, in words."""
    return f"batch size {batch_size} in {dtype}"


def append(path: Path, visit: Visit) -> None:
    """Commit the visit: after this call a kill cannot lose it."""
    files.append_json_line(path, asdict(visit))


def read(path: Path) -> list[Visit]:
    """Return the committed visits in order; [] where there are none."""
    visits = {}
    for line in files.read_json_lines(path):
        with contextlib.suppress(msgspec.ValidationError):  # as good as torn: it is measured again
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


def whole_of(visits: Sequence[Visit]) -> Totals | None:
    """Return what the dataset holds in batches of this size, or where that is not recorded, in those that were timed.

    None where none was.
    """
    recorded = next((visit.whole for visit in visits if visit.whole), None)
    if recorded:
        return recorded
    timed = {timing.index: timing.batch for visit in visits for timing in visit.of("isolated")}
    return sum(timed.values(), start=Totals.none()) if timed else None


def rounds(visits: Sequence[Visit], quantity: Quantity) -> list[float]:
    """Return for each visit of one batch size what a sample of the whole dataset takes, in seconds.

    `quantity` is one that is timed batch by batch, or `pipelined`. Visits in which it was not timed have no value.
    """
    whole = whole_of(visits)
    if whole is None:
        return []
    at_the_ends = [(timing.batch, timing.seconds) for visit in visits for timing in visit.of("largest")]
    if quantity == "pipelined":
        timed = [_blocks(visit) for visit in visits]
    else:
        timed = [[(timing.batch, timing.seconds) for timing in visit.of(quantity)] for visit in visits]
    return seconds_per_sample(timed, whole, at_the_ends if quantity in ("isolated", "pipelined") else ())


def throughput_rounds(visits: Sequence[Visit]) -> list[float]:
    """Return the seconds per sample of each visit of one batch size, of calls queued one after another.

    On a CPU, where nothing is queued, they are those of calls timed alone.
    """
    return rounds(visits, "pipelined") or rounds(visits, "isolated")


def reference_rounds(visits: Sequence[Visit]) -> list[float]:
    """Return the seconds of the reference batch in each visit in which it was timed, the median of its calls."""
    timed = [[timing.seconds for timing in visit.of("reference")] for visit in visits]
    return [median(seconds) for seconds in timed if seconds]


def outcomes(visits: Sequence[Visit]) -> list[Outcome]:
    """Return what the stop rule needs to know of the visits of one point, in their order.

    A disturbed visit has no value for it, so that more are made.
    """
    counts = [visit.status == "ok" and not visit.is_disturbed for visit in visits]
    known = iter(throughput_rounds(list(compress(visits, counts))))
    values = [next(known) if counted else None for counted in counts]
    return [
        Outcome((visit.batch_size, visit.dtype), visit.round, visit.status, visit.spent_s, value)
        for visit, value in zip(visits, values, strict=True)
    ]


def _blocks(visit: Visit) -> list[Timed]:
    """Return the blocks of queued calls with what they hold: all batches of the visit, in one or more passes."""
    if not visit.of("pipelined"):
        return []
    one_pass = sum({timing.index: timing.batch for timing in visit.of("isolated")}.values(), start=Totals.none())
    return [(one_pass * (timing.samples / one_pass.samples), timing.seconds) for timing in visit.of("pipelined")]


def raw_rows(visits: Iterable[Visit]) -> Iterator[dict[str, str | float]]:
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
