"""What limits a training run, as a record and as text."""

from dataclasses import dataclass

from boundby.training.steps import IN_NO_STAGE, Share
from boundby.verdict import Bound, Verdict

MOST_STAGES, MOST_EVIDENCE, MOST_DOUBTS, MOST_GAINS = 5, 4, 3, 3  # with the two lines before them, twelve
SMALL = 0.005  # share that is not worth a word
LONGEST_LINE = 240  # characters
WITHOUT_GAIN = "nothing that the stages show would gain 2 %"
WITHOUT_TRACE = "a trace of some steps tells what takes the time within them"
WITHOUT_ANSWER = "mark the stages that are missing, or let the loop run on, and ask again"


@dataclass(frozen=True)
class Straggler:
    """A process that the others wait for.

    `slower_by` is its own time of a step, without its wait for the others, over the median one of the others. `stage`
    is where it spends more than they do. `gain` is the factor on the speed of the job, if it were as fast as they are:
    the next slowest of them is left.
    """

    rank: int
    slower_by: float
    own_s: float
    others_s: float
    stage: str
    gain: float
    steps: int


@dataclass(frozen=True)
class TrainingVerdict(Verdict):
    """What limits the steps of a training run; `share_of_limit` is the share of their time that counts for the bound.

    `at_most` of a gain is a factor on the speed. `stages` are the shares of the stages, the largest first, and
    `causes` those of what they count for. `rank` is the process they are of: the one that the others wait for; None
    where they are the mean over all `ranks`. `str` of it is its text.
    """

    stages: tuple[Share, ...] = ()
    causes: tuple[Share, ...] = ()
    steps: int = 0  # judged
    step_s: float | None = None
    on_device: bool = False  # by whose clock the shares are
    ranks: tuple[int, ...] = ()
    rank: int | None = None
    straggler: Straggler | None = None
    trace_bound: Bound | None = None  # what the trace says, None where there is none
    trace_agrees: bool | None = None  # None: there is no trace, or it says nothing about this

    def __str__(self) -> str:
        """Return what, why and next in at most twelve lines."""
        return text(self)


def text(verdict: TrainingVerdict) -> str:
    """Return the verdict as a person reads it, in at most twelve lines: what limits, why, and what to do next."""
    gains = [f"{gain.fix}: at most {gain.at_most:.2f} times the speed ({gain.basis})" for gain in verdict.gains]
    if verdict.bound == "inconclusive":
        gains.insert(0, WITHOUT_ANSWER)
    elif verdict.trace_bound is None and "compute" in (verdict.bound, *verdict.alternatives):
        gains.insert(0, WITHOUT_TRACE)
    parts = {
        "What": [_what(verdict)],
        "Why": [*_stages(verdict), *verdict.evidence][:MOST_EVIDENCE],
        "Doubt": [str(doubt) for doubt in verdict.doubts[:MOST_DOUBTS]],
        "Next": gains[:MOST_GAINS] or [WITHOUT_GAIN],
    }
    lines = []
    for head, sentences in parts.items():
        for place, sentence in enumerate(sentences):
            line = f"{'' if place else head + ':':<7}{' '.join(sentence.split())}"
            lines.append(line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…")
    return "\n".join(lines)


def _what(verdict: TrainingVerdict) -> str:
    bound = verdict.bound.replace("_", "-")
    others = " or ".join(label.replace("_", "-") for label in verdict.alternatives)
    if verdict.bound == "inconclusive":
        return f"inconclusive{f'; maybe {others}' if others else ''}"
    if others:
        others = f"; {others}" if verdict.bound == "mixed" else f"; maybe {others}"
    said = f"{bound} ({verdict.confidence} confidence{others})"
    who = verdict.straggler
    if who is None:
        return said
    return f"{said}; the others wait for rank {who.rank}, {who.slower_by:.2f} times as slow, in {who.stage}"


def _stages(verdict: TrainingVerdict) -> list[str]:
    """Return a line on the largest stage, and one on the others."""
    shares = [stage for stage in verdict.stages if stage.share >= SMALL]
    if not shares or verdict.step_s is None:
        return []
    first, rest = shares[0], shares[1 : MOST_STAGES + 1]
    low, high = (percent(end) for end in first.ends)
    ends = "" if low == high else f" ({low.removesuffix(' %')} to {high})"
    clock = " of the device" if verdict.on_device else ""
    whose = "" if verdict.rank is None else f" of rank {verdict.rank}"
    line = (
        f"{called(first)} takes {percent(first.share)}{ends} of the time{clock}: {first.step_s * 1e3:.2f} of "
        f"{verdict.step_s * 1e3:.2f} ms, over {verdict.steps} steps{whose}"
    )
    others = ", ".join(f"{called(stage)} {percent(stage.share)}" for stage in rest)
    return [line, f"then {others}"] if others else [line]


def called(share: Share) -> str:
    """Return the name of a stage as people call it."""
    return "what is in no stage" if share.name == IN_NO_STAGE else share.name


def percent(share: float) -> str:
    """Return a share as people write it."""
    return f"{100 * share:.0f} %"
