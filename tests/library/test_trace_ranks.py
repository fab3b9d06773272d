"""Several ranks played on one machine: who is waited for, and what of communication is waiting.

python -m pytest tests/library/test_trace_ranks.py
"""

import numpy as np
import pytest

from boundby.trace.kernels import Collectives, least_wait_ns, waits_ns
from tests.trace_truth.programs import cases
from tests.trace_truth.recorder import text
from tests.trace_truth.simulator import played
from utils.trace_analysis.traces import examine


@pytest.mark.parametrize(("name", "ranks", "slow"), [("a slow rank", 4, 2), ("two processes with gloo", 2, 1)])
def test_the_others_are_told_to_wait_for_the_slow_rank_and_that_one_is_not(tmp_path, name, ranks, slow):
    machine = played(cases()[name].program)
    for rank in range(ranks):
        (tmp_path / f"rank{rank}.json").write_text(text(machine, rank))
    examination = examine([tmp_path])
    assert examination.slowest == slow
    for rank, each in enumerate(examination.traces):
        kinds = [gain.fix.kind for gain in each.verdict.gains]
        if rank == slow:
            assert "wait_less" not in kinds and each.waits_ns == 0
        else:
            first = each.verdict.gains[0]
            assert (first.fix.kind, dict(first.fix.settings)) == ("wait_less", {"rank": slow})
            true = machine.length(rank) / played(cases()[name].program, "straggler").length(rank)
            assert first.at_most >= 0.95 * true


def collected(*steps: tuple[int, ...]) -> Collectives:
    durations = np.array([duration for step in steps for duration in step])
    places = np.array([place for place, step in enumerate(steps) for _ in step])
    return Collectives(("all_reduce",), np.zeros(len(durations), dtype=np.int64), places, durations)


def test_the_shortest_of_all_ranks_is_the_transfer():
    assert waits_ns([collected((5, 9), (5, 9)), collected((20, 8), (30, 10))]) == (0 + 1 + 0 + 0, 15 + 0 + 25 + 1)
    assert waits_ns([collected((5, 9)), collected((5,))]) is None
    assert waits_ns([collected((5, 9))]) is None


def test_one_rank_alone_tells_what_differs_from_step_to_step():
    assert least_wait_ns(collected((5, 90), (25, 90), (5, 100))) == 20 + 10
    assert least_wait_ns(collected((5, 90))) is None
    assert least_wait_ns(collected((5, 90), (5,))) is None
