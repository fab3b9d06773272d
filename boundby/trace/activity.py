"""What every thread of the host did over time, and whether that is issuing work or something with a name of its own."""

import re

import msgspec
import numpy as np

from boundby.trace.intervals import HostTree, Segments, distinct
from boundby.trace.linking import Links
from boundby.trace.table import ABSENT, ANNOTATION, HOST_CATEGORIES, LAUNCH_CATEGORIES, OPERATOR, PYTHON_FRAME, Trace


class Kind:
    """What a thread of the host is at. Plain numbers: numpy compares millions of them with an enumeration slowly."""

    NOTHING = 0
    LAUNCH = 1
    INPUT = 2
    SYNCHRONISATION = 3
    ALLOCATOR = 4
    COMPILE = 5
    TOKENIZING = 6
    GARBAGE_COLLECTION = 7
    SAVING = 8
    LOADING = 9
    DRIVER = 10
    PYTHON = 11
    CALL = 12  # of the runtime, which is issuing work as well
    QUEUED = 13  # a launching call that waits for room in the queue: the device is ahead of nothing, the host is


KINDS = tuple(name.lower() for name in vars(Kind) if not name.startswith("_"))
# The innermost event that says what the thread does; everything else on the thread is issuing work or Python.
PATTERNS = {
    Kind.INPUT: re.compile(r"DataLoader\b.*__next__|dataloader\.py\(\d+\): __next__|dataloader_next|get_batch_samples"),
    Kind.SYNCHRONISATION: re.compile(
        r"^((cuda|cu|hip)\w*Synchronize(_ptsz)?|(cuda|hip)Memcpy(2D|3D)?|cuMemcpy(HtoD|DtoH|DtoD)?(_v2)?"
        r"|zeEventHostSynchronize|aten::item|aten::_local_scalar_dense|aten::is_nonzero)$"
    ),
    Kind.ALLOCATOR: re.compile(r"^((cuda|hip)(Malloc|Free|Host|Mem)(?!cpy|set)\w*|cuMem(?!cpy|set)\w+)$"),
    Kind.COMPILE: re.compile(
        r"\(dynamo_timed\)|^_compile\.|\b(compile_fx|async_compile|convert_frame)\b|triton/compiler/"
        r"|^(cuda|cu|hip|nvrtc|hiprtc)\w*(LinkCreate|LinkComplete|CompileProgram)"
    ),
    Kind.LOADING: re.compile(
        r"^(cuda|cu|hip)\w*(ModuleLoad|ModuleGetLoadingMode|LibraryLoad|InitDevice)"
        r"|^(cuInit|hipInit|cuDevicePrimaryCtxRetain|(cu|hip)CtxCreate)"
    ),
}
# Functions of Python, in traces with stacks.
OF_FRAMES = {
    Kind.GARBAGE_COLLECTION: re.compile(r"built-in (method|function) collect\b"),
    Kind.SAVING: re.compile(
        r"torch/serialization\.py\(\d+\): _?save|safetensors/\w+\.py\(\d+\): save|: save_pretrained$"
    ),
    Kind.TOKENIZING: re.compile(r"tokenization_\w+\.py\(\d+\): |built-in method encode(_batch\w*)? of tokenizers"),
}
# Names that people give to ranges of their own, in lower case; what a word begins and ends with is no letter.
WORDS = {
    Kind.INPUT: (
        r"data(load(er|ing)?|set)?(?!_?parallel)|(load|fetch|next|get|prepare|make)_?batch(es)?|collat(e|ing)|fetch"
    ),
    Kind.TOKENIZING: r"tokeni[sz](e|er|ing|ation)?",
    Kind.SAVING: r"sav(e|ing)|checkpoint(s|ing)?",
    Kind.GARBAGE_COLLECTION: r"gc|garbage",
    Kind.COMPILE: r"compil(e|ing|ation)",
}
OF_RANGES = {kind: re.compile(f"(?<![a-z])({words})(?![a-z])") for kind, words in WORDS.items()}
# A copy to memory that is not pinned, and HIP's copy that synchronises: the call ends when the copy has.
BLOCKING_COPY = re.compile(r"DtoH.*Pageable|Device -> Pageable")
BLOCKING_CALL = re.compile(r"^hipMemcpyWithStream")
PAGEABLE = re.compile("Pageable")
GRAPH = re.compile("GraphLaunch")
KERNEL = re.compile("Launch")
USUAL_CALL_NS = 50_000  # beyond this no launching call of a kernel is usual, whatever the median of the trace is
LONG = 3  # times the usual call, and a usual one beyond that
SHORT_WAIT_NS = 20_000  # what returns so soon may have waited for nothing
DEEP_QUEUE = 4  # launched and not begun: a long call then waits for room
START_NS = 50_000_000  # a call of the runtime before the first work that lasts so long starts the device
OWN_CODE_NS = 200_000  # of Python in one piece: more than lies between two operators of a model
UNRECORDED_NS = 1_000_000  # without a device and a name: Python, or a wait for a thread that was not recorded
BEFORE_ALL = -(2**62)


