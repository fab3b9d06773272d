"""The steps of a run as a table: what each spent in its stages, the shares of these, and the effect of the batch."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from boundby.bound import Bound
from boundby.timing import CONFIDENCE, WIDENING, independent
from boundby.training.records import ABSENT, UNUSUAL, StageTimes

IN_NO_STAGE = "(in no stage)"
NS_PER_S = 1e9
MOST_WARM_UP = 0.1  # of the steps
SLOW_START = 2.0  # times the median: as long a step at the beginning is warm-up
ENOUGH_MARKS = 0.5  # of the steps, below which the times of the device say too little

LEAST_WINDOW = 5  # steps
MOST_WINDOWS = 20
STEADY = 0.1  # interquartile range of a share over the windows, as a part of the step
QUANTITIES = ("tokens", "samples")  # metrics that tell how much is in a batch
LEAST_GROUP = 3  # steps
LEAST_CONTRAST = 1.3  # of larger batches over smaller ones


@dataclass(frozen=True)
class StepTable:
    """Seconds of steps: one row for each, one column for each stage by its self time; the last is in no stage.

    `seconds` is by the clock of the device where its marks are known; `host_s` is always by that of the host. Steps
    that something disturbed, and those at the beginning that warm up, are left out. Where only totals are known there
    is one row: the mean over all steps.
    """

    names: tuple[str, ...]
    around: Mapping[str, frozenset[str]]  # the stages in which each one lies; none for one that lies in no other
    numbers: np.ndarray
    seconds: np.ndarray
    host_s: np.ndarray
    num_steps: int  # that the rows stand for
    on_device: bool = False
    disturbed: int = 0
    warm_up: int = 0

    @property
    def whole_s(self) -> np.ndarray:
        """The seconds of each step."""
        whole: np.ndarray = self.seconds.sum(axis=1)
        return whole

    @property
    def has_steps(self) -> bool:
        """Tell whether the rows are single steps."""
        return len(self.seconds) == self.num_steps

    def spent_in(self, names: Collection[str]) -> np.ndarray:
        """Return the seconds of each step in all stages of these names."""
        spent: np.ndarray = self.seconds[:, [name in names for name in self.names]].sum(axis=1)
        return spent

    def at(self, rows: np.ndarray) -> "StepTable":
        """Return the table of some of its rows."""
        return replace(
            self, numbers=self.numbers[rows], seconds=self.seconds[rows], host_s=self.host_s[rows], num_steps=len(rows)
        )


def step_table(times: StageTimes) -> StepTable:
    """Return the steps of one process, as far as its rows reach back."""
    ends = times.rows_of("step", "step")
    if not len(ends):
        return _totals(times)
    rows, at = _rows_of_steps(times, ends)
    columns = [index for index, stage in enumerate(times.names) if stage.kind == "stage"]
    host = _summed(rows["self_ns"], rows["stage"], at, (len(ends), columns))
    host[:, -1] = ends["self_ns"] / NS_PER_S
    is_usual = (ends["flags"] & UNUSUAL) == 0
    is_usual[at[(rows["flags"] & UNUSUAL) != 0]] = False
    is_judged = is_usual.copy()
    if times.num_occurrences > len(times.occurrences):
        is_judged[0] = False  # the ring may have lost its first stages
    table = StepTable(
        names=(*(times.names[index].name for index in columns), IN_NO_STAGE),
        around=_around(times, rows),
        numbers=ends["step"],
        seconds=host,
        host_s=host,
        num_steps=len(ends),
        disturbed=int((~is_usual).sum()),
    )
    has_marks = np.isin(np.arange(len(ends)), at)
    has_marks[at[rows["device_ns"] < 0]] = False
    if is_judged.any() and (has_marks & is_judged).sum() >= ENOUGH_MARKS * is_judged.sum():
        table = replace(table, seconds=_by_device(rows, at, (len(ends), columns)), on_device=True)
        is_judged &= has_marks
    return _warm(table.at(np.flatnonzero(is_judged)))


def matched(tables: list[StepTable]) -> list[StepTable]:
    """Return the tables with the steps that all of them have, in the same order and once each."""
    shared = tables[0].numbers
    for table in tables[1:]:
        shared = np.intersect1d(shared, table.numbers)
    shared = np.unique(shared)
    aligned = []
    for table in tables:
        numbers, first = np.unique(table.numbers, return_index=True)
        aligned.append(table.at(first[np.isin(numbers, shared)]))
    return aligned


def averaged(tables: list[StepTable]) -> StepTable | None:
    """Return the mean of several processes, by the steps that all of them have; None where there are none."""
    same = matched(tables) if all(table.has_steps for table in tables) else []
    if not same or not len(same[0].numbers):
        return None
    on_device = all(table.on_device for table in same)
    names = (*dict.fromkeys(name for table in same for name in table.names[:-1]), IN_NO_STAGE)
    around: dict[str, frozenset[str]] = {}
    for table in same:
        around |= {name: around.get(name, frozenset()) | outer for name, outer in table.around.items()}

    def mean(matrices: list[np.ndarray]) -> np.ndarray:
        total = np.zeros((len(same[0].numbers), len(names)))
        for table, matrix in zip(same, matrices, strict=True):
            total[:, [names.index(name) for name in table.names]] += matrix
        return total / len(same)

    host_s = mean([table.host_s for table in same])
    seconds = mean([table.seconds for table in same]) if on_device else host_s
    disturbed, warm_up = max(table.disturbed for table in same), max(table.warm_up for table in same)
    return StepTable(names, around, same[0].numbers, seconds, host_s, len(host_s), on_device, disturbed, warm_up)


def _summed(ns: np.ndarray, names: np.ndarray, at: np.ndarray, shape: tuple[int, Sequence[int]]) -> np.ndarray:
    """Return nanoseconds as seconds by step and by name, of which `shape` has the number and the places.

    The last column is for all other names.
    """
    columns = {index: column for column, index in enumerate(shape[1])}
    table = np.zeros((shape[0], len(columns) + 1))
    np.add.at(table, (at, np.array([columns.get(name, -1) for name in names.tolist()], dtype=np.intp)), ns / NS_PER_S)
    return table


def _by_device(rows: np.ndarray, at: np.ndarray, shape: tuple[int, Sequence[int]]) -> np.ndarray:
    """Return the device's time in each stage and in none inside; what lies between the outer ones is in none."""
    device = np.maximum(rows["device_ns"], 0)
    inside = _summed(device, rows["parent"], at, shape)
    inside[:, -1] = 0.0
    gaps = np.where(rows["parent"] == ABSENT, np.maximum(rows["gap_ns"], 0), 0)
    table: np.ndarray = np.maximum(_summed(device, rows["stage"], at, shape) - inside, 0.0)
    table[:, -1] = np.bincount(at, weights=gaps, minlength=shape[0]) / NS_PER_S
    return table


