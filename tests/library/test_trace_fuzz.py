"""Random traces against brute force, and damaged ones that must end in an error of the reader or in a result.

python -m pytest tests/library/test_trace_fuzz.py
Five minutes of it: tests/truth/test_trace_fuzz.py
"""

from tests.trace_truth.attempts import sound_attempt, unsound_attempt

SEEDS = range(100)


def test_a_random_trace_is_analysed_as_by_brute_force(tmp_path):
    faults = {seed: sound_attempt(seed, tmp_path) for seed in SEEDS}
    assert {seed: fault for seed, fault in faults.items() if fault} == {}


def test_a_damaged_trace_ends_in_a_clean_error_or_in_an_analysis_that_adds_up(tmp_path):
    faults = {seed: unsound_attempt(seed, tmp_path) for seed in SEEDS}
    assert {seed: fault for seed, fault in faults.items() if fault} == {}
