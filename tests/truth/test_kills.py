"""Many real kills at random moments; run by `make truth`, which prints every attempt."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kill_driver import unreadable, visits
from tests.test_end_to_end import arguments  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[2]
KILLS = 100
LONGEST_S = 30.0  # about what a run of this small pipeline takes on two cores: kills fall into every step


@pytest.mark.truth
def test_random_kills_of_the_whole_pipeline_cost_no_file_and_no_visit(arguments, tmp_path):  # noqa: F811
    """Kill runner and step at a random moment, then go on with --resume; again and again, from nothing to the end."""
    rng = random.Random(0)
    results = tmp_path / "results"
    command = [sys.executable, str(ROOT / "run_pipeline.py"), "--resume", "--skip-check", *arguments]
    reference = None
    finished = 0
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
            finished += 1
            metrics = json.loads((results / "baseline_metrics.json").read_text())
            predictions = (results / "evaluation" / "predictions.csv").read_bytes()
            reference = reference or predictions
            assert predictions == reference and metrics["complete"]
            for path in (results / ".receipts").iterdir():  # start again from nothing
                path.unlink()
    print(f"{KILLS} kills, {finished} finished runs, every file readable, no committed visit lost")
    assert finished > 0
