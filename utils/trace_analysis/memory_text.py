"""The memory of a trace: its peak, whose it was, and what every step leaves behind."""

from collections.abc import Mapping
from typing import Any

from utils.render.blocks import Block, Paragraph, Table
from utils.render.formatting import NOTHING, clean, number

Row = Mapping[str, Any]
OWNERS = 6
LEAST_SHARE = 0.01  # of the peak, to stand in the table
LONGEST_OWNER = 40  # characters


def blocks(trace: Row) -> list[Block]:
    """Return a sentence per device, and the owners of the highest peak; [] where memory was not recorded."""
    uses = trace.get("memory") or []
    if not uses:
        return []
    return [Paragraph(" ".join(map(_sentence, uses)), strong="Memory:"), *_owners(uses[0])]


def _sentence(use: Row) -> str:
    who = "the CPU" if use["device"] is None else f"GPU {use['device']}"
    earlier = use["earlier_bytes"]
    said = f"on {who} at most {_size(use['peak_bytes'])} were allocated at once"
    if earlier is None:
        said += ", not counting what was there before the trace"
    else:
        said += f", of which {_size(earlier)} before the trace"
    if use["peak_reserved_bytes"]:
        said += f"; the allocator held {_size(use['peak_reserved_bytes'])}"
    return f"{said}. {_leak(use['kept_per_step_bytes'])}".strip()


def _leak(kept: int | None) -> str:
    if not kept:
        return ""
    return f"Every step leaves at least {_size(kept)} more behind than it found: something keeps what it should drop."


def _owners(use: Row) -> list[Block]:
    shown = [each for each in use["owners"][:OWNERS] if each["bytes"] >= LEAST_SHARE * use["peak_bytes"]]
    rows = [
        [_name(each["operator"]), clean(each["inside"] or NOTHING, LONGEST_OWNER), *_cells(each, use)] for each in shown
    ]
    headers = ["allocated by", "inside", "MB", "% of\npeak", "alloca-\ntions"]
    return [Table(headers, rows, left=[0, 1], caption="Whose memory it was at the peak")] if rows else []


def _name(operator: str | None) -> str:
    return clean(operator, LONGEST_OWNER) if operator else "outside of all operators"


def _cells(owner: dict[str, Any], use: Row) -> list[str]:
    share = 100 * owner["bytes"] / use["peak_bytes"]
    return [number(owner["bytes"] / 1e6), f"{share:.1f}", f"{owner['allocations']:,}"]


def _size(size_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{number(size_bytes / size)} {unit}"
    return f"{size_bytes:,} bytes"
