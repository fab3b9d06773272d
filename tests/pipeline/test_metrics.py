"""From visits to rows: every number by hand, every gap with its reason."""

import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from boundby.machine import MemoryUse, memory
from boundby.machine.disturbance import Conditions, Disturbance
from boundby.machine.sampler import NoSource, Reading, Sampler
from boundby.timing.timer import WarmUp
from tests.fakes import FakeClock
from utils.baseline import columns
from utils.baseline.columns import COLUMNS, NAMES
from utils.baseline.metrics import MetricsCollector
from utils.baseline.rounds import Timing, Visit

MEMORY = MemoryUse(
    device_allocated_bytes=100 * 10**6,
    device_reserved_bytes=200 * 10**6,
    device_peak_allocated_bytes=150 * 10**6,
    device_peak_reserved_bytes=250 * 10**6,
    process_bytes=10**9,
    process_peak_bytes=2 * 10**9,
    reasons=(),
    doubts=(),
)
LOAD = Disturbance("foreign_load", "other processes used 1.0 of 2 cores")
CPU_MEMORY = MemoryUse(process_bytes=10**9, reasons=("no statistics",))


def visit(number: int, *batch_seconds: float, batch_size: int = 4, **others: Any) -> Visit:
    """Return a visit of two batches of 4 samples, 40 and 20 real tokens, 48 padded each; the passes follow another."""
    seconds = batch_seconds or (1.0, 1.0)
    timings = [Timing("cold", 0, 5.0, 4, 40, 48)] if number == 0 else []
    timings += [Timing("tokenize", 0, 0.02, 8, 60, 96)]
    timings += [
        Timing("isolated", index % 2, taken_s, batch_size, 40 if index % 2 == 0 else 20, 48)
        for index, taken_s in enumerate(seconds)
    ]
    return Visit(
        dtype="float32",
        batch_size=batch_size,
        round=number,
        status="ok",
        session="session-1",
        timings=tuple(timings),
        spent_s=sum(seconds),
        batches=2,
        **{"warm_up": WarmUp(30, 3.0, converged=True), "memory": MEMORY, "window_s": 1.0, **others},
    )


def row_of(*visits: Visit, half_width: float = 0.03) -> dict[str, Any]:
    [row] = columns.rows(visits, [visits[0].batch_size], half_width)
    return row


def test_a_row_has_exactly_the_columns_of_the_contract_and_reasons() -> None:
    for row in (row_of(visit(0), visit(1)), row_of(Visit("float32", 4, 0, "oom", "s", message="out of memory"))):
        assert list(row)[: len(NAMES) + 2] == [*NAMES, "doubt_kinds", "reasons"]


