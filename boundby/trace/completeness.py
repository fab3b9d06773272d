"""Whether a trace may be trusted: what is missing, impossible or odd in it, before anything is concluded from it."""

import re
from collections.abc import Iterator

import msgspec
import numpy as np

from boundby.trace.kernels import LaunchStats
from boundby.trace.linking import Links
from boundby.trace.structure import Structure
from boundby.trace.table import ABSENT, HOST_CATEGORIES, LAUNCH_CATEGORIES, PYTHON_FRAME, Trace
from boundby.trace.windows import Window

# Of five healthy traces at most 3.7 % of the launching calls were without work; they ran into the end of the trace.
LOST_WORK, MUCH_LOST_WORK = 0.05, 0.3
MUCH_ORPHANED = 0.05  # of the work of the device, without the call that launched it
MUCH_DAMAGED = 0.01  # of the events
MUCH_NOT_UNDERSTOOD = 0.01  # of the events, where none of what is understood is work of a device
MOST_NAMED = 4  # categories or processes that a sentence names
EARLY_STARTS = 0.01  # of the work, before its own launch: the clocks of host and device disagree
MAY_OVERLAP = re.compile(r"GraphLaunch|LaunchKernelEx")
ROUNDING_NS = 1_000  # of traces in whole us


class Finding(msgspec.Struct, frozen=True):
    """Something wrong with a trace. With a fatal one nothing can be concluded; the others lower the confidence."""

    kind: str
    is_fatal: bool
    text: str


def findings(
    structure: Structure,
    launches: LaunchStats,
    *,
    expected_steps: int | None = None,
    stacks_expected: bool = False,
) -> tuple[Finding, ...]:
    """Return what is wrong with the trace, the fatal ones first; () is a sound one."""
    trace, linked, window = structure.trace, structure.links, structure.window
    faults = list(_damage(trace))
    faults += _contents(trace, linked)
    faults += _steps(window, expected_steps)
    faults += _durations(trace, linked)
    faults += _links(trace, linked, window, launches)
    if window.length_ns == 0:
        faults.append(Finding("empty", True, "the trace holds nothing that takes time on the host or on a device"))
    elif trace.device_names and not len(linked.rows) and not trace.not_understood:
        text = f"the machine has {trace.device_names[0]}, but the trace holds no work of a device"
        faults.append(Finding("device", False, f"{text}; perhaps CUPTI was busy or the records were lost"))
    if stacks_expected and not trace.in_categories([PYTHON_FRAME]).any():
        faults.append(Finding("stacks", False, "Python stacks were asked for and the trace holds none"))
    return tuple(sorted(faults, key=lambda fault: not fault.is_fatal))


def _damage(trace: Trace) -> Iterator[Finding]:
    """Yield what could not be read: fatal where the file is cut short or much of it is lost."""
    for fault in trace.faults:
        if fault.events is None:
            yield Finding("damaged", True, f"{fault.text}; the events before that are analysed")
            continue
        share = fault.events / (fault.events + len(trace.start_ns))
        yield Finding("damaged", share > MUCH_DAMAGED, f"{fault.text} ({share:.2%} of all)")


