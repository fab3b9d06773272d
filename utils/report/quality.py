"""Which classes go wrong, and what they are taken for."""

from collections.abc import Mapping, Sequence
from typing import Any

from utils.evaluation.quality import Quality
from utils.plots import confusion
from utils.render.blocks import Block, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean
from utils.report.pictures import Content, show
from utils.report.sources import Missing, ReportData

SHOWN = 10
LONGEST_CLASS = 34  # characters


def section(data: ReportData) -> list[Content]:
    """Return the worst classes, the most confused pairs and the matrix; no text where nothing was evaluated."""
    heading = Heading("Classes and Confusions")
    quality = data.quality
    if isinstance(quality, Missing):
        why = [heading, Paragraph(f"Not known: {quality.reason}.")] if data.full else []
        return [*why, show(data, confusion.figure, quality)]
    return [
        heading,
        Paragraph(_overview(quality)),
        *_worst(data, quality.classes),
        *_pairs(data, quality),
        show(data, confusion.figure, quality.confusion, quality.names),
    ]


def _overview(quality: Quality) -> str:
    classes = quality.classes
    with_rows = [each for each in classes if each["support"]]
    never = [each for each in with_rows if not each["predicted"]]
    flawless = sum(each["f1"] == 1 for each in with_rows)
    present = f"All {len(classes):,}" if len(with_rows) == len(classes) else f"{len(with_rows):,} of {len(classes):,}"
    said = f"{present} classes have rows; {f'{flawless:,}' if flawless else 'none'} of them without a mistake"
    if never:
        names = ", ".join(clean(each["label_name"], LONGEST_CLASS) for each in never[:SHOWN])
        more = f" and {len(never) - SHOWN:,} more" if len(never) > SHOWN else ""
        said += f". Never predicted: {names}{more}"
    return f"{said}."


def _worst(data: ReportData, classes: Sequence[Mapping[str, Any]]) -> list[Block]:
    ranked = sorted(
        (each for each in classes if each["support"] and each["f1"] < 1),
        key=lambda each: (each["f1"], -each["support"], each["label"]),
    )
    if not ranked:
        return []
    rows = [
        [
            clean(each["label_name"], LONGEST_CLASS),
            f"{each['support']:,}",
            f"{each['predicted']:,}",
            _share(each["precision"]),
            _share(each["recall"]),
            f"{each['recall_ci_low']:.2f} to {each['recall_ci_high']:.2f}",
            _share(each["f1"]),
        ]
        for each in ranked[:SHOWN]
    ]
    notes = [f"{_file(data, data.layout.evaluated.per_class.name)} has all {len(classes):,} classes"]
    if any(each["precision"] is None for each in ranked[:SHOWN]):
        notes.append(f"{NOTHING}: a class that is never predicted has no precision")
    headers = ["class", "rows", "pre-\ndicted", "preci-\nsion", "recall", "its 95 %\ninterval", "F1"]
    return [Table(headers, rows, left=[0], caption="The worst classes by F1", notes=notes)]


def _pairs(data: ReportData, quality: Quality) -> list[Block]:
    if not quality.most_confused:
        return []
    rows = [
        [
            clean(each["label_name"], LONGEST_CLASS),
            clean(each["prediction_name"], LONGEST_CLASS),
            f"{each['rows']:,}",
            f"{100 * each['share']:.1f}",
        ]
        for each in quality.most_confused[:SHOWN]
    ]
    notes = [f"{_file(data, data.layout.evaluated.confusion_matrix.name)} has every pair"]
    headers = ["label", "predicted as", "rows", "% of the\nlabel's rows"]
    return [Table(headers, rows, left=[0, 1], caption="Most confused", notes=notes)]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _file(data: ReportData, name: str) -> str:
    return f"{data.layout.evaluation.name}/{name}"
