"""Check what step 03 or a recording leaves: its receipt, its manifest, the traces, and what was derived from these."""

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from boundby import files
from boundby.cli import typed
from boundby.remarks import Remark
from boundby.trace import OPERATOR_COLUMNS, Analysis, OpStat, analyze, read_trace
from boundby.trace.decoding import MAX_JSON_BYTES
from boundby.trace.source import Source
from utils import steps
from utils.profile_check.subject import STEP, Check, Subject, read_strictly
from utils.trace_analysis.document import SCHEMA_VERSION

LARGEST_JSON_BYTES = 640 * 2**20  # above the default of trace.max_mb; 412 MB take about 5 s
TIMES = ("window", "busy", "idle")
PATH_ENDING = "_path"  # of the keys of a manifest that name a file
FOLDED = re.compile(r"\S.* [1-9]\d*")  # outer;inner;innermost weight
NAMED = 80  # characters of a line that a message quotes


class Cycle(msgspec.Struct):
    """One recording of consecutive steps."""

    steps_recorded: int
    stacks: bool = False
    steps_expected: int | None = None
    trace_path: str | None = None
    trace_bytes: int | None = None
    json_bytes: int | None = None


class Manifest(msgspec.Struct):
    """What is read of a manifest."""

    steps_expected: int
    steps_recorded: int
    trace_path: str | None
    downgrades: list[Remark]
    unavailable: list[Remark]
    trace_bytes: int | None = None
    stacks_path: str | None = None
    warnings: list[str] = []
    cycles: list[Cycle] = []
    trace_wanted: bool = True
    trace_reason: str | None = None

    @property
    def recordings(self) -> dict[str, Cycle]:
        """The recording of each trace by the path that was written down; that of `trace_path` is the first."""
        found = {}
        if self.trace_path:
            found[self.trace_path] = Cycle(self.steps_recorded, trace_bytes=self.trace_bytes)
        return found | {each.trace_path: each for each in self.cycles if each.trace_path}


class StoredDevice(msgspec.Struct):
    """The times of one device, in ms with all digits."""

    device: int | None
    window_ms: float
    busy_ms: float
    idle_ms: float


class StoredTrace(msgspec.Struct):
    """What is read of one trace in the stored analysis."""

    path: str
    devices: list[StoredDevice]


class StoredAnalysis(msgspec.Struct):
    """What is read of the stored analysis."""

    schema_version: int
    traces: list[StoredTrace]


class RunRecord(msgspec.Struct):
    """What is read of run.json."""

    steps: dict[str, dict[str, object]]


def is_without_trace(receipt: steps.Receipt) -> bool:
    """Tell whether the settings asked for none."""
    settings = receipt.parts.config.get("trace")
    return isinstance(settings, Mapping) and settings.get("enabled") is False


def receipt_of(subject: Subject) -> tuple[steps.Receipt | None, list[Check]]:
    """Return the receipt of a run of the pipeline, and what is to be said about it and about the files it lists."""
    path, marker = subject.layout.receipt(STEP), subject.layout.marker(STEP)
    if not subject.is_pipeline:
        return None, []
    if not path.exists():
        found = f"step {STEP} has started and not finished" if marker.exists() else f"step {STEP} left no receipt"
        remedy = f"wait for it, or {typed('run', '--from', '3', '--resume')}" if marker.exists() else None
        return None, [subject.fault("receipt", path, found, remedy)]
    try:
        receipt = steps.receipt_in(path)
    except steps.OtherReceipt as error:
        return None, [subject.fault("receipt", path, str(error), f"check it with that version, or {subject.again}")]
    except (OSError, ValueError) as error:
        return None, [subject.unreadable("receipt", path, error)]
    return receipt, [*_receipt(subject, receipt, path), *_outputs(subject, receipt, path)]


