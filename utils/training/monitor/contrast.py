"""The numbers of a run that a drawing can bear."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from boundby.training import StepTable

if TYPE_CHECKING:
    import pandas

REST = "(other stages)"
MOST_POINTS = 600  # of a line
MOST_BARS = 150  # groups of steps side by side
MOST_STAGES = 8  # that a drawing tells apart


def stage_seconds(table: StepTable, most: int = MOST_STAGES) -> dict[str, np.ndarray]:
    """Return by stage what each step spent in it on the host, most first; all beyond the `most` largest as one."""
    order = np.argsort(-table.host_s.sum(axis=0), kind="stable")
    seconds = {table.names[index]: table.host_s[:, index] for index in order[:most] if table.host_s[:, index].any()}
    if len(order) > most:
        seconds[REST] = table.host_s[:, order[most:]].sum(axis=1)
    return seconds


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
    for window in np.array_split(np.arange(len(values)), most // 2):
        kept |= {int(window[values[window].argmin()]), int(window[values[window].argmax()])}
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
