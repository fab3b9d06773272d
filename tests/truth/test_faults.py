"""All that can fail, made to fail in every step, tool and worker; `make truth ARGS="-k faults"` prints the matrix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_matrix import LIGHT, read, table

pytestmark = [pytest.mark.truth, pytest.mark.timeout(7200)]
ROOT = Path(__file__).resolve().parents[2]
EVALUATION = ("evaluate plan", "evaluate run", "evaluate finalize")
STORED = tuple(f"{name}, in a store" for name in EVALUATION)
TOOLS = ("validate_dataset", "analyze_trace", "check_profile", "compare_runs")
SLOW = ("step 02", "step 03", "step 04", "step 05")
MATRIX = [  # how, at most so many for each scene, and the scenes
    ("fail", 2000, LIGHT),
    ("fail", 2000, ["step 01"]),
    *[("fail", 500, [name]) for name in (*EVALUATION, *STORED)],
    ("fail", 200, TOOLS),
    *[("fail", 40, [name]) for name in (*SLOW, "pipeline")],
    ("stop", 40, ["pipeline"]),
    ("edit", 6, ["evaluate run", "evaluate finalize", "step 02", "step 03"]),
    ("kill", 80, ["evaluate run", "evaluate run, in a store", "pipeline"]),
    ("share", 10, ["a step", "step 01", *EVALUATION, *STORED]),
    ("deafen", 1, ["a step", "step 01", *EVALUATION, *SLOW]),
    ("interrupt", 1, ["step 01", "step 02", "step 04", "pipeline"]),
]


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """What was injected so far; `FAULT_NOTES` names a file to go on with."""
    path = Path(os.environ.get("FAULT_NOTES") or tmp_path_factory.mktemp("faults") / "notes.jsonl")
    yield path
    print(table(read(path)))


@pytest.mark.parametrize(("how", "most", "scenes"), MATRIX)
def test_nothing_is_lost_mixed_or_leaked(notes, how, most, scenes):
    command = [sys.executable, "-m", "tests.fault_matrix", str(notes), "--how", how, "--most", str(most), "--scenes"]
    done = subprocess.run([*command, *scenes], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0
    assert {note.scene.removesuffix(", parts on disk") for note in read(notes)} >= set(scenes)