def longest_gap(times: StageTimes) -> tuple[str, str, float] | None:
    """Return the two stages between which most of the time in no stage passes, and its share; None if no rows say it.

    It is time of the host; what is excluded between two stages is not counted.
    """
    kinds = [stage.kind for stage in times.names]
    rows = times.occurrences[times.occurrences["parent"] == ABSENT]
    is_stage, is_excluded = (
        np.isin(rows["stage"], [index for index, of in enumerate(kinds) if of == kind])
        for kind in ("stage", "excluded")
    )
    starts = np.sort(rows["start_ns"][is_excluded])
    rows = np.sort(rows[is_stage], order="start_ns")
    ends = rows["start_ns"] + rows["host_ns"]
    gaps = np.maximum(rows["start_ns"][1:] - ends[:-1], 0)
    is_whole = np.searchsorted(starts, ends[:-1]) == np.searchsorted(starts, rows["start_ns"][1:])
    pairs = len(kinds) * rows["stage"][:-1].astype(np.int64) + rows["stage"][1:]
    passed = np.bincount(pairs[is_whole], weights=gaps[is_whole])
    if not passed.sum():
        return None
    before, after = divmod(int(passed.argmax()), len(kinds))
    return times.names[before].name, times.names[after].name, float(passed.max() / passed.sum())


