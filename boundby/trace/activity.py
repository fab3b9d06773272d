"""What the threads of the host were doing at each moment, in the few kinds that can keep a device waiting."""

import re
from dataclasses import dataclass

import numpy as np

from boundby.trace.lanes import Segments
from boundby.trace.links import Links
from boundby.trace.nesting import HOST_CATEGORIES, HostTree
from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT

NOTHING, LAUNCH, INPUT, SYNCHRONISATION, ALLOCATOR, COMPILE = range(6)
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
class Activity:
    """What every thread did over time: from each change of `segments` on, `kind` of it, and the event that says so.

    `row` is `ABSENT` where no event runs; where one runs that says nothing special, it is the innermost one. Both have
    one more entry, that of the index `ABSENT`.
    """

    main_thread: int | None  # that carries the step marks, else the one with most events; None where there is none
    segments: Segments
    kind: np.ndarray
    row: np.ndarray


def host_activity(trace: Trace, tree: HostTree, linked: Links) -> Activity:
    """Return the activity of the threads of the host."""
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
    return Activity(_main_thread(trace, tree), tree.segments, kind_of[tree.segments.row], row_of[tree.segments.row])


def _main_thread(trace: Trace, tree: HostTree) -> int | None:
    if not tree.is_active.any():
        return None
    counted = trace.thread[trace.is_step_mark]
    counted = counted[tree.is_active[counted]]
    if not len(counted):
        counted = trace.thread[tree.is_active[trace.thread]]
    return int(np.bincount(counted).argmax())
