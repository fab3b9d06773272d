"""The report as text, word for word, for runs that between them make it say all it can say.

The texts lie in `tests/golden/`. After a change of words renew them, and read the difference before it is committed:

    RENEW_GOLDEN=1 python -m pytest tests/pipeline/test_report_golden.py
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from boundby import files
from boundby.layers.records import Coverage, ModelProfile
from boundby.layers.report import write_summary
from tests import baseline_document as results
from tests import layer_profiles as profiles
from tests import predicted_quality as predicted
from tests import trace_document as traces
from tests.diagnosed_rows import diagnosed
from tests.report_reading import POD, REMARKS, Reader, answered, pod, run_in, text, traced, variants
from utils.report.sources import ReportData
from utils.settings.schema import Targets

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
EXACTNESS = {
    "precision": "bfloat16", "rows": 2000, "same_labels": 1994, "agreement": 0.997, "agreement_low": 0.9935,
    "agreement_high": 0.9986, "max_abs_logit_difference": 0.0521, "mean_abs_logit_difference": 0.0034,
    "accuracy_difference": -0.001, "accuracy_difference_low": -0.0032, "accuracy_difference_high": 0.0012,
}  # fmt: skip


def store(read: Reader, trace: dict | None = None, profile: ModelProfile | None = None, **quality: object) -> None:
    """Leave a trace, a profile by layer and, with any word on it, what the predictions are like."""
    layout = run_in(read.folder).layout
    if trace:
        traces.store(layout, trace)
    if profile:
        layout.layer_summary.parent.mkdir(parents=True, exist_ok=True)
        write_summary(layout.layer_summary, profile)
    if quality:
        predicted.store(layout.evaluated, **quality)


def quickstart(read: Reader) -> ReportData:
    store(read, traces.cpu(), profiles.gpt2(), mistakes=predicted.mistakes(2))
    document = results.document(diagnosed(results.cpu_rows(noisy=[4])))
    document["full_dataset_metrics"]["samples_of"] = [
        {"samples": 100, "accuracy": 0.9, "f1_macro": 0.8, "f1_weighted": 0.85}
    ]
    document["batch_sizes"] = answered(document["batch_sizes"])
    files.write_json(run_in(read.folder).layout.variants, variants())
    return read(document, overrides=["model.dtype=float32"], **traced())


def whole_pod(read: Reader) -> ReportData:
    """Return a run in two dtypes that ran out of memory, on several machines, in bfloat16 with near ties guarded."""
    mistakes = predicted.mistakes(20, "a text\nof words " * 30)
    store(read, traces.gpu(), calibration=predicted.reliability(overconfident=0.1), mistakes=mistakes)
    document = results.gpu_document(diagnosed(results.gpu_rows(), gpu=True))
    full = document["full_dataset_metrics"]
    full |= {"precision": "bfloat16", "exactness": EXACTNESS, "guarded_texts": 12, "trim": True, "compile": True}
    full |= {"machine_time_s": 8 * full["machine_time_s"], "device_time_s": 4 * full["device_time_s"]}
    return pod(read, document, settings={"pod": {"price_per_hour": 2.0}}, **traced(device=True))


def unfinished(read: Reader) -> ReportData:
    rows = results.cpu_rows([1, 2], rounds=1)
    document = results.document(rows, complete=False, full_dataset_metrics=None, doubts=["3 row(s) were left out"])
    failed = [{"what": "trace", "reason": "the profiler failed with OSError"}]
    lost = results.manifest(steps_recorded=0, downgrades=failed)
    unfinished_yet = {**document, "full_dataset_reason": "not reached yet"}
    return read(unfinished_yet, overrides=["model.dtype=float32"], trace=lost)


def nothing(read: Reader) -> ReportData:
    empty = {"model": {}, "device": {}, "agreement": None}
    document = results.document([], complete=False, full_dataset_metrics=None, **empty)
    return read(document, settings={"targets": dict.fromkeys(Targets.model_fields), "layers": {"enabled": False}})


def doubtful(read: Reader) -> ReportData:
    """Return a run of which most can be doubted, reported with the settings of another model."""
    unsure = replace(
        profiles.gpt2(), coverage=Coverage(0.4, "not representative", 0.3), doubts=("disturbed: other processes",)
    )
    trace = traces.verdict(traces.gpu(), bound="mixed", alternatives=["input", "launch"], share_of_limit=None)
    never = np.array([[5, 0, 0], [0, 7, 0], [0, 3, 0]])
    store(read, trace, unsure, names="abc", counts=never, calibration=predicted.reliability(20), mistakes=[])
    unsaid = {"exactness_reason": "too short", "precision": "bfloat16"}
    full = results.full_metrics(rows=500, truncated=7, out_of_memory=2, **unsaid)
    document = results.document(diagnosed(results.cpu_rows(failed=[8])), full_dataset_metrics=full)
    document["agreement"] = {"rows": 64, "same_labels": 63, "share": 63 / 64}
    lost = results.manifest(unavailable=REMARKS, warnings=["torch is not sure"])
    return read(document, POD, op_rows=results.operators(), trace=lost)


RUNS: list[Callable[[Reader], ReportData]] = [quickstart, whole_pod, unfinished, nothing, doubtful]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_report_says_what_it_is_known_to_say(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = text(run(Reader(Path("results"))))
    known = GOLDEN / f"report_{run.__name__}.txt"
    if os.environ.get("RENEW_GOLDEN"):
        known.parent.mkdir(exist_ok=True)
        known.write_text(written, encoding="utf-8")
    assert written == known.read_text(encoding="utf-8")
