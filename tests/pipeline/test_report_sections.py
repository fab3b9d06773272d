"""The sections of the report: the measured values in their places, a reason for everything that is not known."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from boundby import files
from boundby.capture.instruments import SNAPSHOT as UNAVAILABLE
from tests import baseline_document as results
from tests import predicted_quality as predicted
from tests.diagnosed_rows import diagnosed
from tests.report_reading import POD, advised, commands, head, pod, run_in, section, text, traced
from utils.cli import ROOT
from utils.config import Targets
from utils.render.formatting import WIDTH
from utils.report import assembly, batch_sizes, doubts, sources

HEADINGS = [
    "Verdict",
    "What was measured on what",
    "Full Dataset Performance",
    "Classes and Confusions",
    "Confidence and Its Mistakes",
    "Batch Size Analysis",
    "Where the Time Goes",
    "What the Machine Waited For",
    "Layer by Layer",
    "Targets",
    "Doubts",
    "What to do next",
    "Files",
]


def test_sections_stand_in_the_order_of_use(read):
    data = read(results.document(results.cpu_rows()), **traced())
    predicted.store(data.layout.evaluated)
    lines = text(read(data.document, **traced())).splitlines()
    titles = [
        line
        for line, below in zip(lines, lines[1:], strict=False)
        if below and set(below) == {"-"} and len(below) == len(line)
    ]
    assert titles == HEADINGS


ODD_DOCUMENTS = {
    "offline default": lambda: results.document(results.cpu_rows()),
    "pod": lambda: results.gpu_document(),
    "offline default, diagnosed": lambda: results.document(diagnosed(results.cpu_rows())),
    "pod, diagnosed": lambda: results.gpu_document(diagnosed(results.gpu_rows(), gpu=True)),
    "one row": lambda: results.document(results.cpu_rows([8])),
    "one round, not finished": lambda: results.document(
        results.cpu_rows([1, 2], rounds=1),
        complete=False,
        full_dataset_metrics=None,
        full_dataset_reason="not reached yet",
    ),
    "nothing measured yet": lambda: results.document([], complete=False, full_dataset_metrics=None),
    "nothing fits": lambda: results.gpu_document(
        results.gpu_rows(["float32"], [1, 4], {"float32": 1}), full_dataset_metrics=None
    ),
    "failed": lambda: results.document(results.cpu_rows(failed=[4])),
    "tiny numbers": lambda: results.document(results.cpu_rows(speed=results.Speed(1e-7, 3e-10))),
    "huge numbers": lambda: results.document(results.cpu_rows(speed=results.Speed(4e6, 2e4))),
}


@pytest.mark.parametrize("name", ODD_DOCUMENTS)
def test_report_fits_a_terminal_and_knows_no_none(read, name):
    data = read(ODD_DOCUMENTS[name](), **traced())
    predicted.store(data.layout.evaluated)
    data = read(data.document, **traced())
    written = text(data)
    too_long = [line for line in written.splitlines() if len(line) > WIDTH and str(data.layout.results) not in line]
    assert too_long == []
    assert written.isascii()
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b|\{|\}", written)


@pytest.mark.parametrize("name", ["offline default", "pod", "one round, not finished", "nothing fits"])
def test_every_gap_of_the_sweep_has_its_reason(read, name):
    document = ODD_DOCUMENTS[name]()
    data = read(document)
    written = section(data, "Batch Size Analysis")
    columns = (*batch_sizes.COLUMNS, *(batch_sizes.GPU_COLUMNS if data.is_on_gpu else batch_sizes.CPU_COLUMNS))
    gaps = 0
    for row in document["batch_sizes"]:
        for key, _ in columns:
            if row[key] is None:
                gaps += 1
                assert row["reasons"].get("all", row["reasons"].get(key)) in written
    assert gaps > 0


def test_making_the_report_loads_neither_torch_nor_what_is_not_used():
    modules = "utils.report.assembly, utils.render.plain_text, utils.render.html_page"
    heavy = "'torch', 'jinja2'"
    code = f"import sys, {modules}; print([name for name in ({heavy}) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The first lines


def test_synthetic_run_says_so_first(read):
    assert "SYNTHETIC DATA" in text(read(results.document(results.cpu_rows()))).splitlines()[4]
    assert "SYNTHETIC" not in text(pod(read))


def test_unfinished_run_says_so_first_and_how_to_go_on(read):
    document = results.document(results.cpu_rows([1, 2]), complete=False, full_dataset_metrics=None)
    document["full_dataset_reason"] = "not reached yet"
    data = read(document, overrides=["model.dtype=float32"])
    assert "INCOMPLETE" in head(data)
    assert "python run_pipeline.py --from 2 --resume model.dtype=float32" in head(data)
    assert "Accuracy: unknown (not reached yet)" in head(data)
    assert advised(data)[0] == "Finish the measurement"
    assert "INCOMPLETE" not in head(read(results.document(results.cpu_rows([1, 2]))))


def test_summary_gives_the_things_to_know(read):
    said = head(pod(read))
    assert "BASELINE REPORT: codefactory4791/intent-classification-qwen on NVIDIA A100-SXM4-40GB" in said
    assert "measured 2026-08-22 10:15:30 UTC by boundby 0.1.0" in said
    assert "Optimal batch size: 8 in float32: 257.7 samples/s +- 0.5 %, 4.002 ms per sample" in said
    assert "Accuracy: 0.9125 [0.9116, 0.9134], F1 macro 0.8934, on 369,475 texts" in said
    assert "Whole dataset: 742.6 s, 497.5 samples/s" in said
    assert "Targets: 3 met and 2 missed" in said
    assert "Next: Run the model in bfloat16 (measured 4.9 times the throughput)" in said


# What was measured


def test_subject_names_model_data_machine_and_software(read):
    said = section(pod(read), "What was measured on what")
    assert "codefactory4791/intent-classification-qwen (Hugging Face Hub, revision 5f0c6f7a4d2b3e19" in said
    assert "Parameters: 494,033,920 (494,033,920 trainable)" in said
    assert "Size: 1,976 MB in float32" in said and "Load time: 4.810 s" in said
    assert "Measured in: float32, bfloat16" in said
    assert "codefactory4791/amazon_test, split test, revision" in said and "369,475 rows" in said
    assert "512 tokens, longer ones are cut; 1,204 of 369,475 were" in said
    assert "NVIDIA A100-SXM4-40GB, 42.41 GB, compute capability 8.0, CUDA 12.8, driver 570.86.15" in said
    assert "AMD EPYC 7B13, 16 of 64 cores usable" in said and "Memory: 125.0 GB" in said
    assert "torch 2.13.0, transformers 5.23.0" in said


def test_machine_is_that_of_the_measurement_not_of_the_report(read, tmp_path):
    data = read(results.document(results.cpu_rows([1])))
    elsewhere = {"machine": {"cpu": "a laptop"}, "versions": {"torch": "9"}, "machine_fingerprint": "ffff"}
    files.write_json(data.layout.run, elsewhere)
    assert "AMD EPYC 7B13" in section(read(data.document), "What was measured on what")
    data.layout.receipt("02").unlink()
    run = run_in(read.folder)
    reason = f"no file in {data.layout.results} describes the machine {results.CPU_FINGERPRINT}"
    assert sources.read(run).machine == sources.Missing(reason)
    files.write_json(data.layout.run, {**elsewhere, "machine_fingerprint": results.CPU_FINGERPRINT})
    assert sources.read(run).machine == sources.Machine({"cpu": "a laptop"}, {"torch": "9"})


def test_full_dataset_numbers(read):
    document = results.document(results.cpu_rows([1]))
    document["full_dataset_metrics"]["samples_of"] = [
        {"samples": 100, "accuracy": 0.9, "f1_macro": 0.8, "f1_weighted": 0.85}
    ]
    said = section(read(document), "Full Dataset Performance")
    for expected in (
        "Samples: 2,000",
        "Accuracy: 0.9125 [0.8993, 0.9241] (1,825 correct; 95 % interval)",
        "F1-Score (Macro): 0.8934",
        "F1-Score (Weighted): 0.9118",
        "Inference time: 9.500 s, of which tokenizing 0.7600 s",
        "Latency/sample: 4.750 ms",
        "Throughput: 210.5 samples/s, 13,053 real tokens/s",
        "GPU memory, peak: unknown (the CPU allocator keeps no statistics)",
        "CPU memory, peak: 734.2 MB",
        "100 0.9000 0.8000 0.8500",
    ):
        assert expected in said


def test_sample_of_the_dataset_is_called_a_sample(read):
    document = results.document(results.cpu_rows([1]), full_dataset_metrics=results.full_metrics(rows=500))
    data = read(document)
    assert "Samples: 500 of 2,000 (a seeded sample)" in section(data, "Full Dataset Performance")
    assert "Evaluate every row" in advised(data)


def test_dataset_that_was_not_evaluated_has_the_reason(read):
    data = read(results.document(results.cpu_rows([1]), full_dataset_metrics=None))
    assert section(data, "Full Dataset Performance") == "Not evaluated: evaluation.enabled is false."
    assert commands(data)["Evaluate the dataset"] == "python run_pipeline.py --from 2 evaluation.enabled=true"


# Targets and doubts


def test_targets_are_met_missed_or_unknown(read):
    said = section(pod(read), "Targets")
    assert "Throughput: met: 497.5 samples/s over the whole dataset; target at least 100 samples/s" in said
    assert "GPU memory: met: 10,578 MB at batch size 8; target at most 20000 MB" in said
    assert "GPU utilisation: MISSED: 77.00 % at batch size 8; target at least 80 %" in said
    assert "Accuracy: MISSED: 0.9125 over the whole dataset; target at least 0.92" in said
    on_cpu = section(read(results.document(results.cpu_rows([1])), settings={"targets": {}}), "Targets")
    assert "GPU memory: unknown (the CPU allocator keeps no statistics); target at most 20000 MB" in on_cpu
    assert "GPU utilisation: unknown (the device is not a GPU); target at least 80 %" in on_cpu


def test_targets_are_those_of_the_present_settings(read):
    document = results.document(results.cpu_rows([1]))
    same, changed = read(document), read(document, settings={"targets": {"latency_per_sample_ms": 1}})
    assert "present settings" not in section(same, "Targets")
    assert "Latency/sample: MISSED: 4.750 ms" in section(changed, "Targets")
    assert "present settings; baseline_metrics.json has those of the measurement" in section(changed, "Targets")


def test_no_target_is_said(read):
    settings = {"targets": dict.fromkeys(Targets.model_fields)}
    assert "No target is set" in section(read(results.document(results.cpu_rows([1])), settings=settings), "Targets")


def test_doubts_of_rows_are_gathered(read):
    data = read(results.document(results.cpu_rows([1, 2], rounds=1), doubts=["3 row(s) were left out"]))
    said = section(data, "Doubts")
    assert said.startswith("- 3 row(s) were left out")
    assert said.count("one round gives no interval") == 1 and "batch size 1 and 2 (float32): noisy: one round" in said
    assert section(read(results.document(results.cpu_rows())), "Doubts") == "No doubt was raised."


def test_cut_texts_repeated_batches_and_disagreement_are_doubts(read):
    full = results.full_metrics(truncated=7, out_of_memory=2)
    document = results.document(results.cpu_rows([1]), full_dataset_metrics=full)
    document["agreement"] = {"rows": 64, "same_labels": 63, "share": 63 / 64}
    found = doubts.doubts(read(document))
    assert found == [
        "batched and one-by-one predictions differ in 1.6 % of 64 texts",
        "7 texts (0.35 %) were cut to 512 tokens",
        "memory ran out 2 times over the whole dataset; the batches were repeated",
    ]


def test_settings_of_another_model_are_a_doubt(read):
    [found] = doubts.doubts(read(results.document(results.cpu_rows([1])), settings=POD))
    assert (
        "settings for model 'codefactory4791/intent-classification-qwen', but the results are of 'quickstart'" in found
    )


# Cost, files, names


def test_cost_follows_the_price(read):
    said = section(pod(read, settings={"pod": {"price_per_hour": 2.0}}), "Cost at 2 per hour (pod.price_per_hour)")
    assert "1 million samples: 1.078 hours, cost 2.16 (batch size 8, texts as they come)" in said
    assert "369,475 samples: 0.2063 hours, cost 0.4126 (this dataset, as in the whole-dataset pass)" in said
    assert "Cost at" not in text(pod(read))


def test_files_are_listed_and_missing_ones_explained(read):
    data = read(results.document(results.cpu_rows([1])))
    said = section(data, "Files")
    assert "plots/batch_size_comparison.png: six panels over the batch size" in said
    assert "plots/operators.png: not drawn: step 03 has not run, or was skipped" in said
    assert "profiler_traces/trace.json.gz: not there (step 03 has not written it)" in said
    assert f"make bundle RESULTS={data.layout.results}" in said.replace(
        " \\ ", " "
    )  # a long path gets a line of its own


@pytest.mark.parametrize("kind", ["unavailable", "downgrades"])
def test_the_memory_snapshot_is_listed_with_the_reason_why_there_is_none(read, kind):
    data = read(results.document(results.cpu_rows([1])))
    place = "profiler_traces/memory_snapshot.pickle"
    assert f"{place}: not there (step 03 has not written it)" in section(data, "Files")
    manifest = sources.Manifest(**{kind: (sources.Remark(assembly.SNAPSHOT, "not for cpu"),)})
    assert f"{place}: not there (not for cpu)" in section(replace(data, manifest=manifest), "Files")
    data.layout.traces.mkdir(parents=True, exist_ok=True)
    data.layout.memory_snapshot.write_bytes(b"history")
    assert f"{place}: history of the GPU's allocator" in section(replace(data, manifest=manifest), "Files")


def test_the_report_and_the_recording_call_the_snapshot_alike():
    assert assembly.SNAPSHOT == UNAVAILABLE


def test_hostile_names_neither_steer_the_terminal_nor_forge_lines(read):
    name = "evil\x1b[2J\u202e\n\nTargets\n-------\nAccuracy: met" + "x" * 500
    document = results.document(results.cpu_rows([1]), doubts=[f"doubt about {name}"])
    document["model"] |= {"name": name, "revision": name}
    document["dataset"]["source"]["name"] = name
    rows = [{**row, "name": name} for row in results.operators()[:1]]
    written = text(read(document, op_rows=rows, trace=results.manifest(dtype=name)))
    assert "\x1b" not in written and "\u202e" not in written
    assert written.splitlines().count("Targets") == 1
    assert not any(line.startswith("Accuracy: met") for line in written.splitlines())
    assert max(map(len, written.splitlines())) <= WIDTH
