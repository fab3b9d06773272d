"""A committed visit survives a kill and says how long a sample takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from boundby.sweep import Outcome
from utils import visits
from utils.visits import Quantity, Timing, Visit


def timing(quantity: Quantity, index: int, seconds: float, samples: int = 4) -> Timing:
    return Timing(quantity, index, seconds, samples, tokens_real=10 * samples, tokens_padded=12 * samples)


def visit(*timings: Timing, batch_size: int = 4, number: int = 0) -> Visit:
    return Visit("float32", batch_size, number, "ok", "session-1", timings, measured_s=1.5, batches=2)


def test_seconds_per_sample_take_the_median_pass_of_each_batch() -> None:
    made = visit(
        timing("cold", 0, 99.0),
        timing("tokenize", 0, 99.0),
        *(timing("isolated", 0, seconds) for seconds in (1.0, 9.0, 2.0)),
        *(timing("isolated", 1, seconds, samples=2) for seconds in (0.5, 0.5, 7.0)),
    )
    assert made.isolated_s_per_sample == (2.0 + 0.5) / 6
    assert made.throughput_s_per_sample == made.isolated_s_per_sample  # a CPU has finished when the call returns
    made = visit(timing("isolated", 0, 2.0), timing("pipelined", 0, 3.0, samples=24))
    assert made.isolated_s_per_sample == 0.5
    assert made.throughput_s_per_sample == 0.125
    made = Visit("float32", 64, 0, "oom", "session-1", message="OutOfMemoryError: CUDA out of memory.")
    assert (made.isolated_s_per_sample, made.throughput_s_per_sample) == (None, None)
    assert made.outcome() == Outcome(64, 0, "oom")

    def made(number: int, *seconds: float) -> Visit:
        return visit(*(timing("isolated", index, each) for index, each in enumerate(seconds)), number=number)

    quiet = [made(number, 1.0, 2.0, 4.0) for number in range(4)]  # three batches of different length, 4 samples each
    held_up = made(4, 1.0, 60.0, 4.0)
    slower = made(5, 1.5, 3.0, 6.0)
    assert visits.isolated_rounds([*quiet, held_up, slower]) == pytest.approx([7 / 12] * 5 + [1.5 * 7 / 12])
    assert visits.throughput_rounds(quiet) == visits.isolated_rounds(quiet)
    assert visits.isolated_rounds([]) == visits.throughput_rounds([]) == []


def test_the_stop_rule_is_told_undisturbed_visits() -> None:
    made = visit(timing("isolated", 0, 2.0), batch_size=4, number=3)
    assert made.outcome() == Outcome(point=4, round=3, status="ok", seconds=1.5, value=0.5)
    busy = ({"kind": "foreign_load", "text": "other processes used 1.0 of 2 cores", "is_passing": True},)
    disturbed = replace(visit(timing("isolated", 0, 9.0)), disturbances=busy)
    assert disturbed.outcome().value is None
    others = [visit(timing("isolated", 0, 1.0), number=number) for number in range(5)]
    assert visits.usable([disturbed, *others]) == others
    assert visits.usable([disturbed, *others[:4]]) == [disturbed, *others[:4]]
    assert [row["disturbed"] for row in visits.raw_rows([disturbed, others[0]])] == [1, 0]
    rounds = [visit(timing("isolated", 0, seconds), number=number) for number, seconds in enumerate((1.0, 1.0))]
    assert visits.half_width([]) is None
    assert visits.half_width(rounds[:1]) is None
    assert visits.half_width(rounds) == 0.0
    assert visits.half_width([*rounds, visit(timing("isolated", 0, 1.1), number=2)]) == pytest.approx(0.1511, abs=1e-3)


def test_committed_visits_come_back_as_they_were(tmp_path: Path) -> None:
    made = [
        replace(
            visit(timing("cold", 0, 0.1), timing("isolated", 0, 1 / 3)),
            warm_up={"runs": 30, "seconds": 1.25, "converged": True},
            memory={"process_bytes": 10**9, "device_allocated_bytes": None, "reasons": ["no GPU"], "doubts": []},
            readings={"gpu_utilization_pct": [97.0, 98.5]},
            reading_reasons={"gpu_power_w": "NVML: Not Supported"},
            conditions={"seconds": 2.5, "cores": 2, "foreign_cores": 0.25},
            disturbances=({"kind": "foreign_load", "text": "other processes used 0.3 of 2 cores", "is_passing": True},),
            repeats=2,
            device_reason="a call on the CPU has computed when it returns",
            window_s=2.5,
            truncated=3,
        ),
        visit(timing("isolated", 0, 0.5), number=1),
        Visit("float32", 8, 0, "oom", "session-2", message="out of memory \u2028 é"),
    ]
    for each in made:
        visits.append(tmp_path / "deep" / "log.jsonl", each)
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
