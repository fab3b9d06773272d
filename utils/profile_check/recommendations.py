"""What to do about the time that a trace shows lost, for people and programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from boundby.trace import Analysis
from boundby.trace.judgement import judge_trace
from boundby.verdict import fix_of_cause
from utils.render.blocks import Block, BulletList, Heading, OrderedList, Paragraph
from utils.render.formatting import clean, number, times
from utils.trace_analysis import document, text, words
from utils.trace_analysis.traces import Examination, Examined

LEAST_SHARE = 0.01  # of the window: less is not worth a change
MOST_NAMES = 3  # of what the host was in
NOTHING_LOST = "Nothing that can be helped takes 1 % of the time: what is left is the work itself"


@dataclass(frozen=True)
class Recommendation:
    """One cause of lost time on the busiest device, and what helps."""

    cause: str
    meaning: str
    time_ms: float
    share_of_window_pct: float
    at_most: float | None  # times as fast without it; None where that says nothing
    host_in_ms: dict[str, float]
    advice: tuple[str, ...]


def recommendations(analysis: Analysis) -> list[Recommendation]:
    """Return what takes at least 1 % of the window and can be helped, the most first; [] of an untrustworthy trace."""
    device = analysis.devices[0]
    window, on_host = device.window_ns, device.device is None
    if not (analysis.is_conclusive and window):
        return []
    lost = {**device.causes_ns, **device.exposed_ns}
    return [
        Recommendation(
            cause=cause,
            meaning=words.cause(cause, on_host)
            if cause in words.CAUSES
            else f"{words.plain(cause)} that nothing hides",
            time_ms=spent / 1e6,
            share_of_window_pct=100 * spent / window,
            at_most=window / (window - spent) if fix.change.is_bounded and spent < window else None,
            host_in_ms={name: ns / 1e6 for name, ns in device.cause_details.get(cause, ())[:MOST_NAMES]},
            advice=fix.change.steps,
        )
        for cause, spent in sorted(lost.items(), key=lambda item: -item[1])
        if spent >= LEAST_SHARE * window and (fix := fix_of_cause(cause, on_host))
    ]


def as_values(analysis: Analysis) -> dict[str, Any]:
    """Return the trace, the verdict on it and the recommendations as plain values."""
    return {
        **document.subject(_examined(analysis)),
        "recommendations": [asdict(each) for each in recommendations(analysis)],
    }


def blocks(analysis: Analysis) -> list[Block]:
    """Return what the trace says and what to do about it."""
    examination = Examination((_examined(analysis),), (), "shapes")
    [trace] = document.of(examination)["traces"]
    return [Heading("Analysis of the trace"), *text.blocks(trace), Heading("What to do"), *_advice(analysis)]


def _examined(analysis: Analysis) -> Examined:
    return Examined(analysis, judge_trace(analysis), analysis.operators, analysis.rank)


def _advice(analysis: Analysis) -> Sequence[Block]:
    if not analysis.is_conclusive:
        return [Paragraph("Nothing can be recommended from this trace; make it again first.")]
    found = recommendations(analysis)
    if not found:
        return [Paragraph(f"{NOTHING_LOST} (faster kernels, another dtype, less work; see the table of operators).")]
    return [OrderedList([[Paragraph(_sentence(each)), BulletList(each.advice)] for each in found])]


def _sentence(each: Recommendation) -> str:
    """Return what a cause takes, what its absence could gain at most, and what the host was in."""
    gain = "" if each.at_most is None else f"; without it at most {times(each.at_most)} times as fast"
    inside = ", ".join(f"{clean(name)} {number(ms)} ms" for name, ms in each.host_in_ms.items())
    host = f" The host meanwhile: {inside}." if inside else ""
    share = f"{number(each.time_ms)} ms, {each.share_of_window_pct:.1f} % of the window"
    return f"{words.plain(each.cause).capitalize()} ({each.meaning}): {share}{gain}.{host}"
