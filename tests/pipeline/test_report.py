"""The report: the measured values in their places, a reason for everything that is not known, advice that follows."""

import argparse
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boundby import files
from tests import baseline_document as results
from utils.artifacts import Layout
from utils.baseline import Baseline
from utils.cli import DEFAULT_CONFIG, ROOT, Run
from utils.config import Targets
from utils.console import Console
from utils.errors import InputError
from utils.report import advice, assembly, batch_sizes, doubts, pictures, sources
from utils.report.typesetting import WIDTH, clean, command_lines, number, paragraph, table, times

HEADINGS = [
    "What was measured on what",
    "Full Dataset Performance",
    "Batch Size Analysis",
    "Bottleneck Analysis",
    "Targets",
    "Doubts",
    "What to do next",
    "Files",
]


@pytest.fixture
def read(tmp_path):
    """Store results and read them as step 04 does: `read(document, settings=…, overrides=…, **what_else_is_stored)`."""

    def read_document(
        document: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        **stored: Any,
    ) -> sources.ReportData:
        config = results.config(tmp_path / "results", **(settings or {}))
        layout = Layout.of(config)
        results.store(layout, document, **stored)
        args = argparse.Namespace(config=DEFAULT_CONFIG, overrides=list(overrides), trust_remote_code=False)
        return sources.read(Run(config, layout, args, Console(io.StringIO(), io.StringIO())))

    return read_document


def traced(device: bool = False) -> dict[str, Any]:
    """Return what step 03 leaves."""
    return {"op_rows": results.operators(device), "trace": results.manifest(unavailable=[] if device else REMARKS)}


REMARKS = [{"what": "device events", "reason": "the profiler of this torch records none for cpu"}]
POD = {
    "model": {"name": "codefactory4791/intent-classification-qwen"},
    "dataset": {"hf_name": "codefactory4791/amazon_test"},
    "targets": {},
}


def pod(read, document: Mapping[str, Any] | None = None, **others: Any) -> sources.ReportData:
    """Read the results of the pod run."""
    settings = {**POD, **others.pop("settings", {})}
    return read(document or results.gpu_document(), settings, machine=results.GPU_MACHINE, **others)


def section(data: sources.ReportData, title: str) -> str:
    """Return one section of the report as one line, so that line breaks do not matter."""
    _, _, rest = assembly.text(data).partition(f"\n\n{title}\n{'-' * len(title)}\n")
    return flat(rest.partition("\n\n\n")[0])


def flat(text: str) -> str:
    return " ".join(text.split())


def head(data: sources.ReportData) -> str:
    return flat(assembly.text(data).partition("What was measured on what")[0])


def advised(data: sources.ReportData) -> list[str]:
    return [each.title for each in advice.advice(data)]


def commands(data: sources.ReportData) -> dict[str, str | None]:
    return {each.title: each.command for each in advice.advice(data)}


# The whole


def test_sections_stand_in_the_order_of_use(read):
    lines = assembly.text(read(results.document(results.cpu_rows()), **traced())).splitlines()
    titles = [
        line
        for line, below in zip(lines, lines[1:], strict=False)
        if below and set(below) == {"-"} and len(below) == len(line)
    ]
    assert titles == HEADINGS