def test_rates_follow_from_the_seconds_per_sample() -> None:
    row = row_of(*(visit(number, 1.0, 3.0) for number in range(5)))  # 4 s for 8 samples, 60 real and 96 padded tokens
    assert row["status"] == "ok"
    assert (row["rounds"], row["timed_batches"]) == (5, 10)
    expected = {
        "latency_per_sample_ms_mean": 500.0,
        "latency_per_sample_ms_ci_low": 500.0,
        "latency_per_sample_ms_ci_high": 500.0,
        "latency_per_token_ms_mean": 4000 / 60,
        "throughput_samples_per_sec_mean": 2.0,
        "throughput_half_width_pct": 0.0,
        "batches_per_sec": 0.5,
        "tokens_per_sec_real": 15.0,
        "tokens_per_sec_padded": 24.0,
        "padding_pct": 37.5,
        "latency_per_batch_ms_mean": 2000.0,
        "latency_per_batch_ms_median": 2000.0,
        "latency_per_batch_ms_min": 1000.0,
        "latency_per_batch_ms_max": 3000.0,
        "tokenize_per_batch_ms": 10.0,
        "cold_call_ms": 5000.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert row["doubts"] == []


def test_a_slow_batch_moves_the_mean_and_not_the_median() -> None:
    row = row_of(visit(0, 1.0, 1.0, 1.0, 1.0, 1.0, 7.0))
    assert [row["latency_per_batch_ms_median"], row["latency_per_batch_ms_mean"]] == pytest.approx([1000.0, 2000.0])
    assert (row["latency_per_batch_ms_q1"], row["latency_per_batch_ms_q3"]) == (1000.0, 1000.0)


def test_the_cold_call_is_in_no_other_number() -> None:
    cold, mild = visit(0), visit(0)
    cold = replace(cold, timings=(replace(cold.timings[0], seconds=1e6), *cold.timings[1:]))
    row, expected = row_of(cold, visit(1)), row_of(mild, visit(1))
    assert row.pop("cold_call_ms") == 1e9
    assert expected.pop("cold_call_ms") == 5000.0
    assert row == expected


def test_throughput_is_that_of_pipelined_calls_and_latency_that_of_isolated_ones() -> None:
    pipelined = Timing("pipelined", 0, 2.0, 16, 120, 192)
    visits = [replace(made, timings=(*made.timings, pipelined)) for made in (visit(0), visit(1))]
    row = row_of(*visits)
    assert row["rounds"] == 2
    assert row["throughput_samples_per_sec_mean"] == pytest.approx(8.0, rel=1e-12)
    assert row["latency_per_sample_ms_mean"] == pytest.approx(250.0, rel=1e-12)
    assert row["tokens_per_sec_real"] == pytest.approx(60.0, rel=1e-12)


def test_the_interval_of_the_throughput_encloses_its_mean() -> None:
    row = row_of(*(visit(number, seconds, seconds) for number, seconds in enumerate((1.0, 1.1, 0.9, 1.0, 1.05))))
    low, mean, high = (row[f"throughput_samples_per_sec_{end}"] for end in ("ci_low", "mean", "ci_high"))
    assert low < mean < high
    assert row["latency_per_sample_ms_ci_low"] == pytest.approx(1000 / high, rel=1e-12)
    assert row["latency_per_sample_ms_ci_high"] == pytest.approx(1000 / low, rel=1e-12)


@pytest.mark.parametrize(("half_width", "status"), [(0.10, "ok"), (0.05, "noisy")])
def test_a_row_less_certain_than_asked_for_is_noisy(half_width: float, status: str) -> None:
    visits = [visit(number, seconds, seconds) for number, seconds in enumerate((1.0, 1.1, 0.9, 1.0, 1.0))]
    row = row_of(*visits, half_width=half_width)
    assert row["status"] == status
    assert 5 < row["throughput_half_width_pct"] < 10
    assert row["throughput_samples_per_sec_mean"] is not None
    assert [doubt.startswith("noisy: the 95 % interval is ±9.7") for doubt in row["doubts"]] == [True] * (
        status == "noisy"
    )


def test_one_round_is_noisy_and_says_why() -> None:
    row = row_of(visit(0))
    assert row["status"] == "noisy"
    for name in ("throughput_samples_per_sec_ci_low", "latency_per_sample_ms_ci_high", "throughput_half_width_pct"):
        assert row[name] is None
        assert row["reasons"][name] == "one round gives no interval"
    assert any("one round gives no interval" in doubt for doubt in row["doubts"])


@pytest.mark.parametrize(
    ("batches", "given"),
    [
        (28, ()),
        (30, ("p90",)),
        (58, ("p90",)),
        (60, ("p90", "p95")),
        (298, ("p90", "p95")),
        (300, ("p90", "p95", "p99")),
    ],
)
def test_percentiles_stand_where_the_batches_support_them(batches: int, given: tuple[str, ...]) -> None:
    row = row_of(visit(0, *[1.0] * batches))
    for name, needed in (("p90", 29), ("p95", 59), ("p99", 299)):
        column = f"latency_per_batch_ms_{name}"
        assert row[column] == (1000.0 if name in given else None)
        if name not in given:
            assert row["reasons"][column] == f"{batches} timed batches; at least {needed} support it"


def test_one_timed_batch_has_no_spread_and_says_why() -> None:
    one = replace(visit(0, 1.0), batches=1)
    row = row_of(one)
    assert row["latency_per_batch_ms_std"] is None
    assert row["reasons"]["latency_per_batch_ms_std"] == "one timed batch has no spread"


def test_every_none_has_a_reason_and_every_reason_a_none() -> None:
    rows = [
        row_of(visit(0, memory=CPU_MEMORY, reading_reasons={"gpu_utilization_pct": "the device is not a GPU"})),
        row_of(*(visit(number, memory=MEMORY) for number in range(5))),
        row_of(visit(1, warm_up=None), visit(2, warm_up=None)),
    ]
    for row in rows:
        unknown = {name for name in NAMES if row[name] is None}
        assert set(row["reasons"]) == unknown
        assert all(row["reasons"].values())
        assert {column.name for column in COLUMNS if column.diagnosed} <= unknown


def test_memory_is_the_most_of_all_visits_in_mb() -> None:
    more = structs.replace(MEMORY, device_peak_allocated_bytes=175_500_000, process_bytes=900_000_000)
    row = row_of(visit(0), visit(1, memory=more))
    assert (row["memory_allocated_mb"], row["memory_reserved_mb"]) == (100.0, 200.0)
    assert (row["memory_peak_mb"], row["memory_peak_reserved_mb"]) == (175.5, 250.0)
    assert (row["memory_cpu_mb"], row["memory_cpu_peak_mb"]) == (1000.0, 2000.0)


def test_a_device_without_statistics_has_no_memory_and_the_reason() -> None:
    row = row_of(visit(0, memory=CPU_MEMORY))
    assert row["memory_peak_mb"] is None
    assert row["reasons"]["memory_peak_mb"] == "no statistics"


def test_utilization_is_the_mean_of_the_readings_of_all_visits() -> None:
    row = row_of(
        visit(0, readings={"gpu_utilization_pct": [80.0, 90.0, 100.0]}),
        visit(1, readings={"gpu_utilization_pct": [90.0, 100.0]}),
    )
    assert row["gpu_utilization_pct"] == 92.0


@pytest.mark.parametrize(
    ("readings", "window_s", "reason"),
    [
        ((90.0,) * 4, 5.0, "4 readings in 5.0 s; a mean takes 5 in 2 s"),
        ((90.0,) * 5, 1.9, "5 readings in 1.9 s; a mean takes 5 in 2 s"),
    ],
)
def test_too_few_readings_are_no_utilization(readings: tuple[float, ...], window_s: float, reason: str) -> None:
    row = row_of(visit(0, readings={"gpu_utilization_pct": readings}, window_s=window_s))
    assert row["gpu_utilization_pct"] is None
    assert row["reasons"]["gpu_utilization_pct"] == reason


def test_warm_up_and_memory_give_doubts_once() -> None:
    cold = WarmUp(3, 9.0, converged=False)
    full = structs.replace(MEMORY, doubts=("device memory is nearly full",))
    row = row_of(*(visit(number, warm_up=cold, memory=full) for number in range(5)))
    assert row["doubts"] == ["warm-up: it did not converge", "memory: device memory is nearly full"]
    assert (row["warmup_runs"], row["warmup_converged"]) == (3, False)


def test_an_outlier_is_a_doubt() -> None:
    quiet = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0] * 3
    row = row_of(*(visit(number, *quiet, *([9.0, 1.0] if number == 2 else [])) for number in range(5)))
    assert (
        sum(doubt.startswith("outliers: 1 of 92 batches lie ten standard deviations") for doubt in row["doubts"]) == 1
    )


