"""The check of a profile: every artefact broken in turn is named with what was found and how to get it right."""

import gzip
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boundby import __version__, files
from boundby.bound.verdict import CHANGES, OF_CAUSES, OF_CAUSES_ON_HOST, OF_STAGES, Fix, fix_of_cause
from boundby.trace import OPERATOR_COLUMNS, op_stats, operator_rows, read_trace
from boundby.trace.gaps import CAUSES
from boundby.training.judgement import BOUND_OF_STAGE
from tests.traces import call, event, step, work, write
from utils.command.artifacts import Layout
from utils.report import dry_run
from utils.steps import steps
from utils.tracing import trace_document as document
from utils.tracing import traces

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "-> make it again: python run_pipeline.py --from 3, with the settings of this run"
PARTS = {"config": {"trace": {"enabled": True}}}


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
    files.write_json(layout.trace_manifest, taken)
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
    edit(results / "profiler_traces" / "manifest.json", lambda manifest: manifest.update(values))


RECEIPT = ".receipts/03.json"
MANIFEST, STACKS = "profiler_traces/manifest.json", "profiler_traces/stacks.txt"
TRACE, TABLE = "profiler_traces/trace.json.gz", "profiler_traces/op_stats.csv"
ANALYSIS = "profiler_traces/trace_analysis.json"
SNAPSHOT = "profiler_traces/memory.bin"


# A sound profile


def test_a_sound_profile_is_fine_and_every_artefact_is_named(results, capsys):
    layout = layout_of(results)
    names = [path.relative_to(results) for path in (layout.receipt("03"), *layout.traces.iterdir())]
    for folder in (results, results / "profiler_traces"):
        code, out = check(capsys, folder)
        assert code == 0
        assert "fault" not in out.replace("no fault", "") and "FINE: 6 artefact(s), no fault" in out
        assert all(f"ok {name}: " in out for name in names)


def test_in_brief_a_sound_profile_is_one_line_and_a_fault_keeps_its_own(results, capsys):
    assert check(capsys, results, "--brief") == (0, "the profile is whole: 6 files, as they were written")
    (results / STACKS).unlink()
    code, out = check(capsys, results, "--brief")
    assert code == 1 and out.startswith(f"fault {STACKS}: ") and "FAULT: 1 fault(s)" in out and "ok " not in out


def nothing_on_purpose(results: Path) -> None:
    shutil.rmtree(results / "profiler_traces")
    write_receipt(results, parts={"config": {"trace": {"enabled": False}}})


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
        (no_stacks_wanted, []),
    ],
)
def test_what_was_given_up_is_a_note_at_most(results, capsys, change, notes):
    change(results)
    code, out = check(capsys, results)
    assert code == 0
    assert [note for note in notes if f"note {note}" not in out] == []


# One artefact broken at a time


@pytest.mark.parametrize("name", [MANIFEST, STACKS, TRACE, TABLE, ANALYSIS])
def test_a_missing_changed_or_shorter_output_is_named_once_with_the_way_out(results, capsys, name):
    path = results / name
    content = bytearray(path.read_bytes())
    content[4] ^= 1  # of gzip: the time in its header, which changes nothing else
    for broken, result in (
        (bytes(content), "its SHA-256 is not "),
        (bytes(content[:-100]), f"it has {len(content) - 100:,} bytes, {len(content):,} were written"),
        (None, "it is missing; the receipt lists it"),
    ):
        path.unlink() if broken is None else path.write_bytes(broken)
        code, out = check(capsys, results)
        assert code == 1
        assert f"fault {name}: {result}" in out and AGAIN in out and "do not rely on this profile" in out
        assert out.count(f"fault {name}") == 1


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


def replace_trace(results: Path, content: bytes) -> None:
    """Put another trace in place, which the receipt agrees with."""
    (results / TRACE).write_bytes(content)
    write_receipt(results)


def without_the_last_step(results: Path) -> None:
    whole = json.loads(gzip.decompress((results / TRACE).read_bytes()))
    marks = [mark for mark in whole["traceEvents"] if str(mark.get("name")).startswith("ProfilerStep#")]
    last = max(marks, key=lambda mark: mark["ts"])["name"]
    whole["traceEvents"] = [event for event in whole["traceEvents"] if event.get("name") != last]
    replace_trace(results, gzip.compress(json.dumps(whole).encode()))


def cut_off(results: Path) -> None:
    replace_trace(results, (results / TRACE).read_bytes()[:-9])


LEFT_OUT = {"what": "trace", "reason": "1 step(s) made 9 MB; not written"}
STARTED = "step 03 has started and not finished -> wait for it, or python run_pipeline.py --from 3 --resume"


