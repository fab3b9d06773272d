"""Every metric of every batch size in one table, coloured from the worst to the best of its row."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import seaborn
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.baseline import COLUMNS, Optimal, Row
from utils.report.pictures.style import INK, STATUS_TEXT, Rows, Subject, new_figure, number, picture

COLOURS = colormaps["YlGnBu"]
NEITHER = "#ededed"  # better nor worse
WIDEST = 32.0  # inches


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


@picture("metrics_heatmap.png", "every metric of every batch size")
def figure(rows: Rows, about: Subject, best: Optimal) -> Figure:
    """Return the table; the column of the optimal batch size is framed. A metric that no row has is left out."""
    metrics = [metric for metric in METRICS if any(row[metric.key] is not None for row in rows)] or METRICS[:1]
    values = pd.DataFrame([[row[metric.key] for row in rows] for metric in metrics], dtype=float)
    shares = normalised(values, [metric.more_is_better for metric in metrics])
    drawn = new_figure(about, width=min(max(10.0, 5.5 + 1.05 * len(rows)), WIDEST), height=2.6 + 0.52 * len(metrics))
    axes = drawn.subplots()
    axes.set_facecolor(NEITHER)
    seaborn.heatmap(
        shares,
        vmin=0,
        vmax=1,
        cmap=COLOURS,
        annot=values.map(number),
        fmt="",
        annot_kws={"fontsize": 12},
        linewidths=1.5,
        linecolor="white",
        ax=axes,
        cbar_kws={"ticks": [0, 1], "pad": 0.02, "fraction": 0.04},
    )
    axes.collections[0].colorbar.ax.set_yticklabels(["worst\nof the row", "best\nof the row"])
    for line, column in np.argwhere(shares.isna().to_numpy()):
        _fill(axes, column, line, rows[column], values.iat[line, column])
    _name_axes(axes, metrics, rows)
    chosen = [column for column, row in enumerate(rows) if _is_chosen(row, rows, best)]
    for column in chosen:
        frame = {"fill": False, "edgecolor": INK, "linewidth": 3, "clip_on": False, "zorder": 5}
        axes.add_patch(Rectangle((column, 0), 1, len(metrics), **frame))
    axes.set_xlabel("batch size" + ("; framed: optimal" if chosen else ""))
    return drawn


def normalised(values: pd.DataFrame, more_is_better: list[bool]) -> pd.DataFrame:
    """Return each value as 0 for the worst of its row to 1 for the best; NaN where unknown or where none is better."""
    low, high = values.min(axis=1), values.max(axis=1)
    shares = values.sub(low, axis=0).div((high - low).replace(0, np.nan), axis=0)
    return shares.where(pd.Series(more_is_better), 1 - shares, axis=0)


def _name_axes(axes: Axes, metrics: list[Metric], rows: Rows) -> None:
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    columns = [f"{row['dtype']}\n{row['batch_size']}" if len(dtypes) > 1 else str(row["batch_size"]) for row in rows]
    names = [f"{metric.name} {'↑' if metric.more_is_better else '↓'}" for metric in metrics]
    axes.set_xticks(np.arange(len(rows)) + 0.5, columns, rotation=0)
    axes.set_yticks(np.arange(len(metrics)) + 0.5, names, rotation=0)
    axes.tick_params(length=0)
    axes.set_title("Metrics by batch size (↑ more is better, ↓ less is better)", pad=12)


def _fill(axes: Axes, column: int, line: int, row: Row, value: float) -> None:
    """Write a value that is neither best nor worst, or hatch the cell and write why there is none."""
    middle = {"x": column + 0.5, "y": line + 0.5, "ha": "center", "va": "center", "color": INK}
    if not np.isnan(value):
        axes.text(s=number(value), **middle)
        return
    look = {"facecolor": "none", "edgecolor": "#c8c8c8", "hatch": "//", "linewidth": 0}
    axes.add_patch(Rectangle((column, line), 1, 1, zorder=0.5, **look))
    text = STATUS_TEXT.get(row["status"], "not known").replace(" (", "\n(").replace("of ", "of\n")
    axes.text(s=text, fontsize=8.5, linespacing=0.95, **middle)


def _is_chosen(row: Row, rows: Rows, best: Optimal) -> bool:
    return bool(row["batch_size"] == best["batch_size"] and row["dtype"] == rows[0]["dtype"])
