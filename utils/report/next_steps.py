"""What to do next, with the command where there is one."""

from utils.report.advice import Advice, advice
from utils.report.sources import ReportData
from utils.report.typesetting import command_lines, heading, paragraph

INDENT = "   "


def section(data: ReportData) -> list[str]:
    """Return the numbered list of advice."""
    found = advice(data)
    lines = [line for number, each in enumerate(found, start=1) for line in _entry(number, each)]
    return [
        *heading("What to do next"),
        *(lines or ["Nothing stands out: no doubt, no missed target, no gain in reach."]),
    ]


def _entry(number: int, each: Advice) -> list[str]:
    lines = paragraph(f"{each.title}: {each.effect}", INDENT, f"{number}. ") + paragraph(each.why, INDENT, INDENT)
    return lines + (command_lines(each.command, INDENT + "  ") if each.command else [])
