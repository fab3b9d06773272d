"""The check of a profile: every artefact broken in turn is named with what was found and how to get it right."""

import gzip
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from boundby import files
from boundby.trace import OPERATOR_COLUMNS, analyze, op_stats, operator_rows, read_trace
from boundby.trace.gaps import CAUSES
from boundby.verdict import CHANGES, OF_CAUSES, OF_CAUSES_ON_HOST, Fix, fix_of_cause
from tests.traces import call, event, step, work, write
from utils import dry_run, steps
from utils.artifacts import Layout
from utils.profile_check import recording as recordings
from utils.profile_check import report
from utils.trace_analysis import document, traces

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "-> make it again: python run_pipeline.py --from 3, with the settings of this run"
PARTS = {"config": {"trace": {"enabled": True}}}
NEWER_NS = 10**9


def layout_of(results: Path) -> Layout:
    return Layout(results, results / "m.json", results / "m.csv", results.parent / "data" / "val_df.csv")


def write_receipt(results: Path, status: str = "ok", parts: Any = PARTS) -> None:
    steps.finish("03", layout_of(results), steps.Parts(**parts), status=status, exit_code=0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A results folder with all that step 03 leaves, of a trace of three steps of a small module."""
    import torch

    from boundby.capture import CaptureOptions, capture

    layout = layout_of(tmp_path_factory.mktemp("recorded") / "results")
    model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(2, 8)
    options = CaptureOptions(stacks_path=layout.stacks)
    device = torch.device("cpu")
    taken = capture(lambda _: model(batch), device=device, steps=3, warmup=1, trace_path=layout.trace, options=options)
    files.write_csv(layout.op_stats, operator_rows(op_stats(read_trace(layout.trace))), OPERATOR_COLUMNS)
    files.write_json(layout.trace_analysis, document.of(traces.examine([layout.trace])))
    files.write_json(layout.trace_manifest, {"schema_version": 1, **asdict(taken)})
    files.write_json(layout.run, {"schema_version": 1, "steps": {"03": {"status": "ok"}}})
    write_receipt(layout.results)
    return layout.results


@pytest.fixture
def results(recorded, tmp_path) -> Path:
    """A copy of the folder, which lies elsewhere than its receipt and its manifest say."""
    return Path(shutil.copytree(recorded, tmp_path / "moved"))


def check(capsys, *arguments: str | Path) -> tuple[int, str]:
    """Return the exit code and stdout, its lines joined where they were broken."""
    code = importlib.import_module("scripts.check_profile").main(list(map(str, arguments)))
    return code, " ".join(capsys.readouterr().out.split())


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file, and let the receipt of the step list it as it is then."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    write_receipt(path.parents[1])


def edit_manifest(results: Path, **values: Any) -> None:
    edit(results / "profiler_traces" / "manifest.json", lambda found: found.update(values))


def edit_table(results: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = results / "profiler_traces" / "op_stats.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    write_receipt(results)


def replace_trace(results: Path, content: bytes) -> None:
    """Put another trace in place, which manifest and receipt agree with."""
    path = results / "profiler_traces" / "trace.json.gz"
    path.write_bytes(content)

    def note_size(found: Any) -> None:
        found["trace_bytes"] = found["cycles"][0]["trace_bytes"] = len(content)

    edit(results / "profiler_traces" / "manifest.json", note_size)


def events_of(results: Path) -> Any:
    return json.loads(gzip.decompress((results / "profiler_traces" / "trace.json.gz").read_bytes()))


# A sound profile


def test_a_sound_profile_is_fine_and_every_artefact_is_named(results, capsys):
    code, out = check(capsys, results)
    assert code == 0
    assert "fault" not in out.replace("no fault", "") and "FINE: 7 artefact(s), no fault" in out
    layout = layout_of(results)
    for path in (layout.receipt("03"), layout.run, *layout.traces.iterdir()):
        assert f"ok {path.relative_to(results)}: " in out


def test_what_was_given_up_or_cannot_be_had_is_a_note_and_missing_steps_with_a_reason_are_no_fault(results, capsys):
    remark = {"what": "steps", "reason": "9 step(s) would make 9 MB; 3 instead"}
    edit_manifest(results, steps_expected=9, downgrades=[remark], warnings=["a cycle was cleared"])
    code, out = check(capsys, results)
    assert code == 0
    for note in (
        "unavailable: memory snapshot: ",
        f"downgraded: steps: {remark['reason']}",
        "torch warned: a cycle was",
    ):
        assert f"note profiler_traces/manifest.json: {note}" in out
    assert "3 of 9 steps recorded" in out


def test_the_folder_of_the_traces_stands_for_its_run(results, capsys):
    code, out = check(capsys, results / "profiler_traces")
    assert code == 0 and "ok .receipts/03.json" in out


def test_a_run_that_recorded_nothing_on_purpose_is_fine(results, capsys):
    shutil.rmtree(results / "profiler_traces")
    write_receipt(results, parts={"config": {"trace": {"enabled": False}}})
    code, out = check(capsys, results)
    assert code == 0
    assert "note .receipts/03.json: trace.enabled was false: no trace was recorded" in out


def test_copied_files_of_the_content_that_the_receipt_lists_are_not_stale(results, capsys):
    path = results / "profiler_traces" / "stacks.txt"
    written = (results / ".receipts" / "03.json").stat().st_mtime_ns
    os.utime(path, ns=(written, written + NEWER_NS))
    code, out = check(capsys, results)
    assert code == 0
    assert "note .receipts/03.json: older than 1 file(s) whose content is as listed" in out


def test_a_file_of_which_the_receipt_knows_nothing_is_a_note(results, capsys):
    (results / "profiler_traces" / "mine.txt").write_text("x")
    (results / "profiler_traces" / f"{files.TEMPORARY_PREFIX}1-x").write_text("x")
    code, out = check(capsys, results)
    assert code == 0
    assert "note profiler_traces/mine.txt: the receipt does not list it, and it is newer than the receipt" in out
    assert files.TEMPORARY_PREFIX not in out


def test_an_earlier_run_needs_no_run_record(results, tmp_path, capsys):
    (tmp_path / "previous").mkdir()
    earlier = results.rename(tmp_path / "previous" / "20260101T000000Z")
    (earlier / "run.json").unlink()
    code, out = check(capsys, earlier)
    assert code == 0 and "note run.json: it stays with the newest run" in out


# One artefact broken at a time


def truncate(path: Path, by: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:-by])


RECEIPT, RUN = ".receipts/03.json", "run.json"
MANIFEST, STACKS = "profiler_traces/manifest.json", "profiler_traces/stacks.txt"
TRACE, TABLE = "profiler_traces/trace.json.gz", "profiler_traces/op_stats.csv"
ANALYSIS = "profiler_traces/trace_analysis.json"


@pytest.mark.parametrize("name", [MANIFEST, STACKS, TRACE, TABLE, ANALYSIS])
def test_a_missing_changed_or_shorter_output_is_named_once_with_the_way_out(results, capsys, name):
    path = results / name
    content = bytearray(path.read_bytes())
    content[4] ^= 1  # of gzip: the time in its header, which changes nothing else
    for broken, found in (
        (bytes(content), "its SHA-256 is "),
        (bytes(content[:-100]), f"it has {len(content) - 100:,} bytes, {len(content):,} were written"),
        (None, "it is missing; the receipt lists it"),
    ):
        path.unlink() if broken is None else path.write_bytes(broken)
        code, out = check(capsys, results)
        assert code == 1
        assert f"fault {name}: {found}" in out and AGAIN in out and "do not rely on this profile" in out
        assert out.count(f"fault {name}") == 1


@pytest.mark.parametrize("name", [ANALYSIS, TABLE])
def test_an_output_that_the_step_should_have_written_is_missing_also_without_being_listed(results, capsys, name):
    (results / name).unlink()
    write_receipt(results)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {name}: it is missing: the " in out and AGAIN in out


def test_a_missing_receipt_is_a_fault(results, capsys):
    (results / RECEIPT).unlink()
    code, out = check(capsys, results)
    assert code == 1 and f"fault {RECEIPT}: step 03 left no receipt {AGAIN}" in out


def test_a_step_that_was_interrupted_says_how_to_go_on(results, capsys):
    (results / RECEIPT).rename(results / ".receipts" / "03.started.json")
    code, out = check(capsys, results)
    assert code == 1
    assert "step 03 has started and not finished -> wait for it, or python run_pipeline.py --from 3 --resume" in out


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"schema_version": 99, "status": "ok", "outputs": []}', "its schema version is 99, not 1"),
        ('{"schema_version": 1, "status": "incomplete", "outputs": []}', "step 03 ended with status incomplete"),
    ],
)
def test_a_receipt_of_another_version_or_status_is_a_fault(results, capsys, content, found):
    (results / RECEIPT).write_text(content)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {RECEIPT}: {found}" in out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((RECEIPT, text) for text in ("{", "[]", '{"schema_version": 1, "status": "ok", "outputs": [{"path": 3}]}')),
        *((RUN, text) for text in ('{"a": NaN}', "[]", '{"steps": {}}', '{"steps": ', '{"steps": [1]}', "[" * 20_000)),
        *((MANIFEST, text) for text in ("{", "[]", '{"steps_expected": "3"}', '{"steps_expected": NaN}')),
        *((ANALYSIS, text) for text in ("{", "[]", '{"schema_version": 2}', '{"schema_version": 1, "traces": []}')),
        (STACKS, "\udcff 1\n"),
        (TRACE, "no trace"),
    ],
    ids=lambda value: value[-30:],
)
def test_a_damaged_file_is_a_fault_and_no_error(results, capsys, name, content):
    (results / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    if name != RECEIPT:
        write_receipt(results)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {name}: " in out and "it cannot be read: " in out


def test_a_missing_run_record_is_a_fault(results, capsys):
    (results / RUN).unlink()
    code, out = check(capsys, results)
    assert code == 1 and f"fault {RUN}: it is missing" in out


def test_fewer_steps_than_expected_without_a_reason_are_a_fault(results, capsys):
    edit_manifest(results, steps_expected=4)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {MANIFEST}: 3 of 4 steps recorded, and no reason is given" in out


def test_a_manifest_without_a_trace_says_why(results, capsys):
    remark = {"what": "trace", "reason": "1 step(s) made 9 MB; not written"}
    edit_manifest(results, trace_path=None, cycles=[], steps_recorded=0, downgrades=[remark])
    code, out = check(capsys, results)
    assert code == 1 and "there is no trace (trace: 1 step(s) made 9 MB; not written)" in out


@pytest.mark.parametrize("key", ["snapshot_path", "memory_timeline_path"])
def test_a_file_that_the_manifest_names_must_be_there_and_hold_something(results, capsys, key):
    edit_manifest(results, **{key: "elsewhere/profiler_traces/memory.bin"})
    code, out = check(capsys, results)
    what = key.removesuffix("_path")
    assert code == 1
    assert f"fault profiler_traces/memory.bin: it is missing; manifest.json names it as {what}" in out
    (results / "profiler_traces" / "memory.bin").touch()
    assert f"it is empty; manifest.json names it as {what}" in check(capsys, results)[1]
    (results / "profiler_traces" / "memory.bin").write_text("x")
    code, out = check(capsys, results)
    assert code == 0 and f"profiler_traces/memory.bin: the {what} of the manifest" in out


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "it is empty; manifest.json names it as stacks"),
        ("a;b 3\na;c\n", "1 of 2 lines are not `frames weight`; the first is line 2: 'a;c'"),
        ("a;b 3\na;c 0\na;d -1\n", "2 of 3 lines are not `frames weight`; the first is line 2: 'a;c 0'"),
    ],
)
def test_stacks_that_no_flame_graph_can_read_are_a_fault(results, capsys, content, found):
    (results / STACKS).write_text(content)
    write_receipt(results)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {STACKS}: {found} {AGAIN}" in out


def test_no_stacks_are_wanted_where_the_manifest_names_none(results, capsys):
    (results / STACKS).unlink()
    edit_manifest(results, stacks_path=None)
    assert check(capsys, results)[0] == 0


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_trace_that_ends_too_early_is_a_fault_and_the_tables_are_not_blamed(results, capsys, kept):
    content = (results / TRACE).read_bytes()
    replace_trace(results, content[: int(len(content) * kept)])
    code, out = check(capsys, results)
    assert code == 1
    assert "the gzip data ends too early: the file was cut short" in out
    assert f"in {TRACE}; do not rely on this profile" in out
    assert f"note {TABLE}: " in out and f"note {ANALYSIS}: not compared" in out


def test_a_trace_of_another_size_than_the_manifest_says_is_a_fault(results, capsys):
    size = (results / TRACE).stat().st_size

    def other_size(found: Any) -> None:
        found["cycles"][0]["trace_bytes"] = size + 1

    edit(results / MANIFEST, other_size)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TRACE}: it has {size:,} bytes, {size + 1:,} were recorded" in out


def test_a_step_that_the_manifest_tells_of_and_the_trace_lacks_is_a_fault(results, capsys):
    whole = events_of(results)
    marks = [each for each in whole["traceEvents"] if str(each.get("name")).startswith("ProfilerStep#")]
    last = max(marks, key=lambda each: each["ts"])["name"]
    whole["traceEvents"] = [each for each in whole["traceEvents"] if each.get("name") != last]
    replace_trace(results, gzip.compress(json.dumps(whole).encode()))
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TRACE}: 2 of 3 steps are in the trace" in out


def test_a_trace_too_large_to_analyse_is_unpacked_to_its_end(results, capsys, monkeypatch):
    monkeypatch.setattr(recordings, "LARGEST_JSON_BYTES", 1000)
    code, out = check(capsys, results, "--analysis")
    assert code == 0
    assert f"note {TRACE}: 0 MB of JSON, whole; above 0 MB it is not analysed here" in out
    assert "There is none: see above." in out
    content = (results / TRACE).read_bytes()
    replace_trace(results, content[:-9])
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TRACE}: the gzip data ends too early" in out


def test_a_trace_that_unpacks_without_end_is_given_up(results, capsys, monkeypatch):
    monkeypatch.setattr(recordings, "LARGEST_JSON_BYTES", 1000)
    monkeypatch.setattr(recordings, "MAX_JSON_BYTES", 2000)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TRACE}: it unpacks to more than 0 GiB" in out


@pytest.mark.parametrize(("column", "name"), [("calls", "calls"), ("cpu_self_ms", "cpu_self_ns")])
def test_a_table_whose_totals_are_not_those_of_the_trace_is_a_fault(results, capsys, column, name):
    rows = operator_rows(op_stats(read_trace(results / TRACE)))
    rows[0][column] += 1 if column == "calls" else 0.000001  # ms: one ns
    files.write_csv(results / TABLE, rows, OPERATOR_COLUMNS)
    write_receipt(results)
    whole = sum(row["calls"] for row in rows)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TABLE}: {name} is " in out
    assert column != "calls" or f"calls is {whole} here and {whole - 1} in the trace {AGAIN}" in out


def test_a_table_without_a_column_is_a_fault(results, capsys):
    edit_table(results, lambda lines: [lines[0].replace("cpu_self_ms", "cpu_ms"), *lines[1:]])
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TABLE}: it lacks the column(s) cpu_self_ms" in out


@pytest.mark.parametrize("cells", ["aten::x", "aten::x,,many", "aten::x,,1,0,inf", 'aten::x,"', "aten::x,,1,0,1 ms"])
def test_a_table_with_a_row_that_is_none_is_a_fault(results, capsys, cells):
    edit_table(results, lambda lines: [*lines, cells])
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TABLE}: it cannot be read: " in out


@pytest.mark.parametrize("quantity", ["window", "busy", "idle"])
def test_a_stored_analysis_that_is_not_that_of_the_trace_is_a_fault(results, capsys, quantity):
    def longer(found: Any) -> None:
        found["traces"][0]["devices"][0][f"{quantity}_ms"] += 0.001

    edit(results / ANALYSIS, longer)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {ANALYSIS}: {quantity}_ns of the host is " in out


# A recording without a pipeline


@pytest.fixture
def recording(results, tmp_path) -> Path:
    """A folder with a manifest, a trace and stacks alone, as a callback leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (MANIFEST, TRACE, STACKS):
        shutil.copy2(results / name, folder)
    return folder


def test_a_folder_with_a_manifest_is_checked_by_what_that_names(recording, capsys):
    code, out = check(capsys, recording)
    assert code == 0 and "FINE: 3 artefact(s)" in out
    (recording / "stacks.txt").unlink()
    code, out = check(capsys, recording)
    assert code == 1
    assert "fault stacks.txt: it is missing; manifest.json names it as stacks -> record it again" in out


def test_a_trace_in_a_folder_of_its_own_is_found(recording, capsys):
    (recording / "traces").mkdir()
    (recording / "trace.json.gz").rename(recording / "traces" / "trace.json.gz")
    manifest = json.loads((recording / "manifest.json").read_text())
    path = "/gone/run/traces/trace.json.gz"
    manifest["trace_path"] = manifest["cycles"][0]["trace_path"] = path
    (recording / "manifest.json").write_text(json.dumps(manifest))
    code, out = check(capsys, recording)
    assert code == 0 and "ok traces/trace.json.gz: the trace of the manifest; " in out


def test_every_trace_of_several_cycles_is_checked(recording, capsys):
    manifest = json.loads((recording / "manifest.json").read_text())
    second = {**manifest["cycles"][0], "trace_path": "trace_cycle2.json.gz"}
    manifest["cycles"].append(second)
    (recording / "manifest.json").write_text(json.dumps(manifest))
    shutil.copy2(recording / "trace.json.gz", recording / "trace_cycle2.json.gz")
    assert check(capsys, recording)[0] == 0
    truncate(recording / "trace_cycle2.json.gz")
    code, out = check(capsys, recording)
    assert code == 1 and "fault trace_cycle2.json.gz: it has " in out and "fault trace.json.gz" not in out


# Usage


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([], "is no folder; give the results folder of a run"),
        (["run/"], "holds no profile: neither profiler_traces/ nor manifest.json; give the results folder"),
        (["run/", "run/run.json"], "holds no profile: neither profiler_traces/ nor manifest.json; run step 03"),
    ],
)
def test_a_folder_without_a_profile_is_a_usage_error(tmp_path, capsys, made, said):
    for name in made:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    assert importlib.import_module("scripts.check_profile").main([str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err


def test_without_a_folder_the_results_of_the_settings_are_checked_as_the_runner_asks(results, capsys, monkeypatch):
    monkeypatch.chdir(results.parent)
    assert check(capsys, "output.results_dir=moved", "trace.max_mb=7")[0] == 0
    (results / TRACE).unlink()
    assert check(capsys, "output.results_dir=moved")[0] == 1
    (results.parent / "results").mkdir()
    assert check(capsys)[0] == 2


def test_settings_that_ask_for_no_trace_leave_nothing_to_check(results, capsys):
    script = importlib.import_module("scripts.check_profile")
    assert script.main([f"output.results_dir={results / 'none'}", "trace.enabled=false"]) == 0
    assert "trace.enabled is false: there is no profile to check" in capsys.readouterr().err
    (results / TRACE).unlink()
    assert script.main([str(results), "trace.enabled=false"]) == 1  # a folder that is named is checked


@pytest.mark.parametrize(("enabled", "lines"), [("true", 1), ("false", 0)])
def test_a_dry_run_says_that_the_profile_will_be_checked(tmp_path, capsys, enabled, lines):
    arguments = ["02", "03", "04", "--", f"output.results_dir={tmp_path}", f"trace.enabled={enabled}"]
    assert dry_run.main(arguments) == 0
    assert capsys.readouterr().out.count("then scripts/check_profile.py checks what it left") == lines


def test_a_mistaken_setting_is_a_usage_error(capsys):
    assert importlib.import_module("scripts.check_profile").main(["output.result_dir=x"]) == 2
    assert "did you mean 'results_dir'?" in capsys.readouterr().err


def test_the_report_is_the_text_on_the_terminal(results, tmp_path, capsys):
    (results / STACKS).unlink()
    script = importlib.import_module("scripts.check_profile")
    assert script.main([str(results), "--analysis", "--report", str(tmp_path / "report.txt")]) == 1
    assert (tmp_path / "report.txt").read_text() == capsys.readouterr().out


def test_json_is_one_object_with_every_check(results, capsys):
    (results / STACKS).write_text("")
    script = importlib.import_module("scripts.check_profile")
    assert script.main([str(results), "--json", "--analysis"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["kind"], found["verdict"], found["run"]) == ("profile_check", "fault", str(results))
    [fault] = [each for each in found["checks"] if each["is_fatal"]]
    assert (fault["what"], fault["file"], fault["state"]) == ("size", STACKS, "fault")
    assert fault["found"].startswith("it has 0 bytes") and AGAIN.endswith(fault["remedy"])
    assert {"bound", "gains"} <= set(found["analysis"]["verdict"]) and "recommendations" in found["analysis"]
    assert script.main([str(results), "--json"]) == 1
    assert "analysis" not in json.loads(capsys.readouterr().out)


def test_a_profile_is_checked_without_torch(results):
    code = "import sys; from scripts import check_profile; code = check_profile.main(sys.argv[1:])"
    command = [sys.executable, "-c", f"{code}; sys.exit(code or 9 * ('torch' in sys.modules))", results, "--analysis"]
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


# Recommendations


def synchronising_trace(folder: Path) -> Path:
    """Return a trace of three steps of 1 ms: 0.2 ms of a kernel, then 0.7 ms in which the host fetches a value."""
    events = []
    for number in range(3):
        at = 1000 * number
        events += [step(number, at, 1000), call(at, 10, number + 1), work(at + 10, 200, number + 1)]
        events.append(event("aten::item", at + 20, 890))
    return write(folder, *events)


def test_the_cause_of_most_idle_time_comes_first_with_its_gain_and_its_advice(tmp_path):
    found = report.recommendations(analyze(read_trace(synchronising_trace(tmp_path))))
    first = found[0]
    assert first.cause == "synchronisation"
    assert [each.time_ms for each in found] == sorted((each.time_ms for each in found), reverse=True)
    assert first.at_most == pytest.approx(3.0 / (3.0 - first.time_ms))
    assert next(iter(first.host_in_ms)) == "aten::item"
    assert first.advice == CHANGES["stay_asynchronous"].steps
    assert all(each.share_of_window_pct >= 1 for each in found)


def test_the_analysis_names_bound_gain_and_what_to_do(recording, tmp_path, capsys):
    content = gzip.compress(synchronising_trace(tmp_path).read_bytes())
    (recording / "trace.json.gz").write_bytes(content)
    manifest = json.loads((recording / "manifest.json").read_text())
    manifest["trace_bytes"] = manifest["cycles"][0]["trace_bytes"] = len(content)
    (recording / "manifest.json").write_text(json.dumps(manifest))
    code, out = check(capsys, recording, "--analysis")
    assert code == 0
    assert "LAUNCH: the device waits for the host" in out
    assert re.search(r"at most [\d.]+ times: take the waits for the device out of the loop", out)
    assert "1. Synchronisation (waiting for the device" in out
    assert "The host meanwhile: aten::item" in out and "- take .item(), .cpu()" in out


def test_nothing_is_recommended_from_a_broken_trace(results, capsys):
    content = (results / TRACE).read_bytes()
    replace_trace(results, content[: len(content) // 2])
    code, out = check(capsys, results, "--analysis")
    assert code == 1
    assert "INCONCLUSIVE" in out and "Nothing can be recommended from this trace; make it again first." in out


def test_every_cause_has_its_advice():
    assert set(OF_CAUSES) == {*CAUSES, "communication", "memcpy"}
    assert set(OF_CAUSES_ON_HOST) < set(OF_CAUSES)
    assert all(CHANGES[kind].steps for kind in (*OF_CAUSES.values(), *OF_CAUSES_ON_HOST.values()))
    assert fix_of_cause("launch") != fix_of_cause("launch", on_host=True)
    assert fix_of_cause("input", on_host=True) == Fix("load_ahead") == fix_of_cause("input")
    assert fix_of_cause("compute") is None
    assert [cause for cause, kind in OF_CAUSES.items() if not CHANGES[kind].is_bounded] == ["untraced"]
