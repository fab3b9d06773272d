"""How names, times, sizes and shares are written on the page."""

import math
from collections.abc import Sequence

from boundby.layers.ranking import label

LONGEST_NAME = 160  # characters; of a longer name the middle is left out
UNPRINTABLE = "(unprintable name)"


def clean(text: str, longest: int = LONGEST_NAME) -> str:
    """Return `text` on one line without control and direction characters, its middle left out where it is long."""
    plain = "".join(
        character if character.isprintable() else " " if character.isspace() else ""
        for character in text[: 100 * longest]
    )
    line = " ".join(plain.split())
    if len(line) > longest:
        head = (longest - 1) // 2
        line = f"{line[:head]}…{line[head + 1 - longest :]}"
    return line


def layer_name(path: str) -> str:
    """Return the layer's name for people; the root's path is empty."""
    return clean(label(path)) or UNPRINTABLE


def digits(value: float, significant: int = 3) -> str:
    """Return that many significant digits, and all digits before the point: 0.0123, 4.32, 1,264."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{significant - 1}e}"
    return f"{value:,.{max(0, significant - 1 - math.floor(math.log10(abs(value))))}f}"


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return the value in the largest of the units (descending) that is no larger than it, else in the smallest."""
    factor, unit = next((unit for unit in units if abs(value) >= unit[0]), units[-1])
    return f"{digits(value / factor)} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Return a time: 1.23 s, 12.3 ms, 45.6 µs."""
    return scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def size(of_bytes: float) -> str:
    """Return a size in powers of 1,000: 1.23 GB, 45.6 MB, 768 B."""
    return scaled(of_bytes, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def count(number: float) -> str:
    """Return a number of things: 124 M, 2.36 k, 768."""
    return scaled(number, ((1e9, "G"), (1e6, "M"), (1e4, "k"), (1.0, "")))


def whole(number: float) -> str:
    """Return a count, with a digit behind the point where it is not whole, as a mean over runs can be."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def percent(share: float) -> str:
    """Return a share with a digit behind the point: 17.3 %."""
    return f"{100 * share:.1f} %"


def listed(words: Sequence[str]) -> str:
    """Return the words as a list in a sentence: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
