"""A committed visit survives a kill and says how long a sample takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from boundby.machine import MemoryUse
from boundby.machine.disturbance import Conditions, Disturbance
from boundby.timing.rounds import Outcome
from boundby.timing.timer import WarmUp
from boundby.timing.whole_set import Totals
from utils.baseline import rounds as visits
from utils.baseline.rounds import Quantity, Timing, Visit


def timing(quantity: Quantity, index: int, seconds: float, samples: int = 4) -> Timing:
    return Timing(quantity, index, seconds, samples, tokens_real=10 * samples, tokens_padded=12 * samples)


def visit(*timings: Timing, batch_size: int = 4, number: int = 0) -> Visit:
    return Visit("float32", batch_size, number, "ok", "session-1", timings, spent_s=1.5, batches=2)


def test_seconds_per_sample_are_those_of_all_calls_of_the_visit() -> None:
    made = visit(
        timing("cold", 0, 99.0),
        timing("tokenize", 0, 99.0),
        *(timing("isolated", 0, seconds) for seconds in (1.0, 9.0, 2.0)),
    )
    assert visits.rounds([made], "isolated") == [pytest.approx(12.0 / 3 / 4)]  # a plain loop waits for slow calls too
    assert visits.throughput_rounds([made]) == visits.rounds([made], "isolated")  # on a CPU a call that returns is done


def test_throughput_is_that_of_the_pipelined_calls_where_there_are_any() -> None:
    made = visit(timing("isolated", 0, 2.0), timing("pipelined", 0, 3.0, samples=24))
    assert visits.rounds([made], "isolated") == [pytest.approx(0.5)]
    assert visits.throughput_rounds([made]) == [pytest.approx(0.125)]


def test_rounds_that_timed_other_batches_say_the_same_of_the_whole_dataset() -> None:
    def batch(index: int, tokens: int, slower: float = 1.0) -> Timing:
        return Timing("isolated", index, slower * (0.5 + tokens / 64 + tokens**2 / 4096), 4, tokens, 4 * tokens)

    squared = 4 * (8**2 + 32**2 + 128**2)
    whole = Totals(batches=3, samples=12, tokens_real=168, tokens_padded=672, tokens_squared=squared)
    seconds = sum(batch(0, tokens).seconds for tokens in (8, 32, 128))
    rounds = [(batch(0, 8), batch(2, 128)), (batch(0, 8), batch(1, 32)), (batch(1, 32, 1.1), batch(2, 128, 1.1))]
    made = [replace(visit(*timings, number=number), whole=whole) for number, timings in enumerate(rounds)]
    estimates = visits.rounds(made, "isolated")
    assert estimates[:2] == pytest.approx([seconds / 12] * 2, rel=0.02)
    assert estimates[2] == pytest.approx(1.1 * seconds / 12, rel=0.02)


def test_a_visit_that_ran_out_of_memory_has_no_value() -> None:
    made = Visit("float32", 64, 0, "oom", "session-1", message="OutOfMemoryError: CUDA out of memory.")
    assert visits.outcomes([made]) == [Outcome((64, "float32"), 0, "oom")]


def test_the_stop_rule_is_told_point_round_seconds_and_value() -> None:
    [outcome] = visits.outcomes([visit(timing("isolated", 0, 2.0), batch_size=4, number=3)])
    assert outcome == Outcome((4, "float32"), round=3, status="ok", seconds=1.5, value=outcome.value)
    assert outcome.value == pytest.approx(0.5)


def test_committed_visits_come_back_as_they_were(tmp_path: Path) -> None:
    made = [
        replace(
            visit(timing("cold", 0, 0.1), timing("isolated", 0, 1 / 3)),
            warm_up=WarmUp(30, 1.25, converged=True),
            memory=MemoryUse(process_bytes=10**9, reasons=("no GPU",)),
            readings={"gpu_utilization_pct": [97.0, 98.5]},
            reading_reasons={"gpu_power_w": "NVML: Not Supported"},
            conditions=Conditions(2.5, 2, foreign_cores=0.25),
            disturbances=(Disturbance("foreign_load", "other processes used 0.3 of 2 cores"),),
            repeats=2,
            device_reason="a call on the CPU has computed when it returns",
            window_s=2.5,
            truncated=3,
        ),
        visit(timing("isolated", 0, 0.5), number=1),
        Visit("float32", 8, 0, "oom", "session-2", message="out of memory \u2028 é"),
    ]
    for made_visit in made:
        visits.append(tmp_path / "deep" / "log.jsonl", made_visit)
    assert visits.read(tmp_path / "deep" / "log.jsonl") == made


def test_no_log_has_no_visits(tmp_path: Path) -> None:
    assert visits.read(tmp_path / "log.jsonl") == []


def test_a_visit_torn_by_a_kill_is_made_again_and_counts_once(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    first, second = visit(timing("isolated", 0, 1.0)), visit(timing("isolated", 0, 2.0), number=1)
    visits.append(log, first)
    visits.append(log, second)
    log.write_bytes(log.read_bytes()[:-40])
    assert visits.read(log) == [first]
    visits.append(log, second)
    assert visits.read(log) == [first, second]


def test_of_two_visits_of_one_round_the_later_counts(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    again = visit(timing("isolated", 0, 2.0))
    visits.append(log, visit(timing("isolated", 0, 1.0)))
    visits.append(log, again)
    assert visits.read(log) == [again]


def test_raw_rows_hold_every_timing_with_the_columns_of_the_contract() -> None:
    rows = list(visits.raw_rows([visit(timing("cold", 0, 0.5), timing("isolated", 1, 0.25), number=2)]))
    assert all(set(row) == set(visits.RAW_COLUMNS) for row in rows)
    assert rows[1] == {
        "session": "session-1",
        "round": 2,
        "batch_size": 4,
        "index": 1,
        "quantity": "isolated",
        "seconds": 0.25,
        "samples": 4,
        "tokens_real": 40,
        "tokens_padded": 48,
        "dtype": "float32",
        "disturbed": 0,
    }


def test_a_disturbed_visit_has_no_value_for_the_stop_rule_and_is_left_out_where_others_are_enough() -> None:
    busy = (Disturbance("foreign_load", "other processes used 1.0 of 2 cores"),)
    disturbed = replace(visit(timing("isolated", 0, 9.0)), disturbances=busy)
    [outcome] = visits.outcomes([disturbed])
    assert outcome.value is None
    others = [visit(timing("isolated", 0, 1.0), number=number) for number in range(5)]
    assert visits.usable([disturbed, *others]) == others
    assert visits.usable([disturbed, *others[:4]]) == [disturbed, *others[:4]]
    assert [row["disturbed"] for row in visits.raw_rows([disturbed, others[0]])] == [1, 0]
