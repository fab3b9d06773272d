"""The sections about the sweep and where its time goes: tables, their gaps, choices, operators."""

import pytest

from boundby import files
from tests import baseline_document as results
from tests.report_reading import commands, head, run_in, section, traced
from utils.report import sources


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
    said = section(data, "Operators and batches")
    assert "Top operators by own CPU time (3 of 3 batches of 8, float32):" in said
    assert "The profiler slows what it watches: read shares, not times." in said
    assert "aten::addmm 192 84.24 52.0" in said
    assert "device events: unknown (the profiler of this torch records none for cpu)" in said


def test_missing_trace_is_said_and_advised(read):
    data = read(results.document(results.cpu_rows()))
    assert "Top operators: unknown (step 03 has not run, or was skipped)" in section(data, "Operators and batches")
    assert commands(data)["Record a trace"] == "python run_pipeline.py --from 3"
    off = read(data.document, settings={"trace": {"enabled": False}})
    assert commands(off)["Record a trace"] == "python run_pipeline.py --from 3 trace.enabled=true"


def test_trace_of_another_model_is_not_reported_as_of_this_one(read):
    document = results.document(results.cpu_rows([1]))
    data = read(document, **traced())
    other = {"parts": {"inputs": {"model": "another"}}}
    files.write_json(data.layout.receipt("03"), other)
    assert sources.read(run_in(read.folder)).operators == sources.Missing(sources.OTHER_MODEL)
