"""Whether a trace may be trusted: what is missing, impossible or odd in it, before anything is concluded from it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from boundby.trace.kernels import LaunchStats
from boundby.trace.links import Links
from boundby.trace.table import ABSENT, PYTHON_FRAME, Trace
from boundby.trace.window import Window

# Of five healthy traces at most 3.7 % of the launching calls were without work; they ran into the end of the trace.
LOST_WORK, MUCH_LOST_WORK = 0.05, 0.3
MUCH_ORPHANED = 0.05  # of the work of the device, without the call that launched it
EARLY_STARTS = 0.01  # of the work, before its own launch: the clocks of host and device disagree
MOST_DEVICES = 64  # no process has more; each costs a timeline and its steps
SHARE_OF_ZEROS = 0.2  # of the events at the very same earliest moment


@dataclass(frozen=True)
class Finding:
    """Something wrong with a trace. With a fatal one nothing can be concluded; the others lower the confidence."""

    kind: str
    is_fatal: bool
    text: str


def findings(  # noqa: PLR0913  (everything that is known of the trace)
    trace: Trace,
    linked: Links,
    window: Window,
    launches: LaunchStats,
    *,
    devices: int = 1,
    expected_steps: int | None = None,
    stacks_expected: bool = False,
) -> tuple[Finding, ...]:
    """Return what is wrong with the trace, the fatal ones first; () is a sound one."""
    faults = [Finding("damaged", True, fault) for fault in trace.faults]
    faults += _steps(window, expected_steps)
    faults += _durations(trace, linked, window)
    faults += _links(trace, linked, launches)
    if devices > MOST_DEVICES:
        text = f"the work is of {devices:,} devices; only the {MOST_DEVICES} with most of it are told about"
        faults.append(Finding("devices", True, text))
    if window.length_ns == 0:
        faults.append(Finding("empty", True, "the trace holds nothing that takes time on the host or on a device"))
    elif trace.device_names and not len(linked.rows):
        text = f"the machine has {trace.device_names[0]}, but the trace holds no work of a device"
        faults.append(Finding("device", False, f"{text}; perhaps CUPTI was busy or the records were lost"))
    if stacks_expected and not trace.in_categories([PYTHON_FRAME]).any():
        faults.append(Finding("stacks", False, "Python stacks were asked for and the trace holds none"))
    return tuple(sorted(faults, key=lambda fault: not fault.is_fatal))


def _steps(window: Window, expected: int | None) -> Iterator[Finding]:
    steps = sorted(window.steps)
    if steps and steps[-1] - steps[0] + 1 > len(steps):
        missing = steps[-1] - steps[0] + 1 - len(steps)
        text = f"{missing} of the steps {steps[0]} to {steps[-1]} are missing"
        yield Finding("steps", True, text)
    if window.repeated:
        text = f"{len(window.repeated)} step number(s) stand at two different times, such as {window.repeated[0]}"
        yield Finding("steps", True, f"{text}: several recordings are mixed in the file")
    if expected is not None and len(steps) < expected:
        yield Finding("steps", True, f"{len(steps)} of {expected} steps are in the trace")


def _durations(trace: Trace, linked: Links, window: Window) -> Iterator[Finding]:
    negative = np.flatnonzero(trace.duration_ns < 0)
    if len(negative):
        name = trace.names[trace.name[negative[0]]][:80]
        yield Finding("negative", True, f"{len(negative)} event(s) last less than nothing, such as {name!r}")
    empty = int((linked.start_ns == linked.end_ns).sum())
    if empty:
        is_much = empty > LOST_WORK * len(linked.rows)
        text = f"{empty} of {len(linked.rows)} pieces of work of the device last 0 ns"
        yield Finding("zero", False, f"{text}{', so busy time is understated' if is_much else ''}")
    length = linked.end_ns - linked.start_ns
    longer = int((length > window.length_ns).sum()) if window.length_ns else 0
    if longer:
        yield Finding("longer", True, f"{longer} piece(s) of work of the device last longer than the whole window")
    at_base = int((trace.start_ns == 0).sum())
    if at_base > max(1, SHARE_OF_ZEROS * len(trace.start_ns)) and len(trace.start_ns) > 10:
        yield Finding("zero_time", True, f"{at_base} of {len(trace.start_ns)} events carry the same first timestamp")


def _links(trace: Trace, linked: Links, launches: LaunchStats) -> Iterator[Finding]:
    if launches.calls and launches.calls_without_work > LOST_WORK * launches.calls and len(linked.rows):
        share = launches.calls_without_work / launches.calls
        text = f"{launches.calls_without_work} of {launches.calls} launching calls ({share:.1%}) are without work"
        yield Finding("lost", share > MUCH_LOST_WORK, f"{text}; records of the device were lost")
    if launches.work_without_call:
        share = launches.work_without_call / launches.work
        text = f"{launches.work_without_call} of {launches.work} pieces of work of the device ({share:.1%})"
        text = f"{text} have no launch in the trace; what they waited for cannot be told"
        yield Finding("orphaned", share > MUCH_ORPHANED, text)
    joined = linked.launch != ABSENT
    early = int((linked.start_ns[joined] < trace.start_ns[linked.launch[joined]]).sum())
    if early:
        share = early / int(joined.sum())
        text = f"{early} piece(s) of work of the device ({share:.1%}) begin before their own launch"
        yield Finding("clocks", share > EARLY_STARTS, f"{text}: the clocks of host and device disagree")
    overlaps = _overlaps(trace, linked)
    if overlaps:
        text = f"{overlaps} kernel(s) begin before the one before them in the same stream has ended"
        yield Finding("overlap", False, f"{text}; their times are not to be trusted to the microsecond")


def _overlaps(trace: Trace, linked: Links) -> int:
    kernels = np.flatnonzero(trace.in_categories(["kernel"])[linked.rows])
    lane = trace.device[linked.rows[kernels]].astype(np.int64) << 32
    lane |= trace.stream[linked.rows[kernels]].astype(np.int64) & 0xFFFFFFFF
    order = np.lexsort((linked.start_ns[kernels], lane))
    start, end, lane = linked.start_ns[kernels][order], linked.end_ns[kernels][order], lane[order]
    return int(((start[1:] < end[:-1]) & (lane[1:] == lane[:-1])).sum())
