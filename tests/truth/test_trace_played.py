"""Ten thousand random programs on the simulated machine; prints how often the first cause is the best, and the misses.

python -m pytest -m truth -s tests/truth/test_trace_played.py
"""

from pathlib import Path

import pytest

from tests.trace_truth.agreement import compare, summary
from tests.trace_truth.programs import random_program

pytestmark = pytest.mark.truth

PROGRAMS, AT_ONCE = 10_000, 1_000
FIRST_SEED = 1_000_000  # beyond those of `make test`


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + PROGRAMS, AT_ONCE))
def test_the_first_cause_gains_most_and_no_gain_exceeds_its_bound(first: int, tmp_path: Path) -> None:
    found = summary(compare(random_program(seed), tmp_path) for seed in range(first, first + AT_ONCE))
    print(f"\nfrom {first}: {found}")
    assert found.first_is_best >= 0.97 * AT_ONCE
    assert found.within_bounds == AT_ONCE
