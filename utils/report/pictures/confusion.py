"""Which classes are taken for which, as a matrix: rows of a class across, right ones in blue, wrong ones in orange."""

from collections.abc import Sequence

import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure

from utils.report.pictures.style import MUTED, Subject, new_figure, number, picture, shortened

SHOWN = 24  # classes: more cannot be read
OTHERS = "other classes"
LONGEST_CLASS = 32  # characters
GREY = "#eeeeee"
NO_ROWS = "no rows with this label"
# From Okabe & Ito's blue and vermillion, which people with any colour vision tell apart; the counts say it again.
RIGHT = LinearSegmentedColormap.from_list("right", ["#e3eef6", "#0072B2"])
WRONG = LinearSegmentedColormap.from_list("wrong", [(0, "white"), (1 / 255, "#fdeee2"), (1, "#D55E00")])
UPRIGHT = 40  # characters over all columns, up to which names fit side by side
LEAST_SCALE = 0.1  # of the wrong ones, so that a mistake or two do not look like a disaster
CELL, LEAST_WIDTH = 0.45, 9.5  # inches


@picture("confusion_matrix.png", "which classes are taken for which")
def figure(confusion: np.ndarray, about: Subject, names: Sequence[str]) -> Figure:
    """Return the matrix of label (line) by prediction (column); of many classes those that are confused most.

    The predictions of a shown class as one that is not shown are added up in a last column. The wrong ones have a
    scale of their own, by the root, so that few are seen too.
    """
    shown = chosen(confusion)
    counts = with_others(confusion, shown)
    width = 5.2 + CELL * counts.shape[1]
    drawn = new_figure(about, width=max(width, LEAST_WIDTH), height=4.0 + CELL * len(shown))
    axes = drawn.subplots()
    support = confusion.sum(axis=1)[shown]
    shares = counts / np.maximum(support, 1)[:, None]
    is_right = np.eye(*counts.shape, dtype=np.bool_)
    scale = max(float(shares[~is_right].max(initial=0.0)), LEAST_SCALE)
    has_rows = support[:, None] > 0
    axes.set_facecolor(GREY)
    _cells(axes, counts, shares, is_right & has_rows, RIGHT, Normalize(0, 1), "right, of the label's rows")
    wrong = ~is_right & has_rows
    _cells(axes, counts, shares, wrong, WRONG, PowerNorm(0.5, 0, scale), "wrong, of the label's rows")
    for line in np.flatnonzero(support == 0):
        axes.text(counts.shape[1] / 2, line + 0.5, NO_ROWS, ha="center", va="center", color=MUTED, fontsize=9.5)
    _name(axes, [shortened(names[number], LONGEST_CLASS) for number in shown], counts.shape[1] > len(shown))
    axes.set_aspect("equal" if len(shown) > 4 else "auto")
    axes.set_title(_title(confusion, shown, counts), pad=12)
    return drawn


def _cells(
    axes: Axes,
    counts: np.ndarray,
    shares: np.ndarray,
    chosen: np.ndarray,
    colours: Colormap,
    norm: Normalize,
    label: str,
) -> None:
    """Draw the cells chosen, coloured by their share and with their counts; of the wrong ones none without rows."""
    counted = np.where((counts > 0) | np.eye(*counts.shape, dtype=np.bool_), np.vectorize(number)(counts), "")
    seaborn.heatmap(
        shares,
        mask=~chosen,
        norm=norm,
        cmap=colours,
        annot=counted,
        fmt="",
        annot_kws={"fontsize": 9.5},
        linewidths=1.0,
        linecolor="#ededed",
        ax=axes,
        cbar_kws={"label": label, "fraction": 0.03, "pad": 0.02, "shrink": 0.8},
    )
    ticks = np.array([0, 0.25, 1]) * norm.vmax if isinstance(norm, PowerNorm) else np.array([0, 0.5, 1])
    axes.collections[-1].colorbar.set_ticks(ticks, labels=[f"{100 * tick:.3g} %" for tick in ticks], minor=False)
    axes.collections[-1].colorbar.ax.minorticks_off()


def chosen(confusion: np.ndarray) -> list[int]:
    """Return the classes to show, in their order: all, or the `SHOWN` of the most confused pairs."""
    together = confusion + confusion.T
    np.fill_diagonal(together, 0)
    most = np.argsort(-together.max(axis=1), kind="stable")[:SHOWN]
    return sorted(most.tolist())


def with_others(confusion: np.ndarray, shown: Sequence[int]) -> np.ndarray:
    """Return the matrix of the classes `shown`, with a last column for all other predictions where classes are left."""
    part = confusion[np.ix_(shown, shown)]
    if len(shown) == len(confusion):
        return part
    others = confusion[shown].sum(axis=1) - part.sum(axis=1)
    return np.column_stack([part, others])


def _name(axes: Axes, names: Sequence[str], has_others: bool) -> None:
    columns = [*names, OTHERS] if has_others else list(names)
    is_long = max(map(len, columns)) > UPRIGHT / len(columns)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90 if is_long else 0)
    axes.set_yticks(np.arange(len(names)) + 0.5, names, rotation=0)
    axes.tick_params(length=0)
    axes.set_xlabel("predicted as")
    axes.set_ylabel("label")
    if has_others:
        axes.axvline(len(names), color=MUTED, linewidth=1.2)


def _title(confusion: np.ndarray, shown: Sequence[int], counts: np.ndarray) -> str:
    mistakes = int(confusion.sum() - np.trace(confusion))
    if len(shown) == len(confusion):
        return f"{len(shown)} classes: {mistakes:,} of {int(confusion.sum()):,} rows are predicted wrong"
    inside = counts[:, : len(shown)]
    seen = int(inside.sum() - np.trace(inside))
    return (
        f"The {len(shown)} most confused of {len(confusion):,} classes: {seen:,} of all {mistakes:,} mistakes "
        "are among them"
    )
