"""The check of a profile: every artefact broken in turn is named with what was found and how to get it right."""

import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from boundby import __version__, files
from boundby.trace import OPERATOR_COLUMNS, analyze, op_stats, operator_rows, read_trace
from boundby.trace.gaps import CAUSES
from boundby.training.judgement import BOUND_OF_STAGE
from boundby.verdict import CHANGES, OF_CAUSES, OF_CAUSES_ON_HOST, OF_STAGES, Fix, fix_of_cause
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


def replace_trace(results: Path, content: bytes) -> None:
    """Put another trace in place, which manifest and receipt agree with."""
    path = results / "profiler_traces" / "trace.json.gz"
    path.write_bytes(content)

    def note_size(found: Any) -> None:
        found["trace_bytes"] = found["cycles"][0]["trace_bytes"] = len(content)

    edit(results / "profiler_traces" / "manifest.json", note_size)


RECEIPT, RUN = ".receipts/03.json", "run.json"
MANIFEST, STACKS = "profiler_traces/manifest.json", "profiler_traces/stacks.txt"
TRACE, TABLE = "profiler_traces/trace.json.gz", "profiler_traces/op_stats.csv"
ANALYSIS = "profiler_traces/trace_analysis.json"
MEMORY = "profiler_traces/memory.bin"


# A sound profile


def test_a_sound_profile_is_fine_and_every_artefact_is_named(results, capsys):
    layout = layout_of(results)
    names = [path.relative_to(results) for path in (layout.receipt("03"), layout.run, *layout.traces.iterdir())]
    for folder in (results, results / "profiler_traces"):
        code, out = check(capsys, folder)
        assert code == 0
        assert "fault" not in out.replace("no fault", "") and "FINE: 7 artefact(s), no fault" in out
        assert all(f"ok {name}: " in out for name in names)


def test_in_brief_a_sound_profile_is_one_line_and_a_fault_keeps_its_own(results, capsys):
    assert check(capsys, results, "--brief") == (0, "the profile is whole: 7 files, as they were written")
    (results / STACKS).unlink()
    code, out = check(capsys, results, "--brief")
    assert code == 1 and out.startswith(f"fault {STACKS}: ") and "FAULT: 1 fault(s)" in out and "ok " not in out


def nothing_on_purpose(results: Path) -> None:
    shutil.rmtree(results / "profiler_traces")
    write_receipt(results, parts={"config": {"trace": {"enabled": False}}})


def copied(results: Path) -> None:
    written = (results / RECEIPT).stat().st_mtime_ns
    os.utime(results / STACKS, ns=(written, written + NEWER_NS))


def no_stacks_wanted(results: Path) -> None:
    (results / STACKS).unlink()
    edit_manifest(results, stacks_path=None)


def given_up(results: Path) -> None:
    remark = {"what": "steps", "reason": "9 step(s) would make 9 MB; 3 instead"}
    edit_manifest(results, steps_expected=9, downgrades=[remark], warnings=["a cycle was cleared"])


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (given_up, [f"{MANIFEST}: unavailable: memory snapshot: ", f"{MANIFEST}: torch warned: a cycle was"]),
        (given_up, [f"{MANIFEST}: downgraded: steps: 9 step(s) would make 9 MB; 3 instead"]),
        (nothing_on_purpose, [f"{RECEIPT}: trace.enabled was false: no trace was recorded"]),
        (copied, [f"{RECEIPT}: older than 1 file(s) whose content is as listed"]),
        (lambda results: (results / "profiler_traces" / "mine.txt").write_text("x"), ["profiler_traces/mine.txt: "]),
        (lambda results: (results / "profiler_traces" / f"{files.TEMPORARY_PREFIX}1-x").write_text("x"), []),
        (no_stacks_wanted, []),
    ],
)
def test_what_was_given_up_or_is_not_of_this_run_is_a_note_at_most(results, capsys, change, notes):
    change(results)
    code, out = check(capsys, results)
    assert code == 0 and files.TEMPORARY_PREFIX not in out
    assert [note for note in notes if f"note {note}" not in out] == []


