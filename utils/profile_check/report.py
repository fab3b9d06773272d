"""All checks of one profile together: what to look at in which order, how it is told, and what to do about it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from boundby.formatting import clean, listed, number, paragraph, times
from boundby.trace import Analysis
from boundby.training import StageTimes
from boundby.training.judgement import TrainingVerdict, judge_training
from boundby.verdict import OF_STAGES, Bound, Fix, fix_of_cause
from utils.profile_check import recording, training
from utils.profile_check.subject import Check, Subject
from utils.render import plain_text
from utils.render.blocks import Block, BulletList, DefinitionList, Heading, OrderedList, Paragraph
from utils.trace_analysis import document, text, words
from utils.trace_analysis.document import Document
from utils.trace_analysis.traces import Examined
from utils.training import run_folder

SCHEMA_VERSION = 1
PRESENCE = ("existence", "size")
MARGIN = 8  # columns of the word in front of a line
LONGEST_FOUND = 400
LEAST_OF_WINDOW, LEAST_OF_STEP = 0.01, 0.05  # of the time: less is not worth a change
MOST_NAMES = 3  # of what the host was in
HEAD_COLUMNS = 7  # of the text of a verdict
NOTHING_LOST = (
    "Nothing that can be helped takes 1 % of the time: what is left is the work itself (faster kernels, another dtype, "
    "less work; see the table of operators)."
)


@dataclass(frozen=True)
class Checked:
    """What was found in a profile; `analysis` is None where the trace cannot be analysed."""

    run: Path
    checks: tuple[Check, ...]
    analysis: Analysis | None
    training: tuple[StageTimes, ...] = ()  # of a training run: its processes that can be read

    @property
    def faults(self) -> list[Check]:
        """What must not be used as it is."""
        return [each for each in self.checks if each.is_fatal]

    @property
    def verdict(self) -> Literal["fine", "fault"]:
        """Whether all artefacts can be used."""
        return "fault" if self.faults else "fine"


def check(subject: Subject) -> Checked:
    """Return everything that can be said about a profile; a broken file is a fault and never an error."""
    receipt, checks = recording.receipt_of(subject)
    if subject.is_pipeline:
        checks += recording.run_record(subject)
    if receipt is not None and recording.is_without_trace(receipt):
        return Checked(subject.run, tuple(checks), None)
    run, said = training.read(subject)
    checks += said
    recorded = [subject] if run is None else [process.subject for process in run.processes if process.has_recorded]
    analyses = []
    for own in recorded:
        analysis, said = recording.check(own)
        analyses.append(analysis)
        checks += said
    first = next(filter(None, analyses), None)
    return Checked(subject.run, tuple(_without_repetition(checks)), first, run.times if run else ())


def _without_repetition(checks: list[Check]) -> Iterator[Check]:
    """Yield the checks; that a file is missing or of another size is said once, though several others name it."""
    said = set()
    for each in checks:
        if each.is_fatal and each.what in PRESENCE:
            if each.file in said:
                continue
            said.add(each.file)
        yield each


def lines(checked: Checked, *, with_analysis: bool = False, brief: bool = False) -> list[str]:
    """Return one line per artefact that is well and per fault or note, the verdict, and the analysis if wanted.

    The `brief` ones are the verdict alone, with the faults where there are any.
    """
    shown = tuple(each for each in checked.checks if each.is_fatal) if brief else checked.checks
    found = [line for each in _by_file(shown) for line in _of_file(each)]
    if brief and not found:
        return [f"the profile is whole: {len({each.file for each in checked.checks})} files, as they were written"]
    found += ["", *paragraph(_headline(checked))]
    if with_analysis:
        found += plain_text.lines(_analysis(checked))
    return found


def told(checked: Checked, *, with_analysis: bool = False) -> Document:
    """Return the checks, the verdict and, if wanted, the analysis as plain values for JSON."""
    values: Document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "profile_check",
        "run": str(checked.run),
        "verdict": checked.verdict,
        "checks": [{**asdict(each), "is_fatal": each.is_fatal} for each in checked.checks],
    }
    if with_analysis:
        values["analysis"] = _values_of_trace(checked.analysis) if checked.analysis else None
        if checked.training:
            values["training"] = _values_of_stages(_judged(checked))
    return values


def _by_file(checks: tuple[Check, ...]) -> list[list[Check]]:
    grouped: dict[str, list[Check]] = {}
    for each in checks:
        grouped.setdefault(each.file, []).append(each)
    return list(grouped.values())


def _of_file(checks: list[Check]) -> list[str]:
    """Return the lines on one file: that it is well or all that is wrong with it and the way out, then each note."""
    states: dict[str, list[str]] = {"ok": [], "fault": [], "note": []}
    for each in checks:
        states[each.state].append(each.found)
    remedies = dict.fromkeys(each.remedy for each in checks if each.remedy)
    if states["fault"]:
        said = [("fault", f"{'; '.join(states['fault'])} -> {' or '.join(remedies)}")]
    else:
        said = [("ok", "; ".join(states["ok"]))] if states["ok"] else []
    said += [("note", text) for text in states["note"]]
    return [
        line
        for state, text in said
        for line in paragraph(clean(f"{checks[0].file}: {text}", LONGEST_FOUND), " " * MARGIN, f"{state:<{MARGIN}}")
    ]


def _headline(checked: Checked) -> str:
    artefacts = len({each.file for each in checked.checks})
    notes = sum(each.state == "note" for each in checked.checks)
    if not checked.faults:
        return f"FINE: {artefacts} artefact(s), no fault, {notes} note(s)"
    broken = listed([*dict.fromkeys(fault.file for fault in checked.faults)])
    return f"FAULT: {len(checked.faults)} fault(s) in {broken}; do not rely on this profile"


def _analysis(checked: Checked) -> list[Block]:
    return [*_of_stages(checked), Heading("Analysis of the trace"), *_of_trace(checked.analysis)]


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
            at_most=window / left if fix.change.is_bounded and (left := device.least_ns.get(cause, window)) else None,
            host_in_ms={name: ns / 1e6 for name, ns in device.cause_details.get(cause, ())[:MOST_NAMES]},
            advice=fix.change.steps,
        )
        for cause, spent in sorted(lost.items(), key=lambda item: -item[1])
        if spent >= LEAST_OF_WINDOW * window and (fix := fix_of_cause(cause, on_host))
    ]


@dataclass(frozen=True)
class StageRecommendation:
    """What stages of one kind take, and what helps."""

    bound: Bound
    stages: tuple[str, ...]
    share: float
    advice: tuple[str, ...]


def stage_recommendations(verdict: TrainingVerdict) -> list[StageRecommendation]:
    """Return what takes at least 5 % of the time and can be helped, the most first."""
    found = [
        StageRecommendation(
            bound=cause.bound,
            stages=tuple(each.name for each in verdict.stages if each.bound == cause.bound),
            share=cause.share,
            advice=Fix(OF_STAGES[cause.bound]).change.steps,
        )
        for cause in verdict.causes
        if cause.share >= LEAST_OF_STEP and cause.bound in OF_STAGES
    ]
    return sorted(found, key=lambda each: -each.share)


def _values_of_trace(analysis: Analysis) -> Document:
    """Return the trace, the verdict on it and the recommendations as plain values."""
    return {
        **document.subject(Examined.of(analysis)),
        "recommendations": [asdict(advice) for advice in recommendations(analysis)],
    }


def _values_of_stages(verdict: TrainingVerdict) -> Document:
    """Return the verdict on the stages and the recommendations as plain values."""
    return {
        "verdict": verdict.as_dict(),
        "text": str(verdict).splitlines(),
        "recommendations": [asdict(advice) for advice in stage_recommendations(verdict)],
    }


def _of_trace(analysis: Analysis | None) -> list[Block]:
    """Return what the trace says and what to do about it."""
    if analysis is None:
        return [Paragraph("There is none: see above.")]
    advice: Block = Paragraph("Nothing can be recommended from this trace; make it again first.")
    if analysis.is_conclusive:
        lost = recommendations(analysis)
        advice = OrderedList([[Paragraph(_lost(each)), BulletList(each.advice)] for each in lost])
        advice = advice if lost else Paragraph(NOTHING_LOST)
    return [*text.blocks(Examined.of(analysis)), Heading("What to do"), advice]


def _lost(each: Recommendation) -> str:
    """Return what a cause takes, what its absence could gain at most, and what the host was in."""
    gain = "" if each.at_most is None else f"; without it at most {times(each.at_most)} times as fast"
    inside = ", ".join(f"{clean(name)} {number(ms)} ms" for name, ms in each.host_in_ms.items())
    host = f" The host meanwhile: {inside}." if inside else ""
    share = f"{number(each.time_ms)} ms, {each.share_of_window_pct:.1f} % of the window"
    return f"{words.plain(each.cause).capitalize()} ({each.meaning}): {share}{gain}.{host}"


def _judged(checked: Checked) -> TrainingVerdict:
    """Return the verdict on the stages, which knows that on the trace."""
    return judge_training(checked.training, Examined.of(checked.analysis).verdict if checked.analysis else None)


def _of_stages(checked: Checked) -> list[Block]:
    """Return the stages of a training, the verdict on them and what to do about it."""
    if not checked.training:
        return []
    verdict = _judged(checked)
    advice: list[list[Block]] = [
        [Paragraph(_taken(each)), BulletList(each.advice)] for each in stage_recommendations(verdict)
    ]
    return [
        Heading("Stages of the training"),
        run_folder.table(checked.training[0]),
        DefinitionList(_said(verdict)),
        Heading("What to do about the stages"),
        OrderedList(advice) if advice else Paragraph("Nothing can be recommended from these stages."),
    ]


def _said(verdict: TrainingVerdict) -> list[tuple[str, str]]:
    """Return the text of the verdict under its heads, what stands below a head as one sentence."""
    found: list[tuple[str, str]] = []
    for line in str(verdict).splitlines():
        head, text = line[:HEAD_COLUMNS].strip(" :"), line[HEAD_COLUMNS:].strip()
        if head or not found:
            found.append((head, text))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}; {text}")
    return found


def _taken(each: StageRecommendation) -> str:
    taken = f"{', '.join(each.stages)}, {100 * each.share:.1f} % of the time"
    return f"{each.bound.replace('_', '-').capitalize()}: {taken}."
