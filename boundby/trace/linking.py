"""The work of the devices: of which kind it is, and which call of the host launched it."""

import re

import msgspec
import numpy as np

from boundby.trace.table import ABSENT, ANNOTATION, DEVICE_CATEGORIES, LAUNCH_CATEGORIES, OPERATOR, Trace, chosen

# Calls of CUDA's and HIP's runtime and driver that put work into a queue of the device.
LAUNCH = re.compile(
    r"^((cuda|hip|cu)(Ext|Hcc)?(Module)?(Graph)?Launch(Kernel|CooperativeKernel|MultiKernelMultiDevice|ByPtr)?"
    r"(Ex|ExC|GGL|MultiDevice)?(_ptsz|_spt|_v\d+)?"
    r"|(cuda|hip|cu)(Memcpy|Memset)\w*"
    r"|(ur|ze)\w*(Launch|Append|Copy|Fill)\w*)$"
)
# Of names in lower case: without regard to case the same search takes eight times as long, on names of 300 characters.
COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|oneccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|multimem_"
)
HOST_COMMUNICATION = re.compile(r"^(gloo|mpi|ucc):")  # ranges of torch.distributed around collectives of hosts
MOSTLY, HARDLY = 0.5, 0.01  # of the work of a lane
KINDS = ("compute", "communication", "memcpy", "memset")  # in the order in which overlapping time is booked


class Links(msgspec.Struct, frozen=True):
    """The work of the device in the order of its starts, and the call that launched each.

    All arrays but `calls` are parallel. A graph launch is the call of many.
    """

    rows: np.ndarray  # in the trace
    start_ns: np.ndarray
    end_ns: np.ndarray  # not before the start
    launch: np.ndarray  # row of the call, or ABSENT
    device: np.ndarray  # its number; where an event lacks it, the process stands for it
    is_backlog: np.ndarray  # launched before the recording began: without a call, before the first work with one
    calls: np.ndarray  # rows of all launching calls of the trace, with or without work of the device


def links(trace: Trace) -> Links:
    """Return the work of all devices and its launches, joined by the correlation that both carry."""
    rows = np.flatnonzero(trace.in_categories(DEVICE_CATEGORIES))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    calls = np.flatnonzero(trace.in_categories(LAUNCH_CATEGORIES))
    start_ns = trace.start_ns[rows]
    launch, device = _by_correlation(trace, calls, trace.correlation[rows]), _device_numbers(trace, rows)
    return Links(
        rows=rows,
        start_ns=start_ns,
        end_ns=start_ns + np.maximum(trace.duration_ns[rows], 0),
        launch=launch,
        device=device,
        is_backlog=_are_backlog(device, trace.stream[rows], launch == ABSENT),
        calls=calls[trace.named(LAUNCH, trace.in_categories(LAUNCH_CATEGORIES))[calls]],
    )


def _are_backlog(device: np.ndarray, stream: np.ndarray, is_orphan: np.ndarray) -> np.ndarray:
    """Return a mask of the orphans before the first linked piece of their stream, of work in the order of its starts.

    On a stream without one, those before the first of the device are; on a device without one, none: its launches
    may be missing for any reason.
    """
    if not is_orphan.any():
        return is_orphan
    positions = np.arange(len(device))
    first_of_device = _first(device, positions, ~is_orphan)
    lane = (device << 32) ^ (stream.astype(np.int64) & 0xFFFFFFFF)
    first = _first(lane, positions, ~is_orphan)
    first = np.where(first == len(positions), first_of_device, first)
    return is_orphan & (positions < first) & (first_of_device < len(positions))


