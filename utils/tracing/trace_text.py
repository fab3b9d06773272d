"""Tell a person what traces say: the verdict, what it rests on, the tables; or what differs between two of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from boundby.bound import Verdict, values_of
from boundby.formatting import NOTHING, clean, listed, number, percent, times
from boundby.trace import (
    Analysis,
    Breakdown,
    LaunchStats,
    Spread,
    StepTimes,
    frame_name,
    memory_size,
    ncu_command,
    table_lines,
    table_rows,
)
from utils.render import Block, BulletList, CodeBlock, DefinitionList, Heading, Paragraph, Table, plain_text
from utils.tracing import trace_words as words
from utils.tracing.traces import Examination, Examined, LeftOut, Pair

if TYPE_CHECKING:
    from boundby.trace import Change, Diff, Part, StepSpread, TimeChange, Unlike
    from utils.baseline import TracedMemory

TOP = 15
MOST_STEPS = 8
LARGEST_FACTOR = 100  # beyond it nearly nothing would remain, whatever the number
TELLING_SHARE = 0.01  # of the window: less is not worth a line of explanation
OF_KERNELS = ("compute", "memory", "under_utilised", "mixed")  # the bounds that a faster kernel would move
# Characters of names; no line is longer than 120.
LONGEST_FILE = 36
LONGEST_OPERATOR, LONGEST_KERNEL, LONGEST_ENDER = 30, 60, 66
LONGEST_CHANGED_OPERATOR, LONGEST_CHANGED_KERNEL = 40, 52
LONGEST_CONTRIBUTOR = 90
MOST_PARTS = 6
LEAST_CALLS = 0.01  # per step: fewer are rounding
LONGEST_HOST = 25  # two of them, with their times, are one cell
LONGEST_OWNER = 40
MOST_OWNERS = 6
LEAST_OWNED = 0.01  # of the peak, to stand in the table of its owners
NEXT_STEP = (
    "Next step: what limits the slowest kernel, by Nsight Compute (docs/nsight-compute.md; put in your own program):"
)
ONE_SAMPLE = "One trace is one sample: two runs of the same program differ as well. No change below is tested."
UNEQUAL = "since a trace has no steps"
SORTED = {"device_self_ms": "device self time", "cpu_self_ms": "CPU self time"}


def lines(examination: Examination, index: int | None = None, top: int | None = None) -> list[str]:
    """Return what the traces say, in lines of at most 120 columns; in detail the one at `index`, or the slowest."""
    index, top = examination.slowest if index is None else index, top or TOP
    trace = examination.traces[index]
    analysis = trace.analysis
    shown = plain_text.lines([*_left_out(examination.left_out), *_ranks(examination, index), *blocks(trace)])
    if trace.operators:
        by = _order(analysis.devices[0])
        title = f"Top operators by {SORTED[by]}, grouped by {examination.group_by}"
        shown += [*plain_text.lines([Heading(title)]), *table_lines(table_rows(trace.operators), top, by)]
    memory = [Heading("Memory"), *memory_blocks(values_of(analysis.memory))] if analysis.memory else []
    return shown + plain_text.lines([*_kernels(analysis, top), *_annotations(analysis, top), *memory])


def blocks(trace: Examined) -> list[Block]:
    """Return what one trace says, without its tables of operators and kernels."""
    analysis, device = trace.analysis, trace.analysis.devices[0]
    return [
        Paragraph(headline(trace)),
        DefinitionList([("Trace", subject(trace)), ("Window", _window(analysis)), *_communication(trace)]),
        *_verdict(trace.verdict),
        *_devices(analysis.devices),
        _spent(device),
        *_gaps(device, analysis.start_ns),
        *_steps(device.steps),
        *_launches(analysis.launches),
        *_next_step(trace),
    ]


def headline(trace: Examined) -> str:
    """Return the verdict in one sentence."""
    verdict = trace.verdict
    bound, share, others = verdict.bound, verdict.share_of_limit, listed(verdict.alternatives)
    meaning = words.bound(bound, on_host=trace.analysis.devices[0].device is None)
    if bound == "inconclusive":
        why = str(verdict.doubts[0]) if verdict.doubts else "most of its time nothing in it explains"
        return f"INCONCLUSIVE: {meaning}: {clean(why, 300)}"
    if bound == "mixed":
        which = "between" if len(verdict.alternatives) > 1 else "perhaps"
        parts = [meaning, f"{which} {others}" if others else ""]
    else:
        whole = "" if share is None else f", {percent(share, 1)} of the window"
        parts = [f"{meaning}{whole}", f"it may also be {others}" if others else ""]
    return f"{bound.upper()}: {'; '.join(filter(None, [*parts, f'confidence {verdict.confidence}']))}"


def subject(trace: Examined) -> str:
    """Return what the trace is of, on one line."""
    analysis, size = trace.analysis, trace.analysis.world_size
    rank = None if trace.rank is None else f"rank {trace.rank}{f' of {size}' if size else ''}"
    process = None if analysis.process is None else f"process {analysis.process}"
    parts = [analysis.path, rank, process, *analysis.device_names[:1], f"{analysis.events:,} events"]
    return clean(", ".join(filter(None, parts)), 200)


def memory_blocks(uses: "Sequence[TracedMemory]") -> list[Block]:
    """Return a sentence per device, and the owners of the highest peak; [] where memory was not recorded."""
    return [Paragraph(" ".join(map(_peak, uses)), strong="Memory:"), *_owners(uses[0])] if uses else []


def pair_lines(pair: Pair, top: int | None = None) -> list[str]:
    """Return what differs between two traces, the step first, in lines of at most 120 columns."""
    diff, top = pair.diff, top or TOP
    per = "per step" if diff.is_per_step else "in total"
    how = "per step: what a trace holds, over the number of its steps" if diff.is_per_step else f"{per}, {UNEQUAL}"
    return plain_text.lines(
        [
            *_warnings(diff.unlike),
            Paragraph(pair_headline(pair)),
            DefinitionList(
                [
                    ("A", f"{subject(pair.a)}; {_step_spread(diff.step_a)}"),
                    ("B", f"{subject(pair.b)}; {_step_spread(diff.step_b)}"),
                    ("Bound", f"A {pair.a.verdict.bound}, B {pair.b.verdict.bound}"),
                    ("Amounts", f"{how}; operators are matched by {diff.matched_by}"),
                ]
            ),
            *_change_of(diff),
            Paragraph(ONE_SAMPLE),
            _changed_times([*diff.busy, *diff.idle], per),
            *_changed_operators(diff.operators, per, top),
            *_changed_kernels(diff.kernels, per, top),
        ]
    )


def pair_headline(pair: Pair) -> str:
    """Return how the step has changed, and whether that is more than the steps of one trace differ."""
    a, b = pair.diff.step_a, pair.diff.step_b
    broken = [name for name, side in (("A", pair.a), ("B", pair.b)) if side.is_inconclusive]
    doubt = f" ({' and '.join(broken)} inconclusive: see the analysis of each)" if broken else ""
    if a is None or b is None:
        text = f"window of A {_ms(pair.diff.window_a_ns)} ms, of B {_ms(pair.diff.window_b_ns)} ms"
        return f"NO STEPS to compare: {text}; a trace without steps may hold more work, not slower work{doubt}"
    change = b.median_ns - a.median_ns
    share = f" ({100 * change / a.median_ns:+.1f} %)" if a.median_ns else ""
    word = "longer" if change > 0 else "shorter"
    how = f"{_ms(abs(change))} ms {word} than" if change else "as long as"
    beyond = {
        True: "the middle halves of the steps lie apart",
        False: "within the spread of the steps: the middle halves overlap",
        None: "too few steps to know their spread",
    }[pair.diff.is_beyond_spread]
    return f"{word.upper() if change else 'EQUAL'}: the median step of B is {how} that of A{share}; {beyond}{doubt}"


# The verdict and what it is of


def _verdict(verdict: Verdict) -> list[Block]:
    is_open = verdict.bound == "inconclusive"
    doubts = verdict.doubts[is_open:]  # its headline says the first one, and to record anew is what to begin with
    gains = [f"at most {_factor(gain.at_most)} times: {gain.fix} ({gain.basis})" for gain in verdict.gains]
    first = verdict.gains[0].fix.change.steps[:1] if verdict.gains and not is_open else ()
    return [
        *_listing("What to do, largest gain first (upper bounds; gains do not multiply):", gains),
        *(Paragraph(step, strong="First step:") for step in first),
        *_listing("Evidence:", verdict.evidence),
        *_listing("Doubts:", list(map(str, doubts))),
    ]


def _factor(at_most: float) -> str:
    """Return how many times as fast; beyond the largest that is told, only that it is more."""
    return times(at_most) if at_most <= LARGEST_FACTOR else f"more than {LARGEST_FACTOR}"


def _left_out(files: Sequence[LeftOut]) -> list[Block]:
    return _listing("Left out, since it could not be read:", [file.reason for file in files if file.is_fault])


def _next_step(trace: Examined) -> list[Block]:
    """Return how to look into the slowest kernel, where kernels are what the time goes into."""
    launch = trace.analysis.slowest_launch
    if launch is None or trace.verdict.bound not in OF_KERNELS:
        return []
    return [Paragraph(NEXT_STEP), CodeBlock(ncu_command(launch))]


def _listing(title: str, items: Sequence[str]) -> list[Block]:
    return [Paragraph(title), BulletList(items)] if items else []


def _window(analysis: Analysis) -> str:
    numbers, expected = analysis.step_numbers, analysis.steps_expected
    text = f"{_ms(analysis.window_ns)} ms"
    if not numbers:
        return f"{text}, everything that was recorded; no marks of steps"
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps ({min(numbers)} to {max(numbers)})"
    text += f", {which}{f' of {expected} expected' if expected is not None else ''}"
    if len(numbers) == 1:
        return text
    length = analysis.devices[0].step_quartiles["duration"]
    middle = f"{_ms(length.first_ns)} to {_ms(length.third_ns)}"
    return f"{text}: median {_ms(length.median_ns)} ms, the middle half {middle} ms"


def _communication(trace: Examined) -> list[tuple[str, str]]:
    device = trace.analysis.devices[0]
    spent, hidden, collectives = (
        device.by_kind_ns.get("communication"),
        device.communication_overlap,
        trace.analysis.collectives,
    )
    if not spent:
        return []
    known = "" if hidden is None else f"{percent(hidden, 1)} of it overlaps computation, "
    text = f"{_ms(spent)} ms; {known}{_ms(device.exposed_ns['communication'])} ms do not"
    if trace.waits_ns is not None and collectives and collectives.total_ns:
        waiting = percent(trace.waits_ns / collectives.total_ns, 1)
        text += f"; {waiting} of it is waiting for other ranks, the rest is transfer"
    return [("Communication", text)]


def _ranks(examination: Examination, index: int) -> list[Block]:
    """Return the traces side by side, where there are several."""
    traces = examination.traces
    if len(traces) < 2:
        return []
    size = max(trace.analysis.world_size or 0 for trace in traces)
    missing = size - len({trace.rank for trace in traces} - {None})
    notes = ["own: a step without exposed communication; the slowest rank has the most"]
    notes += [f"{missing} of {size} ranks are not among these traces"] if missing > 0 else []
    headers = ["rank", "trace", "step ms\nmedian", "own ms\nper step", "busy\n%", "idle\n%"]
    headers += ["communi-\ncation %", "bound"]
    rows = [_rank(trace, is_slowest=number == examination.slowest) for number, trace in enumerate(traces)]
    return [
        Table(headers, rows, left=[1, 7], caption=f"{len(traces)} traces", notes=notes),
        Heading(f"In detail: {clean(Path(traces[index].analysis.path).name)}"),
    ]


def _rank(trace: Examined, is_slowest: bool) -> list[str]:
    device = trace.analysis.devices[0]
    length = device.step_quartiles.get("duration")
    return [
        NOTHING if trace.rank is None else str(trace.rank),
        clean(Path(trace.analysis.path).name, LONGEST_FILE),
        NOTHING if length is None else _ms(length.median_ns),
        _ms(trace.own_ns_per_step),
        _of_window(device.busy_ns, device),
        _of_window(device.idle_ns, device),
        _of_window(device.exposed_ns.get("communication"), device),
        f"{trace.verdict.bound}{' (slowest)' if is_slowest else ''}",
    ]


# Where the time went


def _devices(devices: Sequence[Breakdown]) -> list[Block]:
    """Return the devices beside each other, where there are several."""
    if len(devices) < 2:
        return []
    rows = [
        [
            str(device.device),
            _of_window(device.busy_ns, device),
            _of_window(device.idle_ns, device),
            _main_cause(device.causes_ns),
        ]
        for device in devices
    ]
    note = "the tables below are of the first, the busiest"
    return [Table(["device", "busy %", "idle %", "main idle cause"], rows, left=[3], caption="Devices", notes=[note])]


def _spent(device: Breakdown) -> Block:
    """Return a table that adds up."""
    on_host = device.device is None
    idle = sorted(device.causes_ns.items(), key=lambda item: -item[1])
    kinds = [] if on_host else device.exposed_ns.items()
    parts = [
        ("in operators" if on_host else "busy", device.busy_ns, ""),
        *((f"- {words.plain(name)}", spent, "") for name, spent in kinds if spent),
        ("between them" if on_host else "idle", device.idle_ns, f"gaps: {device.gaps:,}"),
        *((f"- {words.plain(name)}", spent, _meanwhile(device, name)) for name, spent in idle if spent),
    ]
    rows = [[name, _ms(spent), _of_window(spent, device), text] for name, spent, text in parts]
    telling = [name for name, spent in idle if spent > TELLING_SHARE * device.window_ns]
    notes = [f"{words.plain(name)}: {words.cause(name, on_host)}" for name in telling]
    who = "the host" if on_host else f"device {device.device}"
    headers = ["", "ms", "% of\nwindow", "host activity, ms"]
    return Table(headers, rows, left=[0, 3], caption=f"Where the time of {who} went", notes=notes)


def _meanwhile(device: Breakdown, cause: str) -> str:
    """Return what the host was in for most of this cause."""
    names = device.cause_details.get(cause, ())[:2]
    return ", ".join(f"{clean(frame_name(name), LONGEST_HOST)} {_ms(spent)}" for name, spent in names)


def _gaps(device: Breakdown, start_ns: int) -> list[Block]:
    if not device.longest_gaps or device.device is None:  # of the host the end is not known by name
        return []
    rows = [
        [
            _ms(gap.start_ns - start_ns),
            _ms(gap.duration_ns),
            words.plain(gap.cause),
            words.kernel(gap.ended_by, LONGEST_ENDER) if gap.ended_by else "the end of the window",
        ]
        for gap in device.longest_gaps
    ]
    return [
        Table(
            ["at ms", "for ms", "mostly", "until"], rows, left=[2, 3], caption="Longest gaps, from the window's start"
        )
    ]


def _steps(steps: Sequence[StepTimes]) -> list[Block]:
    """Return the steps in their order; of many the longest."""
    if not steps:
        return []
    longest = sorted(steps, key=lambda step: -step.duration_ns)[:MOST_STEPS]
    rows = []
    for step in sorted(longest, key=lambda step: step.start_ns):
        whole = step.duration_ns
        share = f"{100 * sum(step.idle_ns.values()) / whole:.1f}" if whole else NOTHING
        rows.append([str(step.number), _ms(whole), share, _main_cause(step.idle_ns)])
    caption = "Steps" if len(longest) == len(steps) else f"The {len(longest)} longest of {len(steps)} steps"
    return [Table(["step", "ms", "idle %", "main idle cause"], rows, left=[3], caption=caption)]


def _launches(launches: LaunchStats) -> list[Block]:
    if not launches.work:
        return []
    calls = [f"{launches.calls:,}: {_spread(launches.call)}"]
    calls += [f"{launches.calls_without_work:,} without a kernel or copy"] if launches.calls_without_work else []
    calls += (
        [f"{launches.work_without_call:,} device operations without a launch"] if launches.work_without_call else []
    )
    pairs = [
        ("Kernel launches", "; ".join(calls)),
        ("Launch delay", _spread(launches.delay)),
        ("Shorter than launch", f"{launches.shorter_than_call:,} kernels, of {launches.work:,} device operations"),
    ]
    if launches.mean_queue is not None and launches.empty_queue_share is not None:
        depth = f"{number(launches.mean_queue)} device operations on average, {launches.deepest_queue:,} at most"
        pairs.append(("Queue depth", f"{depth}; empty for {percent(launches.empty_queue_share, 1)} of the window"))
    return [DefinitionList(pairs)]


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "unknown (no kernel is linked to its launch)"
    median, p95, longest = map(_duration, (spread.median_ns, spread.p95_ns, spread.max_ns))
    return f"median {median}, 95 % within {p95}, longest {longest}"


def _duration(nanoseconds: float) -> str:
    """Return a time in the unit that a person would choose."""
    return f"{number(nanoseconds / 1e3)} us" if nanoseconds < 1e6 else f"{_ms(nanoseconds)} ms"


def _main_cause(idle: Mapping[str, int]) -> str:
    return words.plain(max(idle, key=lambda name: idle[name])) if any(idle.values()) else NOTHING


# Operators, kernels, ranges, memory


def _order(device: Breakdown) -> str:
    """Return the column by which operators matter: the device's time where it is mostly busy, else the host's."""
    return "device_self_ms" if device.device is not None and device.busy_ns > device.idle_ns else "cpu_self_ms"


def _kernels(analysis: Analysis, top: int) -> list[Block]:
    if not analysis.kernels:
        return []
    rows = [
        [
            words.kernel(kernel.name, LONGEST_KERNEL),
            _ms(kernel.total_ns),
            NOTHING if kernel.share is None else f"{100 * kernel.share:.1f}",
            f"{kernel.calls:,}",
            number(kernel.median_ns / 1e3),
            clean(kernel.operator or NOTHING, LONGEST_OPERATOR),
        ]
        for kernel in analysis.kernels[:top]
    ]
    headers = ["kernel", "ms", "%", "calls", "median\nus", "launched by"]
    table = Table(headers, rows, left=[0, 5], notes=_more(len(analysis.kernels), top))
    return [Heading("Top kernels, copies and memsets"), table]


def _annotations(analysis: Analysis, top: int) -> list[Block]:
    if not analysis.annotations:
        return []
    rows = [
        [clean(stat.name), f"{stat.calls:,}", _ms(stat.host_ns), _ms(stat.device_ns)]
        for stat in analysis.annotations[:top]
    ]
    headers = ["annotation", "calls", "host ms", "device ms\nlaunched"]
    notes = [*_more(len(analysis.annotations), top), "device time counts for the innermost annotation"]
    return [Heading("User annotations"), Table(headers, rows, left=[0], notes=notes)]


def _more(count: int, top: int) -> list[str]:
    return [f"and {count - top:,} more"] if count > top else []


def _peak(peak: "TracedMemory") -> str:
    who = "the CPU" if peak["device"] is None else f"GPU {peak['device']}"
    sentence = f"on {who} at most {memory_size(peak['peak_bytes'])} were allocated at once"
    if peak["earlier_bytes"] is None:
        sentence += ", not counting what was there before the trace"
    else:
        sentence += f", of which {memory_size(peak['earlier_bytes'])} before the trace"
    if peak["peak_reserved_bytes"]:
        sentence += f"; the allocator held {memory_size(peak['peak_reserved_bytes'])}"
    if not peak["kept_per_step_bytes"]:
        return f"{sentence}."
    return f"{sentence}. It grows by at least {memory_size(peak['kept_per_step_bytes'])} per step: a leak."


def _owners(peak: "TracedMemory") -> list[Block]:
    rows = [
        [
            clean(owner["operator"] or "outside operators", LONGEST_OWNER),
            clean(owner["inside"] or NOTHING, LONGEST_OWNER),
            number(owner["bytes"] / 1e6),
            f"{100 * owner['bytes'] / peak['peak_bytes']:.1f}",
            f"{owner['allocations']:,}",
        ]
        for owner in peak["owners"][:MOST_OWNERS]
        if owner["bytes"] >= LEAST_OWNED * peak["peak_bytes"]
    ]
    headers = ["allocated by", "inside", "MB", "% of\npeak", "alloca-\ntions"]
    return [Table(headers, rows, left=[0, 1], caption="Memory at the peak, by operator")] if rows else []


# What differs between two traces


def _step_spread(spread: "StepSpread | None") -> str:
    if spread is None:
        return "no steps"
    middle = f"{_ms(spread.q1_ns)} to {_ms(spread.q3_ns)}"
    return f"{spread.steps} steps, median {_ms(spread.median_ns)} ms, the middle half {middle} ms"


def _warnings(unlike: "Sequence[Unlike]") -> list[Block]:
    """Return why the numbers below may not be of the program, before any of them."""
    return _listing("Not like with like:", [clean(f"{difference.text}.", 300) for difference in unlike])


def _change_of(diff: "Diff") -> list[Block]:
    """Return what the change is made of, the largest part first."""
    whole = sum(change.change_ns for change in (*diff.busy, *diff.idle))
    if not diff.parts:
        return []
    of = "The window, per step, is" if diff.is_per_step else "The window is"
    how = (
        f"{_ms(abs(whole))} ms {'longer' if whole > 0 else 'shorter'}" if abs(whole) >= 1 else "as long, of other parts"
    )
    return _listing(f"{of} {how}:", [_part_text(part) for part in diff.parts[:MOST_PARTS]])


def _part_text(part: "Part") -> str:
    """Return a part of the change: how much of what, and who makes most of it."""
    more = "more" if part.change_ns > 0 else "less"
    text = f"{_ms(abs(part.change_ns))} ms {more} {words.plain(part.name)}"
    by = part.contributor
    if by is None:
        return text
    known = [_signed(by.change_ns / 1e6) + " ms"]
    if by.calls_change is not None and abs(by.calls_change) >= LEAST_CALLS:
        calls = round(by.calls_change, 2)
        known.append(f"{_amount(abs(calls), 1)} {'more' if calls > 0 else 'fewer'} call{'s' * (abs(calls) != 1)}")
    text = f"{text}, mostly {clean(frame_name(by.name), LONGEST_CONTRIBUTOR)} ({', '.join(known)})"
    if by.caller is None:
        return text
    callers = [frame_name(name) for name in (by.caller.operator, by.caller.location) if name]
    return f"{text}, called from {clean(' in '.join(callers), LONGEST_CONTRIBUTOR)}"


def _changed_times(changes: "Sequence[TimeChange]", per: str) -> Block:
    rows = [
        [words.plain(change.name), _amount(change.a_ns), _amount(change.b_ns), _signed(change.change_ns / 1e6)]
        for change in sorted(changes, key=lambda change: -abs(change.change_ns))
        if change.a_ns or change.b_ns
    ]
    headers = ["", "A ms", "B ms", "change"]
    return Table(headers, rows, left=[0], caption=f"Where the time of the busiest device went, {per}")


def _changed_operators(changes: "Sequence[Change]", per: str, top: int) -> list[Block]:
    changes = _changed(changes, ("cpu_self_ns", "device_self_ns", "calls"))
    if not changes:
        return [Heading(f"Operators, {per}"), Paragraph("No operator differs.")]
    on_device = any(change.difference("device_self_ns") is not None for change in changes)
    quantities = ["cpu_self_ns", *(["device_self_ns"] if on_device else [])]
    headers = ["operator", "calls\nA", "calls\nB", "CPU self\nA ms", "CPU self\nB ms", "change"]
    headers += ["device self\nA ms", "device self\nB ms", "change"] if on_device else []
    rows = [
        [
            clean(f"{change.name} {change.input_shapes or change.location or ''}", LONGEST_CHANGED_OPERATOR),
            *_calls(change),
            *(cell for quantity in quantities for cell in _both(change, quantity)),
        ]
        for change in changes[:top]
    ]
    return [Heading(f"Operators, {per}"), Table(headers, rows, left=[0], notes=list(_beyond(changes, top)))]


def _changed_kernels(changes: "Sequence[Change]", per: str, top: int) -> list[Block]:
    known, changes = bool(changes), _changed(changes, ("device_self_ns", "calls"))
    if not changes:
        return [Heading(f"Kernels, {per}"), Paragraph("No kernel differs.")] if known else []
    headers = ["kernel", "calls\nA", "calls\nB", "A ms", "B ms", "change", "A us\nper call", "B us\nper call"]
    rows = [
        [
            words.kernel(change.name, LONGEST_CHANGED_KERNEL),
            *_calls(change),
            *_both(change, "device_self_ns"),
            *(NOTHING if side is None else _amount(side.per_call_ns, 1e3) for side in (change.a, change.b)),
        ]
        for change in changes[:top]
    ]
    return [Heading(f"Kernels, {per}"), Table(headers, rows, left=[0], notes=list(_beyond(changes, top)))]


def _changed(changes: "Sequence[Change]", quantities: Sequence[str]) -> "list[Change]":
    return [change for change in changes if change.only_in or any(map(change.difference, quantities))]


def _calls(change: "Change") -> list[str]:
    return [NOTHING if side is None else _amount(side.calls, 1) for side in (change.a, change.b)]


def _both(change: "Change", quantity: str) -> list[str]:
    """Return a time in A, in B and the difference, in ms."""
    difference = change.difference(quantity)
    sides = [NOTHING if side is None else _amount(getattr(side, quantity)) for side in (change.a, change.b)]
    return [*sides, NOTHING if difference is None else _signed(difference / 1e6)]


def _beyond(changes: "Sequence[Change]", top: int) -> Iterator[str]:
    """Yield what the table does not show."""
    alone = {side: sum(change.only_in == side for change in changes) for side in ("a", "b")}
    parts = [f"and {len(changes) - top:,} more differ"] if len(changes) > top else []
    parts += [f"{count:,} in {side.upper()} only" for side, count in alone.items() if count]
    if parts:
        yield f"{'; '.join(parts)}."


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def _amount(value: float | None, unit: float = 1e6) -> str:
    if value is None:
        return NOTHING
    value /= unit
    return f"{value:,.0f}" if value == int(value) else number(value)


def _ms(nanoseconds: float) -> str:
    return number(nanoseconds / 1e6)


def _of_window(spent_ns: int | None, device: Breakdown) -> str:
    """Return which percentage of the window this is."""
    return NOTHING if spent_ns is None or not device.window_ns else f"{100 * spent_ns / device.window_ns:.1f}"
