"""The variants of step 05: how fast each is against what it does to the answers; a mark is as large as its weights."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.document import VariantRow, Variants
from utils.plots.style import ALARM, INK, MUTED, Subject, new_figure, number, picture

ALLOWED, REFUSED, CHOSEN = "#0072B2", "#999999", "#D55E00"
LEAST_AREA, MOST_AREA = 150.0, 1100.0
ROOM = 1.25  # beyond the fastest, on the axis
CLOSE = 0.05  # of the fastest: numbers nearer to one another would overlap
NUMBER_ABOVE, NUMBER_STEP = 26, 16  # points


@picture("variants.png", "how fast each variant is, and what it does to the answers")
def figure(rows: Sequence[VariantRow], about: Subject, found: Variants) -> Figure:
    """Return the figure; a line joins the variants that none beats in both."""
    drawn = new_figure(about, width=13.5, height=7)
    axes, key = drawn.subplots(1, 2, width_ratios=[1.75, 1])
    has_labels = all(row["exactness"].get("accuracy_difference") is not None for row in rows)
    tolerance = -100 * found["max_accuracy_drop"] if has_labels else 100 * found["min_agreement"]
    heights = [_height(row, has_labels) for row in rows]
    _front(axes, rows, [height[0] for height in heights])
    heaviest = max(row["weight_bytes"] or 0 for row in rows)
    for row, (value, low, high) in zip(rows, heights, strict=True):
        colour, speed = _colour(row, found), row["texts_per_s"]
        axes.plot([speed["low"], speed["high"]], [value, value], color=colour, linewidth=1.5, zorder=2)
        if row["against"] or low >= tolerance:  # of the same arithmetic the value alone counts
            axes.plot([speed["value"]] * 2, [low, high], color=colour, linewidth=1.5, zorder=2)
        area = LEAST_AREA + (MOST_AREA - LEAST_AREA) * (row["weight_bytes"] or 0) / heaviest
        axes.scatter(
            speed["value"],
            value,
            s=area,
            color=colour,
            alpha=0.85,
            edgecolor="white",
            zorder=3.5 if colour == CHOSEN else 3,
        )
    _number(axes, [(row["texts_per_s"]["value"], height[0]) for row, height in zip(rows, heights, strict=True)])
    axes.axhline(tolerance, color=ALARM, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.annotate("allowed: the whole bar above", (0.01, tolerance), xycoords=("axes fraction", "data"), va="top",
                  xytext=(0, -4), textcoords="offset points", color=ALARM, fontsize=10)  # fmt: skip
    axes.set_xlim(0, ROOM * max(row["texts_per_s"]["value"] for row in rows))
    axes.margins(y=0.15)
    axes.set_xlabel("texts per second, tokenizing included")
    axes.set_ylabel("accuracy against float32, percentage points" if has_labels else "labels as in float32, %")
    axes.set_title("Speed against answers")
    axes.grid(linewidth=0.8)
    _key(key, rows, found)
    return drawn


def _height(row: VariantRow, has_labels: bool) -> tuple[float, float, float]:
    """Return what the answers are worth and the ends of the interval, in percent."""
    names = ("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high")
    if not has_labels:
        names = ("agreement", "agreement_low", "agreement_high")
    value, low, high = (100 * float(row["exactness"][name]) for name in names)  # type: ignore[literal-required]
    return value, low, high


def _number(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Write the number of each mark above it, on a level of its own where marks lie close together."""
    close, last = CLOSE * max(speed for speed, _ in points), dict[int, float]()
    look = {
        "color": INK,
        "weight": "bold",
        "ha": "center",
        "fontsize": 11,
        "zorder": 4,
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    }
    line = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7}
    for place, (speed, value) in sorted(enumerate(points, start=1), key=lambda numbered: numbered[1]):
        level = next(level for level in range(len(points)) if speed - last.get(level, -close) >= close)
        last[level] = speed
        above = (0, NUMBER_ABOVE + NUMBER_STEP * level)
        axes.annotate(str(place), (speed, value), xytext=above, textcoords="offset points", arrowprops=line, **look)


def _front(axes: Axes, rows: Sequence[VariantRow], heights: Sequence[float]) -> None:
    """Join the variants that no other beats in speed without being worse in the answers."""
    points = sorted(zip((row["texts_per_s"]["value"] for row in rows), heights, strict=True), reverse=True)
    front: list[tuple[float, float]] = []
    for speed, height in points:
        if not front or height > front[-1][1]:
            front.append((speed, height))
    axes.plot(*zip(*front, strict=True), color=MUTED, linewidth=1.2, linestyle=":", zorder=1)


def _colour(row: VariantRow, found: Variants) -> str:
    if row["name"] == found["recommended"]["name"]:
        return CHOSEN
    return REFUSED if row["against"] else ALLOWED


def _key(axes: Axes, rows: Sequence[VariantRow], found: Variants) -> None:
    """Write what the numbers in the marks stand for."""
    axes.axis("off")
    for place, row in enumerate(rows, start=1):
        height = 1 - 0.068 * place
        is_chosen = row["name"] == found["recommended"]["name"]
        weight = "bold" if is_chosen else "normal"
        axes.text(0.0, height, str(place), color=_colour(row, found), weight="bold", fontsize=12)
        axes.text(0.08, height, row["words"], color=INK, weight=weight, fontsize=10.5)
        weights = row["weight_bytes"]
        size = "" if weights is None else f", {number(weights / 1e6)} MB"
        figures = f"{number(row['texts_per_s']['value'])}/s{size}"
        axes.text(1.0, height, figures, color=MUTED, fontsize=10.5, ha="right")
    last = 1 - 0.068 * (len(rows) + 1.6)
    axes.text(0.0, last, "orange: recommended; grey: labels or accuracy may change too much", color=MUTED, fontsize=10)
    axes.text(0.0, last - 0.055, "a mark is as large as its weights", color=MUTED, fontsize=10)
