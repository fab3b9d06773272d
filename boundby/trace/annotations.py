"""The ranges that a program marks by name: how long the host was in each, and the device time launched from it."""

from dataclasses import dataclass

import numpy as np

from boundby.trace.links import Links
from boundby.trace.nesting import HostTree
from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT

ANNOTATION = "user_annotation"


@dataclass(frozen=True)
class AnnotationStat:
    """All ranges of one name. `device_ns` counts the work launched in them, but not that of ranges inside them.

    Work that another thread launches, as that of the backward pass is, counts for the range that the main thread is in.
    """

    name: str
    calls: int
    host_ns: int
    device_ns: int


def annotation_stats(trace: Trace, tree: HostTree, linked: Links, main: int | None) -> list[AnnotationStat]:
    """Return one record per name, the one with the most device time, then host time, first; step marks are none."""
    wanted = trace.in_categories([ANNOTATION]) & ~trace.is_step_mark
    rows = np.flatnonzero(wanted)
    owner = tree.nearest(linked.launch, wanted)
    if main is not None:
        elsewhere = np.flatnonzero((owner == ABSENT) & (linked.launch != ABSENT))
        around = tree.segments.row_at(main, trace.start_ns[linked.launch[elsewhere]])
        owner[elsewhere] = tree.nearest(around, wanted)
    device_ns = np.zeros(len(trace.names), dtype=np.int64)
    launched = owner != ABSENT
    np.add.at(device_ns, trace.name[owner[launched]], (linked.end_ns - linked.start_ns)[launched])
    host_ns = np.zeros(len(trace.names), dtype=np.int64)
    np.add.at(host_ns, trace.name[rows], np.maximum(trace.duration_ns[rows], 0))
    calls = np.bincount(trace.name[rows], minlength=len(trace.names))
    stats = [
        AnnotationStat(trace.names[name], int(calls[name]), int(host_ns[name]), int(device_ns[name]))
        for name in np.flatnonzero(calls).tolist()
    ]
    return sorted(stats, key=lambda stat: (-stat.device_ns, -stat.host_ns))
