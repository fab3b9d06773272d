"""Where the time of a batch goes: one bar for each batch size whose time was split, padding hatched."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from boundby.bound import Part, PartKind
from utils.baseline import Row
from utils.report.pictures.style import MUTED, Rows, Subject, new_figure, picture

LOOKS: dict[PartKind, tuple[str, str]] = {  # colour, and the name in the legend
    "compute": ("#0072B2", "compute at peak"),
    "memory": ("#56B4E9", "memory traffic at peak"),
    "kernels": ("#E69F00", "kernels below peak"),
    "around": ("#D55E00", "cold caches, waiting threads"),
    "host": ("#CC79A7", "dispatch overhead (Python)"),
    "unexplained": ("#BBBBBB", "unexplained"),
}
BAR = 0.62  # of the distance between bars
LEAST_NAMED = 0.05  # of the whole, for a part to have its share written in it


@picture("breakdown.png", "where the time of a batch goes, and how much of it goes into padding")
def figure(rows: Rows, about: Subject) -> Figure:
    """Return the figure for the rows whose verdict splits their time."""
    drawn = new_figure(about, width=12, height=2.9 + 0.62 * len(rows))
    axes = drawn.subplots()
    longest = 100.0  # more where what is unexplained is negative
    for line, row in enumerate(rows):
        total_s = sum(part.seconds for part in row["verdict"].breakdown)
        left = 0.0
        for part in (part for part in row["verdict"].breakdown if part.seconds > 0):
            left += _part(axes, (left, line), part, 100 * part.seconds / total_s)
        longest = max(longest, left)
    axes.set_yticks(range(len(rows)), [_name(row, len({row["dtype"] for row in rows}) > 1) for row in rows])
    axes.invert_yaxis()
    axes.set(xlim=(0, longest), xlabel="% of the time of one batch")
    axes.set_title("Where the time goes")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    drawn.legend(handles=_key(rows), loc="outside lower center", ncols=3, fontsize=11)
    return drawn


def _part(axes: Axes, start: tuple[float, int], part: Part, width: float) -> float:
    """Draw one part with its padding hatched at its end; return its width."""
    (left, line), colour = start, LOOKS[part.kind][0]
    axes.barh(line, width, BAR, left, color=colour, edgecolor="white", linewidth=0.8)
    if padding := width * (part.padding_share or 0.0):
        look = {"facecolor": "none", "edgecolor": "white", "hatch": "///", "linewidth": 0}
        axes.barh(line, padding, BAR, left + width - padding, **look)
    if width >= 100 * LEAST_NAMED:
        look = {"ha": "center", "va": "center", "color": "white", "weight": "bold", "fontsize": 11}
        box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
        axes.text(left + width / 2, line, f"{width:.0f}", bbox=box, **look)
    return width


def _name(row: Row, with_dtype: bool) -> str:
    shape = str(row["verdict"].reference or f"batch {row['batch_size']}")
    return f"{shape}, {row['dtype']}" if with_dtype else shape


def _key(rows: Sequence[Row]) -> list[Patch]:
    kinds = {part.kind for row in rows for part in row["verdict"].breakdown if part.seconds > 0}
    marks = [Patch(facecolor=colour, label=name) for kind, (colour, name) in LOOKS.items() if kind in kinds]
    return [*marks, Patch(facecolor=MUTED, edgecolor="white", hatch="////", linewidth=0, label="hatched: for padding")]
