"""Whose the time of a batch is: one bar for each batch size whose time was split, padding hatched."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from boundby.bound import Part, PartKind
from utils.baseline import Row
from utils.report.pictures.style import MUTED, Rows, Subject, new_figure, picture

LOOKS: dict[PartKind, tuple[str, str]] = {  # colour, and the name in the legend
    "compute": ("#0072B2", "arithmetic at full speed"),
    "memory": ("#56B4E9", "moving data at full speed"),
    "kernels": ("#E69F00", "kernels below peak"),
    "around": ("#D55E00", "cold caches, waiting threads"),
    "host": ("#CC79A7", "Python and dispatch"),
    "unexplained": ("#BBBBBB", "left over"),
}
BAR = 0.62  # of the distance between bars
LEAST_NAMED = 0.05  # of the whole, for a part to have its share written in it


@picture("owners.png", "whose the time of a batch is, and how much of it goes into padding")
def figure(rows: Rows, about: Subject) -> Figure:
    """Return the figure for the rows whose verdict names owners."""
    drawn = new_figure(about, width=12, height=2.9 + 0.62 * len(rows))
    axes = drawn.subplots()
    longest = 100.0  # more where what is left over is negative
    for place, row in enumerate(rows):
        parts = row["verdict"].breakdown
        whole = sum(part.seconds for part in parts)
        left = 0.0
        for part in (part for part in parts if part.seconds > 0):
            left += _part(axes, place, left, part, whole)
        longest = max(longest, left)
    names = [_name(row, len({row["dtype"] for row in rows}) > 1) for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, longest), xlabel="% of the time of one batch")
    axes.set_title("Whose the time is")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    drawn.legend(handles=_key(rows), loc="outside lower center", ncols=3, fontsize=11)
    return drawn


def _part(axes: Axes, place: int, left: float, part: Part, whole: float) -> float:
    """Draw one part with its padding hatched at its end; return its width."""
    width, colour = 100 * part.seconds / whole, LOOKS[part.kind][0]
    padding = width * (part.padding_share or 0.0)
    axes.barh(place, width, BAR, left, color=colour, edgecolor="white", linewidth=0.8)
    if padding:
        look = {"facecolor": "none", "edgecolor": "white", "hatch": "///", "linewidth": 0}
        axes.barh(place, padding, BAR, left + width - padding, **look)
    if width >= 100 * LEAST_NAMED:
        look = {"ha": "center", "va": "center", "color": "white", "weight": "bold", "fontsize": 11}
        box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
        axes.text(left + width / 2, place, f"{width:.0f}", bbox=box, **look)
    return width


def _name(row: Row, with_dtype: bool) -> str:
    shape = str(row["verdict"].reference or f"batch {row['batch_size']}")
    return f"{shape}, {row['dtype']}" if with_dtype else shape


def _key(rows: Sequence[Row]) -> list[Patch]:
    kinds = {part.kind for row in rows for part in row["verdict"].breakdown if part.seconds > 0}
    marks = [Patch(facecolor=colour, label=name) for kind, (colour, name) in LOOKS.items() if kind in kinds]
    return [*marks, Patch(facecolor=MUTED, edgecolor="white", hatch="////", linewidth=0, label="hatched: for padding")]
