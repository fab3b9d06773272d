"""Tell a document on traces to a person: the verdict first, then what it rests on, then the tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from boundby.trace.operator_table import table_lines
from utils.render import plain_text
from utils.render.blocks import Block, BulletList, CodeBlock, DefinitionList, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean, listed, number, times
from utils.trace_analysis import memory_text, time_spent, words
from utils.trace_analysis.kernel_names import short
from utils.trace_analysis.words import of_window, percent

Trace = Mapping[str, Any]

TOP = 15
LONGEST_FILE = 36
LONGEST_KERNEL = 60
LONGEST_OPERATOR = 30
OF_KERNELS = ("compute", "memory", "under_utilised", "mixed")
NEXT_STEP = (
    "Next step: what limits the slowest kernel, by Nsight Compute (docs/nsight-compute.md; put in your own program):"
)
SORTED = {"device_self_ms": "device self time", "cpu_self_ms": "CPU self time"}


def lines(document: Mapping[str, Any], place: int | None = None, top: int | None = None) -> list[str]:
    """Return the document as lines of at most 120 columns; of several traces the one at `place`, or the slowest."""
    chosen = document["slowest"] if place is None else place
    trace, top = document["traces"][chosen], top or TOP
    found = plain_text.lines([*_left_out(document["left_out"]), *_ranks(document, chosen), *blocks(trace)])
    if trace["operators"]:
        by = _order(trace)
        title = f"Top operators by {SORTED[by]}, grouped by {document['operators_by']}"
        found += plain_text.lines([Heading(title)]) + table_lines(trace["operators"], top, by)
    more = [*_kernels(trace["kernels"], top), *_annotations(trace["annotations"], top), *_memory(trace)]
    return found + plain_text.lines(more)


def blocks(trace: Trace) -> list[Block]:
    """Return what one trace says, without its tables of operators and kernels."""
    [device, *_] = trace["devices"]
    return [
        Paragraph(headline(trace)),
        DefinitionList([("Trace", subject(trace)), ("Window", _window(trace)), *_communication(device)]),
        *_verdict(trace["verdict"]),
        *time_spent.blocks(trace),
        *_next_step(trace),
    ]


def headline(trace: Trace) -> str:
    """Return the verdict in one sentence."""
    verdict = trace["verdict"]
    bound, share, others = verdict["bound"], verdict["share_of_limit"], listed(verdict["alternatives"])
    meaning = words.bound(bound, on_host=trace["devices"][0]["device"] is None)
    if bound == "inconclusive":
        why = verdict["doubts"][0] if verdict["doubts"] else "most of its time nothing in it explains"
        return f"INCONCLUSIVE: {meaning}: {clean(why, 300)}"
    if bound == "mixed":
        several = len(verdict["alternatives"]) > 1
        said = [meaning, f"{'between' if several else 'perhaps'} {others}" if others else ""]
    else:
        whole = "" if share is None else f", {percent(100 * share)} of the window"
        said = [f"{meaning}{whole}", f"it may also be {others}" if others else ""]
    return f"{bound.upper()}: {'; '.join(filter(None, [*said, 'confidence ' + verdict['confidence']]))}"


def subject(trace: Trace) -> str:
    """Return what the trace is of, on one line."""
    name, size = trace["device_names"][:1], trace["world_size"]
    rank = None if trace["rank"] is None else f"rank {trace['rank']}{f' of {size}' if size else ''}"
    said = [trace["path"], rank, *name, f"{trace['events']:,} events"]
    return clean(", ".join(str(each) for each in said if each), 200)


def _verdict(verdict: Mapping[str, Any]) -> list[Block]:
    doubts = verdict["doubts"][verdict["bound"] == "inconclusive" :]  # its headline says the first one
    gains = [f"at most {times(each['at_most'])} times: {each['fix']} ({each['basis']})" for each in verdict["gains"]]
    return [
        *_listing("Evidence:", verdict["evidence"]),
        *_listing("Doubts:", doubts),
        *_listing("What removing each cause could gain (bounds, not promises; they do not multiply):", gains),
    ]


def _left_out(files: Sequence[Mapping[str, Any]]) -> list[Block]:
    return _listing("Left out, since it could not be read:", [each["reason"] for each in files if each["is_fault"]])


def _next_step(trace: Trace) -> list[Block]:
    """Return how to look into the slowest kernel, where kernels are what the time goes into."""
    command = trace.get("nsight_compute")  # not in documents of earlier versions
    if not command or trace["verdict"]["bound"] not in OF_KERNELS:
        return []
    return [Paragraph(NEXT_STEP), CodeBlock(command)]


def _listing(title: str, items: Sequence[str]) -> list[Block]:
    return [Paragraph(title), BulletList(items)] if items else []


def _ranks(document: Mapping[str, Any], chosen: int) -> list[Block]:
    """Return the traces side by side, where there are several."""
    traces = document["traces"]
    if len(traces) < 2:
        return []
    size = max((each["world_size"] or 0 for each in traces), default=0)
    missing = size - len({each["rank"] for each in traces} - {None})
    notes = ["own: a step without the communication that nothing hides; the slowest takes longest for itself"]
    notes += [f"{missing} of {size} ranks are not among these traces"] if missing > 0 else []
    headers = ["rank", "trace", "step ms\nmedian", "own ms\nper step", "busy\n%", "idle\n%"]
    headers += ["communi-\ncation %", "bound"]
    rows = [_rank(each, is_slowest=place == document["slowest"]) for place, each in enumerate(traces)]
    name = clean(Path(traces[chosen]["path"]).name)
    return [
        Table(headers, rows, left=[1, 7], caption=f"{len(traces)} traces", notes=notes),
        Heading(f"In detail: {name}"),
    ]


def _rank(trace: Trace, is_slowest: bool) -> list[str]:
    [device, *_] = trace["devices"]
    median = trace["steps"]["median_ms"]
    return [
        NOTHING if trace["rank"] is None else str(trace["rank"]),
        clean(Path(trace["path"]).name, LONGEST_FILE),
        NOTHING if median is None else number(median),
        number(trace["own_ms_per_step"]),
        of_window(device["busy_ms"], device),
        of_window(device["idle_ms"], device),
        of_window(device["exposed_ms"].get("communication"), device),
        f"{trace['verdict']['bound']}{' (slowest)' if is_slowest else ''}",
    ]


def _window(trace: Trace) -> str:
    steps = trace["steps"]
    numbers, expected = steps["numbers"], steps["expected"]
    text = f"{number(trace['window_ms'])} ms"
    if not numbers:
        return f"{text}, everything that was recorded; no marks of steps"
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps ({min(numbers)} to {max(numbers)})"
    text += f", {which}{f' of {expected} expected' if expected is not None else ''}"
    if len(numbers) == 1:
        return text
    middle = f"{number(steps['q1_ms'])} to {number(steps['q3_ms'])}"
    return f"{text}: median {number(steps['median_ms'])} ms, the middle half {middle} ms"


def _communication(device: Mapping[str, Any]) -> list[tuple[str, str]]:
    spent, hidden = device["by_kind_ms"].get("communication"), device["communication_overlap_pct"]
    if not spent:
        return []
    known = "" if hidden is None else f"{percent(hidden)} of it is hidden behind computation, "
    return [("Communication", f"{number(spent)} ms; {known}{number(device['exposed_ms']['communication'])} ms are not")]


def _order(trace: Trace) -> str:
    """Return the column by which operators matter: the device's time where it is mostly busy, else the host's."""
    [device, *_] = trace["devices"]
    is_busy = device["device"] is not None and device["busy_ms"] > device["idle_ms"]
    return "device_self_ms" if is_busy else "cpu_self_ms"


def _kernels(kernels: Sequence[Mapping[str, Any]], top: int) -> list[Block]:
    if not kernels:
        return []
    rows = [
        [
            short(each["name"], LONGEST_KERNEL),
            number(each["total_ms"]),
            NOTHING if each["share_pct"] is None else f"{each['share_pct']:.1f}",
            f"{each['calls']:,}",
            number(each["median_us"]),
            clean(each["operator"] or NOTHING, LONGEST_OPERATOR),
        ]
        for each in kernels[:top]
    ]
    headers = ["kernel", "ms", "%", "calls", "median\nus", "launched mostly by"]
    notes = _more(kernels, top)
    return [Heading("Top kernels, copies and memsets"), Table(headers, rows, left=[0, 5], notes=notes)]


def _annotations(found: Sequence[Mapping[str, Any]], top: int) -> list[Block]:
    if not found:
        return []
    rows = [
        [clean(each["name"]), f"{each['calls']:,}", number(each["host_ms"]), number(each["device_ms"])]
        for each in found[:top]
    ]
    headers = ["range", "calls", "host ms", "device ms\nlaunched in it"]
    notes = [*_more(found, top), "device time counts for the innermost range"]
    return [Heading("Ranges that the program marks"), Table(headers, rows, left=[0], notes=notes)]


def _memory(trace: Trace) -> list[Block]:
    if not trace["memory"]:
        return []
    return [Heading("Memory"), *memory_text.blocks(trace)]


def _more(rows: Sequence[Any], top: int) -> list[str]:
    return [f"and {len(rows) - top:,} more"] if len(rows) > top else []
