"""What the report says of the pass over the dataset: its time, cost and exactness, its classes, its confidence."""

from typing import Any

import numpy as np
import pytest

from tests import baseline_document as results
from tests import predicted_quality as predicted
from tests.diagnosed_rows import diagnosed
from tests.report_reading import pod, section, text
from utils.ceiling_share import share_of_ceiling
from utils.report.sources import ReportData

CLASSES, CONFIDENCE = "Classes and Confusions", "Confidence and Its Mistakes"
EXACTNESS = {
    "precision": "bfloat16",
    "rows": 2000,
    "same_labels": 1994,
    "agreement": 0.997,
    "agreement_low": 0.9935,
    "agreement_high": 0.9986,
    "max_abs_logit_difference": 0.0521,
    "mean_abs_logit_difference": 0.0034,
    "accuracy_difference": -0.001,
    "accuracy_difference_low": -0.0032,
    "accuracy_difference_high": 0.0012,
}


def performance(read, **changes: Any) -> str:
    document = results.document(results.cpu_rows([1]), full_dataset_metrics=results.full_metrics(**changes))
    return section(read(document), "Full Dataset Performance")


def with_quality(read, *stored: Any, **changes: Any) -> ReportData:
    data = read(results.document(results.cpu_rows([1])))
    predicted.store(data.layout.evaluated, *stored, **changes)
    return read(data.document)


# Time, cost, exactness


def test_time_is_split_by_phase(read):
    said = performance(read)
    assert (
        "tokenizing 0.7600 8.0 computing 8.645 91.0 transfer of results 0.009500 0.1 waiting for tokens 0 0.0" in said
    )
    assert "anything else 0.08550 0.9" in said
    assert "at most 2,048 tokens each, 3.1 % padding; float32 Padding" in said
    assert "3.1 % padding; bfloat16, last layer trimmed, compiled Padding" in performance(
        read, precision="bfloat16", trim=True, compile=True
    )
    assert "Padding efficiency: 96.9 % of the computed tokens are of texts" in said


def test_phases_beside_each_other_and_workers_beside_each_other_are_said(read):
    split = {"tokenize": 4.0, "transfer": 0.1, "compute": 18.7, "wait": 0.2}
    said = performance(read, phases_s=split, worker_time_s=19.0)
    assert "tokenizing went on beside computing, so the shares add up to more than 100 %" in said
    assert "several workers ran at once: together 19.00 s in 9.500 s" in said
    assert "anything else" not in said


def test_whole_set_is_what_all_rows_would_take_on_the_device_that_was_used(read):
    part = results.document(results.cpu_rows([1]), full_dataset_metrics=results.full_metrics(rows=500, seconds=5.0))
    said = section(read(part, settings={"pod": {"price_per_hour": 3.6}}), "Full Dataset Performance")
    assert "Whole set: 2,000 samples at 100.0 samples/s: 0.005556 hours, cost 0.02000, on a CPU (no GPU-hours)" in said
    on_gpu = section(pod(read), "Full Dataset Performance")
    assert "Whole set: 369,475 samples at 497.5 samples/s: 0.2063 hours, 0.2063 GPU-hours" in on_gpu
    document = results.gpu_document()
    document["full_dataset_metrics"]["device_time_s"] *= 4  # on four GPUs
    assert "0.2063 hours, 0.8251 GPU-hours" in section(pod(read, document), "Full Dataset Performance")


@pytest.mark.parametrize("evaluation", [{"workers": 4}, {"engine": "ray", "gpus_per_worker": 0.25}])
def test_workers_that_share_a_gpu_make_its_hours_no_more(read, evaluation):
    document = results.gpu_document()
    document["full_dataset_metrics"]["worker_time_s"] *= 4
    said = section(pod(read, document, settings={"evaluation": evaluation}), "Full Dataset Performance")
    assert "0.2063 hours, 0.2063 GPU-hours" in said


def test_each_machine_is_paid_for(read):
    document = results.gpu_document()
    document["full_dataset_metrics"]["machine_time_s"] *= 8
    priced = pod(read, document, settings={"pod": {"price_per_hour": 2.0}})
    paid = "0.2063 hours, cost 3.30 for 1.650 hours of all machines"
    assert paid in section(priced, "Full Dataset Performance")
    costs = section(priced, "Cost at 2 per hour (pod.price_per_hour)")
    assert f"369,475 samples: {paid} (this dataset, as in the whole-dataset pass)" in costs
    assert "0.5583 hours, cost 8.93 for 4.466 hours of all machines (as in the" in costs  # a million


def test_cost_and_gpu_hours_are_unknown_where_the_machines_are(read):
    document = results.gpu_document()
    changed = {"machine_time_s": None, "device_time_s": None, "machine_time_reason": "old parts"}
    document["full_dataset_metrics"] |= changed
    said = section(pod(read, document, settings={"pod": {"price_per_hour": 2.0}}), "Full Dataset Performance")
    assert "0.2063 hours, cost unknown (old parts), GPU-hours unknown (old parts)" in said
    for name in changed:
        del document["full_dataset_metrics"][name]
    said = section(pod(read, document), "Full Dataset Performance")
    assert "0.2063 hours, GPU-hours unknown (an earlier version did not note which machines predicted)" in said


