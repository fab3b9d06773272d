"""The whole report, in the order in which a person needs it: the sections, what to do next, and where the files are."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from boundby import card as cards
from utils.render.blocks import Block, CodeBlock, DefinitionList, Details, Document, Heading, OrderedList, Paragraph
from utils.render.formatting import clean
from utils.report import advice, batch_sizes, card, doubts, full_dataset, profiling, quality, summary, verdict
from utils.report.pictures import Content, Drawing, Folded, drawings, placed
from utils.report.sources import ReportData

SHOWN_STEPS = 4  # of what to do next
SNAPSHOT = "memory snapshot"  # as a manifest calls it


@dataclass(frozen=True)
class Report:
    """The document, and the pictures that must be drawn before it is shown."""

    document: Document
    drawings: tuple[Drawing, ...]


def report(data: ReportData) -> Report:
    """Return the report; the sections name its pictures."""
    content = [part for section in SECTIONS for part in section(data)]
    pictures = tuple(drawings(content))
    blocks = [*placed(content), *files(data, pictures)]
    kind, title, detail = "Baseline report", summary.title(data), summary.detail(data)
    return Report(Document(kind, title, detail, blocks, cards.badge(card.facts(data))), pictures)


def next_steps(data: ReportData) -> list[Content]:
    """Return what to do next as a numbered list, with the command where there is one; the less pressing folded."""
    entries: list[list[Block]] = []
    for step in advice.advice(data):
        command = [CodeBlock(step.command)] if step.command else []
        why = [Paragraph(step.why)] if step.why else []
        entries.append([Paragraph(step.effect, strong=f"{step.title}:"), *why, *command])
    nothing = Paragraph("Nothing stands out: no doubt, no missed target, no gain in reach.")
    first: list[Content] = [OrderedList(entries[:SHOWN_STEPS]) if entries else nothing]
    more = [Folded("More to do", [OrderedList(entries[SHOWN_STEPS:])])] if len(entries) > SHOWN_STEPS else []
    return [Heading("What to do next"), *first, *more]


def files(data: ReportData, pictures: Sequence[Drawing]) -> list[Block]:
    """Return where the rest is, and folded each file of the results with what it holds or why it is not there."""
    layout = data.layout
    entries = [
        (layout.report, "this report as text"),
        (layout.html_report, "this report with its pictures, for a browser or a colleague"),
        (layout.card, "its first lines"),
        *((drawing.path, drawing.reason or drawing.description) for drawing in pictures),
        *(
            (path, content if path.is_file() else f"not there ({_why_absent(data, path, step)})")
            for path, step, content in layout.listed()
        ),
    ]
    every = [(clean(path.relative_to(layout.results)), content) for path, content in entries]
    return [
        Heading("Where the rest is"),
        DefinitionList(
            [
                ("For a browser", f"{layout.html_report.name}, with pictures and all that is left out here"),
                ("For programs", layout.metrics.name),
                ("Folder", clean(layout.results, longest=300)),
            ]
        ),
        Details("Every file", [DefinitionList(every)]),
        Paragraph("To take it home from a pod:"),
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
    next_steps,
    verdict.where_time_goes,
    verdict.tried,
    batch_sizes.section,
    verdict.limits,
    full_dataset.section,
    profiling.waiting,
    profiling.layers,
    batch_sizes.targets,
    full_dataset.cost,
    doubts.section,
    batch_sizes.every_metric,
    verdict.work,
    quality.classes,
    quality.confidence,
    summary.subject,
)
