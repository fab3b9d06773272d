"""What the threads of the host were doing at each moment, in the few kinds that can keep a device waiting."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from boundby.trace.intervals import distinct
from boundby.trace.links import Links
from boundby.trace.nesting import HOST_CATEGORIES, HostTree
from boundby.trace.reader import PROFILER_STEP, Trace
from boundby.trace.table import ABSENT

NOTHING, LAUNCH, INPUT, SYNCHRONISATION, ALLOCATOR, COMPILE = range(6)
KINDS = 6
# The innermost event that says what the thread does; everything else on the thread is launching or Python.
PATTERNS = {
    INPUT: re.compile(r"DataLoader\b.*__next__|dataloader\.py\(\d+\): __next__|dataloader_next|get_batch_samples"),
    SYNCHRONISATION: re.compile(
        r"^((cuda|cu|hip)\w*Synchronize(_ptsz)?|(cuda|hip)Memcpy(2D|3D)?|cuMemcpy(HtoD|DtoH|DtoD)?(_v2)?"
        r"|zeEventHostSynchronize|aten::item|aten::_local_scalar_dense|aten::is_nonzero)$"
    ),
    ALLOCATOR: re.compile(r"^((cuda|hip)(Malloc|Free|Host|Mem)(?!cpy|set)\w*|cuMem(?!cpy|set)\w+)$"),
    COMPILE: re.compile(
        r"\(dynamo_timed\)|^_compile\.|\b(compile_fx|async_compile|convert_frame)\b|triton/compiler/"
        r"|^(cuda|cu|hip|nvrtc|hiprtc)\w*(ModuleLoad|LibraryLoad|LinkCreate|LinkComplete|CompileProgram)"
    ),
}
BLOCKING_COPY = re.compile(r"DtoH.*Pageable|Device -> Pageable")


@dataclass(frozen=True)
class ThreadActivity:
    """What one thread did over time: `kind[i]` from `start_ns[i]` on, `row[i]` the event that says so.

    `row` is `ABSENT` where no event runs; where one runs that says nothing special, it is the innermost one.
    """

    start_ns: np.ndarray
    kind: np.ndarray
    row: np.ndarray

    def during(self, start_ns: int, end_ns: int) -> "ThreadActivity":
        """Return what is needed of the activity between two moments."""
        first = max(0, int(np.searchsorted(self.start_ns, start_ns, side="right")) - 1)
        last = int(np.searchsorted(self.start_ns, end_ns, side="right")) + 1
        return ThreadActivity(self.start_ns[first:last], self.kind[first:last], self.row[first:last])

    def or_else(self, other: "ThreadActivity") -> "ThreadActivity":
        """Return this activity and, where the thread does nothing, that of the `other` one."""
        if other is self:
            return self
        moments = distinct(np.sort(np.concatenate([self.start_ns, other.start_ns]), kind="stable"))  # two runs: a merge
        (kind, row), (other_kind, other_row) = self._at(moments), other._at(moments)
        idle = kind == NOTHING
        return ThreadActivity(moments, np.where(idle, other_kind, kind), np.where(idle, other_row, row))

    def until(self, moments: np.ndarray) -> np.ndarray:
        """Return [kind, moment]: the ns that the thread spent on each kind from its first event to each moment."""
        start_ns, kind, before = self._changes
        place = np.searchsorted(start_ns, moments, side="right") - 1
        inside = np.maximum(place, 0)
        found = before[:, inside]
        found[kind[inside], np.arange(len(moments))] += moments - start_ns[inside]
        return np.where(place >= 0, found, 0)

    def kind_at(self, moments: np.ndarray) -> np.ndarray:
        """Return the kind of activity at each moment."""
        start_ns, kind, _ = self._changes
        place = np.searchsorted(start_ns, moments, side="right") - 1
        return np.where(place >= 0, kind[np.maximum(place, 0)], NOTHING)

    @cached_property
    def _changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """When the kind changes, what it is from then on, and [kind, change]: the ns of each kind before."""
        first = np.flatnonzero(np.append(True, self.kind[1:] != self.kind[:-1]))
        start_ns, kind = self.start_ns[first], self.kind[first]
        before = np.zeros((KINDS, len(first)), dtype=np.int64)
        lengths = np.diff(start_ns)
        for each in range(KINDS):
            before[each, 1:] = np.cumsum(np.where(kind[:-1] == each, lengths, 0))
        return start_ns, kind, before

    def _at(self, moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = np.searchsorted(self.start_ns, moments, side="right") - 1
        inside = np.maximum(place, 0)
        return np.where(place >= 0, self.kind[inside], NOTHING), np.where(place >= 0, self.row[inside], ABSENT)


UNKNOWN = ThreadActivity(*(np.array([each]) for each in (0, NOTHING, ABSENT)))  # of a thread that the trace lacks


def thread_activities(trace: Trace, tree: HostTree, linked: Links) -> dict[int, ThreadActivity]:
    """Return the activity of every thread of the host, by its number in the trace."""
    of_event = np.full(len(trace.name), LAUNCH, dtype=np.int8)
    on_host = trace.in_categories(HOST_CATEGORIES)
    for kind, pattern in PATTERNS.items():
        of_event[trace.named(pattern, on_host)] = kind
    blocks = trace.named(BLOCKING_COPY, trace.in_categories(["gpu_memcpy"]))[linked.rows]
    of_event[linked.launch[blocks & (linked.launch != ABSENT)]] = SYNCHRONISATION
    every = np.arange(len(of_event))
    teller = tree.nearest(every, of_event != LAUNCH)
    kind_of = np.append(np.where(teller == ABSENT, LAUNCH, of_event[teller]), NOTHING)  # the last is that of ABSENT
    row_of = np.append(np.where(teller == ABSENT, every, teller), ABSENT)
    return {
        thread: ThreadActivity(segments.start_ns, kind_of[segments.row], row_of[segments.row])
        for thread, segments in tree.segments.items()
        if len(segments.row)
    }


def main_thread(trace: Trace, threads: Sequence[int]) -> int | None:
    """Return the thread that carries the step marks, else the one with most events; None where there is none."""
    if not len(threads):
        return None
    counted = trace.thread[trace.named(PROFILER_STEP)]
    counted = counted[np.isin(counted, threads)]
    if not len(counted):
        counted = trace.thread[np.isin(trace.thread, threads)]
    return int(np.bincount(counted).argmax())
