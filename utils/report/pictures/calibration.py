"""How often predictions are right, by their confidence; and how many there are of each confidence."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from utils.models import Calibration
from utils.report.pictures.style import ALARM, INK, MUTED, Subject, new_figure, number, picture

RIGHT, WRONG = "#0072B2", "#D55E00"
GRID = 0.1  # the axes begin at a multiple of it


@picture("calibration.png", "how often predictions are right, by their confidence")
def figure(calibration: Calibration, about: Subject) -> Figure:
    """Return the reliability diagram and the distribution of the confidence."""
    drawn = new_figure(about, width=15.5, height=7.2)
    diagram, distribution = drawn.subplots(1, 2, width_ratios=[1, 1.05])
    _reliability(diagram, calibration)
    _distribution(distribution, calibration)
    return drawn


def _reliability(axes: Axes, calibration: Calibration) -> None:
    bins = calibration.bins
    start = _start(min(min(group.mean_confidence, group.accuracy_ci_low) for group in bins))
    axes.plot([start, 1], [start, 1], color=MUTED, linestyle=(0, (5, 3)), linewidth=1.3, label="perfectly calibrated")
    for group in bins:
        axes.vlines(group.mean_confidence, group.accuracy_ci_low, group.accuracy_ci_high, RIGHT, linewidth=2)
    for has_few, face in ((False, RIGHT), (True, "white")):
        of_kind = [group for group in bins if group.has_few_rows == has_few]
        if of_kind:
            points = [[group.mean_confidence for group in of_kind], [group.accuracy for group in of_kind]]
            name = "bin of few rows" if has_few else "bin"
            look = {"markerfacecolor": face, "markeredgecolor": RIGHT, "markeredgewidth": 2, "markersize": 9}
            axes.plot(*points, "o", label=f"{name}, with its 95 % interval", **look)
    axes.annotate("overconfident", (0.97, 0.05), xycoords="axes fraction", ha="right", color=ALARM)
    axes.annotate("underconfident", (0.03, 0.95), xycoords="axes fraction", va="top", color=MUTED)
    pad = 0.02 * (1 - start)
    axes.set(xlim=(start - pad, 1 + pad), ylim=(start - pad, 1 + pad), aspect="equal")
    axes.set_title(f"Right predictions by confidence, {len(bins)} bin{'s' if len(bins) > 1 else ''} of equal mass")
    axes.set_xlabel("confidence: probability of the predicted label")
    axes.set_ylabel("predictions that are right")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, 0, " %"))
    axes.grid(linewidth=0.8)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.9))


def _distribution(axes: Axes, calibration: Calibration) -> None:
    rows, right = (np.array(counts) for counts in (calibration.distribution.rows, calibration.distribution.correct))
    edges = np.linspace(0, 1, len(rows) + 1)
    first = int(np.flatnonzero(rows)[0])
    look = {"width": np.diff(edges)[first:], "align": "edge", "edgecolor": "white", "linewidth": 0.6}
    starts, right, wrong = edges[first:-1], right[first:], (rows - right)[first:]
    axes.bar(starts, right, color=RIGHT, label="right", **look)
    axes.bar(starts, wrong, bottom=right, color=WRONG, hatch="//", label="wrong", **look)
    mean, accuracy = calibration.mean_confidence, calibration.accuracy
    axes.axvline(mean, color=INK, linewidth=1.6, label=f"mean confidence {100 * mean:.1f} %")
    axes.axvline(accuracy, color=INK, linewidth=1.6, linestyle=":", label=f"right {100 * accuracy:.1f} %")
    axes.set_xlim(_start(edges[first]), 1)
    axes.set_title(f"How sure it is: {sum(rows):,} prediction{'s' if sum(rows) > 1 else ''}")
    axes.set_xlabel("confidence")
    axes.set_ylabel("predictions")
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(number)
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="upper left")


def _start(least: float) -> float:
    """Return where an axis begins that has to show `least`."""
    return max(0.0, GRID * math.floor((least - 0.01) / GRID))
