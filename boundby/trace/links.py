"""The work of the devices: of which kind it is, and which call of the host launched it."""

import re
from dataclasses import dataclass

import numpy as np

from boundby.trace.table import ABSENT, DEVICE_CATEGORIES, LAUNCH_CATEGORIES, Trace

# Calls of CUDA's and HIP's runtime and driver that put work into a queue of the device.
LAUNCH = re.compile(
    r"^((cuda|hip|cu)(Ext)?(Module)?(Graph)?Launch(Kernel|CooperativeKernel)?(Ex|ExC|MultiDevice)?(_ptsz|_v\d+)?"
    r"|(cuda|hip|cu)(Memcpy|Memset)\w*"
    r"|(ur|ze)\w*(Launch|Append|Copy|Fill)\w*)$"
)
# Of names in lower case: without regard to case the same search takes eight times as long, on names of 300 characters.
COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|oneccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|multimem_"
)
KINDS = ("compute", "communication", "memcpy", "memset")  # in the order in which overlapping time is booked


@dataclass(frozen=True)
class Links:
    """The work of the device in the order of its starts, and the call that launched each.

    All arrays but `calls` are parallel. A graph launch is the call of many.
    """

    rows: np.ndarray  # in the trace
    start_ns: np.ndarray
    end_ns: np.ndarray  # not before the start
    launch: np.ndarray  # row of the call, or ABSENT
    device: np.ndarray  # its number; where an event lacks it, the process stands for it
    calls: np.ndarray  # rows of all launching calls of the trace, with or without work of the device


def links(trace: Trace) -> Links:
    """Return the work of all devices and its launches, joined by the correlation that both carry."""
    rows = np.flatnonzero(trace.in_categories(DEVICE_CATEGORIES))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    calls = np.flatnonzero(trace.in_categories(LAUNCH_CATEGORIES))
    start_ns = trace.start_ns[rows]
    return Links(
        rows=rows,
        start_ns=start_ns,
        end_ns=start_ns + np.maximum(trace.duration_ns[rows], 0),
        launch=_by_correlation(trace, calls, trace.correlation[rows]),
        device=_device_numbers(trace, rows),
        calls=calls[trace.named(LAUNCH, trace.in_categories(LAUNCH_CATEGORIES))[calls]],
    )


def kinds_of_work(trace: Trace) -> np.ndarray:
    """Return the index in `KINDS` of each event's work on a device; -1 for events of the host."""
    kinds = np.full(len(trace.start_ns), -1, dtype=np.int8)
    kernel = trace.in_categories(["kernel"])
    kinds[kernel] = KINDS.index("compute")
    kinds[trace.named(COMMUNICATION, kernel, lower=True)] = KINDS.index("communication")
    kinds[trace.in_categories(["gpu_memcpy"])] = KINDS.index("memcpy")
    kinds[trace.in_categories(["gpu_memset"])] = KINDS.index("memset")
    return kinds


def _by_correlation(trace: Trace, calls: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    calls = calls[trace.correlation[calls] != ABSENT]
    if not len(calls):
        return np.full(len(correlation), ABSENT, dtype=np.int64)
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    known = trace.correlation[calls]
    place = np.minimum(np.searchsorted(known, correlation), len(calls) - 1)
    return np.where((known[place] == correlation) & (correlation != ABSENT), calls[place], ABSENT)


def _device_numbers(trace: Trace, rows: np.ndarray) -> np.ndarray:
    numbers: np.ndarray = trace.device[rows].astype(np.int64)
    lacking = np.flatnonzero(numbers == ABSENT)
    if len(lacking):
        known = [pid if isinstance(pid, int) and abs(pid) < 2**63 else 0 for pid, _ in trace.threads]
        numbers[lacking] = np.array(known, dtype=np.int64)[trace.thread[rows[lacking]]]
    return numbers