ODD_DOCUMENTS = {
    "offline default": lambda: results.document(results.cpu_rows()),
    "pod": lambda: results.gpu_document(),
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
    text = assembly.text(replace(data, pictures=dict.fromkeys([data.layout.batch_size_plot, data.layout.heatmap_plot])))
    too_long = [line for line in text.splitlines() if len(line) > WIDTH and str(data.layout.results) not in line]
    assert too_long == []
    assert text.isascii()
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b|\{|\}", text)


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


def test_arithmetic_of_the_report_loads_no_torch():
    modules = "utils.report.assembly, utils.report.pictures, utils.plots.batch_size_comparison, utils.plots.operators"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# The first lines


def test_synthetic_run_says_so_first(read):
    assert "SYNTHETIC DATA" in assembly.text(read(results.document(results.cpu_rows()))).splitlines()[4]
    assert "SYNTHETIC" not in assembly.text(pod(read))


def test_unfinished_run_says_so_first_and_how_to_go_on(read):
    document = results.document(results.cpu_rows([1, 2]), complete=False, full_dataset_metrics=None)
    document["full_dataset_reason"] = "not reached yet"
    data = read(document, overrides=["model.dtype=float32"])
    assert "INCOMPLETE" in head(data)
    assert "python run_pipeline.py --from 2 --resume model.dtype=float32" in head(data)
    assert "Accuracy: unknown (not reached yet)" in head(data)
    assert advised(data)[0] == "Finish the measurement"
    assert "INCOMPLETE" not in head(read(results.document(results.cpu_rows([1, 2]))))


def test_summary_gives_the_five_things_to_know(read):
    said = head(pod(read))
    assert "BASELINE REPORT: codefactory4791/intent-classification-qwen on NVIDIA A100-SXM4-40GB" in said
    assert "measured 2026-08-22 10:15:30 UTC by boundby 0.1.0" in said
    assert "Optimal batch size: 8 in float32: 257.7 samples/s +- 0.4 %, 4.001 ms per sample" in said
    assert "Accuracy: 0.9125 [0.9116, 0.9134], F1 macro 0.8934, on 369,475 texts" in said
    assert "Whole dataset: 742.6 s, 497.5 samples/s" in said
    assert "Targets: 3 met and 2 missed" in said
    assert "First thing to do: Run the model in bfloat16 (measured 4.9 times the throughput)" in said


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
    left = sources._machine(data.layout, data.document["machine_fingerprint"])
    assert left == (None, None, f"no file in {data.layout.results} describes the machine {results.CPU_FINGERPRINT}")
    files.write_json(data.layout.run, {**elsewhere, "machine_fingerprint": results.CPU_FINGERPRINT})
    assert sources._machine(data.layout, results.CPU_FINGERPRINT)[0] == {"cpu": "a laptop"}


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


# The sweep


def test_sweep_table_has_the_measured_values(read):
    rows = results.cpu_rows()
    lines = assembly.text(read(results.document(rows))).splitlines()
    cells = {line.split()[0]: line.split() for line in lines if line.strip()[:2].strip().isdigit()}
    assert cells["2"] == ["2", "ok", "418.6", "0.1", "2.389", "4.414", "8.444", "23,442", "32,107", "27.0", "702.0"]
    assert cells["16"][6] == "-"


def test_sweep_says_why_a_batch_size_has_no_numbers(read):
    said = section(pod(read), "Batch Size Analysis")
    assert "oom at batch size 64: OutOfMemoryError: CUDA out of memory. Tried to allocate 15.06 GiB" in said
    assert "skipped_oom at batch size 128: batch size 64 ran out of memory" in said
    assert "95th percentile unknown at batch size 16 and 32: 50 timed batches; at least 59 support it" in said


def test_boundless_interval_is_no_figure(read):
    rows = results.cpu_rows([1])
    rows[0]["throughput_half_width_pct"] = 8.4e13
    data = read(results.document(rows))
    assert "386.2 samples/s +- >100 %" in head(data)
    assert "1 ok 386.2 >100 2.590" in section(data, "Batch Size Analysis")


def test_choices_have_their_reasons(read):
    said = section(pod(read), "Batch Size Analysis")
    assert "Optimal batch size: 8 (257.7 samples/s): the smallest batch size whose throughput interval" in said
    assert "Highest throughput: 16 (265.9 samples/s)" in said
    assert "Within GPU memory: 16 (265.9 samples/s): the fastest whose peak is at most 20000 MB" in said
    assert "Optimal batch size: 64 (1,264 samples/s)" in said  # bfloat16
    unset = section(read(results.document(results.cpu_rows())), "Batch Size Analysis")
    assert "Within GPU memory: none (targets.gpu_memory_mb is not set)" in unset


# The bottleneck


def test_bottleneck_claims_no_verdict_and_reads_what_can_be_read(read):
    said = section(read(results.document(results.cpu_rows()), **traced()), "Bottleneck Analysis")
    assert "Bound by: unknown (no verdict is made by this version)" in said
    assert "Energy per sample: unknown (energy is not measured by this version)" in said
    assert "Of the operators' own CPU time, 62 % is matrix products and 11 % fused attention; the other 27 %" in said
    assert "At batch size 2, 27.0 % of the tokens are padding: removing padding could save at most 27.0 %" in said
    assert "Tokenizing a batch of 2 takes 0.4487 ms, the forward 4.414 ms (median): 10 % on top" in said
    assert "2.16 times cheaper at batch size 32 than at 1" in said


def test_operators_are_added_up_over_their_shapes(read):
    data = read(results.document(results.cpu_rows([1])), **traced())
    addmm = data.operators[0]
    assert (addmm["name"], addmm["calls"], addmm["device_total_ms"]) == ("aten::addmm", 192, None)
    assert addmm["cpu_self_ms"] == pytest.approx(1.62 * 52) and addmm["cpu_self_pct"] == pytest.approx(52)
    said = section(data, "Bottleneck Analysis")
    assert "Top operators by own CPU time (3 of 3 batches of 8, float32;" in said
    assert "aten::addmm 192 84.24 52.0" in said
    assert "device events: unknown (the profiler of this torch records none for cpu)" in said


def test_gpu_time_is_counted_once_per_kernel(read):
    said = section(pod(read, **traced(device=True)), "Bottleneck Analysis")
    assert "Of the GPU time, 68 % is matrix products and 9 % fused attention; the other 23 %" in said
    assert "aten::linear 288 4.860 3.0 285.6 68.0" in said


def test_missing_trace_is_said_and_advised(read):
    data = read(results.document(results.cpu_rows()))
    assert "Top operators: unknown (step 03 has not run, or was skipped)" in section(data, "Bottleneck Analysis")
    assert commands(data)["Record a trace"] == "python run_pipeline.py --from 3"
    off = read(data.document, settings={"trace": {"enabled": False}})
    assert commands(off)["Record a trace"] == "python run_pipeline.py --from 3 trace.enabled=true"


def test_trace_that_failed_has_its_reason(read):
    lost = results.manifest(
        steps_recorded=0, downgrades=[{"what": "trace", "reason": "the profiler failed with OSError"}]
    )
    data = read(results.document(results.cpu_rows([1])), trace=lost)
    assert "Top operators: unknown (trace: the profiler failed with OSError)" in section(data, "Bottleneck Analysis")
    assert "trace: the profiler failed with OSError" in section(data, "Doubts")


def test_trace_of_another_model_is_not_reported_as_of_this_one(read):
    document = results.document(results.cpu_rows([1]))
    data = read(document, **traced())
    other = {"parts": {"inputs": {"model": "another"}}}
    files.write_json(data.layout.receipt("03"), other)
    operators, reason = sources._operators(data.layout, document, data.manifest)
    assert operators == () and reason == "the trace is of another model than the sweep"


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
    assert said.count("one round gives no interval") == 1 and "batch size 1 and 2 (float32): one round" in said
    assert section(read(results.document(results.cpu_rows())), "Doubts") == "No doubt was raised."


def test_cut_texts_halved_batches_and_disagreement_are_doubts(read):
    full = results.full_metrics(truncated=7, batches_halved=2)
    document = results.document(results.cpu_rows([1]), full_dataset_metrics=full)
    document["agreement"] = {"rows": 64, "same_labels": 63, "share": 63 / 64}
    found = doubts.doubts(read(document))
    assert found == [
        "batched and one-by-one predictions differ in 1.6 % of 64 texts",
        "7 texts (0.35 %) were cut to 512 tokens",
        "2 batches of the whole dataset ran out of memory and were halved",
    ]


def test_settings_of_another_model_are_a_doubt(read):
    [found] = doubts.doubts(read(results.document(results.cpu_rows([1])), settings=POD))
    assert (
        "settings for model 'codefactory4791/intent-classification-qwen', but the results are of 'quickstart'" in found
    )


# Advice


def test_advice_is_ordered_by_its_gain(read):
    data = pod(read, **traced(device=True))
    gains = [each.gain for each in advice.advice(data) if each.gain]
    assert gains == sorted(gains, reverse=True) and len(gains) == 3
    assert advised(data)[:3] == [
        "Run the model in bfloat16",
        "Use batch size 8",
        "Batch texts of similar length together",
    ]
    said = section(data, "What to do next")
    assert "Use batch size 8: measured 2.84 times the throughput" in said
    assert "257.7 samples/s against 90.71 at batch size 1; a batch then takes 31.67 ms instead of 11.91 ms." in said
    assert "Batch texts of similar length together: at most 2.27 times the throughput" in said


def test_command_keeps_the_settings_of_the_run_and_replaces_its_own(read):
    data = pod(read, overrides=["model.dtype=float32", "profiling.dtypes=[float32,bfloat16]"])
    [command] = [each.command for each in advice.advice(data) if each.title == "Run the model in bfloat16"]
    folder = f"output.results_dir={data.layout.results}-bfloat16"
    assert command == f"python run_pipeline.py --from 2 model.dtype=bfloat16 profiling.dtypes=null {folder}"


def test_command_names_the_configuration_unless_it_is_the_default(monkeypatch):
    monkeypatch.chdir(ROOT)

    def command(config: Path) -> str:
        return sources.Command.of(
            argparse.Namespace(config=config, overrides=["a.b=c d"], trust_remote_code=True)
        ).run()

    assert command(DEFAULT_CONFIG) == "python run_pipeline.py --trust-remote-code 'a.b=c d'"
    assert command(ROOT / "configs" / "quickstart.yaml").startswith(
        "python run_pipeline.py --config configs/quickstart.yaml"
    )


def test_noisy_rows_are_measured_again_for_longer(read):
    data = read(results.document(results.cpu_rows(noisy=[4, 16])))
    command = commands(data)["Measure noisy batch sizes again"]
    assert "'profiling.batch_sizes=[4,16]' profiling.max_seconds_per_batch_size=30" in command
    assert "Measure noisy batch sizes again" not in advised(read(results.document(results.cpu_rows())))


def test_slow_tokenizer_is_advice(read):
    slow = results.Speed(results.CPU.fixed_s, results.CPU.token_s, tokenize_s=30e-6)
    title = "Tokenize ahead, in another thread or process"
    [found] = [
        each for each in advice.advice(read(results.document(results.cpu_rows(speed=slow)))) if each.title == title
    ]
    assert 1 < found.gain <= 2
    assert title not in advised(read(results.document(results.cpu_rows())))


def test_rising_throughput_asks_for_larger_batches(read):
    data = pod(read, results.gpu_document(results.gpu_rows(["bfloat16"], [1, 4, 8], {})))
    assert "'profiling.batch_sizes=[8,16,32]'" in commands(data)["Try larger batch sizes"]
    assert "Try larger batch sizes" not in advised(read(results.document(results.cpu_rows())))


def test_float32_alone_on_a_gpu_asks_for_bfloat16(read):
    data = pod(read, results.gpu_document(results.gpu_rows(["float32"])))
    assert "'profiling.dtypes=[float32,bfloat16]'" in commands(data)["Measure bfloat16 beside float32"]
    assert "Measure bfloat16 beside float32" not in advised(pod(read))


def test_model_that_does_not_fit_is_the_first_thing(read):
    rows = results.gpu_rows(["float32"], [1, 4], {"float32": 1})
    data = pod(read, results.gpu_document(rows, full_dataset_metrics=None))
    assert advised(data) == ["Make the model fit"]
    assert "profiling.max_length=256" in commands(data)["Make the model fit"]


def test_failed_batch_sizes_come_first_with_their_message(read):
    data = read(results.document(results.cpu_rows(failed=[4])))
    assert advised(data)[0] == "Find out why batch sizes failed"
    assert "Batch size 4 failed: RuntimeError: kernel missing." in section(data, "What to do next")


def test_missed_targets_point_to_what_would_meet_them(read):
    strict = {"targets": {"latency_per_sample_ms": 4.5, "throughput_samples_per_sec": 1e6, "gpu_memory_mb": 5000}}
    document = results.gpu_document(full_dataset_metrics=None)
    why = {each.title: each.why for each in advice.advice(pod(read, document, settings=strict))}
    assert "Meet the latency target" not in why  # batch size 8 takes 4.0 ms
    assert why["Meet the memory target"].startswith("Batch size 1 (90.71 samples/s in the sweep)")
    assert "The sweep reached 265.9 samples/s at batch size 16" in why["Meet the throughput target"]


def test_cut_texts_may_be_measured_longer_up_to_what_the_model_takes(read):
    full = results.full_metrics(truncated=7)
    data = read(results.document(results.cpu_rows([1]), full_dataset_metrics=full))
    assert "profiling.max_length=1024" in commands(data)["See whether the cut texts cost accuracy"]
    document = results.document(results.cpu_rows([1]), full_dataset_metrics=full, max_length=1024)
    assert "See whether the cut texts cost accuracy" not in advised(read(document))


# Cost, files, names


def test_cost_follows_the_price(read):
    said = section(pod(read, settings={"pod": {"price_per_hour": 2.0}}), "Cost at 2 per hour (pod.price_per_hour)")
    assert "1 million samples: 1.078 hours, cost 2.16 (batch size 8, texts as they come)" in said
    assert "369,475 samples: 0.2063 hours, cost 0.4126 (this dataset, as in the whole-dataset pass)" in said
    assert "Cost at" not in assembly.text(pod(read))


def test_files_are_listed_and_missing_ones_explained(read):
    data = read(results.document(results.cpu_rows([1])))
    drawn = {data.layout.batch_size_plot: None, data.layout.operators_plot: "not drawn: no trace"}
    said = section(replace(data, pictures=drawn), "Files")
    assert "plots/batch_size_comparison.png six panels over the batch size" in said
    assert "plots/operators.png not drawn: no trace" in said
    assert "profiler_traces/trace.json.gz not there (step 03 has not written it)" in said
    assert f"make bundle RESULTS={data.layout.results}" in said.replace(
        " \\ ", " "
    )  # a long path gets a line of its own


def test_hostile_names_neither_steer_the_terminal_nor_forge_lines(read):
    name = "evil\x1b[2J\u202e\n\nTargets\n-------\nAccuracy: met" + "x" * 500
    document = results.document(results.cpu_rows([1]), doubts=[f"doubt about {name}"])
    document["model"] |= {"name": name, "revision": name}
    document["dataset"]["source"]["name"] = name
    rows = [{**row, "name": name} for row in results.operators()[:1]]
    text = assembly.text(read(document, op_rows=rows, trace=results.manifest(dtype=name)))
    assert "\x1b" not in text and "\u202e" not in text
    assert text.splitlines().count("Targets") == 1
    assert not any(line.startswith("Accuracy: met") for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= WIDTH


# Reading


def test_documents_of_these_tests_are_like_the_real_one(tmp_path):
    config = results.config(tmp_path / "results")
    run = Run(config, Layout.of(config), argparse.Namespace(), Console(io.StringIO(), io.StringIO()))
    fixture = results.document([], full_dataset_metrics=None)
    facts = {key: fixture["dataset"][key] for key in ("path", "bytes", "sha256")}
    receipt = SimpleNamespace(
        source=fixture["dataset"]["source"], dataset=facts, rows=2000, labels_sha256="", synthetic=True, doubts=[]
    )
    real = Baseline(run, receipt).document(complete=False)
    assert list(real) == list(fixture)
    assert set(real["dataset"]) == set(fixture["dataset"])
    assert real["optimal"] == fixture["optimal"]


def test_document_without_a_model_can_be_reported(read):
    document = results.document([], complete=False, full_dataset_metrics=None, model={}, device={}, agreement=None)
    said = section(read(document), "What was measured on what")
    assert said.startswith("Model: unknown (it was not loaded yet)")


def test_missing_metrics_name_the_command(read, tmp_path):
    config = results.config(tmp_path / "nothing")
    args = argparse.Namespace(config=DEFAULT_CONFIG, overrides=["model.dtype=float16"], trust_remote_code=False)
    run = Run(config, Layout.of(config), args, Console(io.StringIO(), io.StringIO()))
    with pytest.raises(
        InputError, match=r"no metrics to report; run `python run_pipeline.py --from 1 model.dtype=float16`"
    ):
        sources.read(run)
    files.write_text(run.layout.metrics, "{")
    with pytest.raises(InputError, match="baseline_metrics.json: cannot be read"):
        sources.read(run)
    files.write_json(run.layout.metrics, {"schema_version": 99})
    with pytest.raises(InputError, match="is of version 99, this program reads 1"):
        sources.read(run)


def test_pictures_without_rows_are_not_drawn_and_old_ones_go(read):
    data = read(results.document([], complete=False, full_dataset_metrics=None))
    for path in (data.layout.batch_size_plot, data.layout.operators_plot):
        files.write_text(path, "of an earlier run")
    drawn = pictures.draw(data)
    assert drawn == {
        data.layout.batch_size_plot: "not drawn: no batch size was measured yet",
        data.layout.heatmap_plot: "not drawn: no batch size was measured yet",
        data.layout.operators_plot: "not drawn: step 03 has not run, or was skipped",
    }
    assert list(data.layout.plots.iterdir()) == []


def step_04(tmp_path: Path, *overrides: str) -> int:
    step = importlib.import_module("scripts.04_visualize_results")
    config = str(ROOT / "configs" / "quickstart.yaml")
    return step.main(["--config", config, f"output.results_dir={tmp_path / 'results'}", *overrides])


def test_step_04_draws_and_writes_with_what_there_is(tmp_path, capsys):
    layout = Layout.of(results.config(tmp_path / "results"))
    results.store(layout, results.document(results.cpu_rows([1, 2])))
    assert step_04(tmp_path) == 0
    said = capsys.readouterr().out
    assert layout.batch_size_plot.read_bytes()[:4] == layout.heatmap_plot.read_bytes()[:4] == b"\x89PNG"
    assert not layout.operators_plot.exists()
    assert "operators.png: not drawn: step 03 has not run, or was skipped" in said
    assert "Optimal batch size:" in said and f"wrote {layout.report}" in said
    assert "operators.png" in layout.report.read_text(encoding="utf-8")


def test_step_04_without_metrics_ends_with_exit_code_2(tmp_path, capsys):
    assert step_04(tmp_path) == 2
    assert "there are no metrics to report; run `python run_pipeline.py" in capsys.readouterr().err


# Typesetting


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.012345, "0.01235"), (4.3214, "4.321"), (99.999, "100.00"), (1264.4, "1,264"), (301_412.3, "301,412"),
     (1e-7, "1.000e-07"), (2.5e12, "2.500e+12")],
)  # fmt: skip
def test_numbers_have_four_digits(value, shown):
    assert number(value) == shown


def test_factors_are_short():
    assert [times(factor) for factor in (1.0849, 4.907, 31.4)] == ["1.08", "4.9", "31"]


def test_long_names_lose_their_middle():
    assert clean("a" * 100 + "z" * 100, longest=11) == "aaaaa...zzz"
    assert clean("two\n words\x1b") == "two words"


def test_percent_sign_stays_with_its_number():
    lines = paragraph("word " * 19 + "9999 % more")
    assert lines[0].endswith("word") and lines[1] == "9999 % more"


def test_table_is_aligned():
    assert table(["size\n", "a\nname"], [["1", "x"], ["100", "yy"]], left=[1]) == [
        "size  a",
        "      name",
        "----  ----",
        "   1  x",
        " 100  yy",
    ]


def test_long_command_is_continued_where_its_words_end():
    lines = command_lines("python run.py " + " ".join(f"key{index}=value" for index in range(20)), "  ")
    assert all(len(line) <= WIDTH for line in lines) and len(lines) > 1
    joined = " ".join(line.rstrip("\\").strip() for line in lines)
    assert joined == "python run.py " + " ".join(f"key{index}=value" for index in range(20))
    assert all(line.endswith(" \\") for line in lines[:-1])
