"""What a program marks as no part of its steps, such as an evaluation between two of them, cut out of a trace."""

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np

from boundby.trace.annotations import ANNOTATION
from boundby.trace.intervals import Intervals, union
from boundby.trace.reader import Trace

EXCLUDED = "excluded: "  # in front of the name of the range
MARK = re.compile(f"^{EXCLUDED}")


def without_excluded(trace: Trace) -> Trace:
    """Return the trace as if the host had never been in a range whose name begins with `EXCLUDED`.

    What lies in one is left out, and what comes after it moves to its begin. Work of a device belongs to the range
    during which it runs, so whoever marks one lets the device finish at both ends.
    """
    marks = np.flatnonzero(trace.in_categories([ANNOTATION]) & trace.named(MARK))
    spans = union(trace.start_ns[marks], trace.start_ns[marks] + trace.duration_ns[marks])
    if not len(spans):
        return trace
    end_ns = trace.start_ns + np.maximum(trace.duration_ns, 0)
    kept = ~_are_inside(trace.start_ns, end_ns, spans)
    moved = _moved(trace.start_ns, spans)
    duration_ns = np.where(trace.duration_ns < 0, trace.duration_ns, _moved(end_ns, spans) - moved)
    changes = trace.memory.start_ns
    memory = replace(trace.memory, start_ns=_moved(changes, spans))
    return replace(
        _rows(replace(trace, start_ns=moved, duration_ns=duration_ns), kept),
        memory=_rows(memory, ~_are_inside(changes, changes, spans)),
    )


def _are_inside(start_ns: np.ndarray, end_ns: np.ndarray, spans: Intervals) -> np.ndarray:
    """Return a mask of what lies wholly in one of the spans."""
    place = np.searchsorted(spans.start_ns, start_ns, side="right") - 1
    return (place >= 0) & (end_ns <= spans.end_ns[place])


def _moved(moments: np.ndarray, spans: Intervals) -> np.ndarray:
    """Return the moments, each one earlier by what of the spans lies before it."""
    return moments - spans.covered_until(moments)


def _rows(table: Any, kept: np.ndarray) -> Any:
    """Return the rows of a record of columns."""
    columns = {each.name: getattr(table, each.name) for each in fields(table)}
    return replace(table, **{name: each[kept] for name, each in columns.items() if isinstance(each, np.ndarray)})
