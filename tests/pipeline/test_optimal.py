"""Which batch size is recommended, and which targets are met."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from boundby.formatting import Missing
from boundby.machine import MemoryUse
from boundby.machine.memory import Demand
from boundby.timing.stats import estimate
from tests import classifiers
from utils.baseline import memory
from utils.baseline.optimum import judge, optimal
from utils.baseline.rounds import Timing, Visit
from utils.baseline.selection import Selection
from utils.settings.schema import Targets

NO_TARGETS = Targets()
ALL_TARGETS = Targets(
    latency_per_sample_ms=50, throughput_samples_per_sec=100, gpu_memory_mb=20000, gpu_utilization_pct=80, accuracy=0.92
)


def row(batch_size: int, rate: float, half_width_pct: float | None = None, **others: Any) -> dict[str, Any]:
    """Return a measured row; its latency per sample is that of the rate."""
    return {
        "batch_size": batch_size, "status": "ok", "throughput_samples_per_sec_mean": rate,
        "throughput_half_width_pct": half_width_pct, "latency_per_sample_ms_mean": 1000 / rate,
        "latency_per_sample_ms_ci_high": None, "memory_peak_mb": None, "gpu_utilization_pct": None,
        "reasons": {"memory_peak_mb": "the CPU allocator keeps no statistics"}, **others,
    }  # fmt: skip


def unmeasured(batch_size: int, status: str) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "status": status,
        "throughput_samples_per_sec_mean": None,
        "reasons": {"all": "x"},
    }


def test_the_smallest_batch_size_near_the_best_is_optimal() -> None:
    choice = optimal([row(1, 50.0), row(8, 95.0), row(16, 100.0), row(32, 99.0)], NO_TARGETS)
    assert (choice["batch_size"], choice["throughput_samples_per_sec"]) == (8, 95.0)
    assert choice["max_throughput"]["batch_size"] == 16
    assert optimal([row(8, 94.9), row(16, 100.0)], NO_TARGETS)["batch_size"] == 16
    assert optimal([row(8, 97.0, 2.0), row(16, 100.0, 2.0)], NO_TARGETS)["batch_size"] == 16  # it may be at 94
    assert optimal([row(8, 99.0, 2.0), row(16, 100.0, 2.0)], NO_TARGETS)["batch_size"] == 8
    assert optimal([row(8, 99.0, 20.0), row(16, 100.0)], NO_TARGETS)["batch_size"] == 16
    rows = [row(1, 10.0, status="noisy"), unmeasured(2, "failed"), unmeasured(4, "oom"), unmeasured(8, "skipped_oom")]
    choice = optimal(rows, NO_TARGETS)
    assert choice["batch_size"] == choice["max_throughput"]["batch_size"] == 1


CURVES = ((393, 414, 390, 329, 275, 219), (450, 533, 526, 491, 383, 311), (100, 190, 340, 520, 600, 640), (100,) * 6)


@pytest.mark.parametrize(("error", "least"), [(0.007, 0.998), (0.02, 0.99)])
def test_the_optimum_is_within_5_percent_of_the_true_one(error: float, least: float) -> None:
    rng, rounds, tries = np.random.default_rng(0), 8, 400
    held = 0
    for curve in CURVES:
        for _ in range(tries):
            true = curve * np.exp(rng.normal(0, 0.03, len(curve)))
            noise = np.exp(rng.normal(0, error * math.sqrt(rounds), (len(curve), rounds)))
            intervals = [estimate(list(seconds)) for seconds in noise / true[:, None]]
            rows = [
                row(size, 1 / interval.value, 100 * (interval.half_width or 0))
                for size, interval in enumerate(intervals)
            ]
            held += true[optimal(rows, NO_TARGETS)["batch_size"]] >= 0.95 * true.max()
    assert held / (len(CURVES) * tries) >= least


def test_nothing_measured_gives_none_with_a_reason_everywhere() -> None:
    nothing = optimal([unmeasured(1, "oom")], Targets())
    for choice in (nothing, nothing["max_throughput"], nothing["within_gpu_memory"], nothing["under_latency"]):
        assert choice["batch_size"] is choice["throughput_samples_per_sec"] is None
        assert choice["reason"] == "no batch size was measured"
    assert optimal([], Targets())["batch_size"] is None


def test_the_fastest_within_the_memory_is_named() -> None:
    rows = [row(1, 10.0, memory_peak_mb=1.0), row(8, 50.0, memory_peak_mb=100.0), row(16, 99.0, memory_peak_mb=101.0)]
    targets = Targets(gpu_memory_mb=100)
    assert optimal(rows, targets)["within_gpu_memory"]["batch_size"] == 8
    none = optimal(rows[2:], targets)["within_gpu_memory"]
    assert (none["batch_size"], none["reason"]) == (None, "every batch size needs more than 100 MB")
    choice = optimal([row(1, 10.0)], Targets(gpu_memory_mb=100))["within_gpu_memory"]
    assert (choice["batch_size"], choice["reason"]) == (None, "the CPU allocator keeps no statistics")
    choice = optimal([row(1, 10.0)], NO_TARGETS)
    assert choice["within_gpu_memory"]["reason"] == "targets.gpu_memory_mb is not set"
    assert choice["under_latency"]["reason"] == "targets.latency_per_sample_ms is not set"


def test_a_latency_is_under_the_limit_when_its_interval_is() -> None:
    rows = [
        row(1, 10.0, latency_per_sample_ms_mean=9.0, latency_per_sample_ms_ci_high=9.9),
        row(8, 50.0, latency_per_sample_ms_mean=9.9, latency_per_sample_ms_ci_high=10.1),
    ]
    assert optimal(rows, Targets(latency_per_sample_ms=10))["under_latency"]["batch_size"] == 1
    none = optimal(rows, Targets(latency_per_sample_ms=5))["under_latency"]
    assert (none["batch_size"], none["reason"]) == (None, "every batch size takes more than 5 ms per sample")


def judged(targets: Targets, chosen: dict[str, Any] | None, full: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {target["name"]: target for target in judge(targets, chosen, full)}


FULL = {"latency_per_sample_ms": 20.0, "throughput_samples_per_sec": 50.0, "accuracy": 0.9}


@pytest.mark.parametrize(
    ("name", "target", "met"),
    [
        ("latency_per_sample_ms", 20.0, True),
        ("latency_per_sample_ms", 19.9, False),
        ("throughput_samples_per_sec", 50.0, True),
        ("throughput_samples_per_sec", 50.1, False),
        ("accuracy", 0.9, True),
        ("accuracy", 0.91, False),
        ("gpu_memory_mb", 300.0, True),
        ("gpu_memory_mb", 299.0, False),
        ("gpu_utilization_pct", 80.0, True),
        ("gpu_utilization_pct", 80.5, False),
    ],
)
def test_a_target_is_met_at_its_value(name: str, target: float, met: bool) -> None:
    targets = NO_TARGETS.model_copy(update={name: target})
    verdict = judge(targets, row(8, 100.0, memory_peak_mb=300.0, gpu_utilization_pct=80.0), FULL)
    assert [(target["name"], target["target"], target["met"], target["reason"]) for target in verdict] == [
        (name, target, met, None)
    ]


def test_the_full_dataset_comes_before_the_sweep() -> None:
    assert judged(ALL_TARGETS, row(8, 100.0), FULL)["throughput_samples_per_sec"]["value"] == 50.0
    assert judged(ALL_TARGETS, row(8, 100.0), None)["throughput_samples_per_sec"]["value"] == 100.0
    assert judged(ALL_TARGETS, row(8, 100.0), None)["latency_per_sample_ms"]["value"] == 10.0


def test_what_is_unknown_is_neither_met_nor_missed() -> None:
    verdict = judged(ALL_TARGETS, row(8, 100.0), None)
    for name in ("gpu_memory_mb", "gpu_utilization_pct", "accuracy"):
        assert (verdict[name]["value"], verdict[name]["met"]) == (None, None)
    assert verdict["gpu_memory_mb"]["reason"] == "the CPU allocator keeps no statistics"
    assert verdict["gpu_utilization_pct"]["reason"] == "not measured"
    assert verdict["accuracy"]["reason"] == "the full dataset was not evaluated"
    verdict = judge(ALL_TARGETS, None, None)
    assert len(verdict) == 5
    assert all(target["met"] is None and target["reason"] for target in verdict)
    assert judge(NO_TARGETS, row(8, 100.0), FULL) == []


def test_without_labels_the_accuracy_says_so():
    unlabelled = {**FULL, "accuracy": None, "accuracy_reason": "the dataset has no labels"}
    verdict = judged(ALL_TARGETS, row(8, 100.0), unlabelled)["accuracy"]
    assert (verdict["met"], verdict["reason"]) == (None, "the dataset has no labels")


FIXED, PER_TEXT, TOKENS = 1_000_000_001, 5e6, 200


def visits(sizes: list[int], field: str) -> list[Visit]:
    def largest(size: int) -> Visit:
        timing = Timing("largest", 0, 1.0, size, size * TOKENS // 2, size * TOKENS)
        held = MemoryUse(**{field: int(FIXED + size * PER_TEXT)})
        return Visit("float32", size, 0, "ok", "test", (timing,), memory=held)

    return [largest(size) for size in sizes]


@pytest.mark.parametrize("field", ["process_peak_bytes", "device_peak_reserved_bytes"])
def test_the_largest_batch_that_fits_is_told_for_usual_sizes(field):
    forecast = memory.forecast(
        visits([1, 8, 32, 128], field), {TOKENS: Demand(TOKENS, ((0, PER_TEXT), (0, -PER_TEXT)))}
    )
    assert {batch["gb"]: batch["samples"] for batch in forecast["fits"]} == {
        8: 1239, 16: 2679, 24: 4119, 48: 8439, 80: 14199, 141: 25179,
    }  # fmt: skip
    assert memory.forecast_in_words(forecast).startswith(
        "Batches of the longest texts (200 tokens) take 1 GB and 5 MB for each text. The largest that fit: 1,239"
    )


def test_what_the_sweep_does_not_tell_has_a_reason():
    counted = Demand(TOKENS, ((0, PER_TEXT),))
    for demands, why in ({TOKENS: counted}, "the peaks of 2"), ({TOKENS: Missing("no")}, "no"), ({}, "not counted"):
        forecast = memory.forecast(visits([1, 8], "process_peak_bytes"), demands)
        assert forecast["model"] is None and why in memory.forecast_in_words(forecast)


def test_what_the_largest_batches_hold_is_counted_once_for_each_length():
    words = classifiers.reviews(40)
    model, tokenizer = classifiers.build("bert", 500, 0), classifiers.tokenizer(words)
    selection = Selection.of(words, tokenizer, 64, torch.device("cpu"))
    demands = memory.demands(model, selection, [1, 4, 8])
    assert set(demands) == {64} and all(demands.values())
    broken = memory.demands(lambda **_: 1 / 0, selection, [1])
    assert "ZeroDivisionError" in broken[64].reason
