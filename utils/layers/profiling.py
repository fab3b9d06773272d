"""Profile a model layer by layer and leave the files of the profile; in step 03 the classifier on a batch of texts."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from boundby import ceilings
from boundby.device import naming_loss
from boundby.inference import Batch
from boundby.layers.engine import ObservabilityEngine
from boundby.layers.ranking import blocks
from boundby.layers.records import ModelProfile
from boundby.layers.report import Report
from boundby.roofline import Limits
from utils.artifacts import LAYER_PROFILE
from utils.cli import Run
from utils.models import LoadedModel

SHOWN = 5


def limits_of_machine(folder: Path, device: torch.device, dtype: str) -> Limits | None:
    """Return the measured limits of this machine in `dtype`, kept in `folder`; None where it has none for it."""
    wanted = tuple(dict.fromkeys([*ceilings.usual_dtypes(device), dtype]))
    found, _, _ = ceilings.cached(folder, device, wanted)
    return found.limits(dtype)


def profile(  # noqa: PLR0913  (what to run, how often, and where the files go)
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor | None],
    *,
    name: str,
    folder: Path,
    limits: Limits | None,
    num_runs: int,
    warmup_runs: int,
    max_seconds: float = math.inf,
    profile_name: str | None = None,
    shape: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[Report, Path]:
    """Return what the layers cost and the path of the dashboard; metrics and summary lie beside it."""
    settings = {"model_name": name, "inference_mode": True}  # as other steps run it; nobody trains this model
    settings |= {"profile_name": profile_name} if profile_name else {}
    settings |= {"shape": shape} if shape else {}
    with ObservabilityEngine(model, folder, settings, limits=limits) as engine:
        engine.instrument()
        device = next((str(each.device) for each in model.parameters()), "cpu")
        note(f"{name}{f' of {shape}' if shape else ''} on {device}: {warmup_runs} warm-up runs")
        engine.warmup(inputs, num_warmup_runs=warmup_runs)
        limit = "" if max_seconds == math.inf else f", or what fits into {max_seconds:g} s"
        note(f"{name}: {num_runs} runs with probes and as many without{limit}")
        report = engine.profile(inputs, num_runs=num_runs, max_seconds=max_seconds)
        return report, engine.save_dashboard()


@naming_loss("the profile of the layers")
def record(run: Run, loaded: LoadedModel, batch: Batch) -> ModelProfile:
    """Profile the layers on `batch`, which is also traced, write the files, and return the profile."""
    mask = batch.attention_mask if batch.is_padded else None
    settings = run.config.layers
    report, _ = profile(
        loaded.model,
        {"input_ids": batch.input_ids, "attention_mask": mask},
        name=run.config.model.name,
        folder=run.layout.layers,
        limits=limits_of_machine(run.layout.ceilings, loaded.device, loaded.dtype),
        num_runs=settings.num_runs,
        warmup_runs=settings.warmup_runs,
        max_seconds=settings.max_seconds,
        profile_name=LAYER_PROFILE,
        shape=str(batch.shape),
        note=run.note,
    )
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
