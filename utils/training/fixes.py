"""What each fix does to the speed of the demo's steps: predicted, bounded, tried on copies of the model, and said."""

import copy
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from boundby import files
from boundby.bound import Trial, Tried
from boundby.formatting import NOTHING
from boundby.machine import HostCounters, Watch, gpu_source, synchronizer
from boundby.timing import Timer
from boundby.training import Recipe, try_fixes
from boundby.work import Interval
from utils.command import InputError
from utils.render import Block, Paragraph, Table, plain_text
from utils.training import loop, run_folder
from utils.training.run import Job
from utils.training.settings import TrainingSettings

FILE, SCHEMA_VERSION = "trials.json", 1
BUDGET_S = 120.0
ROUND_S, LEAST_STEPS = 0.3, 16  # of a round: workers fetch 4 batches ahead, which must not count
NOT_PREDICTED = {
    "fuse_operators": "not predicted: how fast compiled code is shows once it is made",
    "pin_memory": "not predicted: how much of a copy hides behind the work shows once it runs",
}
HEADERS = ("fix", "predicted,\n90 %", "at most", "measured,\n95 %", "as predicted")


def recorded(settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of the run that the trials follow. Raises InputError where they could not follow one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("--try times one process; start it without torchrun")
    return settings.model_copy(update={"profiling": settings.profiling.model_copy(update={"enabled": True})})


def tried(job: Job) -> Iterator[str]:
    """Yield the lines of the scorecard, which is written to the folder of the run too."""
    ranks = run_folder.ranks_of(job.folder)
    verdict = run_folder.judge(job.folder, ranks) if ranks else None
    if verdict is None or not verdict.step_s:
        yield "no fix was tried: the steps of the run are not known"
        return
    steps = max(LEAST_STEPS, math.ceil(ROUND_S / verdict.step_s))
    job.note(f"trying each fix that applies here, in rounds of {steps} steps, about {BUDGET_S:.0f} s in all")
    tried = try_fixes(
        recipe_of(job, steps),
        Timer(synchronize=synchronizer(job.process.device)),
        budget_s=BUDGET_S,
        watch=Watch(HostCounters(), source=gpu_source(job.process.device)),
        told=lambda text, left_s: job.note(f"{text}, {left_s:.0f} s left"),
    )
    yield from plain_text.lines(scorecard(tried, steps))
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "training_trials",
        "steps_of_a_round": steps,
        "trials": [trial.as_dict() for trial in tried.trials],
        "untried": [refused.as_dict() for refused in tried.untried],
        "doubts": [str(doubt) for doubt in tried.doubts],
    }
    files.write_json(job.folder / FILE, document)
    yield f"\nin {job.folder / FILE}"


def recipe_of(job: Job, steps: int) -> Recipe:
    """Return how the steps of a job are made, in rounds of so many."""
    device, training = job.process.device, job.settings.training
    plan = replace(job.plan, steps_per_epoch=steps)

    def optimizer(parameters: Any, is_fused: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=training.learning_rate, fused=is_fused or None)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(**batch)["loss"] / plan.accumulate

    return Recipe(
        device,
        model=lambda: copy.deepcopy(job.task.model).to(device).train(),
        optimizer=optimizer,
        batches=lambda workers, pins: loop.loaders(job.task.split, plan, training.seed, workers, pins)[0],
        move=lambda batch: loop.to_device(batch, device),
        loss=loss,
        workers=job.settings.data.num_workers,
        is_pinned=job.pins_memory,
        accumulate=plan.accumulate,
    )


def scorecard(tried: Tried, steps: int) -> list[Block]:
    """Return what was predicted of each fix beside what was measured, and what to do."""
    rows = [
        *(
            (
                trial.name,
                _factor(trial.predicted),
                NOTHING if trial.at_most is None else f"{trial.at_most:.2f}",
                _factor(trial.measured),
                _said(trial),
            )
            for trial in tried.trials
        ),
        *(
            (refused.fix.change.tried or str(refused.fix), NOTHING, NOTHING, NOTHING, f"not tried: {refused.reason}")
            for refused in tried.untried
        ),
    ]
    caption = f"Factors of the speed of the steps, in rounds of {steps} steps with and without each fix, in turn"
    gaining = [trial for trial in tried.trials if trial.outcome == "gains"]
    best = max(gaining, key=lambda trial: trial.measured.value, default=None)
    advice = f"{best.fix}: {_factor(best.measured)} times the speed" if best else "nothing that was tried here"
    coarse = "; check the loss curve with it" if best and best.fix.kind == "autocast" else ""
    said = [f"What gains most: {advice}{coarse}.", *([f"Doubt: {tried.doubts[0]}."] if tried.doubts else [])]
    return [Table(HEADERS, rows, left=(0, 4), caption=caption), *map(Paragraph, said)]


def _factor(of: Interval | None) -> str:
    return NOTHING if of is None else f"{of.value:.2f} [{of.low:.2f}, {of.high:.2f}]"


def _said(trial: Trial) -> str:
    if not trial.is_within_bound:
        return "above the bound"
    if trial.predicted is None:
        return NOT_PREDICTED.get(trial.fix.kind, NOTHING)
    return "yes" if trial.predicted.low <= trial.measured.value <= trial.predicted.high else "no"
