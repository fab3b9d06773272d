"""How names and numbers are written, and lines of at most `WIDTH` columns: paragraphs, tables, commands."""

import shlex
import textwrap
from collections.abc import Sequence

from boundby.formatting import NOTHING, WIDTH, clean, number, printable, table

__all__ = [
    "NOTHING",
    "WIDTH",
    "clean",
    "command_lines",
    "listed",
    "number",
    "paragraph",
    "quantity",
    "spread",
    "table",
    "times",
    "unknown",
]

WIDEST_SPREAD = 100  # percent
NO_BREAK = "\N{NO-BREAK SPACE}"


def unknown(reason: object) -> str:
    """Return what stands for a value that is not known."""
    return f"unknown ({clean(reason or 'no reason was recorded', longest=300)})"


def times(factor: float) -> str:
    """Return a factor with two or three digits: 1.08, 4.9, 31."""
    return f"{factor:.2f}" if factor < 3 else f"{factor:.1f}" if factor < 30 else f"{factor:,.0f}"


def spread(percent: float) -> str:
    """Return the half-width of an interval in percent; two rounds can give one of any size, which says no more."""
    return f"{percent:.1f}" if percent <= WIDEST_SPREAD else f">{WIDEST_SPREAD}"


def quantity(value: float | None, unit: str, reason: object = None) -> str:
    """Return the value with its unit, or that it is unknown and why."""
    return unknown(reason) if value is None else f"{number(value)} {unit}".rstrip()


def paragraph(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Return `text` in lines of at most `WIDTH` columns; `first` is the indent of the first line."""
    opening = indent if first is None else first
    whole = printable(text).replace(" %", f"{NO_BREAK}%")
    lines = textwrap.wrap(whole, WIDTH, initial_indent=opening, subsequent_indent=indent)
    return [line.replace(NO_BREAK, " ") for line in lines]


def listed(values: Sequence[object]) -> str:
    """Return the values as words: 1, 2 and 4."""
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def command_lines(command: str, indent: str) -> list[str]:
    r"""Return a shell command in lines of at most `WIDTH` columns where its words allow, joined by `\`."""
    lines, line = [], indent
    for word in map(shlex.quote, shlex.split(printable(command))):
        if len(line) + len(word) + 3 > WIDTH and line.strip():
            lines.append(f"{line} \\")
            line = indent + "   "
        line += word if not line.strip() else f" {word}"
    return [*lines, line]
