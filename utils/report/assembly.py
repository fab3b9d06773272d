"""The whole report, in the order in which a person needs it: the sections, what to do next, and where the files are."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from boundby import files
from boundby.bound import card as cards
from boundby.formatting import clean, number
from utils.command import Run
from utils.render import (
    Block,
    CodeBlock,
    DefinitionList,
    Details,
    Document,
    Heading,
    OrderedList,
    Paragraph,
    html_page,
    plain_text,
)
from utils.report import (
    advice,
    batch_sizes,
    card,
    doubts,
    full_dataset,
    profiling,
    quality,
    sources,
    summary,
    variants,
    verdict,
)
from utils.report import figures as pictures
from utils.report.figures import Content, Drawing, Folded, drawings, placed
from utils.report.sources import ReportData
from utils.steps import steps

STEP = "04"
SHOWN_STEPS = 3  # of what to do next
PREVIOUS = "previous"  # folder of the results of earlier runs
SNAPSHOT = "memory snapshot"  # as a manifest calls it


@dataclass(frozen=True)
class Written:
    """What a person is shown of a report that was written: the lines of its card, and how many pictures were drawn."""

    answer: str
    pictures: int


@dataclass(frozen=True)
class Report:
    """The document, and the pictures that must be drawn before it is shown."""

    document: Document
    drawings: tuple[Drawing, ...]


def report(data: ReportData) -> Report:
    """Return the report; the sections name its pictures."""
    content = [part for section in SECTIONS for part in section(data)]
    shown = tuple(drawings(content))
    blocks = [*placed(content), *whereabouts(data, shown)]
    kind, title, detail = "Baseline report", summary.title(data), summary.detail(data)
    return Report(Document(kind, title, detail, blocks, cards.badge(card.facts(data))), shown)


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


def write(run: Run) -> Written:
    """Draw the pictures, and write the report as text and as a page, and its card. Raises as `sources.read` does."""
    data = sources.read(run)
    made = report(data)
    pictures.draw(made.drawings)
    files.write_text(run.layout.report, plain_text.render(made.document))
    files.write_text(run.layout.html_report, html_page.render(made.document))
    return Written(card.draw(data), sum(drawing.reason is None for drawing in made.drawings))


def renew(run: Run) -> bool:
    """Write the report anew where step 04 has written one, and tell whether it has; its receipt is then of this one."""
    try:
        earlier = steps.receipt_in(run.layout.receipt(STEP))
    except (OSError, ValueError):
        return False
    write(run)
    facts = {"status": earlier.status, "started": earlier.started, "seconds": earlier.seconds}
    steps.finish(STEP, run.layout, steps.parts(STEP, run.config, run.layout), exit_code=earlier.exit_code, **facts)
    return True


def whereabouts(data: ReportData, drawn: Sequence[Drawing]) -> list[Block]:
    """Return where the rest is, and folded each file of the results with what it holds or why it is not there."""
    layout = data.layout
    entries = [
        (layout.report, "this report as text"),
        (layout.html_report, "this report with its pictures, for a browser or a colleague"),
        (layout.card, "its first lines"),
        *((drawing.path, drawing.reason or drawing.description) for drawing in drawn),
        *(
            (path, content if path.is_file() else f"not there ({_why_absent(data, path, step)})")
            for path, step, content in layout.listed()
        ),
    ]
    every = [(clean(path.relative_to(layout.results)), content) for path, content in entries]
    if earlier := [path.stat().st_size for path in (layout.results / PREVIOUS).rglob("*") if path.is_file()]:
        command = shlex.join(["make", "prune", "KEEP=3", f"RESULTS={layout.results}"])
        every.append(
            (f"{PREVIOUS}/", f"{number(sum(earlier) / 1e6)} MB of earlier runs; to remove the older: {command}")
        )
    return [
        Heading("Where the rest is"),
        DefinitionList(
            [
                ("Folder", clean(layout.results, longest=300)),
                ("To read", f"{layout.html_report.name}, with pictures and all that is left out here"),
                ("For programs", layout.metrics.name),
                ("To take home", shlex.join(["make", "bundle", f"RESULTS={layout.results}"])),
            ]
        ),
        Details("Every file", [DefinitionList(every)]),
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
    variants.section,
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
