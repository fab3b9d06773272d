"""Check the traces of a recording, and what was derived from them against what is computed from them anew."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from boundby.trace import OPERATOR_COLUMNS, Analysis, OpStat, analyze, read_trace
from boundby.trace.decoding import MAX_JSON_BYTES
from boundby.trace.source import Source
from utils.profile_check.recording import Cycle, Manifest
from utils.profile_check.subject import Check, Subject, read_strictly
from utils.trace_analysis.document import SCHEMA_VERSION

LARGEST_JSON_BYTES = 640 * 2**20  # above the default of trace.max_mb; 412 MB take about 5 s
TIMES = ("window", "busy", "idle")


def check(subject: Subject, manifest: Manifest) -> tuple[Analysis | None, list[Check]]:
    """Return the analysis of the first trace, None where there is none, and what is to be said about all of them."""
    first, found = None, []
    for recorded, cycle in manifest.recordings.items():
        path = subject.resolved(recorded)
        if not path.is_file() or not path.stat().st_size:
            continue  # the manifest's check has said so
        analysis, checks = _trace(subject, path, cycle)
        found += checks
        if recorded == manifest.trace_path:
            first = analysis
    return first, found


def derived(subject: Subject, analysis: Analysis | None) -> list[Check]:
    """Return what is to be said about the table of operators and the stored analysis."""
    return [*_op_stats(subject, analysis), *_stored_analysis(subject, analysis)]


def _trace(subject: Subject, path: Path, cycle: Cycle) -> tuple[Analysis | None, list[Check]]:
    size, checks = path.stat().st_size, []
    if cycle.trace_bytes not in (None, size):
        checks.append(subject.fault("size", path, f"it has {size:,} bytes, {cycle.trace_bytes:,} were recorded"))
    if max(size, cycle.json_bytes or 0) > LARGEST_JSON_BYTES:
        return None, [*checks, _unpacked(subject, path)]
    try:
        trace = read_trace(path, max_json_bytes=LARGEST_JSON_BYTES)
    except (OSError, ValueError) as error:
        return None, [*checks, subject.unreadable("trace", path, error)]
    analysis = analyze(trace, expected_steps=cycle.steps_expected or cycle.steps_recorded, stacks_expected=cycle.stacks)
    checks += [
        subject.fault(each.kind, path, each.text) if each.is_fatal else subject.note(each.kind, path, each.text)
        for each in analysis.findings
    ]
    if analysis.is_conclusive:
        checks.append(subject.ok("trace", path, f"{analysis.events:,} events, {len(analysis.step_numbers)} steps"))
    return analysis, checks


def _unpacked(subject: Subject, path: Path) -> Check:
    """Return whether a trace too large to be analysed here is whole as far as its compression tells."""
    source, total = Source(path), 0
    for piece in source:
        total += len(piece)
        if total > MAX_JSON_BYTES:
            return subject.fault("trace", path, f"it unpacks to more than {MAX_JSON_BYTES / 2**30:.0f} GiB")
    if source.fault:
        return subject.fault("trace", path, source.fault)
    limit = f"{LARGEST_JSON_BYTES / 1e6:,.0f} MB"
    return subject.note("trace", path, f"{total / 1e6:,.0f} MB of JSON, whole; above {limit} it is not analysed here")


def _op_stats(subject: Subject, analysis: Analysis | None) -> Iterator[Check]:
    path = subject.op_stats
    if not path.is_file():
        if subject.is_pipeline or subject.has_table:
            yield subject.fault("existence", path, "it is missing: the table of operators")
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows, columns = list(reader), reader.fieldnames or ()
        absent = [name for name in OPERATOR_COLUMNS if name not in columns]
        if absent:
            yield subject.fault("columns", path, f"it lacks the column(s) {', '.join(absent)}")
            return
        stored = _stored_totals(rows)
    except (OSError, ValueError, TypeError, OverflowError, csv.Error) as error:
        yield subject.unreadable("table", path, error)
        return
    if analysis is None:
        yield subject.note("totals", path, f"{len(rows)} rows; not compared, as there is no analysis of the trace")
        return
    yield from _compared(subject, "totals", path, stored, _totals(analysis.operators))


def _stored_totals(rows: list[dict[str, str]]) -> dict[str, int]:
    """Return calls and ns as they stand in the table, whose cells are ms with all digits."""

    def nanoseconds(column: str) -> int:
        return sum(round(float(row[column]) * 1e6) for row in rows if row[column])

    calls = sum(int(row["calls"]) for row in rows)
    return {"calls": calls, "cpu_self_ns": nanoseconds("cpu_self_ms"), "device_self_ns": nanoseconds("device_self_ms")}


def _totals(operators: tuple[OpStat, ...]) -> dict[str, int]:
    return {
        "calls": sum(each.calls for each in operators),
        "cpu_self_ns": sum(each.cpu_self_ns for each in operators),
        "device_self_ns": sum(each.device_self_ns or 0 for each in operators),
    }


def _stored_analysis(subject: Subject, analysis: Analysis | None) -> Iterator[Check]:
    path = subject.trace_analysis
    if not path.is_file():
        if subject.is_pipeline:
            yield subject.fault("existence", path, "it is missing: the analysis of the trace")
        return
    try:
        stored = _stored_times(read_strictly(path, dict[str, Any]), analysis)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        yield subject.unreadable("analysis", path, error)
        return
    if analysis is None:
        yield subject.note("analysis", path, "not compared, as there is no analysis of the trace")
        return
    anew = {
        f"{name}_ns of {_named(each.device)}": getattr(each, f"{name}_ns")
        for each in analysis.devices
        for name in TIMES
    }
    yield from _compared(subject, "analysis", path, stored, anew)


def _stored_times(document: Mapping[str, Any], analysis: Analysis | None) -> dict[str, int]:
    """Return the ns of each device as they stand in the stored analysis, in ms with all digits."""
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"its schema_version is {document.get('schema_version')!r}, not {SCHEMA_VERSION}")
    name = Path(analysis.path).name if analysis else ""
    traces = document["traces"]
    trace = next((each for each in traces if Path(each["path"]).name == name), traces[0])
    return {
        f"{name}_ns of {_named(each['device'])}": round(each[f"{name}_ms"] * 1e6)
        for each in trace["devices"]
        for name in TIMES
    }


def _named(device: int | None) -> str:
    return "the host" if device is None else f"device {device}"


def _compared(
    subject: Subject, what: str, path: Path, stored: Mapping[str, int], anew: Mapping[str, int]
) -> Iterator[Check]:
    """Yield a fault for each figure that is not the one of the trace, or that all are."""
    wrong = [name for name in dict.fromkeys([*stored, *anew]) if stored.get(name) != anew.get(name)]
    for name in wrong:
        said, found = (f"{each[name]:,}" if name in each else "unknown" for each in (stored, anew))
        yield subject.fault(what, path, f"{name} is {said} here and {found} in the trace")
    if not wrong:
        yield subject.ok(
            what, path, f"as in the trace: {', '.join(f'{name} {value:,}' for name, value in anew.items())}"
        )
