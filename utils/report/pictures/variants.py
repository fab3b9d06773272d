"""The variants of step 05, a line each: how fast it is, and what it does to the answers."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from utils.baseline import VariantRow, Variants
from utils.report.pictures.style import ALARM, Subject, new_figure, number, picture, shortened

ALLOWED, REFUSED, CHOSEN = "#0072B2", "#999999", "#D55E00"
MEANING = {CHOSEN: "recommended", ALLOWED: "allowed", REFUSED: "labels or accuracy may change too much"}
ROOM = 1.15  # beyond the fastest, on the axis
LONGEST_WORDS = 44  # letters
HEIGHT, LINE_HEIGHT = 2.7, 0.34  # inches


@picture("variants.png", "how fast each variant is, and what it does to the answers")
def figure(rows: Sequence[VariantRow], about: Subject, compared: Variants) -> Figure:
    """Return the figure of the variants that were measured, in their order."""
    drawn = new_figure(about, width=15, height=HEIGHT + LINE_HEIGHT * max(len(rows), 4))
    speed, answers = drawn.subplots(1, 2, sharey=True)
    colours = [_colour(row, compared) for row in rows]
    _intervals(speed, [(row["texts_per_s"]["value"], row["texts_per_s"]["low"], row["texts_per_s"]["high"])
                       for row in rows], colours)  # fmt: skip
    speed.set_yticks(range(len(rows)), [_name(row) for row in rows])
    speed.invert_yaxis()
    speed.set_xlim(0, ROOM * max(row["texts_per_s"]["high"] for row in rows))
    speed.set_xlabel("texts per second, tokenizing included")
    speed.set_title("Speed")
    has_labels = all(row["exactness"].get("accuracy_difference") is not None for row in rows)
    tolerance = -100 * compared["max_accuracy_drop"] if has_labels else 100 * compared["min_agreement"]
    _intervals(answers, [_answers(row, has_labels) for row in rows], colours)
    line = answers.axvline(
        tolerance, color=ALARM, linestyle=(0, (5, 3)), label="allowed: the whole interval right of this"
    )
    answers.set_xlabel("accuracy against float32, percentage points" if has_labels else "labels as in float32, %")
    answers.set_title("Answers")
    answers.tick_params(axis="y", length=0)
    marks = [Line2D([], [], color=colour, marker="o", linestyle="none", label=name) for colour, name in MEANING.items()]
    drawn.legend(handles=[*marks, line], loc="outside lower center", ncols=4)
    return drawn


def _intervals(axes: Axes, spans: Sequence[tuple[float, float, float]], colours: Sequence[str]) -> None:
    for index, ((value, low, high), colour) in enumerate(zip(spans, colours, strict=True)):
        axes.plot([low, high], [index, index], color=colour, linewidth=2)
        axes.plot(value, index, color=colour, marker="o", markersize=9)
    axes.grid(axis="x", linewidth=0.8)


def _answers(row: VariantRow, has_labels: bool) -> tuple[float, float, float]:
    """Return what the answers are worth and the ends of the interval, in percent."""
    names = ("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high")
    if not has_labels:
        names = ("agreement", "agreement_low", "agreement_high")
    value, low, high = (100 * float(row["exactness"][name]) for name in names)  # type: ignore[literal-required]
    return value, low, high


def _colour(row: VariantRow, compared: Variants) -> str:
    if row["name"] == compared["recommended"]["name"]:
        return CHOSEN
    return REFUSED if row["against"] else ALLOWED


def _name(row: VariantRow) -> str:
    weights = row["weight_bytes"]
    size = "" if weights is None else f", {number(weights / 1e6)} MB"
    return f"{shortened(row['words'], LONGEST_WORDS)}{size}"
