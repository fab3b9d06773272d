"""What to do next, with the command where there is one."""

from utils.render.blocks import Block, CodeBlock, Heading, OrderedList, Paragraph
from utils.report.advice import Advice, advice
from utils.report.sources import ReportData


def section(data: ReportData) -> list[Block]:
    """Return the numbered list of advice."""
    entries = [_entry(each) for each in advice(data)]
    nothing = Paragraph("Nothing stands out: no doubt, no missed target, no gain in reach.")
    return [Heading("What to do next"), OrderedList(entries) if entries else nothing]


def _entry(each: Advice) -> list[Block]:
    command = [CodeBlock(each.command)] if each.command else []
    return [Paragraph(each.effect, strong=f"{each.title}:"), Paragraph(each.why), *command]