class Activity(msgspec.Struct, frozen=True):
    """What every thread did over time: from each change of `segments` on, `kind` of it, and the event that says so.

    `row` is `ABSENT` where no event runs; where one runs that says nothing special, it is the innermost one. Both have
    one more entry, that of the index `ABSENT`. `late_ns` has a value for every event of the trace: how much longer than
    usual it took a launching call to launch.
    """

    main_thread: int | None  # that carries the step marks, else the one with most events; None where there is none
    segments: Segments
    kind: np.ndarray
    row: np.ndarray
    late_ns: np.ndarray
    is_blocking: np.ndarray  # of every event: a call that copies and waits for it
    leads: np.ndarray  # of every thread: the main one, and those that launch more than copies
    short_python_ns: int  # counted as issuing work, of those threads; it may be the program's own
    long_python_ns: int  # counted as the program's own; so much of it may be issuing work

    def by_kind(self) -> "Activity":
        """Return the same with changes of the kind alone; `row` and `late_ns` are then of no use."""
        changes = np.append(True, self.kind[1:-1] != self.kind[:-2])
        changed = np.flatnonzero(np.append(changes[: len(self.segments.position)], True))
        inner, segments = changed[:-1], self.segments
        kept = Segments(segments.lanes, segments.position[inner], segments.start_ns[inner], segments.row[changed])
        return msgspec.structs.replace(self, segments=kept, kind=self.kind[changed], row=self.row[changed])


def host_activity(trace: Trace, tree: HostTree, linked: Links) -> Activity:
    """Return the activity of the threads of the host."""
    of_event, on_host = np.full(len(trace.name), Kind.LAUNCH, dtype=np.int8), trace.in_categories(HOST_CATEGORIES)
    is_range, is_frame = trace.in_categories([ANNOTATION]), trace.in_categories([PYTHON_FRAME])
    for kind, pattern in OF_RANGES.items():
        of_event[trace.named(pattern, is_range, lower=True)] = kind
    for kind, pattern in OF_FRAMES.items():
        of_event[trace.named(pattern, is_frame)] = kind
    for kind, pattern in PATTERNS.items():
        of_event[trace.named(pattern, on_host)] = kind
    is_blocking = _blocking_copies(trace, linked)
    of_event[is_blocking] = Kind.SYNCHRONISATION
    _find_start(trace, linked, of_event)
    every = np.arange(len(of_event))
    late_ns, told_by = _long_calls(trace, linked, of_event)
    teller = tree.nearest(every, of_event != Kind.LAUNCH)
    has_name = teller != ABSENT
    unnamed = np.where(trace.in_categories(LAUNCH_CATEGORIES), Kind.CALL, Kind.LAUNCH)
    # The last is that of ABSENT.
    kind_of = np.append(np.where(has_name, of_event[teller], unnamed), Kind.NOTHING).astype(np.int8)
    segments, main = tree.segments, _main_thread(trace, tree)
    leads, kind = _leading(trace, linked, main), kind_of[segments.row]
    is_step = trace.is_step_mark
    is_python = np.append((is_range | is_frame | is_step) & (kind_of[:-1] == Kind.LAUNCH) & leads[trace.thread], False)
    is_leaf = np.append(is_range & ~is_step, False)
    is_leaf[tree.parent] = False
    short_ns, long_ns = _find_own_code(
        segments, kind, main, is_python, is_leaf, np.append(is_step, True), has_device=len(linked.rows) > 0
    )
    return Activity(
        main_thread=main,
        segments=segments,
        kind=kind,
        row=np.append(np.where(has_name, told_by[teller], every), ABSENT)[segments.row],
        late_ns=late_ns,
        is_blocking=is_blocking,
        leads=leads,
        short_python_ns=short_ns,
        long_python_ns=long_ns,
    )


