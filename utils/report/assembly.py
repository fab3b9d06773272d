"""The whole report, in the order in which a person needs it."""

from utils.report import (
    artefacts,
    batch_sizes,
    bottleneck,
    cost,
    doubts,
    full_dataset,
    headline,
    next_steps,
    subject,
    targets,
)
from utils.report.sources import ReportData

SECTIONS = (
    headline,
    subject,
    full_dataset,
    batch_sizes,
    bottleneck,
    targets,
    doubts,
    next_steps,
    cost,
    artefacts,
)


def text(data: ReportData) -> str:
    """Return the report."""
    return "\n".join(line.rstrip() for part in SECTIONS for line in part.section(data)) + "\n"