def test_an_earlier_run_needs_no_run_record(results, tmp_path, capsys):
    (tmp_path / "previous").mkdir()
    earlier = results.rename(tmp_path / "previous" / "20260101T000000Z")
    (earlier / "run.json").unlink()
    code, out = check(capsys, earlier)
    assert code == 0 and "note run.json: it stays with the newest run" in out


# One artefact broken at a time


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


def written(name: str, change: Callable[[str], str] | str | None) -> Callable[[Path], None]:
    """Return what gives a file another content, or removes it, and lets the receipt list it as it is then."""

    def write(results: Path) -> None:
        text = change((results / name).read_text()) if callable(change) else change
        (results / name).unlink() if text is None else (results / name).write_text(text)
        if name != RECEIPT:
            write_receipt(results)

    return write


def manifest(**values: Any) -> Callable[[Path], None]:
    return lambda results: edit_manifest(results, **values)


def more(name: str, *place: Any, by: float) -> Callable[[Path], None]:
    def change(found: Any) -> None:
        for key in place[:-1]:
            found = found[key]
        found[place[-1]] += by

    return lambda results: edit(results / name, change)


def without_the_last_step(results: Path) -> None:
    whole = json.loads(gzip.decompress((results / TRACE).read_bytes()))
    marks = [each for each in whole["traceEvents"] if str(each.get("name")).startswith("ProfilerStep#")]
    last = max(marks, key=lambda each: each["ts"])["name"]
    whole["traceEvents"] = [each for each in whole["traceEvents"] if each.get("name") != last]
    replace_trace(results, gzip.compress(json.dumps(whole).encode()))


def total(column: str, more: float) -> Callable[[Path], None]:
    def change(results: Path) -> None:
        rows = operator_rows(op_stats(read_trace(results / TRACE)))
        rows[0][column] += more
        files.write_csv(results / TABLE, rows, OPERATOR_COLUMNS)
        write_receipt(results)

    return change


LEFT_OUT = {"what": "trace", "reason": "1 step(s) made 9 MB; not written"}
STARTED = "step 03 has started and not finished -> wait for it, or python run_pipeline.py --from 3 --resume"


@pytest.mark.parametrize(
    ("change", "name", "found"),
    [
        (written(ANALYSIS, None), ANALYSIS, "it is missing: the "),
        (written(TABLE, None), TABLE, "it is missing: the "),
        (written(RECEIPT, None), RECEIPT, f"step 03 left no receipt {AGAIN}"),
        (lambda results: (results / RECEIPT).rename(results / ".receipts" / "03.started.json"), RECEIPT, STARTED),
        (
            written(RECEIPT, '{"schema_version": 99, "boundby_version": "9.1", "stage": 3}'),
            RECEIPT,
            "its receipt was written by Boundby 9.1 (schema version 99); this is Boundby "
            f"{__version__}, which reads schema version 1 -> check it with that version, or make it again",
        ),
        (written(RECEIPT, lambda old: old.replace('"ok"', '"incomplete"')), RECEIPT, "step 03 ended with"),
        (lambda results: (results / RUN).unlink(), RUN, "it is missing"),
        (manifest(steps_expected=4), MANIFEST, "3 of 4 steps recorded, and no reason is given"),
        (
            manifest(trace_path=None, cycles=[], downgrades=[LEFT_OUT]),
            MANIFEST,
            "there is no trace (trace: 1 step(s) made",
        ),
        (written(STACKS, ""), STACKS, f"it is empty; manifest.json names it as stacks {AGAIN}"),
        (written(STACKS, "a;b 3\na;c\n"), STACKS, "1 of 2 lines are not `frames weight`; the first is line 2: 'a;c' "),
        (written(STACKS, "a;b 3\na;c 0\na;d -1\n"), STACKS, "2 of 3 lines are not `frames weight`"),
        (more(MANIFEST, "cycles", 0, "trace_bytes", by=1), TRACE, "it has "),
        (without_the_last_step, TRACE, "2 of 3 steps are in the trace"),
        (total("calls", 1), TABLE, "calls is "),
        (total("cpu_self_ms", 0.000001), TABLE, "cpu_self_ns is "),  # one ns
        (written(TABLE, lambda old: old.replace("self_ms", "ms", 1)), TABLE, "it lacks the column(s) cpu_self_ms"),
        *(
            (written(TABLE, lambda old, row=row: f"{old}{row}\n"), TABLE, "it cannot be read: ")
            for row in ("aten::x", "aten::x,,many", "aten::x,,1,0,inf", 'aten::x,"', "aten::x,,1,0,1 ms")
        ),
        *(
            (more(ANALYSIS, "traces", 0, "devices", 0, f"{name}_ms", by=0.001), ANALYSIS, f"{name}_ns of the host is ")
            for name in ("window", "busy", "idle")
        ),
    ],
)
def test_what_does_not_fit_the_rest_is_a_fault_of_its_file(results, capsys, change, name, found):
    change(results)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {name}: {found}" in out