def _blocking_copies(trace: Trace, linked: Links) -> np.ndarray:
    """Return a mask of the calls that wait for the copy they launch: by its name, or as they last until its end."""
    is_blocking = np.zeros(len(trace.name), dtype=bool)
    is_copy = trace.in_categories(["gpu_memcpy"])
    copies = np.flatnonzero(is_copy[linked.rows] & (linked.launch != ABSENT))
    call = linked.launch[copies]
    lasts = trace.duration_ns[call]
    lasting = (lasts >= SHORT_WAIT_NS) | trace.named(PAGEABLE, is_copy)[linked.rows[copies]]
    until_end = (trace.start_ns[call] + lasts >= linked.end_ns[copies]) & lasting
    is_blocking[call[until_end | trace.named(BLOCKING_COPY, is_copy)[linked.rows[copies]]]] = True
    is_blocking |= trace.named(BLOCKING_CALL, trace.in_categories(LAUNCH_CATEGORIES))
    return is_blocking


def _main_thread(trace: Trace, tree: HostTree) -> int | None:
    """Return the thread with the step marks; without any, the one that works from earliest to latest."""
    if not tree.is_active.any():
        return None
    marked = trace.thread[trace.is_step_mark]
    marked = marked[tree.is_active[marked]]
    if len(marked):
        return int(np.bincount(marked).argmax())
    segments, threads = tree.segments, np.arange(len(trace.threads))
    first = np.searchsorted(segments.position, segments.lanes.position(threads, np.full(len(threads), BEFORE_ALL)))
    last = np.append(first[1:], len(segments.position)) - 1
    extent = np.zeros(len(threads), dtype=np.int64)
    extent[tree.is_active] = (segments.start_ns[last] - segments.start_ns[np.minimum(first, last)])[tree.is_active]
    works = np.zeros(len(threads), dtype=bool)  # a thread with frames alone may be the monitor of a progress bar
    works[trace.thread[trace.in_categories([OPERATOR, ANNOTATION, *LAUNCH_CATEGORIES])]] = True
    return int(np.where(works & tree.is_active, extent, extent - extent.max() - 1).argmax())


def _leading(trace: Trace, linked: Links, main: int | None) -> np.ndarray:
    """Return a mask of the threads that the device's work waits for; one that only copies ahead is not among them."""
    leads = np.zeros(len(trace.threads), dtype=bool)
    launch = linked.launch[trace.in_categories(["kernel"])[linked.rows]]
    leads[trace.thread[launch[launch != ABSENT]]] = True
    if main is not None:
        leads[main] = True
    return leads


def _find_start(trace: Trace, linked: Links, of_event: np.ndarray) -> None:
    """Tell calls that start the device, which may bear any name, from those of the allocator."""
    first = int(linked.start_ns[0]) if len(linked.rows) else 0
    is_start = (of_event == Kind.ALLOCATOR) & (trace.duration_ns >= START_NS) & (trace.start_ns < first)
    of_event[is_start] = Kind.LOADING


