"""Two runs beside each other: their steps judged as `boundby.compare` does; and the numbers that a drawing can bear."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from boundby import compare
from boundby.compare import MINIMUM_EFFECT, Comparison
from boundby.training.records import StageTimes
from boundby.training.steps import Share, StepTable, share_of, step_table, windows

if TYPE_CHECKING:
    import pandas

LEAST_STEPS = 10  # in two windows
STEP_ROW = "whole step"
MISSING = "not there"

REST = "(other stages)"
MOST_POINTS = 600  # of a line
MOST_BARS = 150  # groups of steps side by side
MOST_STAGES = 8  # that a drawing tells apart


@dataclass(frozen=True)
class StageRow:
    """One stage, or the whole step, in both runs; `reason` says why there is no comparison."""

    name: str
    a: Share | None
    b: Share | None
    comparison: Comparison | None
    reason: str | None = None


@dataclass(frozen=True)
class Contrast:
    """B against A: their steps and stages on the host, and the number of steps that each has for it."""

    rows: tuple[StageRow, ...]
    steps: tuple[int, int]
    minimum_effect: float


def contrast(a: StageTimes, b: StageTimes, minimum_effect: float | None = None) -> Contrast:
    """Return the comparison of two processes by their undisturbed steps, on the clock of the host.

    A difference below `minimum_effect`, by default that of their device, is none.

    The rounds are windows of consecutive steps, since neighbouring steps are alike. Raises ValueError where a run has
    too few steps.
    """
    tables = step_table(a), step_table(b)
    for name, table in zip("AB", tables, strict=True):
        if len(table.numbers) < LEAST_STEPS:
            raise ValueError(f"{name} has {len(table.numbers)} undisturbed steps; at least {LEAST_STEPS} are needed")
    names = [STEP_ROW, *_stages(tables)]
    pairs = {name: (_seconds(tables[0], name), _seconds(tables[1], name)) for name in names}
    judged = {name: _independent(*pair) for name, pair in pairs.items()}
    contrasts = {name: each for name, each in judged.items() if isinstance(each, compare.Contrast)}
    effect = minimum_effect or MINIMUM_EFFECT["cuda" if a.device or b.device else "cpu"]
    verdicts = dict(zip(contrasts, compare.judge(list(contrasts.values()), effect), strict=True))
    rows = tuple(_row(name, pairs[name], tables, verdicts.get(name), judged[name]) for name in names)
    return Contrast(rows, (len(tables[0].numbers), len(tables[1].numbers)), effect)


def differences(a: Mapping[str, object], b: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return the settings in which two documents differ: key, value in A, value in B, all as text."""
    first, second = _flat(a), _flat(b)
    keys = sorted(key for key in {*first, *second} if first.get(key, MISSING) != second.get(key, MISSING))
    return [(key, first.get(key, MISSING), second.get(key, MISSING)) for key in keys]


def _flat(value: object, place: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        inner = ((f"{place}.{key}" if place else str(key), item) for key, item in value.items())
        return {key: text for name, item in inner for key, text in _flat(item, name).items()}
    return {place: str(value)} if place else {}


def _stages(tables: tuple[StepTable, StepTable]) -> list[str]:
    """Return the names of all stages, those with most time first."""
    total: dict[str, float] = {}
    for table in tables:
        for name, seconds in zip(table.names, table.host_s.sum(axis=0), strict=True):
            total[name] = total.get(name, 0.0) + float(seconds)
    return sorted(total, key=lambda name: -total[name])


def _seconds(table: StepTable, name: str) -> np.ndarray | None:
    """Return what each step spent in a stage; None where the run has no such stage."""
    if name == STEP_ROW:
        return table.host_s.sum(axis=1)
    return table.host_s[:, table.names.index(name)] if name in table.names else None


def _independent(a: np.ndarray | None, b: np.ndarray | None) -> compare.Contrast | str:
    """Return the contrast of two runs by the means of their windows, or why there is none."""
    if a is None or b is None:
        return f"only {'B' if a is None else 'A'} has it"
    rounds = [[float(each[places].mean()) for places in windows(len(each))] for each in (a, b)]
    if min(map(min, rounds)) <= 0:
        return "in some windows it took no time"
    return compare.independent(*rounds)


def _row(
    name: str,
    pair: tuple[np.ndarray | None, np.ndarray | None],
    tables: tuple[StepTable, StepTable],
    comparison: Comparison | None,
    judged: compare.Contrast | str,
) -> StageRow:
    shares = [
        None if spent is None else share_of(name, None, spent, table.host_s.sum(axis=1))
        for spent, table in zip(pair, tables, strict=True)
    ]
    reason = judged if isinstance(judged, str) else comparison.reason if comparison else None
    return StageRow(name, shares[0], shares[1], comparison, reason)


def stage_seconds(table: StepTable, most: int = MOST_STAGES) -> dict[str, np.ndarray]:
    """Return by stage what each step spent in it on the host, most first; all beyond the `most` largest as one."""
    order = np.argsort(-table.host_s.sum(axis=0), kind="stable")
    found = {table.names[place]: table.host_s[:, place] for place in order[:most] if table.host_s[:, place].any()}
    if len(order) > most:
        found[REST] = table.host_s[:, order[most:]].sum(axis=1)
    return found


def grouped(numbers: np.ndarray, values: np.ndarray, most: int = MOST_BARS) -> tuple[np.ndarray, np.ndarray]:
    """Return the first number and the mean of each of at most `most` groups of neighbours of about the same size."""
    if not len(values):
        return numbers, values
    first = np.unique(np.linspace(0, len(values), min(len(values), most), endpoint=False).astype(int))
    sizes = np.diff([*first, len(values)])
    return numbers[first], np.add.reduceat(values, first) / sizes


def thinned(numbers: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return about `most` points: both ends, and the least and the largest of neighbours, so that no peak is lost."""
    if len(values) <= most:
        return numbers, values
    kept = {0, len(values) - 1}
    for places in np.array_split(np.arange(len(values)), most // 2):
        kept |= {int(places[values[places].argmin()]), int(places[values[places].argmax()])}
    order = sorted(kept)
    return numbers[order], values[order]


def points(lines: Mapping[str, tuple[np.ndarray, np.ndarray]], unit: float = 1.0) -> "pandas.DataFrame":
    """Return lines as rows of `x`, `y` in the given unit, and `series`, as a drawing takes them."""
    rows = [
        (int(x), float(y) / unit, name)
        for name, (numbers, values) in lines.items()
        for x, y in zip(numbers, values, strict=True)
    ]
    import pandas  # takes a third of a second, and the rules of the alerts do without

    return pandas.DataFrame(rows, columns=["x", "y", "series"])
