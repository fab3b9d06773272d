"""What the report says of a trace: the verdict, every wait with its cause, memory, and what it makes of the sweep."""

from dataclasses import replace
from functools import cache

import pytest
from msgspec import structs

from boundby import files
from boundby.trace.gaps import CAUSES
from tests import baseline_document as results
from tests import trace_document as traces
from tests.diagnosed_rows import diagnosed
from tests.report_reading import Reader, drawings, run_in, section, text, traced
from utils.report import profiling, sources
from utils.report.sources import ReportData

HEADING = "What the machine waited for, in the trace"


@cache
def rows() -> list[dict]:
    return diagnosed(results.cpu_rows([8]))


def reported(read: Reader, *found: dict, is_swept: bool = True, **changes: object) -> ReportData:
    """Read the results of the offline default with these traces of step 03."""
    traces.store(run_in(read.folder).layout, *found, **changes)
    return read(results.document(rows() if is_swept else []), **traced())


def said(read: Reader, *found: dict, **changes: object) -> str:
    return section(reported(read, *found, **changes), HEADING)


def test_causes_that_are_small_or_past_help_are_named_without_a_gain(read):
    [device] = traces.gpu()["devices"]
    small = {**device, "idle_by_cause_ms": {**device["idle_by_cause_ms"], "untraced": 0.003, "allocator": 0.002}}
    whole = said(read, traces.gpu(devices=[small]))
    assert "below 0.1 %: untraced and allocator." in whole and "launch latency 0.1000 0.2 1.01" in whole
    whole = said(read, traces.gpu(devices=[{**device, "idle_by_cause_ms": {"untraced": 10.0}}]))
    assert "untraced 10.00 25.0 -" in whole


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("trace", [traces.gpu, traces.cpu])
def test_every_cause_is_explained(read, cause, trace):
    [device] = trace()["devices"]
    data = reported(read, trace(devices=[{**device, "idle_by_cause_ms": {cause: 4.0}, "idle_details": {}}]))
    name = "between operators" if cause == "launch" and device["device"] is None else cause.replace("_", " ")
    assert f"{name} 4.000 10.0" in section(data, HEADING)
    assert section(data, "What these causes are").startswith(f"- {name}: ")


def test_inconclusive_trace_gives_its_reasons_and_promises_nothing(read):
    trace = traces.verdict(
        traces.gpu(), bound="inconclusive", share_of_limit=None, confidence="low", doubts=["steps: 2 lost"]
    )
    whole = said(read, trace)
    assert whole.startswith("Nothing can be concluded from this trace (confidence low).")
    assert "- doubt: steps: 2 lost" in whole
    assert "To do" not in whole and "promise" not in whole and "input 24.00 60.0 -" in whole
    assert profiling.WHOM_TO_BELIEVE not in whole


def test_findings_that_the_verdict_repeats_are_said_once(read):
    trace = traces.verdict(traces.gpu(), doubts=["zero: 5 pieces last 0 ns"])
    whole = said(read, {**trace, "findings": [{"kind": "zero", "is_fatal": False, "text": "5 pieces last 0 ns"}]})
    assert whole.count("5 pieces last 0 ns") == 1


# The sweep beside the trace


def swept(data: ReportData, **verdict: object) -> str:
    """Return the section with another verdict of the sweep at the batch size of the trace."""
    size, dtype = data.manifest.batch_size, data.manifest.dtype
    for row in data.rows:
        if (row["dtype"], row["batch_size"]) == (dtype, size):
            row["verdict"] = structs.replace(row["verdict"], **{"alternatives": (), **verdict})
    return section(data, HEADING)


def test_verdict_is_compared_with_that_of_the_sweep_at_its_batch_size(read):
    whole = swept(reported(read, traces.gpu()), bound="memory")
    assert profiling.WHOM_TO_BELIEVE in whole
    data = reported(read, traces.gpu())
    data = replace(data, manifest=sources.CaptureManifest(dtype=data.manifest.dtype, batch_size=7))
    assert profiling.WHOM_TO_BELIEVE not in section(data, HEADING)


@pytest.mark.parametrize("bound", ["compute", "under_utilised", "mixed"])
def test_verdicts_that_leave_the_same_open_need_no_word(read, bound):
    whole = swept(reported(read, traces.verdict(traces.cpu(), alternatives=[])), bound=bound, alternatives=("compute",))
    assert profiling.WHOM_TO_BELIEVE not in whole


# Memory


@pytest.mark.parametrize("memory", [[], None])
def test_trace_without_memory_says_why_there_is_no_picture(read, memory):
    data = reported(read, traces.cpu(memory=memory), is_swept=False)
    assert "Memory in the trace" not in text(data)
    assert drawings(data)["trace_memory.png"] == "not drawn: the trace holds no changes of memory (trace.memory)"
    assert drawings(data)["trace_timeline.png"] is None


# Reading


def test_trace_of_another_model_is_not_told(read):
    traces.store(run_in(read.folder).layout, traces.gpu())
    other = results.document(results.cpu_rows([1]))
    read({**other, "model": {**other["model"], "fingerprint": "other"}}, **traced())
    files.write_json(run_in(read.folder).layout.metrics, other)
    data = sources.read(run_in(read.folder))
    assert data.operators == data.trace == sources.Missing("step 03 was run on another model than the sweep")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"schema_version": 99}',
        '{"schema_version": 2, "traces": [], "slowest": null}',
        '{"schema_version": 2, "traces": [3], "slowest": 0}',
        '{"schema_version": 2, "traces": [{"verdict": {"bound": "input"}, "devices": []}], "slowest": 0}',
    ],
)
def test_damaged_analysis_is_a_reason_and_no_error(read, content):
    files.write_text(run_in(read.folder).layout.trace_analysis, content)
    data = read(results.document(results.cpu_rows([1])), **traced())
    assert isinstance(data.trace, sources.Missing)
    assert data.trace.reason.startswith("trace_analysis.json cannot be read: ")
    assert "trace_analysis.json cannot be read: " in section(data, HEADING)
    assert "version 99" in data.trace.reason or "99" not in content


def test_of_several_ranks_the_slowest_is_told(read):
    assert reported(read, traces.cpu(), traces.gpu(), slowest=1).trace["verdict"].bound == "input"


def test_section_of_a_window_without_time_is_rendered(read):
    [device] = traces.cpu()["devices"]
    empty = {**device, "window_ms": 0.0, "busy_ms": 0.0, "idle_ms": 0.0, "idle_by_cause_ms": dict.fromkeys(CAUSES, 0.0)}
    steps = {"numbers": [], "expected": None, "median_ms": None, "q1_ms": None, "q3_ms": None}
    data = reported(read, traces.cpu(devices=[empty], steps=steps), is_swept=False)
    assert "none are marked" in section(data, HEADING) and HEADING in text(data)
    assert drawings(data)["trace_timeline.png"] == "not drawn: nothing in the trace takes time"
