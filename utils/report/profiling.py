"""What step 03 says: what the machine waited for in the trace, its memory, and the model layer by layer."""

import shlex
from collections.abc import Iterator, Sequence

from boundby.bound import ARITHMETIC, OF_CAUSES, Verdict, fix_of_cause, plain
from boundby.formatting import NOTHING, clean, listed, number, times
from boundby.layers import ModelProfile, Ranked, blocks, by_self_time
from utils.baseline import Trace, TracedDevice, TraceSteps
from utils.render import Block, BulletList, DefinitionList, Heading, Paragraph, Table
from utils.report.figures import Content, Folded, show
from utils.report.pictures import layers as layer_bars
from utils.report.pictures import memory, timeline
from utils.report.pictures.style import BOUNDS
from utils.report.sources import Missing, ReportData
from utils.tracing import trace_text
from utils.tracing import trace_words as words

WAITING = "What the machine waited for, in the trace"
SHOWN_PCT, TELLING_PCT = 0.1, 1.0  # of the window, to be in the table, and to be explained
LONGEST_HOST = 26  # characters of what the host was in
WHOM_TO_BELIEVE = (
    "This is not what the measurement without a profiler found. Believe that one on how long a batch takes and what "
    "limits it, and the trace on what was waited for: the profiler makes many small operators look dearer."
)
LAYERS = "Layer by layer"
SHOWN_LAYERS = 5
LONGEST_LAYER = 44  # characters


def waiting(data: ReportData) -> list[Content]:
    """Return the verdict of the trace, what it rests on, and its pictures."""
    trace = data.trace
    timeline_picture = show(data, timeline.figure, _with_time(trace))
    memory_picture = show(data, memory.figure, _with_memory(trace))
    if isinstance(trace, Missing):
        why = Paragraph(f"There is no analysis of a trace: {clean(trace.reason, 300)}.")
        return [Heading(WAITING), why, timeline_picture, memory_picture]
    facts = [*_shares(trace["devices"][0]), *_steps(trace["steps"], data.manifest.shape)]
    facts.append(("All of it", shlex.join(["python", "scripts/analyze_trace.py", str(data.layout.trace)])))
    return [
        Heading(WAITING),
        Paragraph(_verdict(trace)),
        *_against_sweep(data, trace["verdict"]),
        *_doubts(trace),
        DefinitionList(facts),
        *_causes(trace),
        timeline_picture,
        Folded("What these causes are", _explained(trace)),
        Folded("Memory in the trace", [*trace_text.memory_blocks(trace.get("memory") or []), memory_picture]),
    ]


def _with_time(trace: Trace | Missing) -> Trace | Missing:
    return trace if not trace or trace["devices"][0]["window_ms"] else Missing("nothing in the trace takes time")


def _with_memory(trace: Trace | Missing) -> Trace | Missing:
    timed = _with_time(trace)
    known = not timed or timed.get("memory")
    return timed if known else Missing("the trace holds no changes of memory (trace.memory)")


def _verdict(trace: Trace) -> str:
    verdict, on_host = trace["verdict"], trace["devices"][0]["device"] is None
    bound, share = verdict.bound, verdict.share_of_limit
    text = words.bound(bound, on_host)
    text = f"{text[0].upper()}{text[1:]}"
    others = listed([plain(bound) for bound in verdict.alternatives])
    text += f": {others}" if others and bound == "mixed" else ""
    text += "" if share is None else f", {100 * share:.0f} % of the traced time"
    text += f"; it may also be {others}" if others and bound != "mixed" else ""
    return f"{text} (confidence {verdict.confidence})."


def _against_sweep(data: ReportData, verdict: Verdict) -> list[Block]:
    """Return what to make of a trace that speaks for another limit than the sweep at the same batch size."""
    point = (data.manifest.dtype, data.manifest.batch_size)
    swept = next((row.get("verdict") for row in data.rows if (row["dtype"], row["batch_size"]) == point), None)
    if not swept or "inconclusive" in (swept.bound, verdict.bound) or _possible(swept) & _possible(verdict):
        return []
    return [Paragraph(WHOM_TO_BELIEVE)]


def _possible(verdict: Verdict) -> set[str]:
    """Return the bounds that a verdict leaves open; a trace cannot tell whether the work fills the device."""
    bounds = {verdict.bound, *verdict.alternatives} - {"mixed"}
    return bounds | set(ARITHMETIC) if "under_utilised" in bounds else bounds


def _doubts(trace: Trace) -> list[Block]:
    items = [
        f"doubt: {clean(str(doubt), 300)}" for doubt in trace["verdict"].doubts
    ]  # what is wrong with it among them
    return [BulletList(items)] if items else []


def _shares(device: TracedDevice) -> Iterator[tuple[str, str]]:
    on_host, whole = device["device"] is None, device["window_ms"]
    parts = [] if on_host else [f"{words.plain(k)} {_share(ms, whole)}" for k, ms in device["exposed_ms"].items() if ms]
    text = f"{_share(device['busy_ms'], whole)} of {number(whole)} ms"
    yield "In operators" if on_host else "Busy", f"{text}{f' ({listed(parts)})' if parts else ''}"
    gaps = f"{_share(device['idle_ms'], whole)}, in {device['gaps']:,} gaps"
    yield "Between operators" if on_host else "Idle", gaps


def _steps(steps: TraceSteps, shape: str | None) -> Iterator[tuple[str, str]]:
    count, expected = len(steps["numbers"]), steps["expected"]
    if not count:
        yield "Steps", "none are marked; this is about all that was recorded"
        return
    text = (
        f"{count}{'' if expected is None else f' of {expected}'}, median {number(steps['median_ms'])} ms{_shape(shape)}"
    )
    if count > 1:
        text += f", the middle half {number(steps['q1_ms'])} to {number(steps['q3_ms'])} ms"
    yield "Steps", text


