"""The operators that take most of the traced time, as horizontal bars."""

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.baseline import Operator
from utils.report.pictures.style import Subject, bars, new_figure, number, picture, shortened

SHOWN = 12
LONGEST_OPERATOR = 50  # characters


@picture("operators.png", "where the traced time goes")
def figure(rows: Sequence[Operator], about: Subject) -> Figure:
    """Return the figure for one row per operator: own CPU time and, where it is known, the device time it caused."""
    on_device = [row for row in rows if row["device_total_ms"]]
    panels = 2 if on_device else 1
    shown = min(SHOWN, max(len(rows), 3))
    drawn = new_figure(about, width=11.5 if panels == 1 else 19.0, height=2.6 + 0.42 * shown)
    axes = drawn.subplots(1, panels, squeeze=False)[0]
    _bars(axes[0], rows, "cpu_self_ms", "cpu_self_pct", "#0072B2")
    axes[0].set_title("Operators by their own CPU time")
    if on_device:
        _bars(axes[1], on_device, "device_total_ms", "device_pct", "#D55E00")
        axes[1].set_title("Operators by the GPU time they cause")
        axes[1].set_xlabel("ms of kernels; with the operators they call, so bars overlap")
    return drawn


def _bars(
    axes: Axes,
    rows: Sequence[Any],
    key: Literal["cpu_self_ms", "device_total_ms"],
    share: Literal["cpu_self_pct", "device_pct"],
    colour: str,
) -> None:
    top = sorted(rows, key=lambda row: row[key], reverse=True)[:SHOWN]
    names = [shortened(row["name"], LONGEST_OPERATOR) for row in top]
    texts = [f"{number(row[key])} ms{_percent(row[share])}, {row['calls']:,} calls" for row in top]
    bars(axes, names, [row[key] for row in top], texts, 1.75, color=colour)
    axes.set_xlabel("ms, without the operators they call")


def _percent(share: float | None) -> str:
    return "" if share is None else f" ({share:.1f} %)"