@pytest.mark.parametrize("key", ["snapshot_path", "memory_timeline_path"])
def test_a_file_that_the_manifest_names_must_be_there_and_hold_something(results, capsys, key):
    edit_manifest(results, **{key: f"elsewhere/{MEMORY}"})
    what = key.removesuffix("_path")
    for text, code, found in (
        (None, 1, f"fault {MEMORY}: it is missing; manifest.json names it as {what}"),
        ("", 1, f"it is empty; manifest.json names it as {what}"),
        ("x", 0, f"{MEMORY}: the {what} of the manifest"),
    ):
        if text is not None:
            (results / MEMORY).write_text(text)
        ended, out = check(capsys, results)
        assert ended == code and found in out


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_trace_that_ends_too_early_is_a_fault_and_the_tables_are_not_blamed(results, capsys, kept):
    content = (results / TRACE).read_bytes()
    replace_trace(results, content[: int(len(content) * kept)])
    code, out = check(capsys, results, "--analysis")
    assert code == 1
    assert "the gzip data ends too early: the file was cut short" in out
    assert f"in {TRACE}; do not rely on this profile" in out
    assert f"note {TABLE}: " in out and f"note {ANALYSIS}: not compared" in out
    assert "INCONCLUSIVE" in out and "Nothing can be recommended from this trace; make it again first." in out


def test_a_trace_too_large_to_analyse_is_unpacked_to_its_end_and_one_without_end_given_up(results, capsys, monkeypatch):
    monkeypatch.setattr(recordings, "LARGEST_JSON_BYTES", 1000)
    code, out = check(capsys, results, "--analysis")
    assert code == 0
    assert f"note {TRACE}: 0 MB of JSON, whole; above 0 MB it is not analysed here" in out
    assert "There is none: see above." in out
    replace_trace(results, (results / TRACE).read_bytes()[:-9])
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TRACE}: the gzip data ends too early" in out
    monkeypatch.setattr(recordings, "MAX_JSON_BYTES", 2000)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {TRACE}: it unpacks to more than 0 GiB" in out


# A recording without a pipeline


