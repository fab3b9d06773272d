"""The regression gate against simulated runs of known truth: few false alarms, and the power that was foretold."""

import pytest

from benchmarks import gate
from boundby.timing.compare import rounds_to_find

PAIRS = 500
NOMINAL = 0.025  # 5 % in both directions


@pytest.mark.parametrize("rounds", [5, 10, 20])
def test_equal_runs_set_off_no_more_alarms_than_the_nominal_rate(rounds: int) -> None:
    assert gate.alarms(PAIRS, rounds)[0] <= NOMINAL * PAIRS


def test_drift_within_a_run_raises_the_rate_and_more_rounds_bring_it_back() -> None:
    few, many = (gate.alarms(PAIRS, rounds, "drift")[0] for rounds in (5, 20))
    assert NOMINAL * PAIRS < few <= 0.12 * PAIRS and many <= NOMINAL * PAIRS


@pytest.mark.parametrize("effect", [0.05, 0.10])
def test_a_slowdown_is_found_nine_times_in_ten_with_the_rounds_that_are_foretold(effect: float) -> None:
    rounds = rounds_to_find(gate.SPREAD, effect, gate.LEAST, gate.ROWS)
    assert rounds is not None
    any_row, one_row = gate.alarms(PAIRS, rounds, slower=(effect,))
    assert one_row >= 0.88 * PAIRS and any_row >= 0.98 * PAIRS


def test_an_effect_no_larger_than_the_least_is_foretold_to_be_missed() -> None:
    assert rounds_to_find(gate.SPREAD, 0.05, 0.05) is None
    assert gate.alarms(200, 60, slower=(gate.LEAST,))[1] <= 0.6 * 200
