"""Whatever fails at whichever operation on files: a file is old or new, a step ends well, is refused or goes on.

The half that takes seconds; `make truth ARGS="-k faults"` injects into every step, tool and worker.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from boundby import files
from tests.fault_matrix import read, three_visits
from tests.injection import LOST_DATA, LOST_NAMES, Fault, ForkedStep, in_child
from utils import cli
from utils.errors import InputError
from utils.locks import held

ROOT = Path(__file__).resolve().parents[2]
OLD = {"whole": "old"}


@pytest.mark.parametrize("what", [LOST_DATA, LOST_NAMES])
def test_what_a_writer_has_returned_from_outlives_the_power(tmp_path, what):
    def write_and_lose() -> None:
        files.append_json_line(tmp_path / "new" / "deep" / "log.jsonl", OLD)
        files.write_json(tmp_path / "other" / "metrics.json", OLD)
        os.mkdir(tmp_path / "last")

    ended = in_child(write_and_lose, tmp_path, Fault("mkdir", 4, what))
    assert ended.code == -9
    assert files.read_json_lines(tmp_path / "new" / "deep" / "log.jsonl") == [OLD]
    assert files.read_json(tmp_path / "other" / "metrics.json") == OLD


@pytest.mark.parametrize("what", [LOST_DATA, LOST_NAMES])
def test_what_one_step_has_synced_outlives_the_power_lost_in_the_next(tmp_path, monkeypatch, what):
    def first(arguments: list[str]) -> int:
        files.write_json(tmp_path / "stage" / "receipt.json", OLD)
        return 0

    def run() -> None:
        for name in ("first", "second"):
            assert ForkedStep(["python", f"{name}.py"], lambda: None).wait() == 0

    (tmp_path / "stage").mkdir()
    monkeypatch.setitem(sys.modules, "scripts.first", SimpleNamespace(main=first))
    monkeypatch.setitem(
        sys.modules, "scripts.second", SimpleNamespace(main=lambda _: os.mkdir(tmp_path / "stage" / "x"))
    )
    ended = in_child(run, tmp_path / "stage", Fault("mkdir", 1, what))
    assert (ended.code, files.read_json(tmp_path / "stage" / "receipt.json")) == (-9, OLD), ended.said


@pytest.fixture
def step(tmp_path):
    """The command of a small step; `flags` are more of its arguments."""
    (tmp_path / "texts.csv").write_text("text,labels\nhello,0\n")
    (tmp_path / "config.yaml").write_text(
        f"model: {{name: some/model}}\ndataset: {{file: {tmp_path / 'texts.csv'}}}\n"
        f"output: {{results_dir: {tmp_path / 'results'}}}\n"
    )

    main = cli.step("02")(three_visits)

    def play(*flags: str) -> int:
        return main(["--config", str(tmp_path / "config.yaml"), *flags])

    return play


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ": no space left on the disk at "),
        (errno.EDQUOT, ": this user's quota on the disk at "),
        (errno.EIO, " fails or is gone (Input/output error)"),
        (errno.EMFILE, ": this process may open no more than "),
        (errno.EROFS, ": Read-only file system; change its rights or its disk"),
    ],
)
def test_a_message_names_the_real_file_its_disk_and_the_limit(step, tmp_path, number, words):
    paths = [path for operation, path in in_child(step, tmp_path).done if operation == "open"]
    place = next(place for place, path in enumerate(paths, 1) if path.endswith("baseline_metrics.json"))
    fault = Fault("open", place, number)
    ended = in_child(step, tmp_path, fault)
    assert ended.code == 3
    message = ended.said.splitlines()[-1]
    assert message.startswith(f"error: {tmp_path / 'results' / 'baseline_metrics.json'}") and words in message


def test_a_log_on_a_full_disk_ends_no_step(step, tmp_path):
    (tmp_path / "results" / "logs").mkdir(parents=True)
    (tmp_path / "results" / "logs" / "02.log").symlink_to("/dev/full")
    ended = in_child(step)
    assert (ended.code, ended.said) == (0, "measured\n")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_is_said_at_once(step, tmp_path, number):
    (tmp_path / "results").mkdir()
    for _ in range(2):  # nothing is left that would look like another step
        ended = in_child(step, tmp_path, Fault("lock", 1, number))
        assert ended.code == 3 and "results/.lock: the file system there has no locks" in ended.said
        assert in_child(step).code == 0


def test_who_holds_a_lock_is_named_and_a_wait_has_a_limit_and_a_word(tmp_path):
    said: list[str] = []
    program = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print(); sys.stdin.read()"
    (tmp_path / "holder.py").write_text(program)
    command = [sys.executable, str(tmp_path / "holder.py"), str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        named = f"process {process.pid} \\(holder.py\\) is writing there; wait"
        with pytest.raises(InputError, match=named), held(tmp_path / ".lock", 0.0, said.append, "wait"):
            pass
        assert said == []
        process.stdin.close()
    with held(tmp_path / ".lock", 0.0, said.append, "wait"):
        pass


@pytest.mark.parametrize(
    ("scenes", "most"),
    [
        (("writers", "a step", "a step that goes on", "a step anew"), 40),
        (("step 01", "evaluate plan", "evaluate run", "evaluate run, in a store"), 5),
    ],
)
def test_nothing_is_lost_mixed_or_leaked_by_a_sample_of_faults(tmp_path, scenes, most):
    command = [sys.executable, "-m", "tests.fault_matrix", str(tmp_path / "notes"), "--most", str(most), "--scenes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run([*command, *scenes], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    notes = read(tmp_path / "notes")
    assert {note.scene for note in notes} == set(scenes) and len(notes) == most * len(scenes)
