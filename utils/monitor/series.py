"""The numbers of a run in the amounts that a drawing can bear."""

from typing import Any

import numpy as np

from boundby.training.records import StageTimes
from boundby.training.steps import StepTable

REST = "(other stages)"
MOST_POINTS = 600  # of a line
MOST_BARS = 150  # groups of steps side by side
MOST_STAGES = 8  # that a drawing tells apart


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


def metric(times: StageTimes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the finite values of one metric."""
    places = [place for place, each in enumerate(times.metric_names) if each == name]
    rows = times.metric_rows[np.isin(times.metric_rows["metric"], places)]
    rows = rows[np.isfinite(rows["value"])]
    return rows["step"], rows["value"]


def points(lines: dict[str, tuple[Any, Any]], unit: float = 1.0) -> list[dict[str, Any]]:
    """Return lines as rows of `x`, `y` in the given unit, and `series`, as a drawing takes them."""
    return [
        {"x": int(x), "y": float(y) / unit, "series": name}
        for name, (numbers, values) in lines.items()
        for x, y in zip(numbers, values, strict=True)
    ]
