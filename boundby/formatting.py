"""How names and numbers are written in text, and tables of them; names that somebody else chose steer no terminal."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

WIDTH = 100
LONGEST_NAME = 70  # characters of a name somebody else chose
NOTHING = "-"
WIDEST_SPREAD = 100  # percent
NO_BREAK = "\N{NO-BREAK SPACE}"


def printable(text: str) -> str:
    """Return `text` without control characters: a model or label name must not steer the terminal."""
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def clean(value: object, longest: int = LONGEST_NAME) -> str:
    """Return `value` on one line without control characters, its middle left out where it is long."""
    text = " ".join(printable(str(value)).split())
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}...{text[-(longest - longest // 2 - 3) :]}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its type, where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def number(value: float, digits: int = 4) -> str:
    """Return four significant digits, all digits before the point: 0.01235, 4.321, 1,264, 301,412."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-4 <= abs(value) < 1e9:
        return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:.{digits - 1}e}"


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return three digits in the largest of the units (descending) that is no larger, else in the smallest."""
    factor, unit = next((unit for unit in units if abs(value) >= unit[0]), units[-1])
    return f"{number(value / factor, 3)} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Return a time: 1.23 s, 12.3 ms, 45.6 µs."""
    return scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def minutes(seconds: float) -> str:
    """Return a time in whole seconds: 4 min 05 s, 12 s."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest:02d} s" if whole else f"{rest} s"


def size(of_bytes: float) -> str:
    """Return a size in powers of 1,000: 1.23 GB, 45.6 MB, 768 B."""
    return scaled(of_bytes, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def times(factor: float) -> str:
    """Return a factor with two or three digits: 1.08, 4.9, 31."""
    return f"{factor:.2f}" if factor < 3 else f"{factor:.1f}" if factor < 30 else f"{factor:,.0f}"


def percent(share: float, digits: int = 0) -> str:
    """Return a share of 1 in percent: 17 %, with a digit 17.3 %."""
    return f"{100 * share:.{digits}f} %"


def listed(values: Sequence[object]) -> str:
    """Return the values as words: 1, 2 and 4."""
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return an aligned table; a header may have several lines, and the columns `left` are set to the left."""
    tops = [header.split("\n") for header in headers]
    height = max(map(len, tops))
    lines = [[([""] * (height - len(top)) + top)[level] for top in tops] for level in range(height)]
    cells = [*lines, *[[clean(cell) for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headers))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "

    def joined(line: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        for column in left:
            padded[column] = line[column].ljust(widths[column])
        return gap.join(padded).rstrip()

    rule = gap.join("-" * width for width in widths)
    return [*map(joined, lines), rule, *(joined(line) for line in cells[height:])]


def paragraph(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Return `text` in lines of at most `WIDTH` columns; `first` is the indent of the first line."""
    opening = indent if first is None else first
    whole = printable(text).replace(" %", f"{NO_BREAK}%")
    lines = textwrap.wrap(whole, WIDTH, initial_indent=opening, subsequent_indent=indent)
    return [line.replace(NO_BREAK, " ") for line in lines]


def command_lines(command: str, indent: str) -> list[str]:
    r"""Return a shell command in lines of at most `WIDTH` columns where its words allow, joined by `\`."""
    lines, line = [], indent
    for word in map(shlex.quote, shlex.split(printable(command))):
        if len(line) + len(word) + 3 > WIDTH and line.strip():
            lines.append(f"{line} \\")
            line = indent + "   "
        line += word if not line.strip() else f" {word}"
    return [*lines, line]


def unknown(reason: object) -> str:
    """Return what stands for a value that is not known."""
    return f"unknown ({clean(reason or 'no reason was recorded', longest=300)})"


def spread(percent: float) -> str:
    """Return the half-width of an interval in percent; two rounds can give one of any size, which says no more."""
    return f"{percent:.1f}" if percent <= WIDEST_SPREAD else f">{WIDEST_SPREAD}"


def quantity(value: float | None, unit: str, reason: object = None) -> str:
    """Return the value with its unit, or that it is unknown and why."""
    return unknown(reason) if value is None else f"{number(value)} {unit}".rstrip()


T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """Takes the place of a value, with the reason why there is none; false, like None."""

    reason: str

    def __bool__(self) -> Literal[False]:
        """Return False, so that `if value` tells whether there is one."""
        return False


def known(value: T | Missing) -> T | None:
    """Return the value, or None where there is none."""
    return None if isinstance(value, Missing) else value
