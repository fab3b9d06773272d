"""Profile a model layer by layer and leave the files of the profile; in step 03 the classifier on a batch of texts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from boundby.inference import Batch
from boundby.layers import ModelProfile, ObservabilityEngine, Report, blocks
from boundby.machine import ceilings, naming_loss
from boundby.work import Limits
from utils.command import LAYER_PROFILE, Run
from utils.models import LoadedModel
from utils.tracing.layers import LayerSettings, models

SHOWN = 5
MOST_SECONDS_FOR_A_PLAN = 120.0


def limits_of_machine(folder: Path, device: torch.device, dtype: str) -> Limits | None:
    """Return the measured limits of this machine in `dtype`, kept in `folder`; None where it has none for it."""
    wanted = tuple(dict.fromkeys([*ceilings.usual_dtypes(device), dtype]))
    known, _, _ = ceilings.cached(folder, device, wanted)
    return known.limits(dtype)


@dataclass(frozen=True)
class Wanted:
    """What is profiled, how often, and where the files go."""

    name: str  # of the model
    folder: Path
    limits: Limits | None
    num_runs: int
    warmup_runs: int
    max_seconds: float = math.inf
    profile_name: str | None = None
    shape: str | None = None


def profile(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor | None], wanted: Wanted, note: Callable[[str], None]
) -> tuple[Report, Path]:
    """Return what the layers cost and the path of the dashboard; metrics and summary lie beside it."""
    names = {"model_name": wanted.name, "profile_name": wanted.profile_name, "shape": wanted.shape}
    # in the mode in which other steps run it; nobody trains this model
    with ObservabilityEngine(model, wanted.folder, {**names, "inference_mode": True}, limits=wanted.limits) as engine:
        engine.instrument()
        device = next((str(parameter.device) for parameter in model.parameters()), "cpu")
        of_shape = f" of {wanted.shape}" if wanted.shape else ""
        note(f"{wanted.name}{of_shape} on {device}: {wanted.warmup_runs} warm-up runs")
        engine.warmup(inputs, num_warmup_runs=wanted.warmup_runs)
        limit = "" if wanted.max_seconds == math.inf else f", or what fits into {wanted.max_seconds:g} s"
        note(f"{wanted.name}: {wanted.num_runs} runs with probes and as many without{limit}")
        report = engine.profile(inputs, num_runs=wanted.num_runs, max_seconds=wanted.max_seconds)
        return report, engine.save_dashboard()


def profile_as_set(
    settings: LayerSettings, note: Callable[[str], None], *, trust_remote_code: bool = False, for_plan: bool = False
) -> tuple[Report, Path]:
    """Return what `profile` does of the model and inputs that the settings ask for.

    `for_plan` leaves out the limits of the machine, which a plan does not need, and keeps to a time.
    """
    chosen = models.prepare(settings.model, trust_remote_code=trust_remote_code)
    measured, folder = settings.measurement, Path(settings.output.dir)
    inputs = models.inputs_for(chosen.model, measured.batch_size, measured.sequence_length)
    model, inputs = models.generating(chosen.model, inputs, measured.new_tokens)
    wanted = Wanted(
        name=chosen.name,
        folder=folder,
        limits=None if for_plan else limits_of_machine(folder / "ceilings", chosen.device, settings.model.dtype),
        num_runs=measured.num_samples,
        warmup_runs=measured.warmup_runs,
        max_seconds=MOST_SECONDS_FOR_A_PLAN if for_plan else math.inf,
        profile_name=settings.output.profile_name,
        shape=models.shape_of(inputs, measured.new_tokens),
    )
    return profile(model, inputs, wanted, note)


@naming_loss("the profile of the layers")
def record(run: Run, loaded: LoadedModel, batch: Batch) -> ModelProfile:
    """Profile the layers on `batch`, which is also traced, write the files, and return the profile."""
    mask = batch.attention_mask if batch.is_padded else None
    settings = run.config.layers
    wanted = Wanted(
        name=run.config.model.name,
        folder=run.layout.layers,
        limits=limits_of_machine(run.layout.ceilings, loaded.device, loaded.dtype),
        num_runs=settings.num_runs,
        warmup_runs=settings.warmup_runs,
        max_seconds=settings.max_seconds,
        profile_name=LAYER_PROFILE,
        shape=str(batch.shape),
    )
    inputs = {"input_ids": batch.input_ids, "attention_mask": mask}
    report, _ = profile(loaded.model, inputs, wanted, run.note)
    return report.profile


def console_lines(profile: ModelProfile) -> list[str]:
    """Return how far the profile can be trusted and the longest blocks, as lines for the terminal."""
    coverage, of = profile.coverage, f" of the batch of {profile.shape}" if profile.shape else ""
    lines = [
        f"profiled {sum(layer.calls > 0 for layer in profile.layers)} layers in {profile.num_runs} runs{of}: coverage "
        f"{100 * coverage.ratio:.1f} % ({coverage.status}), overhead {100 * profile.overhead:+.1f} %"
    ]
    for row in blocks(profile)[:SHOWN]:
        lines.append(f"  {100 * row.share:5.1f} % {1e3 * row.seconds:10.3f} ms  {row.label}")
    return lines
