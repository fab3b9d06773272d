"""The stages of a Hugging Face Trainer on a real clock: what its parts sleep is found in their stages."""

import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest

from boundby.training import read_stage_times
from boundby.training.transformers import ProfCallback
from tests.fakes import FakeNanoseconds
from tests.trainer_runs import (
    BACKWARD,
    CALLBACK,
    CLIP,
    EVALUATE,
    FORWARD,
    LOAD,
    OPTIMIZER,
    TRANSFER,
    losses,
    slow_copies,
)

pytestmark = [pytest.mark.truth, pytest.mark.timeout(600)]

ATTEMPTS = 3
SECONDS = 4e-3 / LOAD  # for each ns of the tests with a clock that stands still: 4 ms to load, 512 ms to evaluate
STEPS = (1, 2, 3, 5, 6, 7)  # the first step also fills the loader; an evaluation comes before the fourth and eighth


class Nap(NamedTuple):
    kind: int
    start_s: float
    seconds: float


class Sleeper(FakeNanoseconds):
    def __init__(self) -> None:
        super().__init__()
        self.naps: list[Nap] = []

    def wait(self, nanoseconds: int) -> None:
        began = time.perf_counter()
        time.sleep(nanoseconds * SECONDS)
        self.naps.append(Nap(nanoseconds, began, time.perf_counter() - began))

    def inside(self, rows: np.ndarray, base_s: float, kinds: tuple[int, ...]) -> list[float]:
        starts = base_s + rows["start_ns"] / 1e9
        spans = list(zip(starts, starts + rows["host_ns"] / 1e9, strict=True))
        return [
            nap.seconds
            for nap in self.naps
            if nap.kind in kinds and any(start <= nap.start_s < end for start, end in spans)
        ]


def parts(accumulate: int, attach: bool) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the kinds of naps that each stage of a step is to hold, and how many of them."""
    expected = {"forward": ((FORWARD,), accumulate), "optimizer": ((OPTIMIZER,), 1)}
    if attach:
        expected |= {"backward": ((BACKWARD,), accumulate), "clip": ((CLIP,), 1), "callbacks": ((CALLBACK,), 1)}
        return expected | {"data": ((LOAD, TRANSFER), 2 * accumulate), "h2d": ((TRANSFER,), accumulate)}
    expected["backward"] = ((BACKWARD, CLIP), accumulate + 1)
    # The user's callback stands behind ours: what it takes after a step counts to what follows, here the next wait.
    return expected | {"data": ((LOAD, TRANSFER, CALLBACK), 2 * accumulate + 1)}


def misses_of(folder: Path, accumulate: int, attach: bool) -> dict[str, float]:
    """Return by how many seconds the stages miss what was slept in them, those that do by too much."""
    sleeper = Sleeper()
    callback = ProfCallback(str(folder), profile_memory=False, with_stack=False, export_key_averages=False)
    settings = {"eval_strategy": "steps", "eval_steps": 4, "gradient_accumulation_steps": accumulate}
    with slow_copies(sleeper):
        losses(folder, callback, attach=attach, watch=sleeper, logging_steps=100, **settings)
    base_s = time.perf_counter() - callback.manager.snapshot().elapsed_s
    times = read_stage_times(folder)
    misses = {}
    for name, (kinds, count) in parts(accumulate, attach).items():
        rows = times.rows_of(name)
        steps = [rows[rows["step"] == step] for step in STEPS]
        naps = [sleeper.inside(step, base_s, kinds) for step in steps]
        assert [len(nap) for nap in naps] == [count] * len(STEPS), f"{name} does not hold its own parts"
        recorded = [float(step["host_ns"].sum()) / 1e9 for step in steps]
        misses |= missed(name, recorded, [sum(nap) for nap in naps])
    evaluations = times.rows_of("evaluation", "excluded")
    rows = [evaluations[index : index + 1] for index in range(len(evaluations))]
    others = () if attach else (CALLBACK,)
    naps = [sleeper.inside(row, base_s, (EVALUATE, LOAD, TRANSFER, *others)) for row in rows]
    assert [len(nap) for nap in naps] == [6 + len(others)] * 3, "an evaluation of two batches"
    return misses | missed("evaluation", (evaluations["host_ns"] / 1e9).tolist(), [sum(nap) for nap in naps])


def missed(name: str, recorded: list[float], slept: list[float]) -> dict[str, float]:
    """Return the median difference under the name of the stage, where it is too large."""
    difference = median(one - other for one, other in zip(recorded, slept, strict=True))
    print(f"{name}: slept {median(slept) * 1e3:.2f} ms, found {median(recorded) * 1e3:.2f} ms")
    return {name: difference} if abs(difference) > 0.05 * median(slept) + 1e-3 else {}


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_the_parts_of_a_training_sleep_is_found_in_their_stages(
    tmp_path: Path, accumulate: int, attach: bool
) -> None:
    for attempt in range(ATTEMPTS):
        print(f"attempt {attempt + 1}")
        misses = misses_of(tmp_path / str(attempt), accumulate, attach)
        if not misses:
            break
    assert not misses
