"""The memory of a trace as it stands in the document: plain values with the unit in every name."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from boundby.trace.memory import MemoryUse


def entries(uses: Iterable[MemoryUse]) -> list[dict[str, Any]]:
    """Return one entry per device, times in ms since the base of the trace as everywhere in the document."""
    return [_entry(use) for use in uses]


def _entry(use: MemoryUse) -> dict[str, Any]:
    found = asdict(use)
    timeline = found.pop("timeline")
    times_ns, peak_ns = timeline.pop("times_ns"), found.pop("peak_ns")
    return {
        **found,
        "peak_ms": peak_ns / 1e6,
        "timeline": {"times_ms": [each / 1e6 for each in times_ns], **timeline},
    }