@pytest.fixture
def recording(results, tmp_path) -> Path:
    """A folder with a manifest, a trace and stacks alone, as a callback leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (MANIFEST, TRACE, STACKS):
        shutil.copy2(results / name, folder)
    return folder


def rewrite(recording: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads((recording / "manifest.json").read_text())
    change(manifest)
    (recording / "manifest.json").write_text(json.dumps(manifest))


def test_a_folder_with_a_manifest_is_checked_by_what_that_names_wherever_a_trace_lies(recording, capsys):
    (recording / "traces").mkdir()
    (recording / "trace.json.gz").rename(recording / "traces" / "trace.json.gz")
    second = Path(shutil.copy2(recording / "traces" / "trace.json.gz", recording / "trace_cycle2.json.gz"))

    def moved(manifest: Any) -> None:
        manifest["trace_path"] = manifest["cycles"][0]["trace_path"] = "/gone/run/traces/trace.json.gz"
        manifest["cycles"].append({**manifest["cycles"][0], "trace_path": second.name})

    rewrite(recording, moved)
    code, out = check(capsys, recording)
    assert code == 0 and "FINE: 4 artefact(s)" in out and "ok traces/trace.json.gz: the trace of the manifest; " in out
    second.write_bytes(second.read_bytes()[:-100])
    code, out = check(capsys, recording)
    assert code == 1 and "fault trace_cycle2.json.gz: it has " in out and "fault traces/trace.json.gz" not in out
    (recording / "stacks.txt").unlink()
    assert (
        "fault stacks.txt: it is missing; manifest.json names it as stacks -> record it" in check(capsys, recording)[1]
    )


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
    script = importlib.import_module("scripts.check_profile")
    assert script.main(["output.results_dir=moved", "trace.max_mb=7"]) == 0
    (results / TRACE).unlink()
    assert script.main(["output.results_dir=moved"]) == 1
    assert script.main([str(results), "trace.enabled=false"]) == 1  # a folder that is named is checked
    capsys.readouterr()
    for arguments, code, said in (
        ([], 2, "results"),
        (["output.results_dir=none", "trace.enabled=false"], 0, "trace.enabled is false: there is no profile to check"),
        (["output.result_dir=x"], 2, "did you mean 'results_dir'?"),
    ):
        assert (script.main(arguments), said in capsys.readouterr().err) == (code, True)


@pytest.mark.parametrize(("enabled", "lines"), [("true", 1), ("false", 0)])
def test_a_dry_run_says_that_the_profile_will_be_checked(tmp_path, capsys, enabled, lines):
    arguments = ["02", "03", "04", "--", f"output.results_dir={tmp_path}", f"trace.enabled={enabled}"]
    assert dry_run.main(arguments) == 0
    assert capsys.readouterr().out.count("then scripts/check_profile.py checks what it left") == lines


def test_the_report_is_the_text_on_the_terminal_and_json_one_object_with_every_check(results, tmp_path, capsys):
    (results / STACKS).write_text("")
    script = importlib.import_module("scripts.check_profile")
    assert script.main([str(results), "--report", str(tmp_path / "report.txt")]) == 1
    assert (tmp_path / "report.txt").read_text() == capsys.readouterr().out
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


def test_the_cause_of_most_idle_time_comes_first_with_its_gain_and_its_advice(recording, tmp_path, capsys):
    content = gzip.compress(synchronising_trace(tmp_path).read_bytes())
    (recording / "trace.json.gz").write_bytes(content)

    rewrite(recording, lambda found: found["cycles"][0].update(trace_bytes=len(content)))
    code, out = check(capsys, recording, "--analysis")
    assert code == 0
    assert "LAUNCH: the device waits for the host" in out and "1. Synchronisation (waiting for the device" in out
    found = report.recommendations(analyze(read_trace(recording / "trace.json.gz")))
    assert [each.time_ms for each in found] == sorted((each.time_ms for each in found), reverse=True)
    assert (found[0].cause, next(iter(found[0].host_in_ms))) == ("synchronisation", "aten::item")
    assert found[0].at_most == pytest.approx(5.0)  # the host may go on while the device works, 0.6 of 3 ms
    assert found[0].advice == CHANGES["stay_asynchronous"].steps
    assert all(each.share_of_window_pct >= 1 for each in found)


def test_every_cause_and_every_kind_of_stage_has_its_advice():
    assert {*BOUND_OF_STAGE.values(), "inconclusive"} == set(OF_STAGES)
    assert set(OF_CAUSES) == {*CAUSES, "communication", "memcpy"}
    assert set(OF_CAUSES_ON_HOST) < set(OF_CAUSES)
    assert all(CHANGES[kind].steps for kind in (*OF_CAUSES.values(), *OF_CAUSES_ON_HOST.values(), *OF_STAGES.values()))
    assert fix_of_cause("launch") != fix_of_cause("launch", on_host=True)
    assert fix_of_cause("input", on_host=True) == Fix("load_ahead") == fix_of_cause("input")
    assert fix_of_cause("compute") is None
    assert [cause for cause, kind in OF_CAUSES.items() if not CHANGES[kind].is_bounded] == ["untraced"]
