"""How names and numbers are written, and lines of at most `WIDTH` columns: paragraphs, tables, commands."""

from boundby.formatting import NOTHING, WIDTH, clean, command_lines, listed, number, paragraph, table, times

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


def unknown(reason: object) -> str:
    """Return what stands for a value that is not known."""
    return f"unknown ({clean(reason or 'no reason was recorded', longest=300)})"


def spread(percent: float) -> str:
    """Return the half-width of an interval in percent; two rounds can give one of any size, which says no more."""
    return f"{percent:.1f}" if percent <= WIDEST_SPREAD else f">{WIDEST_SPREAD}"


def quantity(value: float | None, unit: str, reason: object = None) -> str:
    """Return the value with its unit, or that it is unknown and why."""
    return unknown(reason) if value is None else f"{number(value)} {unit}".rstrip()
