"""What was found in a profile, as text and as JSON: its faults and notes and, if wanted, what to do about lost time."""

from dataclasses import asdict
from typing import Any

from boundby.bound import OF_STAGES, Fix
from boundby.formatting import clean, listed, paragraph
from boundby.training import TrainingVerdict, judge_training
from utils.render import Block, BulletList, Heading, OrderedList, Paragraph, plain_text
from utils.tracing import trace_document as document
from utils.tracing import trace_text as text
from utils.tracing.profile_check.recording import Check, Profile
from utils.tracing.traces import Examined
from utils.training import run_folder

SCHEMA_VERSION = 2
MARGIN = 8  # columns of the word in front of a line
LONGEST_FOUND = 400
LEAST_OF_STEP = 0.05  # of the time: less is not worth a change
NOTHING_LOST = (
    "Nothing that can be helped takes 1 % of the time: what is left is the work itself (faster kernels, another dtype, "
    "less work; see the table of operators)."
)


def lines(profile: Profile, *, with_analysis: bool = False, brief: bool = False) -> list[str]:
    """Return one line per artefact that is well and per fault or note, the verdict, and the analysis if wanted.

    The `brief` ones are the verdict alone, with the faults where there are any.
    """
    artefacts = list(dict.fromkeys(check.file for check in profile.checks))
    if brief and not profile.faults:
        return [f"the profile is whole: {len(artefacts)} files, as they were written"]
    shown = profile.faults if brief else profile.checks
    text_lines = [line for file in artefacts for line in _of_file([check for check in shown if check.file == file])]
    notes = sum(check.state == "note" for check in profile.checks)
    headline = f"FINE: {len(artefacts)} artefact(s), no fault, {notes} note(s)"
    if profile.faults:
        broken = listed([*dict.fromkeys(fault.file for fault in profile.faults)])
        headline = f"FAULT: {len(profile.faults)} fault(s) in {broken}; do not rely on this profile"
    text_lines += ["", *paragraph(headline)]
    return text_lines + plain_text.lines([*_of_stages(profile), *_of_trace(profile)]) if with_analysis else text_lines


def values(profile: Profile, *, with_analysis: bool = False) -> dict[str, Any]:
    """Return the checks, the verdict and, if wanted, the analysis as plain values for JSON."""
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "profile_check",
        "run": str(profile.run),
        "verdict": "fault" if profile.faults else "fine",
        "checks": [{**asdict(check), "is_fatal": check.is_fatal} for check in profile.checks],
    }
    if with_analysis:
        content["analysis"] = document.subject(Examined.of(profile.analysis)) if profile.analysis else None
        if profile.ranks:
            verdict = _judged(profile)
            content["training"] = {"verdict": verdict.as_dict(), "text": str(verdict).splitlines()}
    return content


def _of_file(checks: list[Check]) -> list[str]:
    """Return the lines on one file: that it is well or all that is wrong with it and the way out, then each note."""
    texts = {state: [check.text for check in checks if check.state == state] for state in ("ok", "fault", "note")}
    remedies = dict.fromkeys(check.remedy for check in checks if check.remedy)
    shown = [("note", note) for note in texts["note"]]
    if texts["fault"]:
        shown.insert(0, ("fault", f"{'; '.join(texts['fault'])} -> {' or '.join(remedies)}"))
    elif texts["ok"]:
        shown.insert(0, ("ok", "; ".join(texts["ok"])))
    return [
        line
        for state, text in shown
        for line in paragraph(clean(f"{checks[0].file}: {text}", LONGEST_FOUND), " " * MARGIN, f"{state:<{MARGIN}}")
    ]


def _of_trace(profile: Profile) -> list[Block]:
    """Return what the trace says and what to do about it."""
    heading = Heading("Analysis of the trace")
    if profile.analysis is None:
        return [heading, Paragraph("There is none: see above.")]
    examined = Examined.of(profile.analysis)
    advice: Block = Paragraph("Nothing can be recommended from this trace; make it again first.")
    if not examined.is_inconclusive:
        fixes = [gain.fix for gain in examined.verdict.gains]
        steps: list[list[Block]] = [[Paragraph(f"{fix}:"), BulletList(fix.change.steps)] for fix in fixes]
        advice = OrderedList(steps) if steps else Paragraph(NOTHING_LOST)
    return [heading, *text.blocks(examined), Heading("What to do"), advice]


def _judged(profile: Profile) -> TrainingVerdict:
    """Return the verdict on the stages, which knows that on the trace."""
    return judge_training(profile.ranks, Examined.of(profile.analysis).verdict if profile.analysis else None)


def _of_stages(profile: Profile) -> list[Block]:
    """Return the stages of a training, the verdict on them and what to do about it."""
    if not profile.ranks:
        return []
    verdict = _judged(profile)
    advice: list[list[Block]] = [
        [
            Paragraph(f"{cause.bound.replace('_', '-').capitalize()}:"),
            BulletList(Fix(OF_STAGES[cause.bound]).change.steps),
        ]
        for cause in sorted(verdict.causes, key=lambda cause: -cause.share)
        if cause.share >= LEAST_OF_STEP and cause.bound in OF_STAGES
    ]
    return [
        Heading("Stages of the training"),
        run_folder.table(profile.ranks[0]),
        *(Paragraph(line) for line in str(verdict).splitlines()),
        Heading("What to do about the stages"),
        OrderedList(advice) if advice else Paragraph("Nothing can be recommended from these stages."),
    ]