def _contents(trace: Trace, linked: Links) -> Iterator[Finding]:
    """Yield which events are not understood here, and which are missing."""
    odd = trace.not_understood
    if odd:
        count, is_host_only = sum(odd.values()), not len(linked.rows)
        named = ", ".join(f"{number:,} {name[:40]}" for name, number in list(odd.items())[:MOST_NAMED])
        text = f"{count:,} event(s) are of kinds that are not understood here ({named})"
        is_much = count > MUCH_NOT_UNDERSTOOD * len(trace.start_ns)
        if is_host_only and is_much:
            text = f"{text}, and no kernel or copy of a device: why the host waited for it is unknown"
        yield Finding("not_understood", is_host_only and is_much, text)
    if len(trace.processes) > 1:
        named = ", ".join(str(process)[:20] for process in trace.processes[:MOST_NAMED])
        text = f"{len(trace.processes)} processes ({named}) are in one file, and which launched what is ambiguous"
        yield Finding("processes", True, f"{text}; give the file that each of them recorded")
    if not len(trace.start_ns) or trace.is_operator.any():
        return
    if not len(linked.rows):
        text = "the trace holds neither operators nor kernels that are understood here"
        yield Finding(
            "operators", True, f"{text}; record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    elif not trace.in_categories(HOST_CATEGORIES).any():
        text = "no host events were recorded, so why the device was idle is unknown"
        yield Finding("operators", False, f"{text}; record ProfilerActivity.CPU as well")


def _steps(window: Window, expected: int | None) -> Iterator[Finding]:
    steps = sorted(window.steps)
    if steps and steps[-1] - steps[0] + 1 > len(steps):
        missing = steps[-1] - steps[0] + 1 - len(steps)
        text = f"{missing} of the steps {steps[0]} to {steps[-1]} are missing"
        yield Finding("steps", True, text)
    if window.repeated:
        text = f"{len(window.repeated)} step number(s) occur at two times, such as {window.repeated[0]}"
        yield Finding("steps", True, f"{text}: several recordings are mixed in the file")
    if expected is not None and len(steps) < expected:
        yield Finding("steps", True, f"{len(steps)} of {expected} steps are in the trace")


def _durations(trace: Trace, linked: Links) -> Iterator[Finding]:
    negative = np.flatnonzero(trace.duration_ns < 0)
    if len(negative):
        name = trace.names[trace.name[negative[0]]][:80]
        yield Finding("negative", True, f"{len(negative)} event(s) have a negative duration, such as {name!r}")
    empty = int((linked.start_ns == linked.end_ns).sum())
    if empty:
        is_much = empty > LOST_WORK * len(linked.rows)
        text = f"{empty} of {len(linked.rows)} device operations last 0 ns"
        yield Finding("zero", False, f"{text}{', so busy time is understated' if is_much else ''}")


def _links(trace: Trace, linked: Links, window: Window, launches: LaunchStats) -> Iterator[Finding]:
    if launches.calls and launches.calls_without_work > LOST_WORK * launches.calls and len(linked.rows):
        share = launches.calls_without_work / launches.calls
        text = f"{launches.calls_without_work} of {launches.calls} launches ({share:.1%}) have no kernel or copy"
        yield Finding("lost", share > MUCH_LOST_WORK, f"{text}; records of the device were lost")
    inside = linked.is_backlog & (linked.start_ns >= window.start_ns) & (linked.start_ns < window.end_ns)
    backlog = int(inside.sum())
    if backlog:
        spent_ms = float((linked.end_ns - linked.start_ns)[inside].sum()) / 1e6
        text = f"the first {backlog:,} device operations ({spent_ms:,.1f} ms) were launched before the recording began"
        yield Finding("backlog", False, f"{text}: the host ran ahead; which operators launched them is unknown")
    orphans = launches.work_without_call - backlog
    if orphans:
        share = orphans / launches.work
        text = f"{orphans} of {launches.work} device operations ({share:.1%}) have no launch in the trace"
        text = f"{text}; what they waited for is unknown"
        yield Finding("orphaned", share > MUCH_ORPHANED, text)
    joined = linked.launch != ABSENT
    early = int((linked.start_ns[joined] < trace.start_ns[linked.launch[joined]]).sum())
    if early:
        share = early / int(joined.sum())
        text = f"{early} device operation(s) ({share:.1%}) begin before their own launch"
        yield Finding("clocks", share > EARLY_STARTS, f"{text}: the clocks of host and device disagree")
    overlaps = _overlaps(trace, linked)
    if overlaps:
        text = f"{overlaps} kernel(s) begin before the one before them in the same stream has ended"
        yield Finding("overlap", False, f"{text}; their times are not exact to the microsecond")


def _overlaps(trace: Trace, linked: Links) -> int:
    """Count kernels that cannot have begun so early: branches of one graph and dependent launches (Hopper) may."""
    kernels = np.flatnonzero(trace.in_categories(["kernel"])[linked.rows])
    lane = trace.device[linked.rows[kernels]].astype(np.int64) << 32
    lane |= trace.stream[linked.rows[kernels]].astype(np.int64) & 0xFFFFFFFF
    order = np.lexsort((linked.start_ns[kernels], lane))
    start, end, lane = linked.start_ns[kernels][order], linked.end_ns[kernels][order], lane[order]
    call = linked.launch[kernels][order]
    may = np.append(trace.named(MAY_OVERLAP, trace.in_categories(LAUNCH_CATEGORIES)), False)[call]  # the last: ABSENT
    is_early = (end[:-1] - start[1:] > ROUNDING_NS) & (lane[1:] == lane[:-1])
    return int((is_early & ~may[1:]).sum())
