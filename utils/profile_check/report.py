"""All checks of one profile together: what to look at in which order, and how it is told."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from boundby.trace import Analysis
from boundby.trace.judgement import judge_trace
from boundby.training import StageTimes
from boundby.verdict import Verdict
from utils.profile_check import receipt, recommendations, recording, stage_advice, trace, training_run
from utils.profile_check.subject import STEP, Check, Subject, read_strictly
from utils.render import plain_text
from utils.render.blocks import Block, Heading, Paragraph
from utils.render.formatting import clean, listed, paragraph
from utils.trace_analysis import document

SCHEMA_VERSION = 1
PRESENCE = ("existence", "size")
MARGIN = 8  # columns of the word in front of a line
LONGEST_FOUND = 400


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
    found, checks = receipt.read(subject)
    if subject.is_pipeline:
        checks += _run_record(subject)
    if found is not None and found.is_without_trace:
        return Checked(subject.run, tuple(checks), None)
    run, said = training_run.read(subject)
    checks += said
    if run is None:
        analysis, said = _recording(subject)
        return Checked(subject.run, tuple(_without_repetition(checks + said)), analysis)
    analyses = []
    for each in run.processes:
        if each.has_recorded:
            analysis, said = _recording(each.subject)
            analyses.append(analysis)
            checks += said
    return Checked(subject.run, tuple(_without_repetition(checks)), next(filter(None, analyses), None), run.times)


def _recording(subject: Subject) -> tuple[Analysis | None, list[Check]]:
    """Return the analysis of the first trace of a recording, and what is to be said about all that it left."""
    manifest, checks = recording.read(subject)
    analysis, said = None, []
    if manifest is not None:
        analysis, said = trace.check(subject, manifest)
        checks += said
    if manifest is None or manifest.trace_path:
        is_sound = analysis is not None and not any(each.is_fatal for each in said)
        checks += trace.derived(subject, analysis if is_sound else None)
    return analysis, checks


def _without_repetition(checks: list[Check]) -> Iterator[Check]:
    """Yield the checks; that a file is missing or of another size is said once, though several others name it."""
    said = set()
    for each in checks:
        if each.is_fatal and each.what in PRESENCE:
            if each.file in said:
                continue
            said.add(each.file)
        yield each


def _run_record(subject: Subject) -> Iterator[Check]:
    path = subject.layout.run
    try:
        status = read_strictly(path, dict[str, Any])["steps"][STEP]["status"]
    except FileNotFoundError:
        if subject.run.resolve().parent.name == "previous":
            yield subject.note("existence", path, "it stays with the newest run; this is an earlier one")
        else:
            yield subject.fault("existence", path, "it is missing: settings, versions and machine are not known")
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield subject.unreadable("run record", path, error)
    else:
        say = subject.ok if status == "ok" else subject.note
        yield say("run record", path, f"step {STEP} ended with status {status}")


def lines(checked: Checked, *, with_analysis: bool = False) -> list[str]:
    """Return one line per artefact that is well and per fault or note, the verdict, and the analysis if wanted."""
    found = [line for each in _by_file(checked.checks) for line in _of_file(each)]
    found += ["", *paragraph(_headline(checked))]
    if with_analysis:
        found += plain_text.lines(_analysis(checked))
    return found


def as_json(checked: Checked, *, with_analysis: bool = False) -> str:
    """Return the checks, the verdict and, if wanted, the analysis as one strict JSON object."""
    told: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "profile_check",
        "run": str(checked.run),
        "verdict": checked.verdict,
        "checks": [{**asdict(each), "is_fatal": each.is_fatal} for each in checked.checks],
    }
    if with_analysis:
        told["analysis"] = recommendations.as_values(checked.analysis) if checked.analysis else None
        if checked.training:
            told["training"] = stage_advice.as_values(checked.training, _judged(checked.analysis))
    return document.as_json(told)


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
    broken = listed(dict.fromkeys(each.file for each in checked.faults))
    return f"FAULT: {len(checked.faults)} fault(s) in {broken}; do not rely on this profile"


def _analysis(checked: Checked) -> list[Block]:
    found = stage_advice.blocks(checked.training, _judged(checked.analysis)) if checked.training else []
    if checked.analysis is None:
        return [*found, Heading("Analysis of the trace"), Paragraph("There is none: see above.")]
    return [*found, *recommendations.blocks(checked.analysis)]


def _judged(analysis: Analysis | None) -> Verdict | None:
    return judge_trace(analysis) if analysis else None
