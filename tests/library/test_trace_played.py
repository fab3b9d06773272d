"""Programs played on a simulated machine: what is said first of their traces, against what playing without it gains.

python -m pytest tests/library/test_trace_played.py
Ten thousand programs: tests/truth/test_trace_causes.py
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.trace_truth.agreement import WORTH, compare, summary
from tests.trace_truth.programs import cases, loop, random_program, random_program_of_the_host
from tests.trace_truth.recorder import trace
from tests.trace_truth.simulator import (
    COMPUTE,
    COPY,
    IDLE,
    MAIN,
    MS,
    OTHER,
    US,
    Collective,
    Program,
    all_reduce,
    device_synchronize,
    hold_driver,
    item,
    join,
    kernels,
    launch,
    played,
    record,
    spawn,
    step,
    wait_event,
    work,
)

CASES = cases()
PROGRAMS = 500


def gain(program, *causes, rank=0):
    return played(program).length(rank) / played(program, *causes).length(rank)


@pytest.mark.parametrize("name", CASES)
def test_a_played_program_gains_what_its_numbers_say(name):
    case = CASES[name]
    for causes, expected in case.gains.items():
        assert gain(case.program, *causes, rank=case.rank) == pytest.approx(expected, rel=0.02), causes


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_of_a_known_program_is_the_one_to_begin_with(name, tmp_path):
    case = CASES[name]
    compared = compare(case.program, tmp_path, case.rank)
    assert compared.is_right, compared
    if not case.first:
        assert all(gain < WORTH for gain in compared.true.values())


@pytest.mark.parametrize(
    "other", [{"is_rocm": True}, {"has_steps": False}, {"first_step": 1}, {"has_stacks": True}], ids=str
)
@pytest.mark.parametrize("name", ["data loading", "inference with a tokenizer", "data and item", "nothing to gain"])
def test_the_first_cause_is_the_same_however_the_program_was_recorded(name, other, tmp_path):
    case = CASES[name]
    compared = compare(replace(case.program, **other), tmp_path)
    assert compared.is_right and bool(compared.claimed) >= bool(case.first), compared


def test_the_first_cause_of_random_programs_gains_most(tmp_path):
    result = summary(compare(random_program(seed), tmp_path) for seed in range(PROGRAMS))
    assert result.first_is_best >= 0.97 * PROGRAMS, result
    assert result.within_bounds == PROGRAMS, result


def test_the_first_cause_of_random_programs_of_the_host_gains_most(tmp_path):
    result = summary(compare(random_program_of_the_host(seed), tmp_path) for seed in range(100))
    assert result.first_is_best >= 97, result
    assert result.within_bounds == 100, result


def test_a_launching_call_waits_for_room_in_the_queue():
    machine = played(loop("full queue", kernels(8, MS), steps=1, queue=3))
    lengths = [row.end - row.start for row in machine.rows if row.name == "cudaLaunchKernel"]
    assert lengths[:3] == [5 * US] * 3
    assert all(length > MS / 2 for length in lengths[4:])


def test_a_launch_waits_for_the_lock_of_the_driver():
    machine = played(loop("lock", spawn(OTHER, hold_driver(3 * MS)), work(US), launch(US), join(OTHER), steps=1))
    (call,) = [row for row in machine.rows if row.name == "cudaLaunchKernel"]
    assert call.end - call.start == pytest.approx(3 * MS, abs=10 * US)


def test_a_stream_waits_for_what_another_had_recorded():
    machine = played(
        loop("order", launch(MS, stream=COPY), record("done", COPY), wait_event("done", COMPUTE), launch(US), steps=1)
    )
    first, second = machine.works
    assert second.start == first.end


def test_a_collective_ends_on_every_rank_a_transfer_after_the_last_was_ready():
    def plan(rank):
        return step(0, work(5 * MS * rank), all_reduce(Collective("sum", MS, 3)))

    machine = played(Program("three ranks", tuple((rank, MAIN, plan(rank)) for rank in range(3))))
    starts, ends = zip(*((kernel.start, kernel.end) for kernel in machine.works), strict=True)
    assert set(ends) == {max(starts) + MS}


def test_hidden_work_of_a_host_that_never_catches_up_gains_all_its_time():
    """Five of the six milliseconds pass while the device works, and yet each step is six shorter without them."""
    program = loop("always late", kernels(1, 5 * MS), work(6 * MS), kernels(1, US), work(6 * MS), steps=4)
    assert gain(program, "python") == pytest.approx(12 / 5, rel=0.02)


def test_a_wait_gains_no_more_than_it_kept_the_host_from():
    program = loop("short wait", kernels(1, 2 * MS), item(), work(50 * MS))
    assert gain(program, "synchronisation") == pytest.approx(52 / 50, rel=0.01)
    assert gain(program, "python") == pytest.approx(52 / 2, rel=0.02)


def test_without_everything_the_device_is_left_alone():
    program = loop("everything", work(MS), kernels(20, 50 * US), device_synchronize(), work(3 * MS))
    assert played(program, *IDLE).length() == pytest.approx(4 * 20 * 50 * US, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_a_recording_is_what_a_device_can_have_done(seed):
    events = [
        traceevent for traceevent in trace(played(random_program(seed)))["traceEvents"] if traceevent["ph"] == "X"
    ]
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] == "cuda_runtime"}
    on_stream = defaultdict(list)
    for event in events:
        assert event["dur"] >= 0
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            on_stream[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            call = calls.get(event["args"]["correlation"])
            assert call is None or call["ts"] < event["ts"]
    for spans in on_stream.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(sorted(spans)))
