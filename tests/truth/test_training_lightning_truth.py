"""Sleeps in every part of a Lightning fit, beside what `ProfilerCallback` says of the stage in which they belong.

A sleep lasts as long as the system makes it last: each is timed where it happens, and its stage is held against the
sleeps of the same step. The median over the steps that no profiler disturbed must be within 5 % and a millisecond; the
best of a few attempts counts, and all are printed.
"""

import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from boundby.training import StageTimes, read_stage_times
from boundby.training.lightning import ProfilerCallback
from tests import lightning_fits as fits
from tests.lightning_fits import PACKAGES, Rows, module_of, nobody

pytestmark = [pytest.mark.truth, pytest.mark.timeout(600)]
pytestmark += [pytest.mark.filterwarnings(warning) for warning in fits.WARNINGS]

ATTEMPTS = 5
WITHIN, WITHIN_S = 0.05, 0.001
STEPS, BATCH, EVALUATIONS = 24, 2, 4
SLEEPS_S = {
    "read": 0.008,  # of each row
    "transfer": 0.008,
    "forward": 0.012,
    "backward": 0.018,
    "optimize": 0.010,
    "callback before": 0.006,
    "callback behind": 0.008,
    "validate": 0.025,
}
PARTS = {  # of a stage
    "data": ("read",),
    "h2d": ("transfer",),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimize",),
    "callbacks": ("callback before", "callback behind"),
}
Found = dict[str, tuple[float, float]]  # by stage: what was slept in it and what was said of it, in seconds


class Sleeper:
    """Sleeps in each part, and keeps how long that really took; what is part of a validation stands under that."""

    def __init__(self) -> None:
        self.slept: dict[str, list[float]] = defaultdict(list)
        self.is_validating = False

    def __call__(self, part: str) -> None:
        begin = time.perf_counter()
        time.sleep(SLEEPS_S[part])
        self.slept["validate" if self.is_validating else part].append(time.perf_counter() - begin)

    def sums(self, parts: tuple[str, ...], count: int) -> np.ndarray:
        """Return the seconds of some parts in each of `count` steps, which all have as many of them."""
        return np.sum([np.reshape(self.slept[part], (count, -1)).sum(axis=1) for part in parts], axis=0)


def excess(slept: np.ndarray, said: np.ndarray) -> tuple[float, float]:
    """Return the median of what was slept, and with it the median of what was said beyond."""
    return float(np.median(slept)), float(np.median(slept) + np.median(said - slept))


def stage_in_steps(times: StageTimes, stage: str, numbers: np.ndarray) -> np.ndarray:
    """Return the seconds of a stage in each of these steps, without what lies in stages inside."""
    rows = times.rows_of(stage)
    return np.array([rows["self_ns"][rows["step"] == number].sum() / 1e9 for number in numbers])


def attempt(package: str, accumulate: int, folder: Path) -> Found:
    sleeper = Sleeper()
    callback = ProfilerCallback(True, folder, 8, 0, 1, 1, 1, say=nobody)
    module = module_of(package, sleeper)
    module.on_validation_start = lambda: setattr(sleeper, "is_validating", True)
    module.on_validation_end = lambda: setattr(sleeper, "is_validating", False)
    rows = DataLoader(Rows(STEPS * BATCH * accumulate, sleeper), batch_size=BATCH)
    val = DataLoader(Rows(3 * BATCH, nobody), batch_size=BATCH)
    watchers = [fits.watcher_of(package, sleeper) for _ in range(2)]
    settings = {"accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0}
    settings["val_check_interval"] = 1 / EVALUATIONS
    fits.fit(package, module, rows, watchers[0], callback, watchers[1], val=val, **settings)
    times = read_stage_times(folder / "Tiny")
    ends = times.rows_of("step", "step")
    usual = ends["step"][ends["flags"] == 0]
    medians = {
        stage: excess(sleeper.sums(parts, STEPS)[usual], stage_in_steps(times, stage, usual))
        for stage, parts in PARTS.items()
    }
    evaluations = times.rows_of("evaluation", "excluded")["host_ns"] / 1e9
    return {**medians, "evaluation": excess(sleeper.sums(("validate",), EVALUATIONS), evaluations)}


@pytest.mark.parametrize(("package", "accumulate"), [(PACKAGES[0], 1), (PACKAGES[0], 2), (PACKAGES[1], 1)])
def test_sleeps_land_in_their_stage_within_5_percent_and_a_millisecond(package, accumulate, tmp_path):
    best: dict[str, float] = {}
    for number in range(1, ATTEMPTS + 1):
        medians = attempt(package, accumulate, tmp_path / str(number))
        off = {stage: abs(said - slept) - WITHIN * slept for stage, (slept, said) in medians.items()}
        shown = ", ".join(
            f"{stage} {1e3 * said:.2f} of {1e3 * slept:.2f} ms" for stage, (slept, said) in medians.items()
        )
        print(f"attempt {number} ({package}, accumulate {accumulate}): {shown}")
        best = off if not best or max(off.values()) < max(best.values()) else best
        if max(best.values()) <= WITHIN_S:
            return
    assert {stage: excess_s for stage, excess_s in best.items() if excess_s > WITHIN_S} == {}
