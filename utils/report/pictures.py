"""Draw every figure there are rows for, say why the others are not drawn, and show one in a section."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from boundby import files
from utils.render import blocks
from utils.report.sources import Picture, ReportData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.plots.style import Subject

Drawing: TypeAlias = "tuple[Picture, Callable[[], Figure]]"


def draw(data: ReportData) -> tuple[Picture, ...]:
    """Write the pictures there are rows for; return all of them."""
    from utils.plots import batch_size_comparison, layers, memory, metrics_heatmap, operators, roofline, style, timeline

    layout, about = data.layout, style.subject(data.document, data.machine)
    no_rows = None if data.rows else "not drawn: no batch size was measured yet"
    no_operators = None if data.operators else f"not drawn: {data.operators_reason}"
    no_layers = None if data.layers else f"not drawn: {data.layers_reason}"
    ceilings = data.document["ceilings"]
    no_roofline = roofline.why_not(data.rows, ceilings, data.document["ceilings_reason"])
    choice, targets, trace = data.choice, data.config.targets, data.trace or {}
    plan: list[Drawing] = [
        (
            Picture(
                layout.roofline_plot,
                "each batch size under the limits of this machine",
                no_roofline and f"not drawn: {no_roofline}",
            ),
            lambda: roofline.figure(data.rows, about, ceilings),
        ),
        *_of_predictions(data, about),
        (
            Picture(layout.batch_size_plot, "six panels over the batch size", no_rows),
            lambda: batch_size_comparison.figure(data.rows, about, choice, targets),
        ),
        (
            Picture(layout.heatmap_plot, "every metric of every batch size", no_rows),
            lambda: metrics_heatmap.figure(data.rows, about, choice),
        ),
        (
            Picture(layout.operators_plot, "where the traced time goes", no_operators),
            lambda: operators.figure(data.operators, about),
        ),
        (
            Picture(layout.timeline_plot, "work and waiting over the time of the trace", _no_timeline(data)),
            lambda: timeline.figure(trace, about),
        ),
        (
            Picture(layout.layers_plot, "the layers that take most of the time", no_layers),
            lambda: layers.figure(data.layers, about),
        ),
        (
            Picture(layout.memory_plot, "memory over the time of the trace, and whose it was", _no_memory(data)),
            lambda: memory.figure(trace, about),
        ),
    ]
    for picture, make in plan:
        if picture.reason is None:
            _save(make(), picture.path)
        else:
            picture.path.unlink(missing_ok=True)  # a picture of an earlier run would pass for this one's
    return tuple(picture for picture, _ in plan)


def _of_predictions(data: ReportData, about: "Subject") -> "list[Drawing]":
    from utils.plots import calibration, confusion

    layout, quality = data.layout, data.quality
    reason = None if quality else f"not drawn: {data.quality_reason}"
    return [
        (
            Picture(layout.confusion_plot, "which classes are taken for which", reason),
            lambda: confusion.figure(quality.confusion, quality.names, about),
        ),
        (
            Picture(layout.calibration_plot, "how often predictions are right, by their confidence", reason),
            lambda: calibration.figure(quality.calibration, about),
        ),
    ]


def shown(data: ReportData, path: Path) -> list[blocks.Block]:
    """Return the picture at `path` as a block, nothing where it was not drawn: the list of files says why."""
    return [
        blocks.Figure(picture.path, picture.description)
        for picture in data.pictures
        if picture.path == path and picture.reason is None
    ]


def _no_timeline(data: ReportData) -> str | None:
    if data.trace is None:
        return f"not drawn: {data.trace_reason}"
    return None if data.trace["devices"][0]["window_ms"] else "not drawn: nothing in the trace takes time"


def _no_memory(data: ReportData) -> str | None:
    if _no_timeline(data) or (data.trace or {}).get("memory"):
        return _no_timeline(data)
    return "not drawn: the trace holds no changes of memory (trace.memory)"


def _save(figure: "Figure", path: Path) -> None:
    with files.replacing(path) as temporary:
        figure.savefig(temporary)
