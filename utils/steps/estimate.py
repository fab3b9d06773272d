"""How long steps may take, where a run stands and what it has spent: for the dry run, and for steps as they end."""

import os
from datetime import UTC, datetime

from boundby.formatting import Missing, minutes
from boundby.formatting import number as digits
from boundby.machine import RaplCounter, environment, gpu_energy
from utils.command import RUN_STARTED_VARIABLE, TIME_IN_NAMES, Layout
from utils.settings import AUTO, Config
from utils.steps import steps

LEFT_VARIABLE = "BOUNDBY_RUN_LEFT"  # set by the runner: the step that runs and those after it
SWEEP_SHARE = 1.1  # of the seconds it may take: the last visit ends later, and writing every one comes on top
CEILINGS_S = 5.0  # the budgets of `boundby.machine.ceilings` and `boundby.bound.replay`, whose modules load torch
REPLAY_S = 10.0  # for the chosen batch size; trials may take as long as a batch size
LOADING_S = 15.0  # of the packages, and of the model
COUNTING_S = 4.0  # to count the work of a batch size and find its limits, seen on two cores
ENERGY_S = 15.0  # of a batch size, where there is a counter
TRACE_S = 20.0  # to record, write and read the trace of a few forwards, seen on two cores
WH = 3600.0  # joules


def seconds(number: str, config: Config, layout: Layout) -> tuple[float, str | None]:
    """Return how long the step took last time with these settings, or its budget, and what of it is not counted."""
    try:
        earlier = steps.receipt_in(layout.receipt(number))
    except (OSError, ValueError):
        earlier = None
    if earlier and earlier.seconds is not None and earlier.parts.config == steps.settings_of(number, config):
        return earlier.seconds, None
    if number == "02":
        points, most_s = _points(config), config.profiling.max_seconds_per_batch_size
        limits_s = CEILINGS_S + points * COUNTING_S + REPLAY_S + most_s  # the own dtype's chosen size in full
        measured_s = points * (SWEEP_SHARE * most_s + (ENERGY_S if _has_counter(config) else 0.0))
        return LOADING_S + measured_s + limits_s, "the evaluation of step 02" if config.evaluation.enabled else None
    if number == "03":
        recorded_s = (TRACE_S if config.trace.enabled else 0.0) + config.layers.max_seconds * config.layers.enabled
        return LOADING_S + recorded_s if recorded_s else 2.0, None
    if number == "05" and config.variants.enabled:
        return LOADING_S + config.variants.max_seconds, None
    return {"00": (2.0, None), "04": (10.0, None), "05": (2.0, None)}.get(number, (0.0, f"step {number}"))


def _points(config: Config) -> int:
    """Return how many batch sizes are swept, in all dtypes."""
    listed = config.profiling.dtypes or (config.model.dtype,)  # auto is one of those that are listed, as a rule
    dtypes = listed if config.model.dtype == AUTO else steps.sweep_dtypes(config)
    return len(dtypes) * len(steps.sweep_sizes(config, is_on_gpu=has_gpu(config)))


def has_gpu(config: Config) -> bool:
    """Tell whether the model runs on a GPU, as far as the driver tells."""
    return config.model.device != "cpu" and bool(environment.machine()["gpus"])


def _has_counter(config: Config) -> bool:
    try:
        _ = gpu_energy().joules() if has_gpu(config) else RaplCounter()
    except OSError:
        return False
    return True


def standing(number: str, config: Config, layout: Layout, resumes: bool, here_s: float = 0.0) -> str | None:
    """Return how long the run has taken, what its GPUs have, and about how much is left after this step; in a line.

    `here_s` are the seconds that this step has still to go. None where no run is under way.
    """
    left = os.environ.get(LEFT_VARIABLE, "").split()
    try:
        began = datetime.strptime(os.environ[RUN_STARTED_VARIABLE], TIME_IN_NAMES).replace(tzinfo=UTC)
        later = left[left.index(number) + 1 :]
    except (KeyError, ValueError):
        return None
    runs = [step for step in later if not resumes or steps.decide(step, config, layout).run]
    known_s, without = zip((here_s, None), *(seconds(step, config, layout) for step in runs), strict=True)
    uncounted = ", ".join(filter(None, without))
    joules = steps.joules_so_far(layout)
    parts = [f"step {number}: {minutes((datetime.now(UTC) - began).total_seconds())} since the start"]
    parts += [] if isinstance(joules, Missing) else [f"{watt_hours(joules)} by the GPU's counter"]
    least = f"at least {minutes(sum(known_s))} left (not counted: {uncounted})"
    rest = least if uncounted else f"about {minutes(sum(known_s))} left"
    return "; ".join([", ".join(parts), *([rest] if later or here_s else [])])


def energy_wh(minutes: float, config: Config) -> float | Missing:
    """Return the most that the GPUs may take in so many minutes, by the limit that their driver holds them to."""
    limits = [gpu.get("power_limit_w") for gpu in environment.machine()["gpus"]] if has_gpu(config) else []
    if not limits or None in limits:
        return Missing(environment.machine().get("gpus_reason") or "no GPU whose driver tells its power limit")
    return float(sum(limits) * minutes / 60)


def watt_hours(joules: float) -> str:
    """Return an energy as people pay for it."""
    return f"{digits(joules / WH, 3)} Wh"