def _first(group: np.ndarray, places: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return, for each place, the first one of its group that counts; the number of places where none does."""
    different, number = np.unique(group, return_inverse=True)
    first = np.full(len(different), len(places), dtype=np.int64)
    np.minimum.at(first, number[counts], places[counts])
    return first[number]


def kinds_of_work(trace: Trace) -> np.ndarray:
    """Return the index in `KINDS` of each event's work on a device; -1 for events of the host."""
    kinds = np.full(len(trace.start_ns), -1, dtype=np.int8)
    kernel = trace.in_categories(["kernel"])
    kinds[kernel] = KINDS.index("compute")
    kinds[trace.named(COMMUNICATION, kernel, lower=True)] = KINDS.index("communication")
    kinds[trace.in_categories(["gpu_memcpy"])] = KINDS.index("memcpy")
    kinds[trace.in_categories(["gpu_memset"])] = KINDS.index("memset")
    return kinds


def host_collectives(trace: Trace) -> np.ndarray:
    """Return a mask of the events in which the host itself communicates, mostly on a thread of its own."""
    return trace.named(HOST_COMMUNICATION, trace.in_categories([ANNOTATION, OPERATOR]))


def _by_correlation(trace: Trace, calls: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    calls = calls[trace.correlation[calls] != ABSENT]
    if not len(calls):
        return np.full(len(correlation), ABSENT, dtype=np.int64)
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    known = trace.correlation[calls]
    index = np.minimum(np.searchsorted(known, correlation), len(calls) - 1)
    return np.where((known[index] == correlation) & (correlation != ABSENT), calls[index], ABSENT)


def _device_numbers(trace: Trace, rows: np.ndarray) -> np.ndarray:
    numbers: np.ndarray = trace.device[rows].astype(np.int64)
    lacking = np.flatnonzero(numbers == ABSENT)
    if len(lacking):
        known = [pid if isinstance(pid, int) and abs(pid) < 2**63 else 0 for pid, _ in trace.threads]
        numbers[lacking] = np.array(known, dtype=np.int64)[trace.thread[rows[lacking]]]
    return numbers


def by_process(trace: Trace) -> tuple[Trace, ...]:
    """Return the trace of each process of the host in the file, as merged ranks are; the only one is the file's.

    The work of a device belongs to the process whose calls carry its correlations and come before it, lane by lane.
    Where that fits none or several, the trace stays whole, and its `processes` tell how many there are.
    """
    if len(trace.processes) < 2:
        return (trace,)
    number_of = {pid: number for number, pid in enumerate(trace.processes)}
    owner = np.array([number_of.get(pid, ABSENT) for pid, _ in trace.threads], dtype=np.int64)  # of each thread
    rows = np.flatnonzero(trace.in_categories(DEVICE_CATEGORIES))
    calls = np.flatnonzero(trace.in_categories(LAUNCH_CATEGORIES))
    pids = [pid for pid, _ in trace.threads]
    for pid in dict.fromkeys(pids[number] for number in sorted(set(trace.thread[rows].tolist()))):
        lane = np.array([other == pid for other in pids])
        work = rows[lane[trace.thread[rows]]]
        fitting = [
            number for number in number_of.values() if _fits(trace, work, calls[owner[trace.thread[calls]] == number])
        ]
        if len(fitting) != 1:
            return (trace,)
        owner[lane] = fitting[0]
    of_event, of_memory = owner[trace.thread], owner[trace.memory.thread]
    return tuple(
        msgspec.structs.replace(
            chosen(trace, (of_event == number) | (of_event == ABSENT)),
            memory=chosen(trace.memory, of_memory == number),
            process=pid,
        )
        for pid, number in number_of.items()
    )


def _fits(trace: Trace, work: np.ndarray, calls: np.ndarray) -> bool:
    """Tell whether these calls may have launched the work: most of it has one, and hardly any begins before."""
    launch = _by_correlation(trace, calls, trace.correlation[work])
    joined = launch != ABSENT
    early = trace.start_ns[work[joined]] < trace.start_ns[launch[joined]]
    return bool(joined.sum() > MOSTLY * len(work) and early.sum() <= HARDLY * joined.sum())