def _receipt(subject: Subject, receipt: steps.Receipt, path: Path) -> Iterator[Check]:
    if receipt.status != "ok":
        yield subject.fault("receipt", path, f"step {STEP} ended with status {receipt.status}")
    elif is_without_trace(receipt):
        yield subject.note("receipt", path, "trace.enabled was false: no trace was recorded")
    else:
        yield subject.ok("receipt", path, f"step {STEP} finished, {len(receipt.outputs)} file(s) listed")


def _outputs(subject: Subject, receipt: steps.Receipt, path: Path) -> Iterator[Check]:
    written = path.stat().st_mtime_ns
    listed = {_place(subject, output.path): output for output in receipt.outputs}
    touched = []
    for place, output in listed.items():
        yield (check := _output(subject, place, output, written))
        if not check.is_fatal and place.stat().st_mtime_ns > written:
            touched.append(place.name)
    if touched:
        text = f"older than {len(touched)} file(s) whose content is as listed: they were copied or touched since"
        yield subject.note("age", path, text)
    for place in sorted(subject.folder.rglob("*")):
        if place.is_file() and place not in listed and not place.name.startswith(files.TEMPORARY_PREFIX):
            age = "newer" if place.stat().st_mtime_ns > written else "older"
            yield subject.note("listing", place, f"the receipt does not list it, and it is {age} than the receipt")


def _output(subject: Subject, place: Path, output: steps.Output, written: int) -> Check:
    if not place.is_file():
        return subject.fault("existence", place, "it is missing; the receipt lists it")
    size = place.stat().st_size
    since = ", after the receipt" if place.stat().st_mtime_ns > written else ""
    if size != output.bytes:
        return subject.fault("size", place, f"it has {size:,} bytes, {output.bytes:,} were written: changed{since}")
    found = files.sha256(place)
    if found != output.sha256:
        return subject.fault(
            "hash", place, f"its SHA-256 is {found[:12]}..., not {output.sha256[:12]}...: changed{since}"
        )
    return subject.ok("hash", place, f"{size:,} bytes, as written")


def _place(subject: Subject, recorded: str) -> Path:
    """Return where a listed file is to be now, also when the folder of the run has moved."""
    parts = Path(recorded).parts
    for folder in (subject.folder, subject.folder.resolve().parent):  # layers lie beside the traces, in the results
        if folder.name in parts:
            last = len(parts) - 1 - parts[::-1].index(folder.name)
            return folder.joinpath(*parts[last + 1 :])
    return Path(recorded)


def run_record(subject: Subject) -> Iterator[Check]:
    """Yield what is to be said about the record of the run."""
    path = subject.layout.run
    try:
        status = read_strictly(path, RunRecord).steps[STEP]["status"]
    except FileNotFoundError:
        if subject.run.resolve().parent.name == "previous":
            yield subject.note("existence", path, "it stays with the newest run; this is an earlier one")
        else:
            yield subject.fault("existence", path, "it is missing: settings, versions and machine are not known")
    except (OSError, ValueError, LookupError) as error:
        yield subject.unreadable("run record", path, error)
    else:
        say = subject.ok if status == "ok" else subject.note
        yield say("run record", path, f"step {STEP} ended with status {status}")


def check(subject: Subject) -> tuple[Analysis | None, list[Check]]:
    """Return the analysis of the first trace of a recording, and what is to be said about all that it left."""
    manifest, checks = _manifest(subject)
    if manifest is None:
        return None, [*checks, *_op_stats(subject, None), *_stored_analysis(subject, None)]
    first, said = None, []
    for recorded, cycle in manifest.recordings.items():
        path = subject.resolved(recorded)
        if path.is_file() and path.stat().st_size:  # else the checks of the manifest have said so
            analysis, of_trace = _trace(subject, path, cycle)
            said += of_trace
            first = analysis if recorded == manifest.trace_path else first
    if manifest.trace_path:
        known = None if any(each.is_fatal for each in said) else first  # a broken trace refutes no table
        said += [*_op_stats(subject, known), *_stored_analysis(subject, known)]
    return first, checks + said


