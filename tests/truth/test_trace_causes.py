"""Traces whose answer is known: real programs, ten thousand simulated ones, zip bombs, random and damaged files.

Five minutes of the last ones; `FUZZ_SEED` begins elsewhere:
python -m pytest -m truth -s tests/truth/test_trace_causes.py -k fuzzing
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from boundby.bound.trace_judgement import judge_trace
from boundby.capture import capture
from boundby.trace import Analysis, analyze, read_trace
from tests.trace_truth.agreement import compare, summary
from tests.trace_truth.attempts import sound_attempt, unsound_attempt
from tests.trace_truth.large import BOMBS, bomb, launching_threads, measured
from tests.trace_truth.programs import random_program

pytestmark = [pytest.mark.truth, pytest.mark.timeout(900)]
STEPS = 5
PAUSE_S = 0.02


class Slow(Dataset):
    """One hundred thousand rows that take 20 ms each to load."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, row: int) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return torch.randn(64)


def loop_that_waits_for_data() -> Callable[[int], object]:
    batches: Iterator[torch.Tensor] = iter(DataLoader(Slow(), batch_size=2))
    model = torch.nn.Linear(64, 64)
    return lambda _: model(next(batches)).sum().backward()


def loop_of_large_products() -> Callable[[int], object]:
    model, inputs = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]), torch.randn(256, 1024)
    return lambda _: model(inputs).sum()


def loop_of_large_additions() -> Callable[[int], object]:
    numbers = torch.randn(20_000_000)
    return lambda _: numbers.add_(1.0).mul_(0.5)


def loop_of_python() -> Callable[[int], object]:
    numbers = torch.randn(8)
    return lambda _: [(sum(range(20_000)), numbers.sum()) for _ in range(30)]


def analysed(step: Callable[[int], object], folder: Path) -> Analysis:
    path = folder / "trace.json.gz"
    taken = capture(step, device=torch.device("cpu"), steps=STEPS, warmup=2, trace_path=path)
    assert taken.steps_recorded == STEPS, taken.downgrades
    return analyze(read_trace(path), expected_steps=STEPS)


@pytest.mark.parametrize(
    ("loop", "bound", "least_share"),
    [
        (loop_that_waits_for_data, "input", 0.8),
        (loop_of_large_products, "compute", 0.7),
        (loop_of_large_additions, "memory", 0.7),
        (loop_of_python, "launch", 0.7),
    ],
)
def test_names_what_the_program_was_made_to_wait_for(
    tmp_path: Path, loop: Callable[[], Callable[[int], object]], bound: str, least_share: float
) -> None:
    result = analysed(loop(), tmp_path)
    verdict = judge_trace(result)
    print(f"{loop.__name__}: {verdict.bound}, {verdict.share_of_limit}, {verdict.evidence}, {verdict.doubts}")
    assert verdict.bound == bound
    assert verdict.share_of_limit is None or verdict.share_of_limit >= least_share
    assert not [finding for finding in result.findings if finding.is_fatal]


def test_the_time_slept_for_data_is_booked_on_the_input(tmp_path: Path) -> None:
    (host,) = analysed(loop_that_waits_for_data(), tmp_path).devices
    slept_ns = STEPS * 2 * PAUSE_S * 1e9
    print(f"slept {slept_ns / 1e6:.1f} ms, booked on the input {host.causes_ns['input'] / 1e6:.1f} ms")
    assert slept_ns <= host.causes_ns["input"] <= 1.1 * slept_ns


PROGRAMS, AT_ONCE = 10_000, 1_000
FIRST_SEED = 1_000_000  # beyond those of `make test`


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + PROGRAMS, AT_ONCE))
def test_the_first_cause_gains_most_and_no_gain_exceeds_its_bound(first: int, tmp_path: Path) -> None:
    result = summary(compare(random_program(seed), tmp_path) for seed in range(first, first + AT_ONCE))
    print(f"\nfrom {first}: {result}")
    assert result.first_is_best >= 0.97 * AT_ONCE
    assert result.within_bounds == AT_ONCE


@pytest.mark.parametrize("name", BOMBS)
def test_a_large_zip_bomb_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    [(grown, said)] = measured(bomb(tmp_path, name, 700), max_json_bytes=2**29, timeout_s=600)
    print(f"{name}: {grown:.0f} MiB; {said}")
    assert f"{name}.json.gz is not a readable Chrome trace" in said
    assert grown < 600


def test_ten_thousand_launching_threads_need_bounded_memory(tmp_path: Path) -> None:
    [(grown, said)] = measured(launching_threads(tmp_path, 10_000, 100_000), timeout_s=600)
    print(f"ten thousand threads: {grown:.0f} MiB")
    assert said == "120000"
    assert grown < 400


MINUTES = 5


def test_five_minutes_of_fuzzing_find_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("FUZZ_SEED", FIRST_SEED))
    attempts = dict.fromkeys((sound_attempt, unsound_attempt), 0)
    failed: list[str] = []
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        for attempt in attempts:
            attempts[attempt] += 1
            if fault := attempt(seed, tmp_path):
                failed.append(f"{attempt.__name__}({seed}): {fault}")
        seed += 1
    message = ", ".join(f"{attempt.__name__} {count}" for attempt, count in attempts.items())
    print(f"\n{message}; {len(failed)} failed; the last seed was {seed - 1}")
    assert failed[:20] == []
