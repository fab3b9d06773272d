"""The sections about the sweep and where its time goes: tables, their gaps, choices, operators."""

import pytest

from boundby import files
from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from tests.report_reading import commands, head, pod, run_in, section, text, traced
from utils.report import sources


def test_sweep_table_has_the_measured_values(read):
    rows = results.cpu_rows()
    lines = text(read(results.document(rows))).splitlines()
    cells = {line.split()[0]: line.split() for line in lines if line.strip()[:2].strip().isdigit()}
    assert cells["2"] == ["2", "ok", "418.5", "0.1", "2.389", "4.414", "8.444", "23,438", "32,101", "27.0", "702.0"]
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
    assert "1 ok 386.2 >100 2.589" in section(data, "Batch Size Analysis")


def test_choices_have_their_reasons(read):
    said = section(pod(read), "Batch Size Analysis")
    assert "Optimal batch size: 8 (257.7 samples/s): the smallest batch size whose throughput interval" in said
    assert "Highest throughput: 16 (265.9 samples/s)" in said
    assert "Within GPU memory: 16 (265.9 samples/s): the fastest whose peak is at most 20000 MB" in said
    assert "Optimal batch size: 64 (1,264 samples/s)" in said  # bfloat16
    unset = section(read(results.document(results.cpu_rows())), "Batch Size Analysis")
    assert "Within GPU memory: none (targets.gpu_memory_mb is not set)" in unset


# Where the time goes


def test_time_is_divided_by_operators_padding_and_tokenizing(read):
    said = section(read(results.document(results.cpu_rows()), **traced()), "Where the Time Goes")
    assert "Of the operators' own CPU time, 62 % is matrix products and 11 % fused attention; the other 27 %" in said
    assert (
        "At batch size 2, 27.0 % of the tokens are padding; what removing it could gain stands with the verdict" in said
    )
    assert "Tokenizing a batch of 2 takes 0.4487 ms, the forward 4.414 ms (median): 10 % on top" in said
    assert "2.16 times cheaper at batch size 32 than at 1" in said


def test_operators_are_added_up_over_their_shapes(read):
    data = read(results.document(results.cpu_rows([1])), **traced())
    addmm = data.operators[0]
    assert (addmm["name"], addmm["calls"], addmm["device_total_ms"]) == ("aten::addmm", 192, None)
    assert addmm["cpu_self_ms"] == pytest.approx(1.62 * 52) and addmm["cpu_self_pct"] == pytest.approx(52)
    said = section(data, "Where the Time Goes")
    assert "Top operators by own CPU time (3 of 3 batches of 8, float32):" in said
    assert "The profiler slows what it watches: read shares, not times." in said
    assert "aten::addmm 192 84.24 52.0" in said
    assert "device events: unknown (the profiler of this torch records none for cpu)" in said


def test_gpu_time_is_counted_once_per_kernel(read):
    said = section(pod(read, **traced(device=True)), "Where the Time Goes")
    assert "Of the GPU time, 68 % is matrix products and 9 % fused attention; the other 23 %" in said
    assert "aten::linear 288 4.860 3.0 285.6 68.0" in said


def test_picture_stands_in_the_section_it_belongs_to_where_it_was_drawn(read):
    data = read(results.document(diagnosed(results.cpu_rows([1]))))
    named = "Picture: plots/batch_size_comparison.png Picture: plots/metrics_heatmap.png"
    assert section(data, "Batch Size Analysis").endswith(named)
    assert "Picture: plots/roofline.png" in section(data, "Verdict")
    assert "Picture:" not in section(data, "Where the Time Goes")


def test_missing_trace_is_said_and_advised(read):
    data = read(results.document(results.cpu_rows()))
    assert "Top operators: unknown (step 03 has not run, or was skipped)" in section(data, "Where the Time Goes")
    assert commands(data)["Record a trace"] == "python run_pipeline.py --from 3"
    off = read(data.document, settings={"trace": {"enabled": False}})
    assert commands(off)["Record a trace"] == "python run_pipeline.py --from 3 trace.enabled=true"


def test_trace_that_failed_has_its_reason(read):
    lost = results.manifest(
        steps_recorded=0, downgrades=[{"what": "trace", "reason": "the profiler failed with OSError"}]
    )
    data = read(results.document(results.cpu_rows([1])), trace=lost)
    assert "Top operators: unknown (trace: the profiler failed with OSError)" in section(data, "Where the Time Goes")
    assert "trace: the profiler failed with OSError" in section(data, "Doubts")


def test_trace_of_another_model_is_not_reported_as_of_this_one(read):
    document = results.document(results.cpu_rows([1]))
    data = read(document, **traced())
    other = {"parts": {"inputs": {"model": "another"}}}
    files.write_json(data.layout.receipt("03"), other)
    assert sources.read(run_in(read.folder)).operators == sources.Missing(sources.OTHER_MODEL)


def test_doubtful_rows_are_named_below_their_table(read):
    rows = results.cpu_rows([1, 2, 4], noisy=[2])
    said = section(read(results.document(rows)), "Batch Size Analysis")
    assert "doubtful: batch size 2 (noisy" in said
    assert "doubtful" not in section(read(results.document(results.cpu_rows([1, 2, 4]))), "Batch Size Analysis")
