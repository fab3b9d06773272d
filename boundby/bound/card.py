"""The answer on one screen: what limits, what was tried, what to do next, and how sure that is, in at most 12 lines.

Plain facts in, lines out; nothing here knows where they come from. What is not known has no line.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from boundby.bound.verdict import Bound, Cause, CauseKind, MatmulSpeed, Trial, Verdict
from boundby.formatting import clean, command_lines, paragraph
from boundby.work import Interval

MOST_LINES = 12
LABEL = 12  # columns
LEAST_SHARE = 0.1  # of the time, from which a second cause is named
LONGEST_DOUBT = 86  # characters
SHOWN_DOUBTS = 2
SHOWN_COMPARED = 3  # ways to run all texts
LONGEST_REASON = 180  # characters, why it is not settled
NEAR_ONE, TEN, HUNDRED = 1.3, 10, 100
NOT_YET = "not measured yet"
CAUSES: dict[CauseKind, str] = {
    "padding": "padding: {share} of the time goes into padding tokens",
    "compute": "compute: at this machine's peak it alone takes {share} of the time",
    "memory": "memory: moving the data at peak bandwidth alone takes {share} of the time",
    "kernels": "kernels below peak: {share} of the time, even when run alone",
    "around": "cold caches and waiting threads: {share} of the time, gone when the operators run alone",
    "host": "dispatch overhead: Python and the dispatcher between operators take {share} of the time",
    "unexplained": "unexplained: {share} of the time did not show again in the replays",
    "input": "preparing the input: {share} of the time of input and forward together",
    "transfer": "copying the input to the device: {share} of the time of input and forward together",
}
BOUNDS: dict[Bound, str] = {  # where the time has no parts
    "compute": "compute: the time goes into matmul and attention",
    "memory": "memory: the time goes into moving data",
    "launch": "dispatch overhead: many small operators take longer to dispatch than to run",
    "transfer": "copying the input to the device, which takes as long as the work there",
    "input": "preparing the input, which takes at least as long as the forward",
    "optimizer": "updating the weights",
    "communication": "waiting for other devices",
    "under_utilised": "work too small to use this machine",
    "mixed": "more than one thing",
}


class Next(msgspec.Struct, frozen=True):
    """What to do first: in words, the command as it runs, and the factor that was measured or is predicted for it."""

    words: str
    command: str | None = None
    factor: Interval | None = None
    is_measured: bool = False


class Rate(msgspec.Struct, frozen=True):
    """Samples per second, half of the interval in percent where it is known, and where this holds.

    `per_second` None is not measured yet.
    """

    per_second: float | None
    where: str
    half_width_pct: float | None = None


class Compared(msgspec.Struct, frozen=True):
    """A way to run all texts and its factor over padded batches as they come, and the share of labels that stayed.

    `is_allowed` False: it changes more than may change.
    """

    words: str
    measured: Interval
    same_labels: float
    is_allowed: bool = True


class Facts(msgspec.Struct, frozen=True):
    """What the card is made from.

    `compared` is what was tried over many texts, `compared_texts` or else all, the one to use first; it takes the place
    of the trials of the verdict, which are of one batch.
    `verdict` is that of the batch of `shape`, which takes `seconds`; `why_not` says what is known where there is none.
    `rates` are those of the chosen batch size and of the whole set. `scores` are labels with texts.
    """

    model: str
    machine: str
    dtype: str | None = None
    shape: str | None = None
    seconds: float | None = None
    verdict: Verdict | None = None
    why_not: str | None = None
    compared: Sequence[Compared] = ()
    compared_texts: int | None = None
    next: Next | None = None
    rates: Sequence[Rate] = ()
    unit: str = "samples"
    scores: Mapping[str, str] = msgspec.field(default_factory=dict)
    doubts: Sequence[str] = ()


class Entry(msgspec.Struct, frozen=True):
    """One thing the card says: its label, texts below one another, and a command that runs as it stands.

    A command goes over several lines, joined by backslashes, unless it `is_one_line`.
    """

    label: str
    texts: Sequence[str]
    command: str | None = None
    is_one_line: bool = False

    def lines(self) -> list[str]:
        """Return it in lines, the label before the first."""
        indent = " " * LABEL
        lines = [line for text in self.texts for line in paragraph(text, indent)]
        lines[0] = f"{self.label:<{LABEL}}{lines[0][LABEL:]}"
        if self.command is None:
            return lines
        return [*lines, *([indent + self.command] if self.is_one_line else command_lines(self.command, indent))]


def lines(facts: Facts) -> list[str]:
    """Return the card: at most `MOST_LINES` lines, of at most `WIDTH` columns where a command allows it."""
    return _lines(facts, entries(facts))[:MOST_LINES]


def title(facts: Facts) -> str:
    """Return what was measured: the model on the machine, the dtype, the shape of the batch and its time."""
    subject = f"{clean(facts.model)} on {clean(facts.machine)}"
    batch = f"batch {facts.shape}" if facts.shape else None
    time = _duration(facts.seconds) if facts.seconds else None
    return " · ".join(filter(None, [subject, facts.dtype, batch, time]))


def entries(facts: Facts) -> list[Entry]:
    """Return what stands below the title.

    Where the card would be too long it loses, in this order: what was tried and gained nothing, all doubts but one, the
    second cause, the line breaks of the command, and of what gained the least.
    """
    tried = _all_tried(facts)
    causes, doubts, is_one_line = 2, SHOWN_DOUBTS, False
    while len(_lines(facts, shown := _entries(facts, tried, causes, doubts, is_one_line))) > MOST_LINES:
        if tried and not tried[-1].gains:
            tried = tried[:-1]
        elif doubts > 1:
            doubts = 1
        elif causes > 1:
            causes = 1
        elif not is_one_line:
            is_one_line = True
        elif tried:
            tried = tried[:-1]
        else:
            break
    return shown


def badge(facts: Facts) -> str:
    """Return in a word or two whether the answer is settled; "" where there is none."""
    verdict = facts.verdict
    if verdict is None or verdict.bound == "inconclusive":
        return "no answer"
    return "settled" if verdict.settled else "not settled"


def factor(of: Interval) -> str:
    """Return a factor with its interval: `2.6× [2.5, 2.7]`."""
    return f"{_digits(of.value)}× {_ends(of)}"


def _ends(of: Interval) -> str:
    return f"[{_digits(of.low)}, {_digits(of.high)}]"


def _digits(value: float) -> str:
    """Return two digits, and two decimals near 1, where the second decides whether it is worth it."""
    return f"{value:.2f}" if value < NEAR_ONE else f"{value:.1f}" if value < TEN else f"{value:,.0f}"


def _lines(facts: Facts, shown: Sequence[Entry]) -> list[str]:
    return [*paragraph(title(facts), "  ", ""), *(line for entry in shown for line in entry.lines())]


def _entries(facts: Facts, tried: Sequence["_Tried"], causes: int, doubts: int, is_one_line: bool) -> list[Entry]:
    step, texts = facts.next, "all" if facts.compared_texts is None else f"{facts.compared_texts:,}"
    where = f"over {texts} texts: " if facts.compared else ""
    known = [
        Entry("Limited by", _limits(facts, causes)),
        Entry("Tried here", [where + " · ".join(trial.said for trial in tried)] if tried else []),
        Entry("Next", [_next(step)], step.command, is_one_line) if step else Entry("Next", []),
        Entry("Throughput", _rates(facts)),
        *(Entry(label, [text]) for label, text in facts.scores.items()),
        Entry("Doubts", _doubts(facts.doubts, doubts) or (["none that changes the answer"] if facts.verdict else [])),
    ]
    return [entry for entry in known if entry.texts]


def _limits(facts: Facts, most: int) -> list[str]:
    verdict = facts.verdict
    if verdict is None:
        return [facts.why_not or "not known: nothing was measured"]
    first, others = verdict.limited_by[:1], verdict.limited_by[1:most]
    causes = [*first, *(cause for cause in others if cause.share >= LEAST_SHARE)]
    named = [_cause(cause, verdict.matmul) for cause in causes]
    if not named:
        named = [BOUNDS.get(verdict.bound) or facts.why_not or "not known: the times do not tell"]
    opening = f"{named[0]} {_standing(verdict, bool(facts.compared))}".rstrip()
    return [opening, *(f"then {words}" for words in named[1:])]


def _cause(cause: Cause, matmul: MatmulSpeed | None) -> str:
    """Return what a cause is and its share of the time, or of padding that of the arithmetic where it is known."""
    if cause.kind == "padding" and cause.flops_share:
        return f"padding: {100 * cause.flops_share:.0f} % of the FLOPs are for padding tokens"
    if cause.kind == "kernels" and matmul:
        inside, alone = (f"{100 * share:.0f} %" for share in (matmul.in_model, matmul.alone))
        return f"matmul kernels at these shapes: {inside} of this machine's peak, {alone} when run alone"
    return CAUSES[cause.kind].format(share=f"{100 * cause.share:.0f} %")


def _standing(verdict: Verdict, elsewhere: bool) -> str:
    """Return in brackets which trial bears the first cause out, or what would settle it; "" where neither is known.

    `elsewhere`: other figures of the card are of all texts.
    """
    if verdict.unsettled:
        return f"[not settled: {clean(verdict.unsettled.text, LONGEST_REASON)}]"
    cause = verdict.limited_by[0] if verdict.limited_by else None
    proof = next((trial for trial in verdict.trials if cause and trial.fix == cause.confirmed_by), None)
    if cause is None or proof is None:
        return ""
    said = f"{proof.name} gave {_digits(proof.measured.value)}×{' on this batch' if elsewhere else ''}"
    if cause.kind == "host" and proof.fix.kind == "threads":  # a loss bears it out, since it is a small one
        shared = float(proof.fix.settings["threads"]) / float(proof.fix.settings["instead_of"])
        said += f", where compute-bound work would give {_digits(shared)}×"
    return f"[confirmed: {said}]"


class _Tried(msgspec.Struct, frozen=True):
    said: str
    gains: bool


def _all_tried(facts: Facts) -> list[_Tried]:
    """Return what was tried, the most telling first: over all texts, or else on the batch of the verdict."""
    if facts.compared:
        first, *others = facts.compared
        ranked = sorted(others, key=lambda way: abs(math.log(way.measured.value)), reverse=True)
        return [_Tried(_over_all(way), way.measured.low > 1) for way in [first, *ranked][:SHOWN_COMPARED]]
    trials = filter(_is_told, facts.verdict.trials if facts.verdict else ())
    return [_Tried(_tried(trial), trial.outcome == "gains") for trial in sorted(trials, key=_telling, reverse=True)]


def _over_all(way: Compared) -> str:
    said = f"{way.words} {factor(way.measured)}"
    if way.measured.low <= 1:
        return said + (", do not" if way.measured.high < 1 else "")
    return f"{said}, {_same(way.same_labels)}" + ("" if way.is_allowed else ": too few")


def _same(share: float) -> str:
    return "same labels" if share == 1 else f"{100 * share:.1f} % same labels"


def _tried(trial: Trial) -> str:
    said = f"{trial.name} {factor(trial.measured)}"
    if trial.outcome == "no_change":
        said = f"{trial.name}: no change {_ends(trial.measured)}"
    said += ", do not" if trial.outcome == "loses" else ""
    same = trial.same_labels
    return f"{said}, {_same(same.same / same.of)}" if same and trial.outcome == "gains" else said


def _is_told(trial: Trial) -> bool:
    """Tell whether a trial is of a fix; that another batch size is no better is said by the choice of this one."""
    return trial.is_fix and (trial.fix.kind != "batch_size" or trial.outcome == "gains")


def _telling(trial: Trial) -> tuple[bool, bool, float]:
    return trial.outcome == "gains", trial.outcome == "loses", abs(math.log(trial.measured.value))


def _next(step: Next) -> str:
    brings = f": {'measured' if step.is_measured else 'predicted'} {factor(step.factor)}" if step.factor else ""
    return f"{step.words}{brings}"


def _rates(facts: Facts) -> list[str]:
    said = []
    for at, rate in enumerate(facts.rates):
        if rate.per_second is None:
            said.append(f"{NOT_YET} {rate.where}")
            continue
        per_second = f"{rate.per_second:,.0f}" if rate.per_second >= HUNDRED else f"{rate.per_second:.3g}"
        unit = f" {facts.unit}/s" if at == 0 else ""
        width = "" if rate.half_width_pct is None else f" ± {_percent(rate.half_width_pct)} %"
        said.append(f"{per_second}{unit}{width} {rate.where}".rstrip())
    return ["; ".join(said)] if said else []


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percent(half_width: float) -> str:
    return f"{half_width:.2g}" if half_width < HUNDRED else f">{HUNDRED}"


def _doubts(doubts: Sequence[str], most: int) -> list[str]:
    shown = [clean(doubt, LONGEST_DOUBT) for doubt in doubts[:most]]
    more = len(doubts) - len(shown)
    if not shown:
        return []
    return [*shown[:-1], shown[-1] + (f" (and {more} more, below)" if more else "")]
