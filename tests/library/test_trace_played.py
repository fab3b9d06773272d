"""Programs played on a simulated machine: what their traces say first, against what playing them without it gains.

python -m pytest tests/library/test_trace_played.py
Ten thousand programs: tests/truth/test_trace_played.py
"""

import pytest

from tests.trace_truth.agreement import WORTH, compare, summary
from tests.trace_truth.programs import cases, random_program
from tests.trace_truth.simulator import played

CASES = cases()
PROGRAMS = 500


@pytest.mark.parametrize("name", CASES)
def test_a_played_program_gains_what_its_numbers_say(name):
    case = CASES[name]
    length = played(case.program).length(case.rank)
    for causes, gain in case.gains.items():
        assert length / played(case.program, *causes).length(case.rank) == pytest.approx(gain, rel=0.02), causes


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_of_a_known_program_is_the_one_to_begin_with(name, tmp_path):
    case = CASES[name]
    compared = compare(case.program, tmp_path, case.rank)
    assert compared.is_right, compared
    if not case.first:
        assert all(gain < WORTH for gain in compared.true.values())


def test_the_first_cause_of_random_programs_gains_most(tmp_path):
    compared = [compare(random_program(seed), tmp_path) for seed in range(PROGRAMS)]
    found = summary(compared)
    assert found.first_is_best >= 0.97 * PROGRAMS, found
    assert not found.over_bound, found
