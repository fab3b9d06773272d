"""The whole report, in the order in which a person needs it: the sections, what to do next, and where the files are."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.render.blocks import Block, CodeBlock, DefinitionList, Document, Heading, OrderedList, Paragraph
from utils.render.formatting import clean
from utils.report import advice, batch_sizes, full_dataset, profiling, quality, summary, verdict
from utils.report.pictures import Content, Drawing, placed
from utils.report.sources import ReportData

SNAPSHOT = "memory snapshot"  # as a manifest calls it


@dataclass(frozen=True)
class Report:
    """The document, and the pictures that must be drawn before it is shown."""

    document: Document
    drawings: tuple[Drawing, ...]


def report(data: ReportData) -> Report:
    """Return the report; the sections name its pictures."""
    content = [part for section in SECTIONS for part in section(data)]
    drawings = tuple(part for part in content if isinstance(part, Drawing))
    blocks = [*placed(content), *files(data, drawings)]
    kind, title, detail = "Baseline report", summary.title(data), summary.detail(data)
    return Report(Document(kind, title, detail, blocks), drawings)


def next_steps(data: ReportData) -> list[Block]:
    """Return what to do next as a numbered list, with the command where there is one."""
    entries: list[list[Block]] = []
    for step in advice.advice(data):
        command = [CodeBlock(step.command)] if step.command else []
        entries.append([Paragraph(step.effect, strong=f"{step.title}:"), Paragraph(step.why), *command])
    nothing = Paragraph("Nothing stands out: no doubt, no missed target, no gain in reach.")
    return [Heading("What to do next"), OrderedList(entries) if entries else nothing]


def files(data: ReportData, drawings: Sequence[Drawing]) -> list[Block]:
    """Return each file below the results folder with what it holds, or why it is not there, and how to take it home."""
    layout = data.layout
    entries = [
        (layout.report, "this report as text"),
        (layout.html_report, "this report with its pictures, for a browser or a colleague"),
        *((drawing.path, drawing.reason or drawing.description) for drawing in drawings),
        *(
            (path, content if path.is_file() else f"not there ({_why_absent(data, path, step)})")
            for path, step, content in layout.listed()
        ),
    ]
    return [
        Heading("Files"),
        Paragraph(f"In {clean(layout.results, longest=300)}:"),
        DefinitionList([(clean(path.relative_to(layout.results)), content) for path, content in entries]),
        Paragraph("To take them home from a pod:"),
        CodeBlock(shlex.join(["make", "bundle", f"RESULTS={layout.results}"])),
    ]


def _why_absent(data: ReportData, path: Path, step: str) -> str:
    """Return why a file is not there; of the memory snapshot, which a CPU cannot give, the recording says so."""
    if path == data.layout.memory_snapshot:
        for remark in (*data.manifest.unavailable, *data.manifest.downgrades):
            if remark.what == SNAPSHOT:
                return clean(remark.reason, longest=300)
    return f"step {step} has not written it"


SECTIONS: tuple[Callable[[ReportData], Sequence[Content]], ...] = (
    summary.opening,
    verdict.section,
    summary.subject,
    full_dataset.section,
    quality.classes,
    quality.confidence,
    batch_sizes.section,
    verdict.where_time_goes,
    profiling.waiting,
    profiling.layers,
    batch_sizes.targets,
    summary.doubtful,
    next_steps,
    full_dataset.cost,
)
