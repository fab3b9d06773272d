"""Which classes are taken for which, as a matrix: rows of a class across, right ones in blue, wrong ones in orange."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
from matplotlib.figure import Figure

from utils.plots.style import INK, MUTED, Subject, draw_cells, new_figure, number, shortened, styled

SHOWN = 24  # classes: more cannot be read
OTHERS = "other classes"
LONGEST_CLASS = 32  # characters
EMPTY, GREY = to_rgba("white"), to_rgba("#eeeeee")
NO_ROWS = "no rows with this label"
# From Okabe & Ito's blue and vermillion, which people with any colour vision tell apart; the counts say it again.
RIGHT = LinearSegmentedColormap.from_list("right", ["#e3eef6", "#0072B2"])
WRONG = LinearSegmentedColormap.from_list("wrong", ["#fdeee2", "#D55E00"])
DARK_FROM = 0.6  # of the blues, from which white letters are read better
UPRIGHT = 40  # characters over all columns, up to which names fit side by side
LEAST_SCALE = 0.1  # of the wrong ones, so that a mistake or two do not look like a disaster
CELL, LEAST_WIDTH = 0.45, 9.5  # inches


@styled
def figure(confusion: np.ndarray, names: Sequence[str], about: Subject) -> Figure:
    """Return the matrix of label (line) by prediction (column); of many classes those that are confused most.

    The predictions of a shown class as one that is not shown are added up in a last column.
    """
    shown = chosen(confusion)
    counts = with_others(confusion, shown)
    width = 5.2 + CELL * counts.shape[1]
    drawn = new_figure(about, width=max(width, LEAST_WIDTH), height=4.0 + CELL * len(shown))
    axes = drawn.subplots()
    support = confusion.sum(axis=1)[shown]
    shares = counts / np.maximum(support, 1)[:, None]
    wrong = shares.copy()
    wrong[np.arange(len(shown)), np.arange(len(shown))] = 0
    scale = max(float(wrong.max(initial=0.0)), LEAST_SCALE)
    axes.imshow(_colours(counts, shares, support, scale), aspect="equal" if len(shown) > 4 else "auto")
    _name(axes, [shortened(names[each], LONGEST_CLASS) for each in shown], counts.shape[1] > len(shown))
    _count(axes, counts, shares)
    axes.set_title(_title(confusion, shown, counts), pad=12)
    _legend(drawn, axes, scale)
    return drawn


def chosen(confusion: np.ndarray) -> list[int]:
    """Return the classes to show: all in their order, or the `SHOWN` of the most confused pairs, those side by side."""
    classes = len(confusion)
    if classes <= SHOWN:
        return list(range(classes))
    together = confusion + confusion.T
    np.fill_diagonal(together, 0)
    first, second = np.nonzero(np.triu(together))
    order = np.lexsort((second, first, -together[first, second]))
    found: dict[int, None] = {}
    for place in order.tolist():
        pair = (int(first[place]), int(second[place]))
        if len(found.keys() | set(pair)) > SHOWN:
            continue
        found |= dict.fromkeys(pair)
    largest = np.argsort(-confusion.sum(axis=1), kind="stable").tolist()  # where hardly anything is confused
    for each in largest:
        if len(found) < SHOWN:
            found.setdefault(each)
    return _side_by_side(together, list(found))


def with_others(confusion: np.ndarray, shown: Sequence[int]) -> np.ndarray:
    """Return the matrix of the classes `shown`, with a last column for all other predictions where classes are left."""
    part = confusion[np.ix_(shown, shown)]
    if len(shown) == len(confusion):
        return part
    others = confusion[shown].sum(axis=1) - part.sum(axis=1)
    return np.column_stack([part, others])


def _side_by_side(together: np.ndarray, classes: list[int]) -> list[int]:
    """Return `classes` so that those confused with each other stand together: next comes the one confused most."""
    placed, left = [classes[0]], classes[1:]
    while left:
        links = together[np.ix_(left, placed[-3:])].sum(axis=1)
        further = together[np.ix_(left, placed)].sum(axis=1)
        best = int(np.lexsort((-further, -links))[0])  # of none, the pair that is confused most comes first
        placed.append(left.pop(best))
    return placed


def _colours(counts: np.ndarray, shares: np.ndarray, support: np.ndarray, scale: float) -> np.ndarray:
    coloured = WRONG(np.sqrt(shares / scale))
    coloured[counts == 0] = EMPTY
    for line in range(len(counts)):
        coloured[line, line] = RIGHT(shares[line, line])
        if not support[line]:
            coloured[line, :] = GREY
    return coloured


def _name(axes: Axes, names: Sequence[str], has_others: bool) -> None:
    columns = [*names, OTHERS] if has_others else list(names)
    is_long = max(map(len, columns)) > UPRIGHT / len(columns)
    axes.set_xticks(range(len(columns)), columns, rotation=90 if is_long else 0)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("predicted as")
    axes.set_ylabel("label")
    draw_cells(axes, len(names), len(columns), color="#ededed", width=1.0)
    if has_others:
        axes.axvline(len(names) - 0.5, color=MUTED, linewidth=1.2)


def _count(axes: Axes, counts: np.ndarray, shares: np.ndarray) -> None:
    """Write how many rows each cell has, where it has any or should have; a label without rows says so."""
    look = {"ha": "center", "va": "center", "fontsize": 9.5}
    for line, row in enumerate(counts):
        if not row.any():
            axes.text(len(row) / 2 - 0.5, line, NO_ROWS, color=MUTED, **look)
            continue
        for column in {line, *np.flatnonzero(row).tolist()}:
            is_dark = line == column and shares[line, column] > DARK_FROM
            axes.text(column, line, number(row[column]), color="white" if is_dark else INK, **look)


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


def _legend(drawn: Figure, axes: Axes, scale: float) -> None:
    """Say what the colours mean; the wrong ones have a scale of their own, by the root, so that few are seen too."""
    right = ScalarMappable(Normalize(0, 1), RIGHT)
    wrong = ScalarMappable(Normalize(0, 1), WRONG)
    for mappable, ticks, texts, label in (
        (right, [0, 0.5, 1], ["0 %", "50 %", "100 %"], "right, of the label's rows"),
        (wrong, [0, 0.5, 1], [f"{100 * scale * each**2:.3g} %" for each in (0, 0.5, 1)], "wrong, of the label's rows"),
    ):
        bar = drawn.colorbar(mappable, ax=axes, ticks=ticks, fraction=0.03, pad=0.02, shrink=0.8)
        bar.ax.set_yticklabels(texts)
        bar.set_label(label)
        bar.outline.set_visible(False)
