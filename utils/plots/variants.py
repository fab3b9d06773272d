"""The variants of step 05: how fast each is against what it does to the answers; a mark is as large as its weights."""

import itertools
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from utils.document import VariantRow, Variants
from utils.plots.style import ALARM, INK, MUTED, Subject, new_figure, number, picture, shortened

ALLOWED, REFUSED, CHOSEN = "#0072B2", "#999999", "#D55E00"
LEAST_AREA, MOST_AREA = 150.0, 1100.0
ROOM = 1.25  # beyond the fastest, on the axis
NUMBER_SIZE = (20.0, 15.0)  # points, of two digits with a margin
AROUND = [math.radians(degrees) for degrees in range(90, 450, 45)]  # where a number may stand, above first
FARTHER = 6.0  # points
LONGEST_WORDS = 36  # letters


@picture("variants.png", "how fast each variant is, and what it does to the answers")
def figure(rows: Sequence[VariantRow], about: Subject, found: Variants) -> Figure:
    """Return the figure; a line joins the variants that none beats in both."""
    drawn = new_figure(about, width=13.5, height=7)
    axes, key = drawn.subplots(1, 2, width_ratios=[1.6, 1])
    has_labels = all(row["exactness"].get("accuracy_difference") is not None for row in rows)
    tolerance = -100 * found["max_accuracy_drop"] if has_labels else 100 * found["min_agreement"]
    heights = [_height(row, has_labels) for row in rows]
    _front(axes, rows, [height[0] for height in heights])
    heaviest = max(row["weight_bytes"] or 0 for row in rows)
    areas = [LEAST_AREA + (MOST_AREA - LEAST_AREA) * (row["weight_bytes"] or 0) / heaviest for row in rows]
    for row, (value, low, high), area in zip(rows, heights, areas, strict=True):
        colour, speed = _colour(row, found), row["texts_per_s"]
        axes.plot([speed["low"], speed["high"]], [value, value], color=colour, linewidth=1.5, zorder=2)
        if row["against"] or low >= tolerance:  # of the same arithmetic the value alone counts
            axes.plot([speed["value"]] * 2, [low, high], color=colour, linewidth=1.5, zorder=2)
        axes.scatter(
            speed["value"],
            value,
            s=area,
            color=colour,
            alpha=0.85,
            edgecolor="white",
            zorder=3.5 if colour == CHOSEN else 3,
        )
    axes.axhline(tolerance, color=ALARM, linestyle=(0, (5, 3)), linewidth=1.2)
    place = {"xytext": (0, -4), "textcoords": "offset points", "va": "top"}
    allowed = axes.annotate("allowed: the whole bar above", (0.01, tolerance), xycoords=("axes fraction", "data"),
                            color=ALARM, fontsize=10, **place)  # fmt: skip
    axes.set_xlim(0, ROOM * max(row["texts_per_s"]["value"] for row in rows))
    axes.margins(y=0.15)
    axes.set_xlabel("texts per second, tokenizing included")
    axes.set_ylabel("accuracy against float32, percentage points" if has_labels else "labels as in float32, %")
    axes.set_title("Speed against answers")
    axes.grid(linewidth=0.8)
    _key(key, rows, found)
    drawn.draw_without_rendering()  # only then are the places in points known
    points = [(row["texts_per_s"]["value"], height[0]) for row, height in zip(rows, heights, strict=True)]
    _number(axes, points, areas, allowed.get_window_extent())
    return drawn


def _height(row: VariantRow, has_labels: bool) -> tuple[float, float, float]:
    """Return what the answers are worth and the ends of the interval, in percent."""
    names = ("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high")
    if not has_labels:
        names = ("agreement", "agreement_low", "agreement_high")
    value, low, high = (100 * float(row["exactness"][name]) for name in names)  # type: ignore[literal-required]
    return value, low, high


def _number(axes: Axes, points: Sequence[tuple[float, float]], areas: Sequence[float], taken: Bbox) -> None:
    """Write the number of each mark near it, where it hides no mark and no other number; `taken` is in pixels."""
    assert axes.figure is not None
    pixels = axes.figure.dpi / 72
    middles = [(x / pixels, y / pixels) for x, y in axes.transData.transform(points)]
    marks = [_box(middle, math.sqrt(area), math.sqrt(area)) for middle, area in zip(middles, areas, strict=True)]
    room, texts = (Bbox(box.extents.reshape(2, 2) / pixels) for box in (axes.bbox, taken))
    look = {
        "color": INK,
        "weight": "bold",
        "ha": "center",
        "va": "center",
        "fontsize": 11,
        "zorder": 4,
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    }
    line = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
    occupied = [*marks, texts]
    for place in sorted(range(len(points)), key=lambda place: points[place]):
        offset = _free(middles[place], occupied, room)
        occupied.append(_beside(middles[place], offset))
        shown = axes.annotate("", points[place], offset, textcoords="offset points", arrowprops=line, zorder=3.8)
        text = axes.annotate(str(place + 1), points[place], offset, textcoords="offset points", **look)
        for each in (shown, text):
            each.set_in_layout(False)


def _free(middle: tuple[float, float], occupied: Sequence[Bbox], room: Bbox) -> tuple[float, float]:
    """Return how far from the middle of its mark a number stands free, in points; within the room if it holds any."""
    farthest = math.hypot(room.width, room.height)
    for step in itertools.count(1):
        for angle in AROUND:
            offset = (step * FARTHER * math.cos(angle), step * FARTHER * math.sin(angle))
            box = _beside(middle, offset)
            is_inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
            if (is_inside or step * FARTHER > farthest) and not box.count_overlaps(occupied):
                return offset
    raise AssertionError("the plane has an end")


def _beside(middle: tuple[float, float], offset: tuple[float, float]) -> Bbox:
    return _box((middle[0] + offset[0], middle[1] + offset[1]), *NUMBER_SIZE)


def _box(middle: tuple[float, float], width: float, height: float) -> Bbox:
    return Bbox.from_bounds(middle[0] - width / 2, middle[1] - height / 2, width, height)


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
    """Write what the numbers of the marks stand for."""
    axes.axis("off")
    step = min(0.068, 1 / (len(rows) + 2))
    for place, row in enumerate(rows, start=1):
        height = 1 - step * place
        is_chosen = row["name"] == found["recommended"]["name"]
        weight = "bold" if is_chosen else "normal"
        axes.text(0.0, height, str(place), color=_colour(row, found), weight="bold", fontsize=11)
        axes.text(0.07, height, shortened(row["words"], LONGEST_WORDS), color=INK, weight=weight, fontsize=10)
        weights = row["weight_bytes"]
        size = "" if weights is None else f", {number(weights / 1e6)} MB"
        figures = f"{number(row['texts_per_s']['value'])}/s{size}"
        axes.text(1.0, height, figures, color=MUTED, fontsize=10, ha="right")
    said = "orange: recommended; grey: labels or accuracy may change too much;\na mark is as large as its weights"
    axes.text(0.0, 1 - step * (len(rows) + 0.6), said, color=MUTED, fontsize=9.5, va="top", linespacing=1.5)
