"""All that can fail, made to fail in every step, tool and worker; `make truth ARGS="-k faults"` prints the matrix."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_matrix import LIGHT, read, table
from tests.injection import unreadable, visits
from tests.test_end_to_end import arguments, finished  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.truth, pytest.mark.timeout(7200)]
ROOT = Path(__file__).resolve().parents[2]
KILLS = 100
LONGEST_S = 30.0  # about what a run of this small pipeline takes on two cores: kills fall into every step
EVALUATION = ("evaluate plan", "evaluate run", "evaluate finalize")
STORED = tuple(f"{name}, in a store" for name in EVALUATION)
TOOLS = ("validate_dataset", "analyze_trace", "check_profile", "compare_runs")
SLOW = ("step 02", "step 03", "step 04", "step 05")
MATRIX = [  # how, at most so many for each scene, and the scenes
    ("fail", 2000, LIGHT),
    ("fail", 2000, ["step 01"]),
    *[("fail", 500, [name]) for name in (*EVALUATION, *STORED)],
    ("fail", 200, TOOLS),
    *[("fail", 40, [name]) for name in SLOW],
    ("edit", 6, ["evaluate run", "evaluate finalize", "step 02", "step 03"]),
    ("kill", 60, ["evaluate run", "evaluate run, in a store"]),
    ("share", 10, ["a step", "step 01", *EVALUATION, *STORED]),
    ("deafen", 1, ["a step", "step 01", *EVALUATION, *SLOW]),
    ("interrupt", 1, ["step 02"]),
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


def test_random_kills_of_the_whole_pipeline_cost_no_file_and_no_visit(arguments, tmp_path):  # noqa: F811
    """Kill runner and step at a random moment, then go on with --resume; again and again, from nothing to the end."""
    rng = random.Random(0)
    results = tmp_path / "results"
    command = [sys.executable, str(ROOT / "run_pipeline.py"), "--resume", "--skip-check", *arguments]
    reference = None
    runs = 0
    for attempt in range(KILLS):
        before = visits(results)
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        moment = rng.uniform(0.1, LONGEST_S)
        try:
            code = process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        problems = unreadable(results) if results.exists() else []
        kept = visits(results)
        seen = f"exit {code}, {len(kept)} visits, {len(problems)} unreadable"
        print(f"kill {attempt + 1}/{KILLS} after {moment:.1f} s: {seen}")
        assert problems == []
        assert before <= kept
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            runs += 1
            metrics = json.loads((results / "baseline_metrics.json").read_text())
            predictions = (results / "evaluation" / "predictions.csv").read_bytes()
            reference = reference or predictions
            assert predictions == reference and metrics["complete"]
            for path in (results / ".receipts").iterdir():  # start again from nothing
                path.unlink()
    print(f"{KILLS} kills, {runs} finished runs, every file readable, no committed visit lost")
    assert runs > 0
