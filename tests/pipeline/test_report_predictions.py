"""What the report says of the pass over the dataset: its time, cost and exactness, its classes, its confidence."""

from typing import Any

import pytest

from tests import baseline_document as results
from tests import predicted_quality as predicted
from tests.diagnosed_rows import diagnosed
from tests.report_reading import pod, section, text
from utils.baseline.ceiling_share import share_of_ceiling
from utils.report.sources import ReportData

CLASSES, CONFIDENCE = "Classes and confusions", "Confidence, and the surest mistakes"


def performance(read, **changes: Any) -> str:
    document = results.document(results.cpu_rows([1]), full_dataset_metrics=results.full_metrics(**changes))
    return whole_pass(read(document))


def whole_pass(data: ReportData) -> str:
    """Return what is said of the pass over the dataset, and what is folded away."""
    return section(data, "The whole dataset") + section(data, "More of the pass over the whole dataset")


def with_quality(read, *stored: Any, **changes: Any) -> ReportData:
    data = read(results.document(results.cpu_rows([1])))
    predicted.store(data.layout.evaluated, *stored, **changes)
    return read(data.document)


# Time, cost, exactness


def test_phases_beside_each_other_and_workers_beside_each_other_are_said(read):
    split = {"tokenize": 4.0, "transfer": 0.1, "compute": 18.7, "wait": 0.2}
    said = performance(read, phases_s=split, worker_time_s=19.0)
    assert "tokenizing went on beside computing, so the shares add up to more than 100 %" in said
    assert "several workers ran at once: together 19.00 s in 9.500 s" in said
    assert "anything else" not in said


def test_whole_set_is_what_all_rows_would_take_on_the_device_that_was_used(read):
    part = results.document(results.cpu_rows([1]), full_dataset_metrics=results.full_metrics(rows=500, seconds=5.0))
    said = whole_pass(read(part, settings={"pod": {"price_per_hour": 3.6}}))
    assert "Whole set: 2,000 samples at 100.0 samples/s: 20.00 s, cost 0.02000" in said
    on_gpu = whole_pass(pod(read))
    assert "Whole set: 369,475 samples at 497.5 samples/s: 12.38 minutes, 0.2063 GPU-hours" in on_gpu
    document = results.gpu_document()
    document["full_dataset_metrics"]["device_time_s"] *= 4  # on four GPUs
    assert "12.38 minutes, 0.8251 GPU-hours" in whole_pass(pod(read, document))


@pytest.mark.parametrize("evaluation", [{"engine": "ray", "workers": 4}, {"engine": "ray", "gpus_per_worker": 0.25}])
def test_workers_that_share_a_gpu_make_its_hours_no_more(read, evaluation):
    document = results.gpu_document()
    document["full_dataset_metrics"]["worker_time_s"] *= 4
    said = whole_pass(pod(read, document, settings={"evaluation": evaluation}))
    assert "12.38 minutes, 0.2063 GPU-hours" in said


def test_cost_and_gpu_hours_are_unknown_where_the_machines_are(read):
    document = results.gpu_document()
    changed = {"machine_time_s": None, "device_time_s": None, "machine_time_reason": "old parts"}
    document["full_dataset_metrics"] |= changed
    said = whole_pass(pod(read, document, settings={"pod": {"price_per_hour": 2.0}}))
    assert "12.38 minutes, cost unknown (old parts), GPU-hours unknown (old parts)" in said


# Share of the ceiling


def share(gpu: bool = False, **changes: Any) -> dict[str, Any]:
    rows = diagnosed(results.gpu_rows(["bfloat16"], [8], {}) if gpu else results.cpu_rows([8]), gpu=gpu)
    document = results.gpu_document(rows) if gpu else results.document(rows)
    full = results.full_metrics(**changes)
    return share_of_ceiling(full, rows, document["ceilings"], "cuda" if gpu else "cpu")


def test_share_counts_the_tokens_of_texts_against_the_ceiling_of_the_precision():
    result = share()  # 62 tokens of 4.2 MFLOP for each of 2,000 rows
    assert result["useful_flops_per_sec"] == pytest.approx(2000 * 62 * 4.2e6 / 9.5, rel=0.02)
    assert result["ceiling_flops_per_sec"] == 240e9 and result["share_of_ceiling_reason"] is None
    assert result["share_of_ceiling_pct"] == pytest.approx(100 * result["useful_flops_per_sec"] / 240e9)
    assert share(precision="float32_fast")["ceiling_flops_per_sec"] == 460e9
    assert share(precision="bfloat16", dtype="bfloat16")["ceiling_flops_per_sec"] == 960e9
    fast = share(gpu=True, precision="float32_fast")["ceiling_flops_per_sec"]
    assert fast == 118e12  # TF32
    twice = share(gpu=True, precision="bfloat16", dtype="bfloat16", device_time_s=19.0)
    once = share(gpu=True, precision="bfloat16", dtype="bfloat16")
    assert twice["share_of_ceiling_pct"] == pytest.approx(once["share_of_ceiling_pct"] / 2)  # of two GPUs


def test_share_that_cannot_be_told_is_none_with_its_reason(read):
    assert share(worker_time_s=19.0) == share()  # two workers beside each other on one device
    nowhere = share(device_time_s=None, machine_time_reason="old parts")
    assert nowhere["share_of_ceiling_pct"] is None and nowhere["share_of_ceiling_reason"] == "old parts"
    uncounted = share_of_ceiling(results.full_metrics(), results.cpu_rows([8]), None, "cpu")
    assert uncounted["share_of_ceiling_reason"] == "the FLOPs of a forward were not counted"
    unmeasured = share_of_ceiling(results.full_metrics(), diagnosed(results.cpu_rows([8])), None, "cpu")
    assert unmeasured["share_of_ceiling_reason"] == "no ceiling was measured for float32"
    assert "Of the peak: unknown (the FLOPs of a forward were not counted)" in performance(read)
    said = performance(read, trim=True, **share())
    assert "Of the peak: 22.8 %: 54.82 of 240.0 matmul GFLOP/s, padding not counted; the" in said


# Classes


def test_quality_of_another_evaluation_is_not_reported(read):
    data = with_quality(read, plan="another")
    assert section(data, CLASSES) == "Not known: quality.json is of another evaluation than the metrics."
    assert CONFIDENCE not in text(data)


# Confidence


@pytest.mark.parametrize(("shift", "word"), [(0.1, "overconfident"), (-0.1, "underconfident")])
def test_confidence_that_is_wrong_comes_with_the_way_out(read, shift, word):
    said = section(with_quality(read, calibration=predicted.reliability(overconfident=shift)), CONFIDENCE)
    assert f"on average: it is {word}. Before a probability or a threshold is used, fit a temperature" in said
    assert "more than chance explains" in said