def _manifest(subject: Subject) -> tuple[Manifest | None, list[Check]]:
    """Return the manifest, and what is to be said about it and the files that it names."""
    path = subject.manifest
    manifest, checks = subject.read("manifest", path, Manifest, "what the trace holds is not known")
    if manifest is None:
        return None, checks
    document = read_strictly(path, dict[str, object])
    return manifest, [*_recorded(subject, manifest), *_named_files(subject, document), *_stacks(subject, manifest)]


def _recorded(subject: Subject, manifest: Manifest) -> Iterator[Check]:
    path = subject.manifest
    counted = f"{manifest.steps_recorded} of {manifest.steps_expected} steps recorded"
    reasons = "; ".join(f"{each.what}: {each.reason}" for each in manifest.downgrades)
    if not manifest.trace_wanted:
        yield subject.note("trace", path, f"no trace was wanted: {manifest.trace_reason or 'no reason is given'}")
    elif manifest.trace_path is None:
        yield subject.fault("trace", path, f"there is no trace ({reasons or 'and no reason'})")
    elif manifest.steps_recorded < manifest.steps_expected and not reasons:
        yield subject.fault("steps", path, f"{counted}, and no reason is given")
    else:
        yield subject.ok("steps", path, counted)
    for kind, remarks in (("downgraded", manifest.downgrades), ("unavailable", manifest.unavailable)):
        for each in remarks:
            yield subject.note(kind, path, f"{kind}: {each.what}: {each.reason}")
    for text in manifest.warnings:
        yield subject.note("warning", path, f"torch warned: {text}")


def _named_files(subject: Subject, document: Mapping[str, object]) -> Iterator[Check]:
    cycles = document.get("cycles")
    parts = [*(cycles if isinstance(cycles, list) else ()), document]
    named = {
        value: key.removesuffix(PATH_ENDING)
        for part in parts
        for key, value in part.items()
        if key.endswith(PATH_ENDING) and isinstance(value, str)
    }
    for recorded, what in named.items():
        place = subject.resolved(recorded)
        if not place.is_file():
            yield subject.fault("existence", place, f"it is missing; {subject.manifest.name} names it as {what}")
        elif not place.stat().st_size:
            yield subject.fault("size", place, f"it is empty; {subject.manifest.name} names it as {what}")
        else:
            yield subject.ok("existence", place, f"the {what} of the manifest")


def _stacks(subject: Subject, manifest: Manifest) -> Iterator[Check]:
    path = subject.resolved(manifest.stacks_path) if manifest.stacks_path else None
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        yield subject.unreadable("stacks", path, error)
        return
    wrong = [number for number, line in enumerate(lines, start=1) if not FOLDED.fullmatch(line)]
    if wrong:
        line = lines[wrong[0] - 1][:NAMED]
        text = f"{len(wrong)} of {len(lines)} lines are not `frames weight`; the first is line {wrong[0]}: {line!r}"
        yield subject.fault("stacks", path, text)
    else:
        yield subject.ok("stacks", path, f"{len(lines):,} stacks")


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
        stored = _stored_times(read_strictly(path, StoredAnalysis), analysis)
    except (OSError, ValueError, LookupError, OverflowError) as error:
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


def _stored_times(stored: StoredAnalysis, analysis: Analysis | None) -> dict[str, int]:
    """Return the ns of each device as they stand in the stored analysis."""
    if stored.schema_version != SCHEMA_VERSION:
        raise ValueError(f"its schema_version is {stored.schema_version}, not {SCHEMA_VERSION}")
    name = Path(analysis.path).name if analysis else ""
    trace = next((trace for trace in stored.traces if Path(trace.path).name == name), stored.traces[0])
    return {
        f"{name}_ns of {_named(device.device)}": round(getattr(device, f"{name}_ms") * 1e6)
        for device in trace.devices
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