@pytest.mark.parametrize(
    ("change", "name", "result"),
    [
        (written(RECEIPT, None), RECEIPT, f"step 03 left no receipt {AGAIN}"),
        (lambda results: (results / RECEIPT).rename(results / ".receipts" / "03.started.json"), RECEIPT, STARTED),
        (
            written(RECEIPT, '{"schema_version": 99, "boundby_version": "9.1", "stage": 3}'),
            RECEIPT,
            "its receipt was written by Boundby 9.1 (schema version 99); this is Boundby "
            f"{__version__}, which reads schema version 1 -> check it with that version, or make it again",
        ),
        (written(RECEIPT, lambda old: old.replace('"ok"', '"incomplete"')), RECEIPT, "step 03 ended with"),
        (manifest(steps_expected=4), MANIFEST, "3 of 4 steps recorded, and no reason is given"),
        (
            manifest(trace_path=None, cycles=[], downgrades=[LEFT_OUT]),
            MANIFEST,
            "there is no trace (trace: 1 step(s) made",
        ),
        (manifest(snapshot_path=f"elsewhere/{SNAPSHOT}"), SNAPSHOT, "it is missing; manifest.json names it as memory"),
        (written(STACKS, ""), STACKS, f"it is empty; manifest.json names it as stacks {AGAIN}"),
        *(
            (written(RECEIPT, text), RECEIPT, "")
            for text in ("{", "[]", '{"schema_version": 1, "outputs": [{"path": 3}]}')
        ),
        *(
            (written(MANIFEST, text), MANIFEST, "")
            for text in ("{", "[]", '{"steps_expected": "3"}', '{"seconds": NaN}')
        ),
        (written(TRACE, "no trace"), TRACE, ""),
        (without_the_last_step, TRACE, "2 of 3 steps are in the trace"),
        (cut_off, TRACE, "the gzip data ends too early: the file was cut short"),
    ],
)
def test_what_is_damaged_or_does_not_fit_the_rest_is_a_fault_of_its_file_and_no_error(
    results, capsys, change, name, result
):
    change(results)
    code, out = check(capsys, results)
    assert code == 1 and f"fault {name}: {result}" in out


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
    assert code == 0 and "FINE: 4 artefact(s)" in out and "ok traces/trace.json.gz: " in out
    second.write_bytes(second.read_bytes()[:-100])
    code, out = check(capsys, recording)
    assert code == 1 and "fault trace_cycle2.json.gz: " in out and "fault traces/trace.json.gz" not in out
    (recording / "stacks.txt").unlink()
    assert (
        "fault stacks.txt: it is missing; manifest.json names it as stacks -> record it" in check(capsys, recording)[1]
    )


# Usage


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([], "is no folder; give the results folder of a run"),
        (["run/"], "holds no profile: neither profiler_traces/ nor manifest.json; run step 03"),
    ],
)
def test_a_folder_without_a_profile_is_a_usage_error(tmp_path, capsys, made, text):
    for name in made:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    assert importlib.import_module("scripts.check_profile").main([str(tmp_path / "run")]) == 2
    assert text in capsys.readouterr().err


def test_without_a_folder_the_results_of_the_settings_are_checked_as_the_runner_asks(results, capsys, monkeypatch):
    monkeypatch.chdir(results.parent)
    script = importlib.import_module("scripts.check_profile")
    assert script.main(["output.results_dir=moved", "trace.max_mb=7"]) == 0
    (results / TRACE).unlink()
    assert script.main(["output.results_dir=moved"]) == 1
    assert script.main([str(results), "trace.enabled=false"]) == 1  # a folder that is named is checked
    capsys.readouterr()
    for arguments, code, text in (
        ([], 2, "results"),
        (["output.results_dir=none", "trace.enabled=false"], 0, "trace.enabled is false: there is no profile to check"),
        (["output.result_dir=x"], 2, "did you mean 'results_dir'?"),
    ):
        assert (script.main(arguments), text in capsys.readouterr().err) == (code, True)


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
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (result["kind"], result["verdict"], result["run"]) == ("profile_check", "fault", str(results))
    [fault] = [item for item in result["checks"] if item["is_fatal"]]
    assert (fault["what"], fault["file"], fault["state"]) == ("size", STACKS, "fault")
    assert fault["text"].startswith("it has 0 bytes") and AGAIN.endswith(fault["remedy"])
    assert {"bound", "gains"} <= set(result["analysis"]["verdict"]) and result["analysis"]["steps"]["numbers"]
    assert script.main([str(results), "--json"]) == 1
    assert "analysis" not in json.loads(capsys.readouterr().out)


def test_a_profile_is_checked_without_torch(results):
    code = "import sys; from scripts import check_profile; code = check_profile.main(sys.argv[1:])"
    command = [sys.executable, "-c", f"{code}; sys.exit(code or 9 * ('torch' in sys.modules))", results, "--analysis"]
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


# What to do


def test_the_cause_that_takes_most_comes_first_with_its_advice(recording, tmp_path, capsys):
    events = []
    for number in range(3):  # 0.2 ms of a kernel, then 0.7 ms in which the host fetches a value
        at = 1000 * number
        events += [step(number, at, 1000), call(at, 10, number + 1), work(at + 10, 200, number + 1)]
        events.append(event("aten::item", at + 20, 890))
    (recording / "trace.json.gz").write_bytes(gzip.compress(write(tmp_path, *events).read_bytes()))
    code, out = check(capsys, recording, "--analysis")
    assert code == 0 and "LAUNCH: the device waits for the host" in out
    content = out.partition("What to do ---")[2].partition("2.")[0]
    assert all(step in content for step in CHANGES["stay_asynchronous"].steps)
    (recording / "trace.json.gz").write_bytes((recording / "trace.json.gz").read_bytes()[:-50])
    code, out = check(capsys, recording, "--analysis")
    assert code == 1 and "Nothing can be recommended from this trace; make it again first." in out


def test_every_cause_and_every_kind_of_stage_has_its_advice():
    assert {*BOUND_OF_STAGE.values(), "inconclusive"} == set(OF_STAGES)
    assert set(OF_CAUSES) == {*CAUSES, "communication", "memcpy"}
    assert set(OF_CAUSES_ON_HOST) < set(OF_CAUSES)
    assert all(CHANGES[kind].steps for kind in (*OF_CAUSES.values(), *OF_CAUSES_ON_HOST.values(), *OF_STAGES.values()))
    assert fix_of_cause("launch") != fix_of_cause("launch", on_host=True)
    assert fix_of_cause("input", on_host=True) == Fix("load_ahead") == fix_of_cause("input")
    assert fix_of_cause("compute") is None
    assert [cause for cause, kind in OF_CAUSES.items() if not CHANGES[kind].is_bounded] == ["untraced"]
