"""The answer on one screen: what limits, what was tried, what to do next, and how sure that is, in at most 12 lines.

Plain facts in, lines out; nothing here knows where they come from. What is not known has no line.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from boundby.formatting import clean, command_lines, number, paragraph, times
from boundby.roofline import Interval

MOST_LINES = 12
LABEL = 13  # columns
LEAST_SHARE = 0.1  # of the time, from which a second owner is named
TELLING = 1.02  # a factor nearer to 1 than this says nothing
LONGEST_DOUBT = 90  # characters
SHOWN_DOUBTS = 2
PADDING = "padding"
WORDS: dict[str, str] = {
    PADDING: "padding: {share} of the time goes into padding tokens",
    "compute": "arithmetic: at this machine's peak it would still take {share} of the time",
    "memory": "memory: moving the data at full speed would still take {share} of the time",
    "kernels": "operators slow at these shapes: even alone they lose {share} of the time to this machine's limits",
    "around": "cold caches and threads that wait: {share} of the time is lost around the operators",
    "host": "Python and dispatch between the operators: {share} of the time",
    "input": "preparing the input: {share} of the time",
    "transfer": "bringing the input to the device: {share} of the time",
}
REMAINDER = "remainder"
RELIEF: dict[str, tuple[str, ...]] = {  # the kinds of fix that, where they gain, confirm what limits
    PADDING: ("remove_padding",),
    "compute": ("dtype", "matmul_precision"),
    "memory": ("dtype", "batch_size", "double_batch"),
    "kernels": ("dtype", "better_kernels", "matmul_precision"),
    "around": ("threads", "issue_at_once", "fuse_operators"),
    "host": ("issue_at_once", "fuse_operators", "batch_size", "double_batch"),
    "input": ("overlap_input",),
}


class Owned(Protocol):
    """A part of the time of a forward: whose it is, its seconds, and which share of it is for padding."""

    @property
    def kind(self) -> str:
        """A key of `WORDS`, or the remainder."""

    @property
    def seconds(self) -> float:
        """What it takes; that of the remainder may be negative."""

    @property
    def padding_share(self) -> float | None:
        """Between 0 and 1; None where it is not known."""


@dataclass(frozen=True)
class Tried:
    """A fix that was made here: time before over time after; `remark` is what it changed beside the speed."""

    kind: str
    words: str
    factor: Interval
    outcome: Literal["gains", "no_change", "loses"]
    remark: str = ""


@dataclass(frozen=True)
class Next:
    """What to do first: in words, the command as it runs, and the factor that is measured or predicted for it."""

    words: str
    command: str | None = None
    factor: Interval | None = None
    is_measured: bool = False


@dataclass(frozen=True)
class Rate:
    """Samples per second, half of the interval in percent where it is known, and where this holds."""

    per_second: float
    where: str
    half_width_pct: float | None = None


@dataclass(frozen=True)
class Facts:
    """What the card is made from.

    `limit` says what limits where the time has no `owners`, or why it is not known. `settled` is None where nothing
    was tried. `rates` are those of the chosen batch size and of the whole set, in this order. `scores` are labels
    with texts.
    """

    model: str
    machine: str
    dtype: str | None = None
    shape: str | None = None
    seconds: float | None = None
    owners: Sequence[Owned] = ()
    limit: str | None = None
    settled: bool | None = None
    would_settle: str | None = None
    tried: Sequence[Tried] = ()
    next: Next | None = None
    rates: Sequence[Rate] = ()
    unit: str = "samples"
    scores: Mapping[str, str] = field(default_factory=dict)
    doubts: Sequence[str] = ()


def shares(owners: Iterable[Owned]) -> dict[str, float]:
    """Return the share of the time of each owner, padding as one of its own, the largest first; they add up to 1.

    The remainder comes last and keeps its sign. Empty where there is no time.
    """
    seconds: dict[str, float] = {}
    for owner in owners:
        padding = owner.seconds * (owner.padding_share or 0.0) if owner.kind != REMAINDER else 0.0
        seconds[owner.kind] = seconds.get(owner.kind, 0.0) + owner.seconds - padding
        seconds[PADDING] = seconds.get(PADDING, 0.0) + padding
    total = sum(seconds.values())
    if total <= 0:
        return {}
    ranked = sorted(seconds, key=lambda kind: (kind == REMAINDER, -seconds[kind]))
    return {kind: seconds[kind] / total for kind in ranked if seconds[kind]}


def lines(facts: Facts) -> list[str]:
    """Return the card: at most `MOST_LINES` lines of at most `WIDTH` columns where words allow.

    Where it would be longer, what was tried with the least effect is left out first, then a second owner.
    """
    tried = sorted(facts.tried, key=lambda each: -abs(_effect(each.factor.value)))
    most = 2
    while True:
        found = _lines(facts, tried, most)
        if len(found) <= MOST_LINES or (not tried and most == 1):
            return found[:MOST_LINES]
        if tried:
            tried = tried[:-1]
        else:
            most = 1


def _lines(facts: Facts, tried: Sequence[Tried], most: int) -> list[str]:
    return [
        *paragraph(_title(facts), "  ", ""),
        *_labelled("Limited by", *_limits(facts, most)),
        *_labelled("Tried here", " · ".join(map(_tried, tried))),
        *_next(facts.next),
        *_labelled("Throughput", "; ".join(_rate(rate, facts.unit) for rate in facts.rates)),
        *(line for label, text in facts.scores.items() for line in _labelled(label, text)),
        *_labelled("Doubts", *_doubts(facts.doubts)),
    ]


def badge(facts: Facts) -> str:
    """Return in a word or two whether the answer is settled."""
    return {True: "settled", False: "not settled", None: "not tried"}[facts.settled]


def factor(of: Interval) -> str:
    """Return a factor with its interval: `2.60× [2.50, 2.70]`."""
    return f"{times(of.value)}× [{times(of.low)}, {times(of.high)}]"


def _labelled(label: str, *texts: str) -> list[str]:
    indent = " " * LABEL
    found = [line for text in texts if text for line in paragraph(text, indent)]
    return [f"{label:<{LABEL}}{found[0][LABEL:]}", *found[1:]] if found else []


def _title(facts: Facts) -> str:
    subject = f"{clean(facts.model)} on {clean(facts.machine)}"
    batch = f"batch {facts.shape}" if facts.shape else None
    time = f"{number(1e3 * facts.seconds)} ms" if facts.seconds else None
    return " · ".join(filter(None, [subject, facts.dtype, batch, time]))


def _limits(facts: Facts, most: int) -> list[str]:
    ranked = [(kind, share) for kind, share in shares(facts.owners).items() if kind in WORDS]
    if not ranked:
        said = facts.limit or "not known"
        return [f"{said} {_standing(facts, None)}".rstrip()]
    named = [pair for index, pair in enumerate(ranked[:most]) if index == 0 or pair[1] >= LEAST_SHARE]
    texts = [WORDS[kind].format(share=f"{100 * share:.0f} %") for kind, share in named]
    first = f"{texts[0]} {_standing(facts, named[0][0])}".rstrip()
    return [first, *(f"then {text}" for text in texts[1:])]


def _standing(facts: Facts, kind: str | None) -> str:
    """Return whether what was tried confirms the answer, in brackets; nothing where nothing was tried."""
    if facts.settled is None:
        return ""
    if not facts.settled:
        return f"[not settled{f': {facts.would_settle}' if facts.would_settle else ''}]"
    proofs = [each for each in facts.tried if kind and each.kind in RELIEF.get(kind, ()) and each.outcome == "gains"]
    return f"[confirmed: {proofs[0].words} gave {times(proofs[0].factor.value)}×]" if proofs else "[confirmed]"


def _tried(each: Tried) -> str:
    said = f"{each.words} {factor(each.factor)}"
    said = f"{each.words}: no change [{times(each.factor.low)}, {times(each.factor.high)}]" if _is_same(each) else said
    said += ", do not" if each.outcome == "loses" else ""
    return f"{said}, {each.remark}" if each.remark else said


def _is_same(each: Tried) -> bool:
    return each.outcome == "no_change"


def _effect(value: float) -> float:
    return max(value, 1 / value) if value > 0 else 0.0


def _next(step: Next | None) -> list[str]:
    if step is None:
        return []
    brings = ""
    if step.factor and step.factor.value >= TELLING:
        brings = f": {'measured' if step.is_measured else 'predicted'} {factor(step.factor)}"
    command = command_lines(step.command, " " * LABEL) if step.command else []
    return [*_labelled("Next", f"{step.words}{brings}"), *command]


def _rate(rate: Rate, unit: str) -> str:
    width = "" if rate.half_width_pct is None else f" ± {rate.half_width_pct:.0f} %"
    return f"{number(rate.per_second)} {unit}/s{width} {rate.where}".rstrip()


def _doubts(doubts: Sequence[str]) -> list[str]:
    shown = [clean(doubt, LONGEST_DOUBT) for doubt in doubts[:SHOWN_DOUBTS]]
    more = len(doubts) - len(shown)
    if not shown:
        return ["none that changes the answer"]
    return [*shown[:-1], shown[-1] + (f" (and {more} more, below)" if more else "")]