def test_rounds_that_stayed_disturbed_are_one_typed_doubt() -> None:
    pushed = Disturbance("preemption", "this process was pushed off its core 250 times a second")
    row = row_of(visit(0), visit(1, disturbances=(LOAD, pushed)), visit(2, disturbances=(LOAD,)))
    [doubt] = [text for text in row["doubts"] if text.startswith("disturbed:")]
    assert "2 of 3 rounds" in doubt
    assert f"{LOAD.text} (in 2)" in doubt and f"{pushed.text} (in 1)" in doubt
    assert row["disturbed_rounds"] == 2


def test_disturbed_rounds_do_not_count_where_enough_others_are_there() -> None:
    slow = [visit(number, 30.0, 30.0, disturbances=(LOAD,)) for number in (1, 4)]
    row = row_of(*slow, *(visit(number, 1.0, 1.0) for number in (0, 2, 3, 5, 6)))
    assert row["throughput_samples_per_sec_mean"] == 4.0
    assert (row["rounds"], row["disturbed_rounds"], row["doubts"]) == (5, 2, [])
    few = row_of(*slow, *(visit(number, 1.0, 1.0) for number in (0, 2, 3, 5)))
    assert few["rounds"] == 6 and few["throughput_samples_per_sec_mean"] < 3
    assert [doubt.partition(":")[0] for doubt in few["doubts"]] == ["noisy", "disturbed"]


