"""The allocated memory over the time of a trace, and which operators and stages had allocated it at the peak.

A GPU's allocator reports all that is allocated on the device. That of the host counts what it handed out while torch
was recording, and misses what was freed between two recordings; so only what was allocated inside the trace counts
there, and `earlier_bytes` is not known.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from boundby.formatting import number
from boundby.trace.intervals import HostTree, distinct, sums
from boundby.trace.operators import MODULE, is_module, names_of
from boundby.trace.structure import Structure
from boundby.trace.table import ABSENT, ANNOTATION, MemoryTable, Trace
from boundby.trace.windows import Window

STAGE = re.compile("^stage: ")  # the ranges that mark the stages of a training step
MEMORY_COLUMNS = ("device", "time_ms", "allocated_bytes", "reserved_bytes")
MOST_OWNERS = 10
MOST_POINTS = 2000  # of the timeline: more are not told apart in a picture
LEAST_STEPS = 3  # to see whether memory grows
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# What these allocate belongs to the operator that called them; they do nothing else.
ALLOCATING = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "_resize_output_")
)


class MemoryOwner(msgspec.Struct, frozen=True):
    """Allocations that are alive at the peak, together."""

    operator: str | None  # the innermost that does more than allocate; None: no operator was running
    inside: str | None  # the innermost nn.Module (known where stacks were recorded) or annotation around it
    bytes: int
    allocations: int


class MemoryTimeline(msgspec.Struct, frozen=True):
    """The allocated bytes from each moment until the next one, as a step function with the highest point exact."""

    times_ns: tuple[int, ...]  # since the base of the trace
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...] | None  # None where it was not recorded


class MemoryUse(msgspec.Struct, frozen=True):
    """The memory of one device over the whole trace.

    At the peak, `earlier_bytes`, the bytes of the `owners` and `others_bytes` add up to `peak_bytes`.
    """

    device: int | None  # None: the host
    allocations: int
    allocated_bytes: int  # by all allocations together
    frees: int
    freed_bytes: int
    change_bytes: int  # from before the first change to after the last
    kept_per_step_bytes: int | None  # that every step but the first leaves behind at least; None: too few steps
    peak_bytes: int
    peak_ns: int  # since the base of the trace
    peak_reserved_bytes: int | None
    earlier_bytes: int | None  # at the peak, allocated before the trace began; None: not known and not counted
    owners: tuple[MemoryOwner, ...]  # of the peak, the one with most bytes first
    others_bytes: int
    timeline: MemoryTimeline
    by_stage: tuple[tuple[str | None, int], ...] = ()  # bytes at the peak by the stage that allocated them, most first


def memory_use(structure: Structure) -> tuple[MemoryUse, ...]:
    """Return the use of each device, the one with the highest peak first; () where memory was not recorded.

    Changes without an address cannot be told apart and are left out.
    """
    trace = structure.trace
    table = trace.memory
    if not len(trace.start_ns):
        return ()
    known = np.flatnonzero((table.address != ABSENT) & (table.bytes != 0))
    known = known[np.argsort(table.start_ns[known], kind="stable")]
    uses = []
    for device in distinct(np.sort(table.device[known])).tolist():
        changes = _Changes(table, known[table.device[known] == device], device)
        uses.append(_use(structure, changes))
    return tuple(sorted(uses, key=lambda use: -use.peak_bytes))


def memory_rows(uses: Sequence[MemoryUse]) -> list[dict[str, Any]]:
    """Return the timelines as rows with the columns `MEMORY_COLUMNS`, in ms since the base of the trace."""
    return [
        {
            "device": "host" if use.device is None else use.device,
            "time_ms": time_ns / 1e6,
            "allocated_bytes": allocated,
            "reserved_bytes": None if use.timeline.reserved_bytes is None else use.timeline.reserved_bytes[index],
        }
        for use in uses
        for index, (time_ns, allocated) in enumerate(
            zip(use.timeline.times_ns, use.timeline.allocated_bytes, strict=True)
        )
    ]


class _Changes:
    """The changes on one device in the order of time: their `rows` in the table, and what is allocated after each.

    `end` is, for each allocation, the place of the change that ends it: the next one of its address, since an address
    is handed out again only after it was given back. `counts_all` tells whether `allocated` is that of the device.
    """

    def __init__(self, table: MemoryTable, rows: np.ndarray, device: int) -> None:
        self.device = device
        self.rows = rows
        self.start_ns = table.start_ns[rows]
        self.bytes = table.bytes[rows]
        self.end = _next_of_address(table.address[rows])
        totals, reserved = table.allocated_bytes[rows], table.reserved_bytes[rows]
        self.counts_all = device != ABSENT and bool((totals >= 0).all())
        self.change = self.bytes if self.counts_all else self._of_this_trace()
        self.allocated = totals if self.counts_all else np.cumsum(self.change)
        self.reserved = reserved if device != ABSENT and (reserved >= 0).all() else None

    def _of_this_trace(self) -> np.ndarray:
        """Return what each change adds to the bytes of the allocations of this trace."""
        change: np.ndarray = np.maximum(self.bytes, 0)
        ended = np.flatnonzero((self.bytes > 0) & (self.end < len(self.end)))
        change[self.end[ended]] -= self.bytes[ended]
        return change

    def alive_at(self, index: int) -> np.ndarray:
        """Return the places of the allocations of this trace that live after that change."""
        return np.flatnonzero((self.bytes[: index + 1] > 0) & (self.end[: index + 1] > index))


def _next_of_address(address: np.ndarray) -> np.ndarray:
    """Return the place of the next change of the same address, the number of changes where there is none."""
    order = np.argsort(address, kind="stable")
    follows = np.flatnonzero(address[order[1:]] == address[order[:-1]])
    end = np.full(len(address), len(address), dtype=np.int64)
    end[order[follows]] = order[follows + 1]
    return end


def _use(structure: Structure, changes: _Changes) -> MemoryUse:
    is_taken = changes.bytes > 0
    peak = int(changes.allocated.argmax())
    alive = changes.alive_at(peak)
    alive_bytes = int(changes.bytes[alive].sum())
    owners = _owners(structure.trace, structure.tree, changes, alive)
    shown = owners[:MOST_OWNERS]
    peak_bytes = int(changes.allocated[peak])
    return MemoryUse(
        device=None if changes.device == ABSENT else changes.device,
        allocations=int(is_taken.sum()),
        allocated_bytes=int(changes.bytes[is_taken].sum()),
        frees=int((~is_taken).sum()),
        freed_bytes=-int(changes.bytes[~is_taken].sum()),
        change_bytes=int(changes.change.sum()),
        kept_per_step_bytes=_kept_per_step(changes, structure.window),
        peak_bytes=peak_bytes,
        peak_ns=int(changes.start_ns[peak]),
        peak_reserved_bytes=None if changes.reserved is None else int(changes.reserved.max()),
        earlier_bytes=max(0, peak_bytes - alive_bytes) if changes.counts_all else None,
        owners=tuple(shown),
        others_bytes=alive_bytes - sum(owner.bytes for owner in shown),
        timeline=_timeline(changes, peak),
        by_stage=_by_stage(structure.trace, changes, alive),
    )


def _by_stage(trace: Trace, changes: _Changes, alive: np.ndarray) -> tuple[tuple[str | None, int], ...]:
    """Return the bytes of the allocations `alive` by the stage that ran then, whichever thread made them.

    The backward of a GPU allocates in a thread of its own. A stage inside another counts to the outer one; () where
    the trace marks no stages.
    """
    marks = np.flatnonzero(trace.in_categories([ANNOTATION]) & trace.named(STAGE))
    if not len(marks):
        return ()
    marks = marks[np.lexsort((-trace.duration_ns[marks], trace.start_ns[marks]))]
    end_ns = trace.start_ns[marks] + trace.duration_ns[marks]
    latest = np.maximum.accumulate(end_ns)
    is_outer = np.append(True, trace.start_ns[marks][1:] >= latest[:-1])
    marks, end_ns = marks[is_outer], end_ns[is_outer]
    taken_ns = changes.start_ns[alive]
    mark = np.searchsorted(trace.start_ns[marks], taken_ns, side="right") - 1
    inside = (mark >= 0) & (taken_ns < end_ns[mark])
    names = np.where(inside, trace.name[marks][mark], ABSENT)
    by_stage: dict[str | None, int] = {}
    for name, size in zip(names.tolist(), changes.bytes[alive].tolist(), strict=True):
        stage = None if name == ABSENT else STAGE.sub("", trace.names[name])
        by_stage[stage] = by_stage.get(stage, 0) + size
    return tuple(sorted(by_stage.items(), key=lambda item: -item[1]))


def _owners(trace: Trace, tree: HostTree, changes: _Changes, alive: np.ndarray) -> list[MemoryOwner]:
    """Return who made the allocations `alive`, the one with most bytes first."""
    rows = changes.rows[alive]
    inside = tree.segments.row_at(trace.memory.thread[rows], trace.memory.start_ns[rows])
    allocates = np.array([name in ALLOCATING for name in trace.names], dtype=bool)[trace.name]
    operator = tree.nearest(inside, trace.is_operator & ~allocates)
    operator = np.where(operator == ABSENT, tree.nearest(inside, trace.is_operator), operator)
    annotated = trace.in_categories(["user_annotation"]) & ~trace.is_step_mark
    outer = names_of(trace, tree.nearest(inside, is_module(trace) | annotated))
    names = (None, *trace.names)
    both, group, counts = np.unique(
        (names_of(trace, operator) + 1).astype(np.int64) * len(names) + outer + 1,
        return_inverse=True,
        return_counts=True,
    )
    sizes = sums(group, changes.bytes[alive], len(both))
    owners = []
    for key, size, count in zip(both.tolist(), sizes.tolist(), counts.tolist(), strict=True):
        name, outer = (names[number] for number in divmod(key, len(names)))
        owners.append(MemoryOwner(name, outer and outer.removeprefix(MODULE), size, count))
    return sorted(owners, key=lambda owner: -owner.bytes)


def _kept_per_step(changes: _Changes, window: Window) -> int | None:
    """Return the least growth of the steps after the first, which may fill caches; 0 where one of them does not grow.

    On the host the first one also frees what was allocated before the trace, unseen.
    """
    if len(window.steps) < LEAST_STEPS:
        return None
    at_edges = np.searchsorted(changes.start_ns, window.edges_ns[1:], side="left")
    before = np.concatenate([[0], np.cumsum(changes.change)])[at_edges]
    return max(0, int(np.diff(before).min()))


def _timeline(changes: _Changes, peak: int) -> MemoryTimeline:
    """Return every change, or where there are too many the highest and the last point of spans of equal length."""
    count = len(changes.rows)
    chosen = np.arange(count)
    if count > MOST_POINTS:
        edges = np.linspace(changes.start_ns[0], changes.start_ns[-1], MOST_POINTS // 2)[1:-1]
        span = np.searchsorted(edges, changes.start_ns, side="right")
        order = np.lexsort((changes.allocated, span))
        last = np.flatnonzero(np.append(np.diff(span) > 0, True))
        highest = order[np.append(np.diff(span[order]) > 0, True)]
        chosen = distinct(np.sort(np.concatenate([[0, peak], highest, last])))
    return MemoryTimeline(
        times_ns=tuple(changes.start_ns[chosen].tolist()),
        allocated_bytes=tuple(changes.allocated[chosen].tolist()),
        reserved_bytes=None if changes.reserved is None else tuple(changes.reserved[chosen].tolist()),
    )


def memory_size(in_bytes: int) -> str:
    """Return a size with four digits, in the largest unit of powers of 1,000 that is no larger."""
    for unit, name in BYTES:
        if abs(in_bytes) >= unit:
            return f"{number(in_bytes / unit)} {name}"
    return f"{in_bytes:,} bytes"