def _long_calls(trace: Trace, linked: Links, of_event: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how much later than usual each event launched, and which event tells why; `of_event` is told the kind."""
    late_ns, told_by = np.zeros(len(of_event), dtype=np.int64), np.arange(len(of_event))
    launching = linked.calls[of_event[linked.calls] == Kind.LAUNCH]
    launching = launching[trace.named(KERNEL, trace.in_categories(LAUNCH_CATEGORIES))[launching]]
    names, length = trace.name[launching], np.maximum(trace.duration_ns[launching], 0)
    slow = np.zeros(len(launching), dtype=bool)
    for name in distinct(np.sort(names)).tolist():
        same = np.flatnonzero(names == name)
        usual = int(np.partition(length[same], (len(same) - 1) // 2)[(len(same) - 1) // 2])
        if not GRAPH.search(trace.names[name]):
            usual = min(usual, USUAL_CALL_NS)
        beyond = length[same] - usual
        slow[same] = beyond > max(USUAL_CALL_NS, (LONG - 1) * usual)
        late_ns[launching[same]] = np.where(slow[same], beyond, 0)
    calls = launching[slow]
    if len(calls):
        of_event[calls] = Kind.DRIVER
        _find_first_uses(trace, linked, calls, of_event, told_by)
        _find_holders(trace, calls, of_event, told_by)
        of_event[calls[_has_deep_queue(trace, linked, calls)]] = Kind.QUEUED
    return late_ns, told_by


def _find_first_uses(trace: Trace, linked: Links, calls: np.ndarray, of_event: np.ndarray, told_by: np.ndarray) -> None:
    """Tell the calls that launch a kernel for the first time: its code is loaded then."""
    is_slow = np.zeros(len(of_event) + 1, dtype=bool)  # one more for ABSENT
    is_slow[calls] = True
    of_slow = np.flatnonzero(is_slow[linked.launch])
    first_ns = np.full(len(trace.names), np.iinfo(np.int64).max)
    launched = np.flatnonzero(linked.launch != ABSENT)
    np.minimum.at(first_ns, trace.name[linked.rows[launched]], trace.start_ns[linked.launch[launched]])
    call = linked.launch[of_slow]
    is_first = first_ns[trace.name[linked.rows[of_slow]]] == trace.start_ns[call]
    of_event[call[is_first]] = Kind.LOADING
    told_by[call[is_first]] = linked.rows[of_slow[is_first]]


def _find_holders(trace: Trace, calls: np.ndarray, of_event: np.ndarray, told_by: np.ndarray) -> None:
    """Tell the calls during most of which another thread was in a call that keeps the driver to itself."""
    holders = np.flatnonzero(np.isin(of_event, (Kind.ALLOCATOR, Kind.LOADING)) & trace.in_categories(LAUNCH_CATEGORIES))
    if not len(holders):
        return
    holders = holders[np.argsort(trace.start_ns[holders], kind="stable")]
    start, end = trace.start_ns[calls], trace.start_ns[calls] + trace.duration_ns[calls]
    last = np.searchsorted(trace.start_ns[holders], end) - 1
    for position in (last - 1, last):
        holder = holders[np.maximum(position, 0)]
        began, ended = trace.start_ns[holder], trace.start_ns[holder] + trace.duration_ns[holder]
        shared = np.minimum(end, ended) - np.maximum(start, began)
        held = (position >= 0) & (trace.thread[holder] != trace.thread[calls]) & (2 * shared > end - start)
        of_event[calls[held]], told_by[calls[held]] = Kind.DRIVER, holder[held]


def _has_deep_queue(trace: Trace, linked: Links, calls: np.ndarray) -> np.ndarray:
    """Tell the calls at whose end much work has been launched and has not begun."""
    joined = np.flatnonzero(linked.launch != ABSENT)
    launched = np.sort(trace.start_ns[linked.launch[joined]])
    end = trace.start_ns[calls] + trace.duration_ns[calls]
    waiting = np.searchsorted(launched, trace.start_ns[calls]) - np.searchsorted(linked.start_ns[joined], end)
    is_deep: np.ndarray = waiting >= DEEP_QUEUE
    return is_deep


def _find_own_code(
    segments: Segments,
    kind: np.ndarray,
    main: int | None,
    is_python: np.ndarray,
    is_leaf: np.ndarray,
    is_unnamed: np.ndarray,
    *,
    has_device: bool,
) -> tuple[int, int]:
    """Tell Python with a time of its own, in `kind`, from that between two operators, which is part of issuing work.

    Takes masks of all events and one more, that of the index `ABSENT`. The main thread is in Python wherever it is in
    no event between its first and its last one. Without a device, where nothing has a name, it may as well wait for a
    thread that was not recorded; with one it keeps that waiting, whatever it does. Returns how much Python may be the
    other of the two: all that was too short, and as much of each long stretch as would have been too short by itself.
    """
    row, count = segments.row[:-1], len(segments.position)
    python = is_python[row]
    if main is not None:
        first, end = np.searchsorted(
            segments.position, segments.lanes.position(np.array([main, main + 1]), np.full(2, BEFORE_ALL))
        )
        python[first : end - 1] |= row[first : end - 1] == ABSENT
    edges = np.flatnonzero(np.diff(np.concatenate([[False], python, [False]]).astype(np.int8)))
    begin, end = edges[::2], np.minimum(edges[1::2], count - 1)
    lasts = segments.start_ns[end] - segments.start_ns[begin]
    length = np.repeat(lasts, edges[1::2] - begin)
    chosen = np.flatnonzero(python)
    is_own = (length >= OWN_CODE_NS) | is_leaf[row[chosen]]
    kind[chosen] = np.where(is_own, Kind.PYTHON, Kind.LAUNCH)
    if not has_device:
        kind[chosen[(length >= UNRECORDED_NS) & is_unnamed[row[chosen]]]] = Kind.NOTHING
    short = chosen[~is_own]
    short_ns = int((segments.start_ns[np.minimum(short + 1, count - 1)] - segments.start_ns[short]).sum())
    return short_ns, OWN_CODE_NS * int((lasts >= OWN_CODE_NS).sum())