def test_rounds_that_grow_slower_are_a_drift() -> None:
    growing = row_of(*(visit(number, 1.0 + 0.1 * number, 1.0 + 0.1 * number) for number in range(9)))
    assert any(doubt.startswith("drift: the last third of the rounds took") for doubt in growing["doubts"])
    steady = row_of(*(visit(number, 1.0, 1.0) for number in range(6)))
    assert not any(doubt.startswith("drift") for doubt in steady["doubts"])


def test_device_enqueue_and_transfer_times_are_medians_by_batch() -> None:
    on_gpu = visit(0)
    extra = [Timing("device", 0, 0.25, 4, 40, 48), Timing("enqueue", 0, 0.125, 4, 40, 48)]
    row = row_of(replace(on_gpu, timings=(*on_gpu.timings, *extra), device_reason="the device reached the call"))
    assert (row["device_per_batch_ms"], row["enqueue_per_batch_ms"]) == (250.0, 125.0)
    assert row["transfer_per_batch_ms"] is None
    assert row["reasons"]["transfer_per_batch_ms"] == "the device reached the call"


def test_rows_stand_in_order_and_points_without_visits_wait() -> None:
    visits = [visit(0, batch_size=8), visit(0, batch_size=2)]
    rows = columns.rows(visits, [8, 4, 2], 0.03)
    assert [row["batch_size"] for row in rows] == [2, 8]
    assert columns.rows([], [1, 2], 0.03) == []


def test_out_of_memory_is_a_row_and_larger_ones_were_skipped() -> None:
    oom = Visit("float32", 8, 0, "oom", "s", message="OutOfMemoryError: CUDA out of memory.")
    rows = columns.rows([visit(0), oom], [32, 4, 8, 16], 0.03)
    assert [(row["batch_size"], row["status"]) for row in rows] == [
        (4, "noisy"),
        (8, "oom"),
        (16, "skipped_oom"),
        (32, "skipped_oom"),
    ]
    assert rows[1]["reasons"]["all"] == "OutOfMemoryError: CUDA out of memory."
    assert rows[3]["reasons"]["all"] == "batch size 8 ran out of memory"
    assert rows[1]["throughput_samples_per_sec_mean"] is None
    assert rows[2]["doubts"] == []


def test_a_failure_is_a_row_and_larger_ones_are_measured() -> None:
    failed = Visit("float32", 2, 0, "failed", "s", message="RuntimeError: device-side assert")
    rows = columns.rows([failed, visit(0)], [2, 4], 0.03)
    assert [row["status"] for row in rows] == ["failed", "noisy"]
    assert rows[0]["reasons"]["all"] == "RuntimeError: device-side assert"
    assert len(columns.rows([failed], [2, 4], 0.03)) == 1  # 4 has yet to be measured


