"""Five minutes of random and damaged traces; prints the number of attempts. `FUZZ_SEED` begins elsewhere.

python -m pytest -m truth -s tests/truth/test_trace_fuzz.py
"""

import os
import time
from pathlib import Path

import pytest

from tests.trace_truth.attempts import sound_attempt, unsound_attempt

pytestmark = [pytest.mark.truth, pytest.mark.timeout(900)]

MINUTES = 5
FIRST_SEED = 1_000_000  # beyond those of `make test`


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
    told = ", ".join(f"{attempt.__name__} {count}" for attempt, count in attempts.items())
    print(f"\n{told}; {len(failed)} failed; the last seed was {seed - 1}")
    assert failed[:20] == []
