"""The sections of the report: the measured values in their places, a reason for everything that is not known."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from boundby import files
from boundby.capture import CaptureManifest, Remark
from boundby.capture.instruments import SNAPSHOT
from boundby.formatting import WIDTH
from tests import baseline_document as results
from tests import predicted_quality as predicted
from tests.diagnosed_rows import diagnosed
from tests.report_reading import commands, head, run_in, section, text, traced
from utils.command.cli import ROOT
from utils.report import assembly, batch_sizes, sources, summary

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
    predicted.store(run_in(read.folder).layout.evaluated)
    data = read(ODD_DOCUMENTS[name](), **traced())
    written = text(data)
    too_long = [line for line in written.splitlines() if len(line) > WIDTH and str(data.layout.results) not in line]
    assert too_long == []
    assert re.sub("[×·±]", "", written).isascii()
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b|\{|\}", written)


@pytest.mark.parametrize("name", ["offline default", "pod", "one round, not finished", "nothing fits"])
def test_every_gap_of_the_sweep_has_its_reason(read, name):
    document = ODD_DOCUMENTS[name]()
    data = read(document)
    written = section(data, "Batch sizes")
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


# What was measured


def test_machine_is_that_of_the_measurement_not_of_the_report(read):
    data = read(results.document(results.cpu_rows([1])))
    files.write_json(data.layout.run, {"machine": {**results.CPU_MACHINE, "cpu": "a laptop"}})
    assert "AMD EPYC 7B13" in section(read(data.document), "What was measured on what, and how")
    data.layout.receipt("02").unlink()
    reason = sources.Missing("no receipt of step 02 describes the machine")
    assert sources.read(run_in(read.folder)).machine == reason


def test_dataset_that_was_not_evaluated_has_the_reason(read):
    data = read(results.document(results.cpu_rows([1]), full_dataset_metrics=None))
    assert section(data, "The whole dataset") == "Not evaluated: evaluation.enabled is false."
    assert commands(data)["Evaluate the dataset"] == "python run_pipeline.py --from 2 evaluation.enabled=true"


# Cost, files, names


def test_earlier_runs_are_listed_with_what_they_hold_and_how_to_remove_them(read):
    data = read(results.document(results.cpu_rows([1])))
    assert "previous/" not in section(data, "Every file")
    (data.layout.results / "previous" / "20261101T000000Z").mkdir(parents=True)
    (data.layout.results / "previous" / "20261101T000000Z" / "run.json").write_bytes(b" " * 3_000_000)
    said = "previous/: 3.000 MB of earlier runs; to remove the older: make prune KEEP=3"
    assert said in section(data, "Every file")


@pytest.mark.parametrize(
    ("vendor", "words"),
    [({}, "compute capability 8.0, CUDA 12.8"), ({"rocm": "7.1.0", "architecture": "gfx942"}, "gfx942, ROCm 7.1.0")],
)
def test_a_gpu_is_told_by_its_vendors_words_by_its_uuid_and_with_those_left_out(read, vendor, words):
    document = results.gpu_document()
    document["device"] |= {"uuid": "5d1d7e4c", "visible_gpus": 4, **vendor}
    written = str(summary.subject(read(document)))
    assert words in written and "5d1d7e4c" in written and "3, left out of the sweep" in written
    assert not (vendor and re.search("CUDA 12|compute capability|NVML", written))


@pytest.mark.parametrize("kind", ["unavailable", "downgrades"])
def test_the_memory_snapshot_is_listed_with_the_reason_why_there_is_none(read, kind):
    data = read(results.document(results.cpu_rows([1])))
    position = "profiler_traces/memory_snapshot.pickle"
    assert f"{position}: not there (step 03 has not written it)" in section(data, "Every file")
    manifest = CaptureManifest(**{kind: (Remark(assembly.SNAPSHOT, "not for cpu"),)})
    assert f"{position}: not there (not for cpu)" in section(replace(data, manifest=manifest), "Every file")
    data.layout.traces.mkdir(parents=True, exist_ok=True)
    data.layout.memory_snapshot.write_bytes(b"history")
    assert f"{position}: history of the GPU's allocator" in section(replace(data, manifest=manifest), "Every file")


def test_the_report_and_the_recording_call_the_snapshot_alike_and_targets_are_those_of_the_present_settings(read):
    assert assembly.SNAPSHOT == SNAPSHOT
    document = results.document(results.cpu_rows([1]))
    same, changed = read(document), read(document, settings={"targets": {"latency_per_sample_ms": 1}})
    assert "present settings" not in section(same, "Targets")
    assert "Time/sample: MISSED: 4.750 ms" in section(changed, "Targets")
    assert "present settings; baseline_metrics.json has those of the measurement" in section(changed, "Targets")


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


def test_what_disturbed_the_chosen_batch_size_is_told_once(read):
    rows, ceilings = results.cpu_rows([1]), "disturbed: the ceilings were measured while others computed"
    rows[0]["doubts"] = ["disturbed: 12 of 16 rounds: others computed", "disturbed: others computed", ceilings]
    rows[0]["doubt_kinds"] = ["disturbed"] * 3
    written = section(read(results.document(rows, doubts=[ceilings])), "Doubts")
    assert written.count("disturbed") == 2 and written.count("12 of 16 rounds") == written.count("ceilings") == 1


def test_boundless_interval_is_no_figure(read):
    rows = results.cpu_rows([1])
    rows[0]["throughput_half_width_pct"] = 8.4e13
    data = read(results.document(rows))
    assert "386 samples/s ± >100 %" in head(data)
    assert "1 ok 386.2 >100 2.432" in section(data, "Batch sizes")


# Where the time goes


def test_operators_are_added_up_over_their_shapes(read):
    data = read(results.document(results.cpu_rows([1])), **traced())
    addmm = data.operators[0]
    assert (addmm["name"], addmm["calls"], addmm["device_total_ms"]) == ("aten::addmm", 192, None)
    assert addmm["cpu_self_ms"] == pytest.approx(1.62 * 52) and addmm["cpu_self_pct"] == pytest.approx(52)
    said = section(data, "Operators of the trace")
    assert "Of 3 of 3 batches of 8 in float32. The profiler slows what it watches" in said
    assert "device events: unknown (the profiler of this torch records none for cpu)" in said


def test_missing_trace_is_said_and_advised(read):
    data = read(results.document(results.cpu_rows()))
    assert "unknown (step 03 has not run, or was skipped)" in section(data, "Operators of the trace")
    assert commands(data)["Record a trace"] == "python run_pipeline.py --from 3"
    off = read(data.document, settings={"trace": {"enabled": False}})
    assert commands(off)["Record a trace"] == "python run_pipeline.py --from 3 trace.enabled=true"
