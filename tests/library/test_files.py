"""A reader never meets half a file, whatever stops the writer."""

import csv
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from boundby import files

ROOT = Path(__file__).resolve().parents[2]

# Each writer says "ready" where it has been stopped, and then waits for its end.
KILLED_WHILE_WRITING = """
import sys
from boundby import files
with files.replacing(sys.argv[1]) as temporary, temporary.open("w") as file:
    file.write('{"half": ')
    file.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""
KILLED_BEFORE_THE_FLUSH = """
import os, sys
from boundby import files
os.fsync = lambda descriptor: (print("ready", flush=True), sys.stdin.read())
files.write_json(sys.argv[1], {"whole": True})
"""
KILLED_BEFORE_THE_RENAME = KILLED_BEFORE_THE_FLUSH.replace(
    "os.fsync = lambda descriptor", "os.replace = lambda old, new"
)


def stopped_writer(program: str, path: Path) -> subprocess.Popen[str]:
    """Return a process that has come to the place where it waits."""
    command = [sys.executable, "-c", program, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text('{"old": true}\n')
    return path


def is_untouched(old):
    return old.read_text() == '{"old": true}\n' and names(old.parent) == ["metrics.json"]


@pytest.fixture
def dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_replaces_the_old_content_leaves_no_other_file_and_makes_the_folders_it_needs(old, tmp_path):
    files.write_bytes(old, b"new \x00 bytes")
    assert old.read_bytes() == b"new \x00 bytes"
    assert names(old.parent) == ["metrics.json"]
    files.write_text(tmp_path / "a" / "b" / "note.txt", "schön")
    assert (tmp_path / "a" / "b" / "note.txt").read_bytes() == "schön".encode()


def test_a_temporary_name_is_unlike_any_other_ends_like_the_final_one_and_tells_the_machine_of_its_writer(tmp_path):
    final = tmp_path / "part-0.parquet"
    with files.replacing(final) as first, files.replacing(final) as second:
        assert first != second and first.suffix == ".parquet" and first.parent == tmp_path
        assert first.name.startswith(files.TEMPORARY_PREFIX) and files.WRITER.match(first.name)[2] == files.HOST
        first.write_text("first")
        second.write_text("second")
    assert final.read_text() == "first"  # the last to finish wins, whole
    program = "import platform; platform.node = lambda: 'pod-b'; from boundby import files; print(files.HOST)"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.strip() not in ("", files.HOST)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_keeps_the_old_file_when_the_writer_raises_or_the_disk_is_full(old, error, monkeypatch):
    def rows():
        yield {"a": 1}
        raise error

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(type(error)), files.replacing(old) as temporary:
        temporary.write_text("half")
        raise error
    assert is_untouched(old)
    with pytest.raises(type(error)):
        files.write_csv(old, rows(), ["a"])
    assert is_untouched(old)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(old, {"new": True})
    assert is_untouched(old)


def test_flushes_the_content_before_the_rename_and_the_folder_after_it(old, monkeypatch):
    events: list[str] = []
    replace = os.replace

    def fsync(descriptor):
        events.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.split('-')[-1]}")

    def rename(source, target):
        events.append("rename")
        replace(source, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("/proc tells which file is flushed, and this system has none")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    files.write_text(old, "new")
    assert events == ["flush metrics.json", "rename", f"flush {old.parent.name.split('-')[-1]}"]


@pytest.mark.parametrize(
    "program",
    [KILLED_WHILE_WRITING, KILLED_BEFORE_THE_FLUSH, KILLED_BEFORE_THE_RENAME],
    ids=["while-writing", "before-the-flush", "before-the-rename"],
)
def test_a_killed_writer_leaves_the_old_file_and_one_orphan_that_is_swept(old, program):
    writer = stopped_writer(program, old)
    assert len(names(old.parent)) == 2
    assert files.remove_orphans(old.parent) == 0  # its writer lives
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    assert old.read_text() == '{"old": true}\n'
    assert len(names(old.parent)) == 2
    assert files.remove_orphans(old.parent) == 1
    assert names(old.parent) == ["metrics.json"]


def test_sweeps_orphans_in_folders_below_and_keeps_the_files_of_this_process_and_of_others(tmp_path, dead, monkeypatch):
    assert files.remove_orphans(tmp_path / "nowhere") == 0
    orphan = tmp_path / "evaluation" / f".tmp-{dead}-{files.HOST}-0a1b2c3d-part.parquet"
    mine, undotted = f".tmp-{os.getpid()}-{files.HOST}-0a1b2c3d-mine", f"tmp-{dead}-{files.HOST}-0a1b2c3d-x"
    kept = [mine, ".tmp-notes-of-the-user", undotted, "metrics.json"]
    orphan.parent.mkdir()
    for path in [orphan, *(tmp_path / name for name in kept)]:
        path.write_text("x")
    with monkeypatch.context() as patch:  # a process of another user
        patch.setattr(os, "kill", lambda pid, number: (_ for _ in ()).throw(PermissionError()))
        assert files.remove_orphans(tmp_path) == 0
    assert files.remove_orphans(tmp_path) == 1
    assert not orphan.exists()
    assert names(tmp_path) == sorted([*kept, "evaluation"])


@pytest.mark.parametrize("host", ["00000000", "of the version before hosts were named"])
def test_a_writer_on_another_machine_lives_until_it_was_silent_for_a_day(tmp_path, host, dead):
    name = f"{host}-0a1b2c3d-part" if host.isdecimal() else "0a1b2c3d-part"
    half = tmp_path / f".tmp-{dead}-{name}"
    half.write_text("x")
    assert files.remove_orphans(tmp_path) == 0
    last = half.stat().st_mtime - files.SILENT_S
    os.utime(half, (last + 600, last + 600))
    assert files.remove_orphans(tmp_path) == 0
    os.utime(half, (last - 600, last - 600))
    assert files.remove_orphans(tmp_path) == 1
    assert names(tmp_path) == []


def test_a_later_process_with_the_number_of_a_writer_keeps_no_orphan(tmp_path):
    orphan = tmp_path / f".tmp-{os.getppid()}-{files.HOST}-0a1b2c3d-x"
    orphan.write_text("x")
    assert files.remove_orphans(tmp_path) == 0
    began = psutil.Process(os.getppid()).create_time()
    os.utime(orphan, (began - 2 * files.CLOCKS_DIFFER_S,) * 2)
    assert files.remove_orphans(tmp_path) == 1


def test_another_namespace_of_processes_is_another_host(monkeypatch):
    here = files.process_space()
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    assert files.process_space() != here


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), "$"),
        ({"rows": [{"latency_s": 1.0}, {"latency_s": float("inf")}]}, "$.rows[1].latency_s"),
        ({"pair": (0.0, -float("inf"))}, "$.pair[1]"),
        ({"f64": np.float64("nan")}, "$.f64"),
        ({"f32": np.float32("nan")}, "$.f32"),
    ],
)
def test_strict_json_names_the_place_of_what_is_not_finite(old, value, path):
    with pytest.raises(ValueError) as raised:
        files.write_json(old, value)
    assert str(raised.value).startswith(f"{path} is NaN or infinite")
    assert old.read_text() == '{"old": true}\n'


def test_json_comes_back_as_it_was_and_what_has_no_json_form_or_is_no_json_is_refused(tmp_path):
    value = {"text": "日本 \u2028 \u0085", "none": None, "list": [1, 2.5, True], "tiny": 5e-324, "big": 2**60}
    files.write_json(tmp_path / "x.json", value)
    assert files.read_json(tmp_path / "x.json") == value
    value = {"i": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "p": Path("a") / "b"}
    assert json.loads(files.encode_json(value)) == {"i": 3, "f": 0.5, "b": True, "p": "a/b"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.encode_json({float("nan"): 1})
    with pytest.raises(TypeError, match=r"set has no JSON form: \{1\}"):
        files.encode_json({"labels": {1}})
    for content in (b"", b'{"half": ', b"\xff\xfe"):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.json is not valid JSON"):
            files.read_json(tmp_path / "x.json")


def test_lines_of_a_log_are_on_disk_when_an_append_returns_and_come_back(tmp_path, monkeypatch):
    log, sizes = tmp_path / "deep" / "visits.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    assert files.read_json_lines(log) == []
    values = [{"n": 1}, {"text": "line\nbreak \u2028 \u2029 \u0085 \r é"}, {"n": None}]
    for value in values:
        files.append_json_line(log, value)
        assert log.stat().st_size in sizes
    assert files.read_json_lines(log) == values
    assert log.read_bytes().count(b"\n") == 3
    with pytest.raises(ValueError, match=r"\$\.seconds is NaN"):
        files.append_json_line(log, {"seconds": float("nan")})
    log.write_bytes(log.read_bytes()[:-1])  # a line that lacks only its end is kept
    files.append_json_line(log, {"n": 4})
    assert files.read_json_lines(log) == [*values, {"n": 4}]


def test_a_log_cut_at_any_byte_loses_its_last_line_alone_and_can_be_continued(tmp_path):
    whole, log = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    files.append_json_line(whole, {"round": 0, "text": "é"})
    first = whole.stat().st_size
    files.append_json_line(whole, {"round": 1, "text": "日本"})
    content = whole.read_bytes()
    for length in range(first, len(content) - 1):
        log.write_bytes(content[:length])
        assert files.read_json_lines(log) == [{"round": 0, "text": "é"}], length
        files.append_json_line(log, {"round": 2})
        assert files.read_json_lines(log) == [{"round": 0, "text": "é"}, {"round": 2}], length


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_csv_disarms_text_that_a_spreadsheet_would_run(tmp_path, text):
    files.write_csv(tmp_path / "x.csv", [{text: text}], [text])  # a class that somebody else named
    assert read_table(tmp_path / "x.csv") == [{f"'{text}": f"'{text}"}]


def test_csv_leaves_numbers_alone_and_none_is_empty(tmp_path):
    row = {"negative": -1.5, "exact": 0.1 + 0.2, "none": None, "text": "a = b", "not a column": 1}
    columns = ["negative", "exact", "none", "text", "missing"]
    assert files.write_csv(tmp_path / "x.csv", [row], columns) == 1
    expected = "negative,exact,none,text,missing\n-1.5,0.30000000000000004,,a = b,\n"
    assert (tmp_path / "x.csv").read_bytes() == expected.encode()


AWKWARD = ("=1+1", "a\rb", "a\nb", "a\r\nb", 'a "quote"', "a,b", "", " ", "'", "\ufeff", "\u2028", "日本", "\r", "\r\n")


@pytest.mark.parametrize("text", AWKWARD, ids=repr)
def test_a_table_comes_back_unchanged(tmp_path, text):
    rows = [{"first": text, "last": text}, {"first": "x", "last": "y"}]
    assert files.write_table(tmp_path / "x.csv", iter(rows), ["first", "last"]) == 2
    assert read_table(tmp_path / "x.csv") == rows
    assert (tmp_path / "x.csv").read_bytes().endswith(b"x,y\n")  # a line feed alone


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_hashes_are_those_of_the_standard_and_know_values_and_not_the_order_of_keys(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.sha256(tmp_path / "abc") == expected
    assert files.sha256_of({"a": 1, "b": [1, 2]}) == files.sha256_of({"b": [1, 2], "a": 1})
    assert len({files.sha256_of(value) for value in ({"a": [1, 2]}, {"a": [2, 1]}, {"a": 1}, {"a": "1"})}) == 4