def test_exactness_is_said_or_why_it_is_not_known(read):
    assert "Exactness: float32, as the model alone; beyond a self-check not measured: that would" in performance(read)
    said = performance(read, precision="bfloat16", exactness=EXACTNESS, guarded_texts=12)
    assert "1,994 of 2,000 labels as in float32 one text at a time (99.70 % [99.35, 99.86])" in said
    assert "logits differ by at most 0.05210, 0.003400 on average" in said
    assert "accuracy -0.10 [-0.32, +0.12] percentage points; 12 near ties were computed again in float32" in said
    alone = performance(read, guarded_texts=3)
    assert "all texts about 10 s; 3 near ties were computed again in float32" in alone
    assert "Exactness: unknown (too short)" in performance(read, precision="bfloat16", exactness_reason="too short")


def test_results_of_an_earlier_version_are_reported_with_what_they_lack(read):
    full = results.full_metrics()
    for name in ("phases_s", "worker_time_s", "plan", "share_of_ceiling_pct", "share_of_ceiling_reason", "exactness"):
        del full[name]
    data = read(results.document(results.cpu_rows([1]), full_dataset_metrics=full))
    said = section(data, "Full Dataset Performance")
    assert "Share of the ceiling: unknown (an earlier version did not note it)" in said
    assert "Where the time went" not in said
    assert section(data, CLASSES) == "Not known: there is no evaluation/quality.json."


# Share of the ceiling


def share(gpu: bool = False, **changes: Any) -> dict[str, Any]:
    rows = diagnosed(results.gpu_rows(["bfloat16"], [8], {}) if gpu else results.cpu_rows([8]), gpu=gpu)
    document = results.gpu_document(rows) if gpu else results.document(rows)
    full = results.full_metrics(**changes)
    return share_of_ceiling(full, rows, document["ceilings"], "cuda" if gpu else "cpu")


def test_share_counts_the_tokens_of_texts_against_the_ceiling_of_the_precision():
    found = share()  # 62 tokens of 4.2 MFLOP for each of 2,000 rows
    assert found["useful_flops_per_sec"] == pytest.approx(2000 * 62 * 4.2e6 / 9.5, rel=0.02)
    assert found["ceiling_flops_per_sec"] == 240e9 and found["share_of_ceiling_reason"] is None
    assert found["share_of_ceiling_pct"] == pytest.approx(100 * found["useful_flops_per_sec"] / 240e9)
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
    assert "Share of the ceiling: unknown (the FLOPs of a forward were not counted)" in performance(read)
    said = performance(read, trim=True, **share())
    assert "Share of the ceiling: 22.8 %: 54.82 of 240.0 GFLOP/s of matrix products, padding not counted; the" in said


# Classes


def test_worst_classes_come_first_and_the_rest_is_named(read):
    said = section(with_quality(read), CLASSES)
    assert said.startswith("2 of 3 classes have rows; none of them without a mistake.")
    assert "neutral 90 68 0.882 0.667 0.56 to 0.76 0.759 negative 100 120 0.750 0.900 0.83 to 0.94 0.818" in said
    assert "evaluation/per_class.csv has all 3 classes" in said
    assert "neutral negative 30 33.3 negative neutral 8 8.0 negative positive 2 2.0" in said


def test_class_that_is_never_predicted_is_said_and_has_no_precision(read):
    said = section(with_quality(read, "abc", np.array([[5, 0, 0], [0, 7, 0], [0, 3, 0]])), CLASSES)
    assert said.startswith("All 3 classes have rows; 1 of them without a mistake. Never predicted: c.")
    assert "c 3 0 - 0.000 0.00 to 0.56 0.000" in said
    assert "-: a class that is never predicted has no precision" in said
    flawless = section(with_quality(read, "ab", np.diag([5, 7])), CLASSES)
    assert "2 of them without a mistake." in flawless and "worst" not in flawless and "Most confused" not in flawless


def test_quality_of_another_evaluation_is_not_reported(read):
    data = with_quality(read, plan="another")
    assert section(data, CLASSES) == "Not known: quality.json is of another evaluation than the metrics."
    assert CONFIDENCE not in text(data)


# Confidence


def test_confidence_that_can_be_trusted_is_called_so(read):
    said = section(with_quality(read), CONFIDENCE)
    assert "The model is right in 70.3 % of the texts, and says 69.9 % on average: the confidence can be" in said
    assert "no more than chance explains: a perfectly calibrated model would show about" in said
    assert "To be right in at least 90 %: take predictions from a confidence of 0." in said
    assert "To be right in at least 95 %: no confidence is high enough to be sure of that." in said
    assert "at least 99 %" not in said


@pytest.mark.parametrize(("shift", "word"), [(0.1, "overconfident"), (-0.1, "underconfident")])
def test_confidence_that_is_wrong_comes_with_the_way_out(read, shift, word):
    said = section(with_quality(read, calibration=predicted.reliability(overconfident=shift)), CONFIDENCE)
    assert f"on average: it is {word}. Before a probability or a threshold is used, fit a temperature" in said
    assert "more than chance explains" in said


def test_few_rows_are_called_few(read):
    said = section(with_quality(read, calibration=predicted.reliability(20)), CONFIDENCE)
    assert "1 bin of 1 with few rows (20): these figures say little." in said


def test_surest_mistakes_are_shown_cut_and_the_file_is_named(read):
    said = section(with_quality(read, mistakes=predicted.mistakes(20, text="a text\nof many words " * 30)), CONFIDENCE)
    assert "evaluation/confident_mistakes.csv has 20: 1. Row 0, neutral: predicted as negative with 99.00 %" in said
    assert "10. Row 63, neutral" in said and "Row 70" not in said
    assert '"a text of many words a text of many words' in said and '..."' in said
    none = section(with_quality(read, mistakes=[]), CONFIDENCE)
    assert "mistakes" not in none