def test_a_measurement_spans_its_start_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(now=10.0)
    sampler = Sampler(NoSource("none"), clock=clock)
    taken = [Reading(10.0, {"cpu_utilization_pct": 50.0}), Reading(12.5, {"cpu_utilization_pct": 70.0})]
    monkeypatch.setattr(sampler, "_readings", [*taken, Reading(12.6, {"cpu_utilization_pct": 99.0})])
    monkeypatch.setattr(memory.ProcessPeak, "reset", lambda self: True)
    monkeypatch.setattr(memory.ProcessPeak, "read", lambda self: 7)
    collector = MetricsCollector(torch.device("cpu"), sampler)
    measurement = collector.start_measurement()
    clock.advance(2.5)
    seen = collector.end_measurement(measurement, batch_size=8, num_samples=81)
    assert (seen["batch_size"], seen["num_samples"], seen["window_s"]) == (8, 81, 2.5)
    assert seen["latency_per_batch_ms"] == pytest.approx(2500 / 11)  # the last batch holds one
    assert seen["latency_per_sample_ms"] == pytest.approx(2500 / 81)
    assert seen["throughput_samples_per_sec"] == pytest.approx(81 / 2.5)
    assert seen["batches_per_sec"] == pytest.approx(11 / 2.5)
    assert seen["readings"] == {"cpu_utilization_pct": [50.0, 70.0]}
    assert seen["reading_reasons"]["gpu_utilization_pct"] == "none"
    assert seen["memory"].process_bytes > 2**20
    assert seen["memory"].process_peak_bytes == 7
    assert seen["memory"].device_allocated_bytes is None


def test_a_measurement_ends_when_the_device_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    collector = MetricsCollector("cpu", Sampler(NoSource("none"), clock=clock))
    monkeypatch.setattr(collector, "_synchronize", lambda: clock.advance(2.0))
    seen = collector.end_measurement(collector.start_measurement(), batch_size=1, num_samples=4)
    assert seen["window_s"] == 2.0 and seen["latency_per_sample_ms"] == 500.0


def test_a_measurement_that_took_no_time_claims_no_throughput() -> None:
    collector = MetricsCollector("cpu", Sampler(NoSource("none"), clock=FakeClock()))
    seen = collector.end_measurement(collector.start_measurement(), batch_size=1, num_samples=4)
    assert seen["throughput_samples_per_sec"] is None and seen["batches_per_sec"] is None


def test_a_measurement_without_a_sampler_reads_the_machine_itself_and_leaves_no_thread_behind() -> None:
    collector = MetricsCollector("cpu")
    measurement = collector.start_measurement()
    while not measurement.sampler.between(0.0, float("inf")):
        time.sleep(0.01)  # no matter how long: until it has read
    seen = collector.end_measurement(measurement, batch_size=1, num_samples=4)
    assert seen["readings"]["cpu_utilization_pct"] and seen["readings"]["process_bytes"]
    assert seen["reading_reasons"].keys() == {"gpu_utilization_pct", "gpu_power_w", "gpu_sm_clock_mhz"}
    assert "boundby-sampler" not in {thread.name for thread in threading.enumerate()}


def test_a_measurement_of_nothing_is_refused() -> None:
    collector = MetricsCollector("cpu", Sampler(NoSource("none"), clock=FakeClock()))
    with pytest.raises(ValueError, match="num_samples is 0 and batch_size 8"):
        collector.end_measurement(collector.start_measurement(), batch_size=8, num_samples=0)


def test_no_number_of_a_row_is_nan() -> None:
    row = row_of(*(visit(number) for number in range(3)))
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


@pytest.mark.parametrize(("clocks", "kinds"), [((1980.0, 1900.0), []), ((1980.0, 1410.0), ["throttled"])])
def test_rounds_under_two_clocks_are_doubted(clocks: tuple[float, ...], kinds: list[str]) -> None:
    seen = [Conditions(seconds=1.0, cores=2, gpu_sm_clock_mhz=(clock,)) for clock in clocks]
    made = [visit(number, conditions=seen[number % 2]) for number in range(5)]
    assert row_of(*made)["doubt_kinds"] == kinds
    assert row_of(*(visit(number, conditions=Conditions(1.0, 2)) for number in range(5)))["doubt_kinds"] == []