def _causes(trace: Trace) -> list[Block]:
    """Return the causes of idling with what the host was in and what removing each could gain at most."""
    device = trace["devices"][0]
    on_host, whole = device["device"] is None, device["window_ms"]
    causes = sorted(((ms, name) for name, ms in device["idle_by_cause_ms"].items() if ms), reverse=True)
    shown = [(ms, name) for ms, name in causes if 100 * ms / whole >= SHOWN_PCT]
    if not shown:
        return []
    fixes = {} if trace["verdict"].bound == "inconclusive" else _fixes(on_host)
    rows = [
        [
            _cause(name, on_host),
            number(ms),
            f"{100 * ms / whole:.1f}",
            f"{times(whole / left)}×" if name in fixes and (left := device["least_without_ms"].get(name)) else NOTHING,
            _meanwhile(device, name),
        ]
        for ms, name in shown
    ]
    small = [_cause(name, on_host) for ms, name in causes[len(shown) :]]
    notes = [f"below {SHOWN_PCT} %: {listed(small)}."] if small else []
    bound = "At most: all of this waiting gone, all else the same. No prediction; what was tried is above."
    notes += [bound] if fixes else []
    headers = ["", "ms", "%", "gain, at\nmost", "the host meanwhile, ms"]
    caption = "Time outside of operators" if on_host else "What it was idle for"
    return [Table(headers, rows, left=[0, 4], caption=caption, notes=notes)]


def _fixes(on_host: bool) -> dict[str, str]:
    """Return what to do about each cause that something can be done about."""
    fixes = {name: fix_of_cause(name, on_host) for name in OF_CAUSES}
    return {name: str(fix) for name, fix in fixes.items() if fix and fix.change.is_bounded}


def _explained(trace: Trace) -> list[Block]:
    """Return what each cause that tells is, and what to do about it."""
    device = trace["devices"][0]
    on_host, whole = device["device"] is None, device["window_ms"]
    fixes = {} if trace["verdict"].bound == "inconclusive" else _fixes(on_host)
    notes = [
        f"{_cause(name, on_host)}: {words.cause(name, on_host)}.{f' To do: {fixes[name]}.' if name in fixes else ''}"
        for name, ms in device["idle_by_cause_ms"].items()
        if 100 * ms > TELLING_PCT * whole
    ]
    return [BulletList(notes)] if notes else []


def _cause(name: str, on_host: bool) -> str:
    return "between operators" if on_host and name == "launch" else words.plain(name)


def _meanwhile(device: TracedDevice, cause: str) -> str:
    longest = device["idle_details"].get(cause, ())[:2]
    return ", ".join(f"{clean(spent['host_in'], LONGEST_HOST)} {number(spent['ms'])}" for spent in longest)


def _share(spent: float, whole: float) -> str:
    return f"{100 * spent / whole:.1f} %" if whole else f"{number(spent)} ms"


def layers(data: ReportData) -> list[Content]:
    """Return coverage, overhead, both rankings, and where the dashboard lies."""
    profile = data.layers
    picture = show(data, layer_bars.figure, profile)
    if isinstance(profile, Missing):
        return [Heading(LAYERS), Paragraph(f"There is no profile by layer: {clean(profile.reason, 300)}."), picture]
    coverage = profile.coverage
    dashboard = data.layout.layer_dashboard.relative_to(data.layout.results)
    summary = (
        f"One batch{_shape(profile.shape)} took {number(1e3 * profile.reference_s.median)} ms without probes; the "
        f"layers account for {100 * coverage.ratio:.1f} % of it, the probes cost {100 * profile.overhead:+.1f} %. "
        f"All of it: {dashboard}"
    )
    doubts = [clean(doubt, 300) for doubt in profile.doubts]
    own = _table(by_self_time(profile), "Layers by their own time, without the layers inside", profile)
    return [
        Heading(LAYERS),
        Paragraph(summary),
        *_trust(profile),
        _table(blocks(profile), "The blocks of the model, the longest first", profile),
        picture,
        Folded("Layers by their own time", [own]),
        Folded("Doubts about the profile by layer", [BulletList(doubts)] if doubts else []),
    ]


def _shape(shape: str | None) -> str:
    return f" ({shape})" if shape else ""


def _trust(profile: ModelProfile) -> list[Block]:
    if profile.coverage.status == "not representative":
        return [Paragraph("The layers do not account for the time of the model: read ranks at most, no times.")]
    return []


def _table(rows: Sequence[Ranked], caption: str, profile: ModelProfile) -> Block:
    bounds = {layer.path: (layer.bound, layer.share_of_limit) for layer in profile.layers}
    cells = []
    for row in rows[:SHOWN_LAYERS]:
        bound, share = bounds.get(row.path, (None, None))
        cells.append(
            [
                clean(row.label, LONGEST_LAYER),
                clean(row.type, 24),
                number(1e3 * row.seconds),
                f"{100 * row.share:.1f}",
                NOTHING if row.gain_at_limit_s is None else number(1e3 * row.gain_at_limit_s),
                NOTHING if bound is None else BOUNDS.get(bound, bound),
                NOTHING if share is None else f"{100 * share:.0f}",
            ]
        )
    return Table(
        headers=["layer", "type", "ms", "%", "to gain,\nms", "own work\nlimited by", "% of\nlimit"],
        rows=cells,
        left=[0, 1, 5],
        caption=caption,
        notes=["To gain: if its own work and that of everything inside ran at the limits of this machine."],
    )
