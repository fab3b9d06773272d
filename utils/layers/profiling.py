"""Profile one model layer by layer and leave the files of the profile."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from boundby import ceilings
from boundby.layers.engine import ObservabilityEngine
from boundby.layers.report import Report
from boundby.roofline import Limits


def limits_of_machine(folder: Path, device: torch.device, dtype: str) -> Limits | None:
    """Return the measured limits of this machine in `dtype`, kept in `folder`; None where it has none for it."""
    wanted = tuple(dict.fromkeys([*ceilings.usual_dtypes(device), dtype]))
    found, _, _ = ceilings.cached(folder, device, wanted)
    return found.limits(dtype)


def profile(  # noqa: PLR0913  (what to run, how often, and where the files go)
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    *,
    name: str,
    folder: Path,
    limits: Limits | None,
    num_runs: int,
    warmup_runs: int,
    max_seconds: float = math.inf,
    profile_name: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[Report, Path]:
    """Return what the layers cost and the path of the dashboard; metrics and summary lie beside it."""
    settings = {"model_name": name, "inference_mode": True}  # as other steps run it; nobody trains this model
    settings |= {"profile_name": profile_name} if profile_name else {}
    with ObservabilityEngine(model, folder, settings, limits=limits) as engine:
        engine.instrument()
        note(f"{name}: {warmup_runs} warm-up runs")
        engine.warmup(inputs, num_warmup_runs=warmup_runs)
        limit = "" if max_seconds == math.inf else f", or what fits into {max_seconds:g} s"
        note(f"{name}: {num_runs} runs with probes and as many without{limit}")
        report = engine.profile(inputs, num_runs=num_runs, max_seconds=max_seconds)
        return report, engine.save_dashboard()