def _rows_of_steps(times: StageTimes, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of stages, and the place of the step of each: the next one that ends."""
    columns = [index for index, stage in enumerate(times.names) if stage.kind == "stage"]
    rows = times.occurrences[np.isin(times.occurrences["stage"], columns)]
    at = np.searchsorted(ends["index"], rows["index"])
    is_whole = at < len(ends)
    rows, at = rows[is_whole], at[is_whole]
    is_own = rows["step"] == ends["step"][at]
    return rows[is_own], at[is_own]


def _around(times: StageTimes, rows: np.ndarray) -> dict[str, frozenset[str]]:
    around: dict[str, set[str]] = {}
    for stage, parent in np.unique(rows[["stage", "parent"]]).tolist():
        names = around.setdefault(times.names[stage].name, set())
        if parent != ABSENT:
            names.add(times.names[parent].name)
    return {name: frozenset(names) for name, names in around.items()}


def _warm(table: StepTable) -> StepTable:
    """Return the table without the long steps at its beginning."""
    whole = table.whole_s
    if not len(whole):
        return table
    is_slow = whole > SLOW_START * np.median(whole)
    most = int(MOST_WARM_UP * len(whole))
    warm_up = next((row for row in range(most) if not is_slow[row]), most)
    return replace(table.at(np.arange(warm_up, len(whole))), warm_up=warm_up)


def _totals(times: StageTimes) -> StepTable:
    """Return the mean step of the summaries, for a run whose rows are not at hand."""
    step = times.step
    count = step.host_s.n if step else 0
    stages = [stage for stage in times.stages if stage.kind == "stage"]
    totals = [*(stage.self_total_s for stage in stages), step.self_total_s if step else 0.0]
    means = np.array([totals])[: min(count, 1)] / max(count, 1)
    return StepTable(
        names=(*(stage.name for stage in stages), IN_NO_STAGE),
        around={stage.name: frozenset() for stage in stages},
        numbers=np.zeros(len(means), dtype=np.int64),
        seconds=means,
        host_s=means,
        num_steps=count,
        disturbed=step.unusual if step else 0,
    )


@dataclass(frozen=True)
class Share:
    """The share of the time of all steps that a stage takes, or all stages of one bound together.

    `low` and `high` are the ends of its 95 % interval, `median` and `iqr` those of its windows; None where there are
    too few windows. `drift` is how much larger the share is in the last third of the windows than in the first.
    """

    name: str
    bound: Bound  # what its time counts for; `inconclusive` where that is not known
    step_s: float  # in each step, on average
    share: float
    low: float | None = None
    high: float | None = None
    median: float | None = None
    iqr: float | None = None
    drift: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, the share itself where there is none."""
        return (self.share if self.low is None else self.low, self.share if self.high is None else self.high)


def windows(num_steps: int) -> list[np.ndarray]:
    """Return the places of consecutive steps, in windows of about the same size."""
    count = max(1, min(MOST_WINDOWS, num_steps // LEAST_WINDOW))
    return np.array_split(np.arange(num_steps), count)


def share_of(name: str, bound: Bound, spent_s: np.ndarray, whole_s: np.ndarray) -> Share:
    """Return the share of the time of some steps that was spent on this."""
    total = float(whole_s.sum())
    share = float(spent_s.sum()) / total if total else 0.0
    plain = Share(name, bound, float(spent_s.mean()), share)
    sums = [(float(spent_s[window].sum()), float(whole_s[window].sum())) for window in windows(len(whole_s))]
    parts = np.array([spent / whole for spent, whole in sums if whole])
    if len(parts) < 2:
        return plain
    reach = WIDENING * float(stdtrit(len(parts) - 1, 0.5 + CONFIDENCE / 2) * parts.std(ddof=1)) / math.sqrt(len(parts))
    first, median, third = (float(quartile) for quartile in np.quantile(parts, [0.25, 0.5, 0.75]))
    return Share(
        name=name,
        bound=bound,
        step_s=plain.step_s,
        share=share,
        low=max(0.0, share - reach),
        high=min(1.0, share + reach),
        median=median,
        iqr=third - first,
        drift=_drift(parts),
    )


def _drift(parts: np.ndarray) -> float | None:
    """Return the median share of the last third of the windows less that of the first; None below six windows.

    It is 0 where the shares differ as much within these thirds: what comes and goes is no drift.
    """
    third = len(parts) // 3
    if third < 2:
        return None
    quartiles = [np.quantile(third_of_parts, [0.25, 0.5, 0.75]) for third_of_parts in (parts[:third], parts[-third:])]
    drift = float(quartiles[1][1] - quartiles[0][1])
    return drift if abs(drift) > max(float(quartile[2] - quartile[0]) for quartile in quartiles) else 0.0


@dataclass(frozen=True)
class BatchEffect:
    """How the work of steps depends on their batches.

    `fixed` is the part of the work of the larger batches that does not grow with them, `fixed_low` the lower end of
    its 95 % interval; `larger` and `smaller` are the means of the two groups of steps.
    """

    quantity: str
    smaller: float
    larger: float
    steps: int
    fixed: float
    fixed_low: float


def batch_effect(times: StageTimes, numbers: np.ndarray, work_s: np.ndarray) -> BatchEffect | None:
    """Return how the work of the steps of these numbers depends on their `tokens` or `samples`; None if unknown.

    The steps are split at the middle of the sizes. It takes sizes that differ: the last batch of an epoch may be
    enough.
    """
    for quantity in QUANTITIES:
        size = _sizes(times, quantity, numbers)
        is_known = np.isfinite(size) & (size > 0) & (work_s > 0)
        size, work = size[is_known], work_s[is_known]
        if not len(size):
            continue
        is_large = size > math.sqrt(float(size.min()) * float(size.max()))
        if min(is_large.sum(), (~is_large).sum()) < LEAST_GROUP:
            continue
        smaller, larger = float(size[~is_large].mean()), float(size[is_large].mean())
        if larger < LEAST_CONTRAST * smaller:
            continue
        contrast = independent(_calm(work[~is_large]), _calm(work[is_large]))
        growth = contrast.log_ratio, contrast.log_ratio + (contrast.reach or 0.0)
        fixed, fixed_low = (_fixed(math.exp(log_ratio), larger / smaller) for log_ratio in growth)
        return BatchEffect(quantity, smaller, larger, len(size), fixed, fixed_low)
    return None


def _calm(work_s: np.ndarray) -> list[float]:
    """Return the lower quartile of each window, since disturbances only add time; each value, where they are few."""
    parts = windows(len(work_s))
    return [float(np.quantile(work_s[window], 0.25)) for window in parts] if len(parts) > 1 else work_s.tolist()


def _sizes(times: StageTimes, quantity: str, numbers: np.ndarray) -> np.ndarray:
    """Return the sum of a metric over each step, NaN where it has none."""
    if quantity not in times.metric_names:
        return np.full(len(numbers), np.nan)
    rows = times.metric_rows[times.metric_rows["metric"] == times.metric_names.index(quantity)]
    steps, row_steps = np.unique(rows["step"], return_inverse=True)
    sums = dict(zip(steps.tolist(), np.bincount(row_steps, weights=rows["value"]).tolist(), strict=True))
    return np.array([sums.get(number, math.nan) for number in numbers.tolist()])


def _fixed(time_ratio: float, size_ratio: float) -> float:
    """Return the fixed part of a larger batch's time, where time is a fixed part and one in proportion to the size."""
    growing = (1 - 1 / time_ratio) * size_ratio / (size_ratio - 1)
    return min(1.0, max(0.0, 1 - growing))
