"""The whole report, in the order in which a person needs it."""

from utils.render.blocks import Document
from utils.report import (
    artefacts,
    batch_sizes,
    bottleneck,
    classes,
    confidence,
    cost,
    doubts,
    full_dataset,
    headline,
    layers,
    next_steps,
    subject,
    targets,
    verdict,
    waiting,
)
from utils.report.sources import ReportData

SECTIONS = (
    headline,
    verdict,
    subject,
    full_dataset,
    classes,
    confidence,
    batch_sizes,
    bottleneck,
    waiting,
    layers,
    targets,
    doubts,
    next_steps,
    cost,
    artefacts,
)


def document(data: ReportData) -> Document:
    """Return the report."""
    return Document(
        kind="Baseline report",
        title=headline.title(data),
        detail=headline.detail(data),
        blocks=[block for part in SECTIONS for block in part.section(data)],
    )
