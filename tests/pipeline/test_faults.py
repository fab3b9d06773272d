"""Whatever fails at whichever operation on files: a file is old or new, a step ends well, is refused or goes on."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from boundby import files
from tests.fault_matrix import LIGHT, STORED, three_visits
from tests.injection import LOST_DATA, LOST_NAMES, Fault, in_child
from utils.command.errors import InputError
from utils.command.locks import held
from utils.steps import running

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


@pytest.fixture
def step(tmp_path):
    """The command of a small step; `flags` are more of its arguments."""
    (tmp_path / "texts.csv").write_text("text,labels\nhello,0\n")
    (tmp_path / "config.yaml").write_text(
        f"model: {{name: some/model}}\ndataset: {{file: {tmp_path / 'texts.csv'}}}\n"
        f"output: {{results_dir: {tmp_path / 'results'}}}\n"
    )

    main = running.step("02")(three_visits)

    def play(*flags: str) -> int:
        return main(["--config", str(tmp_path / "config.yaml"), *flags])

    return play


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ": no space left on the disk at "),
        (errno.EDQUOT, ": this user's quota on the disk at "),
        (errno.EIO, " failed or is gone (Input/output error)"),
        (errno.EMFILE, ": this process may open no more than "),
        (errno.EROFS, ": Read-only file system; change its permissions"),
    ],
)
def test_a_message_names_the_real_file_its_disk_and_the_limit(step, tmp_path, number, words):
    paths = [path for operation, path in in_child(step, tmp_path).done if operation == "open"]
    index = next(index for index, path in enumerate(paths, 1) if path.endswith("baseline_metrics.json"))
    fault = Fault("open", index, number)
    ended = in_child(step, tmp_path, fault)
    assert ended.code == 3
    message = ended.said.splitlines()[-1]
    assert message.startswith(f"error: {tmp_path / 'results' / 'baseline_metrics.json'}") and words in message


def test_a_name_that_is_too_long_is_one_message_with_the_way_out(step, tmp_path):
    ended = in_child(lambda: step(f"output.results_dir={tmp_path / ('x' * 300)}"))
    assert ended.code == 3 and ended.said.endswith(
        "File name too long; choose another folder or file in the settings\n"
    )


def test_a_log_on_a_full_disk_ends_no_step(step, tmp_path):
    (tmp_path / "results" / "logs").mkdir(parents=True)
    (tmp_path / "results" / "logs" / "02.log").symlink_to("/dev/full")
    ended = in_child(step)
    assert (ended.code, ended.said) == (0, "measured\n")


def test_a_disk_without_locks_is_said_at_once(step, tmp_path):
    (tmp_path / "results").mkdir()
    for _ in range(2):  # nothing is left that would look like another step
        ended = in_child(step, tmp_path, Fault("lock", 1, errno.ENOLCK))
        assert ended.code == 3 and "results/.lock: the file system there has no locks" in ended.said
        assert in_child(step).code == 0


def test_a_folder_in_use_is_refused_with_the_way_out_and_free_again_once_it_is_left(tmp_path):
    said: list[str] = []
    with held(tmp_path / ".lock", 0.0, said.append, "wait"):
        refused = pytest.raises(InputError, match="another program is writing there; wait")
        with refused, held(tmp_path / ".lock", 0.0, said.append, "wait"):
            pass
    with held(tmp_path / ".lock", 0.0, said.append, "wait"):
        assert said == []


def injected_into(folder: Path, scenes: tuple[str, ...], most: int, how: str = "fail") -> list[dict]:
    """Return a note of each injection into these scenes, in none of which anything was wrong."""
    command = [sys.executable, "-m", "tests.fault_matrix", str(folder / "notes"), "--how", how, "--most", str(most)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run([*command, "--scenes", *scenes], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


@pytest.mark.parametrize(("scenes", "most"), [(LIGHT, 40), (("step 01", "evaluate plan", "evaluate run", STORED), 5)])
def test_nothing_is_lost_mixed_or_leaked_by_a_sample_of_faults(tmp_path, scenes, most):
    notes = injected_into(tmp_path, scenes, most)
    assert {note["scene"] for note in notes} == set(scenes) and len(notes) == most * len(scenes)
