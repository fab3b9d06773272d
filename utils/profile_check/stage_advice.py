"""What to do about the stages that take the time of a training run, for people and programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from boundby.training import StageTimes
from boundby.training.judgement import judge_training
from boundby.training.verdict import TrainingVerdict
from boundby.verdict import OF_STAGES, Bound, Fix, Verdict
from utils.render.blocks import Block, BulletList, DefinitionList, Heading, OrderedList, Paragraph
from utils.training import run_folder

HEAD_COLUMNS = 7  # of the text of a verdict
LEAST_SHARE = 0.05  # of the time of a step: less is not worth a change


@dataclass(frozen=True)
class Recommendation:
    """What stages of one kind take, and what helps."""

    bound: Bound
    stages: tuple[str, ...]
    share: float
    advice: tuple[str, ...]


def recommendations(verdict: TrainingVerdict) -> list[Recommendation]:
    """Return what takes at least 5 % of the time and can be helped, the most first."""
    found = [
        Recommendation(
            bound=cause.bound,
            stages=tuple(each.name for each in verdict.stages if each.bound == cause.bound),
            share=cause.share,
            advice=Fix(OF_STAGES[cause.bound]).change.steps,
        )
        for cause in verdict.causes
        if cause.share >= LEAST_SHARE and cause.bound in OF_STAGES
    ]
    return sorted(found, key=lambda each: -each.share)


def as_values(times: Sequence[StageTimes], trace: Verdict | None) -> dict[str, Any]:
    """Return the verdict on the stages and the recommendations as plain values."""
    verdict = judge_training(times, trace)
    return {
        "verdict": verdict.as_dict(),
        "text": str(verdict).splitlines(),
        "recommendations": [asdict(each) for each in recommendations(verdict)],
    }


def blocks(times: Sequence[StageTimes], trace: Verdict | None) -> list[Block]:
    """Return the stages, the verdict on them and what to do about it."""
    verdict = judge_training(times, trace)
    advised = [[Paragraph(_sentence(each)), BulletList(each.advice)] for each in recommendations(verdict)]
    return [
        Heading("Stages of the training"),
        *run_folder.table(times[0]),
        DefinitionList(_said(verdict)),
        Heading("What to do about the stages"),
        OrderedList(advised) if advised else Paragraph("Nothing can be recommended from these stages."),
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


def _sentence(each: Recommendation) -> str:
    taken = f"{', '.join(each.stages)}, {100 * each.share:.1f} % of the time"
    return f"{each.bound.replace('_', '-').capitalize()}: {taken}."
