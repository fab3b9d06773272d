"""Random traces against brute force, and damaged ones that must end in an error of the reader or in a result.

python -m pytest tests/library/test_trace_fuzz.py
Five minutes of it: tests/truth/test_trace_fuzz.py
"""

from pathlib import Path

import pytest

from tests.trace_truth.attempts import sound_attempt, unsound_attempt

BATCH = 15


@pytest.mark.parametrize("batch", range(12))
def test_a_random_trace_is_analysed_as_by_brute_force(tmp_path: Path, batch: int) -> None:
    failed = {}
    for seed in range(BATCH * batch, BATCH * (batch + 1)):
        if fault := sound_attempt(seed, tmp_path):
            failed[seed] = fault
    assert failed == {}


@pytest.mark.parametrize("batch", range(12))
def test_a_damaged_trace_ends_in_a_clean_error_or_in_an_analysis_that_adds_up(tmp_path: Path, batch: int) -> None:
    failed = {}
    for seed in range(BATCH * batch, BATCH * (batch + 1)):
        if fault := unsound_attempt(seed, tmp_path):
            failed[seed] = fault
    assert failed == {}
