"""Real processes: those of a job under Lightning leave their files, and a killed one leaves what can be read.

python -m pytest tests/truth/test_training_processes_truth.py -m truth
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from boundby.training import read_stage_times
from tests import lightning_fits as fits
from tests.lightning_fits import LIGHTNING

pytestmark = [pytest.mark.truth, pytest.mark.timeout(600)]  # ends a wait that would be for ever
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "profile_training.py"


def test_two_ranks_of_lightning_write_files_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(fits.__file__)), LIGHTNING, str(tmp_path)]
    root = Path(fits.__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    for rank in (0, 1):
        times = read_stage_times(tmp_path, rank)
        assert (times.rank, times.world_size, times.last_step) == (rank, 2, 5)
        assert "communication" in {each.name for each in times.stages}
        for name in ("manifest.json", "op_stats.csv", "trace.json", "profiler_summary.json"):
            assert (tmp_path / f"rank{rank}_{name}").stat().st_size > 100
    names = sorted(path.name.split(".")[0] for path in (tmp_path / "traces" / "Tiny").iterdir())
    assert names == ["rank0", "rank0_chrome_trace", "rank1", "rank1_chrome_trace"]
    assert ran.stdout.count("whole step") == 1  # said by the first alone


def test_a_killed_run_can_be_read_and_its_check_says_so(tmp_path, capsys):
    command = [sys.executable, str(SCRIPT), "--profiler", "on", "--steps", "1000000", "--output", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["data.subsample_percentage=0.1", f"profiling.output_dir={tmp_path / 'logs'}"]
    arguments.append("profiling.repeat_cycles=1")  # a second one would be in work at the kill, or not
    running = subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not _has_written(tmp_path / "run"):
            assert running.poll() is None
            time.sleep(0.05)  # another process writes; nothing here depends on how long
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    times, metrics = read_stage_times(tmp_path / "run"), json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert times.status == metrics["status"] == "running"
    assert times.last_step > 10 and len(metrics["steps"]["loss"]) > 10
    code = importlib.import_module("scripts.check_profile").main([str(tmp_path / "run"), "--analysis"])
    out = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "fault stage_times.json: the training was killed; the last step that has ended is " in out
    assert "op_stats.csv: as in the trace" in out  # what was finished before is whole


def _has_written(run: Path) -> bool:
    try:
        times = read_stage_times(run)
        return (run / "op_stats.csv").is_file() and (times.last_step or 0) > 10 and len(losses_in(run)) > 10
    except (OSError, ValueError):
        return False


def losses_in(folder: Path) -> list[float]:
    return json.loads((folder / "metrics.json").read_text())["steps"]["loss"]
