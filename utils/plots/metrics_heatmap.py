"""Every metric of every batch size in one table, coloured from the worst to the best of its row."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.columns import COLUMNS
from utils.plots.panel import STATUS_TEXT
from utils.plots.style import INK, Subject, draw_cells, new_figure, number, styled

Rows = Sequence[Mapping[str, Any]]
COLOURS = colormaps["YlGnBu"].with_extremes(bad="#ededed")
WIDEST = 32.0  # inches
DARK_FROM = 0.6  # share of the scale from which white letters are read better


class Metric(NamedTuple):
    """A row of the table: its column in the metrics, its name with unit, and whether more is better."""

    key: str
    name: str
    more_is_better: bool


METRICS = [
    Metric(column.name, column.shown, more_is_better)
    for more_is_better in (True, False)
    for column in COLUMNS
    if column.shown and more_is_better == (column.is_better == "more")
]


@styled
def figure(rows: Rows, about: Subject, best: Mapping[str, Any]) -> Figure:
    """Return the table; the column of the optimal batch size is framed. A metric that no row has is left out."""
    metrics = [metric for metric in METRICS if any(row[metric.key] is not None for row in rows)] or METRICS[:1]
    drawn = new_figure(about, width=min(max(10.0, 5.5 + 1.05 * len(rows)), WIDEST), height=2.6 + 0.52 * len(metrics))
    axes = drawn.subplots()
    shares = np.array([normalised([row[metric.key] for row in rows], metric.more_is_better) for metric in metrics])
    image = axes.imshow(np.ma.masked_invalid(shares), cmap=COLOURS, vmin=0, vmax=1, aspect="auto")
    _name_axes(axes, metrics, rows)
    for line, metric in enumerate(metrics):
        for column, row in enumerate(rows):
            _fill(axes, (column, line), row, metric, shares[line, column])
    chosen = [column for column, row in enumerate(rows) if _is_chosen(row, rows, best)]
    for column in chosen:
        size = (1, len(metrics))
        axes.add_patch(
            Rectangle((column - 0.5, -0.5), *size, fill=False, edgecolor=INK, linewidth=3, clip_on=False, zorder=5)
        )
    axes.set_xlabel("batch size" + ("; framed: optimal" if chosen else ""))
    bar = drawn.colorbar(image, ax=axes, ticks=[0, 1], pad=0.02, fraction=0.04)
    bar.ax.set_yticklabels(["worst\nof the row", "best\nof the row"])
    bar.outline.set_visible(False)
    return drawn


def normalised(values: Sequence[float | None], more_is_better: bool) -> list[float]:
    """Return each value as 0 for the worst to 1 for the best; NaN for None, and for all where none is better."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    shares = [math.nan if value is None or high == low else (value - low) / (high - low) for value in values]
    return shares if more_is_better else [1 - share for share in shares]


def _name_axes(axes: Axes, metrics: Sequence[Metric], rows: Rows) -> None:
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    columns = [f"{row['dtype']}\n{row['batch_size']}" if len(dtypes) > 1 else str(row["batch_size"]) for row in rows]
    axes.set_xticks(range(len(rows)), columns)
    axes.set_yticks(
        range(len(metrics)), [f"{metric.name} {'↑' if metric.more_is_better else '↓'}" for metric in metrics]
    )
    draw_cells(axes, len(metrics), len(rows), color="white", width=2.5)
    axes.set_title("Metrics by batch size (↑ more is better, ↓ less is better)", pad=12)


def _fill(axes: Axes, place: tuple[int, int], row: Mapping[str, Any], metric: Metric, share: float) -> None:
    """Write the value into its cell, or hatch the cell and write why there is none."""
    column, line = place
    value = row[metric.key]
    if value is not None:
        axes.text(column, line, number(value), ha="center", va="center", color="white" if share > DARK_FROM else INK)
        return
    look = {"facecolor": "none", "edgecolor": "#c8c8c8", "hatch": "//", "linewidth": 0}
    axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, zorder=0.5, **look))
    text = STATUS_TEXT.get(row["status"], "not known").replace(" (", "\n(").replace("of ", "of\n")
    axes.text(column, line, text, ha="center", va="center", color=INK, fontsize=8.5, linespacing=0.95)


def _is_chosen(row: Mapping[str, Any], rows: Rows, best: Mapping[str, Any]) -> bool:
    return row["batch_size"] == best["batch_size"] and row["dtype"] == rows[0]["dtype"]
