"""Numbers and names as the page shows them. Everything here is plain text, for places that render no Markdown."""

import os
from collections import Counter
from pathlib import Path

from boundby.formatting import duration
from utils.command import printable

UNKNOWN = "unknown"
NAME_CHARACTERS, REASON_CHARACTERS = 120, 300
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def plain(text: str, most: int = NAME_CHARACTERS) -> str:
    """Return a text of unknown origin without control characters, cut to a length that a page can bear."""
    text = printable(text.encode("utf-8", "replace").decode("utf-8")).replace("\n", " ").replace("\t", " ")
    return text if len(text) <= most else f"{text[: most - 3]}..."


def distinct(names: list[str]) -> list[str]:
    """Return names that are told apart: the same one again gets a number."""
    counts: Counter[str] = Counter()
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return numbered


def reason(error: Exception, folder: Path) -> str:
    """Return why something of a folder cannot be read, in one line without the path of the folder."""
    first = (str(error).splitlines() or [""])[0].replace(f"{folder}{os.sep}", "")
    return plain(first or type(error).__name__, REASON_CHARACTERS)


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if value is None:
        return UNKNOWN
    for size, unit in UNITS:
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return duration(value)


def size(value: float | None) -> str:
    """Return a number of bytes in the unit that suits it."""
    if value is None:
        return UNKNOWN
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(value) >= 2**power:
            return f"{value / 2**power:,.1f} {unit}"
    return f"{value:.0f} B"


def count(value: int | None) -> str:
    """Return a whole number with its thousands told apart."""
    return UNKNOWN if value is None else f"{value:,}"


def ago(then_unix_s: float, now_unix_s: float) -> str:
    """Return how long ago something was."""
    passed = max(0.0, now_unix_s - then_unix_s)
    return f"{passed:.0f} s ago" if passed < 2 * UNITS[-1][0] else f"{seconds(passed)} ago"
