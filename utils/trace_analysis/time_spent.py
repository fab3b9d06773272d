"""Where the time of the window went: busy by kind, idle by cause, the longest gaps, the steps, the launches."""

from collections.abc import Mapping, Sequence
from typing import Any

from boundby.trace.stacks import frame_name
from utils.render.blocks import Block, DefinitionList, Table
from utils.render.formatting import NOTHING, clean, listed, number
from utils.trace_analysis import words
from utils.trace_analysis.kernel_names import short
from utils.trace_analysis.words import of_window, percent, plain

Device = Mapping[str, Any]

MOST_STEPS = 8
TELLING_PCT = 1.0  # of the window: less is not worth a line of explanation
LONGEST_KERNEL = 66
LONGEST_HOST = 25  # two of them, with their times, are one cell


def blocks(trace: Mapping[str, Any]) -> list[Block]:
    """Return the tables on the busiest device, and on the devices beside each other where there are several."""
    [device, *_] = trace["devices"]
    return [
        *_devices(trace["devices"]),
        _spent(device),
        *_gaps(device),
        *_steps(device["steps"]),
        *_launches(trace["launches"]),
    ]


def _devices(devices: Sequence[Device]) -> list[Block]:
    if len(devices) < 2:
        return []
    rows = [
        [
            str(each["device"]),
            of_window(each["busy_ms"], each),
            of_window(each["idle_ms"], each),
            _main_cause(each["idle_by_cause_ms"]),
        ]
        for each in devices
    ]
    note = "what follows is about the first, which is the busiest"
    return [Table(["device", "busy %", "idle %", "idle mostly for"], rows, left=[3], caption="Devices", notes=[note])]


def _spent(device: Device) -> Block:
    """Return a table that adds up."""
    on_host = device["device"] is None
    idle = sorted(device["idle_by_cause_ms"].items(), key=lambda item: -item[1])
    kinds = [] if on_host else device["exposed_ms"].items()
    parts = [
        ("in operators" if on_host else "busy", device["busy_ms"], ""),
        *((f"- {plain(name)}", spent, "") for name, spent in kinds if spent),
        ("between them" if on_host else "idle", device["idle_ms"], f"gaps: {device['gaps']:,}"),
        *((f"- {plain(name)}", spent, _meanwhile(device, name)) for name, spent in idle if spent),
    ]
    rows = [[name, number(spent), of_window(spent, device), text] for name, spent, text in parts]
    whole = device["window_ms"]
    telling = [name for name, spent in idle if whole and 100 * spent / whole > TELLING_PCT]
    notes = [f"{plain(name)}: {words.cause(name, on_host)}" for name in telling]
    absent = [plain(name) for name, spent in idle if not spent]
    notes += [f"none: {listed(absent)}"] if absent and not on_host else []
    who = "the host" if on_host else f"device {device['device']}"
    headers = ["", "ms", "% of\nwindow", "the host meanwhile, ms"]
    return Table(headers, rows, left=[0, 3], caption=f"Where the time of {who} went", notes=notes)


def _meanwhile(device: Device, cause: str) -> str:
    """Return what the host was in for most of this cause."""
    found = device["idle_details"].get(cause, ())[:2]
    return ", ".join(f"{clean(frame_name(each['host_in']), LONGEST_HOST)} {number(each['ms'])}" for each in found)


def _gaps(device: Device) -> list[Block]:
    gaps = device["longest_gaps"]
    if not gaps or device["device"] is None:  # of the host the end is not known by name
        return []
    rows = [
        [
            number(each["start_ms"]),
            number(each["duration_ms"]),
            plain(each["cause"]),
            short(each["ended_by"], LONGEST_KERNEL) if each["ended_by"] else "the end of the window",
        ]
        for each in gaps
    ]
    return [Table(["at ms", "for ms", "mostly", "until"], rows, left=[2, 3], caption="Longest gaps")]


def _steps(steps: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return the steps in their order; of many the longest."""
    if not steps:
        return []
    longest = sorted(steps, key=lambda step: -step["duration_ms"])[:MOST_STEPS]
    rows = []
    for step in sorted(longest, key=lambda step: step["start_ms"]):
        idle, whole = step["idle_ms"], step["duration_ms"]
        share = f"{100 * sum(idle.values()) / whole:.1f}" if whole else NOTHING
        rows.append([str(step["number"]), number(whole), share, _main_cause(idle)])
    caption = "Steps" if len(longest) == len(steps) else f"The {len(longest)} longest of {len(steps)} steps"
    return [Table(["step", "ms", "idle %", "idle mostly for"], rows, left=[3], caption=caption)]


def _launches(found: Mapping[str, Any]) -> list[Block]:
    if not found["work"]:
        return []
    lost = [f"{found['calls_without_work']:,} without work in the trace"] if found["calls_without_work"] else []
    lost += [f"{found['work_without_call']:,} pieces of work without a call"] if found["work_without_call"] else []
    pairs = [
        ("Launching calls", "; ".join([f"{found['calls']:,}: {_spread(found['call_us'])}", *lost])),
        ("From call to work", _spread(found["delay_us"])),
        ("Shorter than its call", f"{found['shorter_than_call']:,} kernels, of {found['work']:,} pieces of work"),
    ]
    if found["mean_queue"] is not None:
        often = f"none for {percent(found['empty_queue_pct'])} of the window"
        text = f"{number(found['mean_queue'])} pieces of work on average, {found['deepest_queue']:,} at most; {often}"
        pairs.append(("Waiting in the queue", text))
    return [DefinitionList(pairs)]


def _spread(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "unknown (no work is joined to its call)"
    median, p95, longest = (_duration(found[name]) for name in ("median", "p95", "max"))
    return f"median {median}, 95 % within {p95}, longest {longest}"


def _duration(microseconds: float) -> str:
    """Return a time in the unit that a person would choose."""
    return f"{number(microseconds)} us" if microseconds < 1000 else f"{number(microseconds / 1e3)} ms"


def _main_cause(idle: Mapping[str, float]) -> str:
    return plain(max(idle, key=lambda name: idle[name])) if any(idle.values()) else NOTHING
