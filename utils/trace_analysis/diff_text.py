"""Tell a person what differs between two traces: the step first, then where the time went, operators and kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

from utils.render import plain_text
from utils.render.blocks import Block, DefinitionList, Heading, Paragraph, Table
from utils.render.formatting import NOTHING, clean, number
from utils.trace_analysis import words
from utils.trace_analysis.kernel_names import short
from utils.trace_analysis.text import TOP, subject

LONGEST_OPERATOR = 40
LONGEST_KERNEL = 52
ONE_SAMPLE = "One trace is one sample: two runs of the same program differ as well. No change below is tested."


def lines(document: Mapping[str, Any], top: int | None = None) -> list[str]:
    """Return the document of `diff_document` as lines of at most 120 columns."""
    return plain_text.lines(_blocks(document, top or TOP))


def headline(document: Mapping[str, Any]) -> str:
    """Return how the step has changed, and whether that is more than the steps of one trace differ."""
    step, a, b = document["step"], document["a"], document["b"]
    broken = [name for name, side in (("A", a), ("B", b)) if not side["is_conclusive"]]
    doubt = f" ({' and '.join(broken)} inconclusive: see the analysis of each)" if broken else ""
    if step["median_change_ms"] is None:
        text = f"window of A {number(a['window_ms'])} ms, of B {number(b['window_ms'])} ms"
        return f"NO STEPS to compare: {text}; a trace without steps may hold more work, not slower work{doubt}"
    change, before = step["median_change_ms"], step["a"]["median_ms"]
    share = f" ({100 * change / before:+.1f} %)" if before else ""
    word = "longer" if change > 0 else "shorter"
    how = f"{number(abs(change))} ms {word} than" if change else "as long as"
    beyond = {
        True: "the middle halves of the steps lie apart",
        False: "within the spread of the steps: the middle halves overlap",
        None: "too few steps to know their spread",
    }[step["is_beyond_spread"]]
    return f"{word.upper() if change else 'EQUAL'}: the median step of B is {how} that of A{share}; {beyond}{doubt}"


def _blocks(document: Mapping[str, Any], top: int) -> list[Block]:
    per = "per step" if document["is_per_step"] else "in total"
    a, b = document["a"], document["b"]
    return [
        Paragraph(headline(document)),
        DefinitionList(
            [
                ("A", f"{subject(a)}; {_step(document['step']['a'])}"),
                ("B", f"{subject(b)}; {_step(document['step']['b'])}"),
                ("Bound", f"A {a['verdict']['bound']}, B {b['verdict']['bound']}"),
                ("Amounts", _amounts(document)),
            ]
        ),
        Paragraph(ONE_SAMPLE),
        _times([*document["busy"], *document["idle"]], per),
        *_operators(document, per, top),
        *_kernels(document["kernels"], per, top),
    ]


def _amounts(document: Mapping[str, Any]) -> str:
    matched = f"operators are matched by {document['operators_matched_by']}"
    if document["is_per_step"]:
        return f"per step: what a trace holds, over the number of its steps; {matched}"
    return f"in total, since a trace has no steps; {matched}"


def _step(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "no steps"
    middle = f"{number(spread['q1_ms'])} to {number(spread['q3_ms'])}"
    return f"{spread['steps']} steps, median {number(spread['median_ms'])} ms, the middle half {middle} ms"


def _times(changes: Sequence[Mapping[str, Any]], per: str) -> Block:
    ranked = sorted(changes, key=lambda each: -abs(each["change_ms"]))
    rows = [
        [words.plain(each["name"]), _number(each["a_ms"]), _number(each["b_ms"]), _signed(each["change_ms"])]
        for each in ranked
        if each["a_ms"] or each["b_ms"]
    ]
    headers = ["", "A ms", "B ms", "change"]
    return Table(headers, rows, left=[0], caption=f"Where the time of the busiest device went, {per}")


def _operators(document: Mapping[str, Any], per: str, top: int) -> list[Block]:
    changes = _changed(document["operators"], ("cpu_self_ms", "device_self_ms", "calls"))
    if not changes:
        return [Heading(f"Operators, {per}"), Paragraph("No operator differs.")]
    on_device = any(each["device_self_ms_change"] is not None for each in changes)
    times = ["cpu_self_ms", *(["device_self_ms"] if on_device else [])]
    headers = ["operator", "calls\nA", "calls\nB", "CPU self\nA ms", "CPU self\nB ms", "change"]
    headers += ["device self\nA ms", "device self\nB ms", "change"] if on_device else []
    rows = [
        [
            clean(f"{each['name']} {each['input_shapes'] or ''}", LONGEST_OPERATOR),
            *_calls(each),
            *(cell for name in times for cell in _amount(each, name)),
        ]
        for each in changes[:top]
    ]
    return [Heading(f"Operators, {per}"), Table(headers, rows, left=[0], notes=_more(changes, top))]


def _kernels(kernels: Sequence[Mapping[str, Any]], per: str, top: int) -> list[Block]:
    changes = _changed(kernels, ("total_ms", "calls"))
    if not changes:
        return [Heading(f"Kernels, {per}"), Paragraph("No kernel differs.")] if kernels else []
    headers = ["kernel", "calls\nA", "calls\nB", "A ms", "B ms", "change", "A us\nper call", "B us\nper call"]
    rows = [
        [
            short(each["name"], LONGEST_KERNEL),
            *_calls(each),
            *_amount(each, "total_ms"),
            _number(each["per_call_us_a"]),
            _number(each["per_call_us_b"]),
        ]
        for each in changes[:top]
    ]
    return [Heading(f"Kernels, {per}"), Table(headers, rows, left=[0], notes=_more(changes, top))]


def _changed(changes: Sequence[Mapping[str, Any]], quantities: Sequence[str]) -> list[Mapping[str, Any]]:
    return [each for each in changes if each["only_in"] or any(each[f"{name}_change"] for name in quantities)]


def _calls(each: Mapping[str, Any]) -> list[str]:
    return [_number(each["calls_a"]), _number(each["calls_b"])]


def _amount(each: Mapping[str, Any], name: str) -> list[str]:
    change = each[f"{name}_change"]
    return [_number(each[f"{name}_a"]), _number(each[f"{name}_b"]), NOTHING if change is None else _signed(change)]


def _more(changes: Sequence[Mapping[str, Any]], top: int) -> list[str]:
    alone = {side: sum(each["only_in"] == side for each in changes) for side in ("a", "b")}
    said = [f"and {len(changes) - top:,} more that differ"] if len(changes) > top else []
    said += [f"{count:,} in {side.upper()} only" for side, count in alone.items() if count]
    return [f"{'; '.join(said)}."] if said else []


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}" if value == int(value) else number(value)
