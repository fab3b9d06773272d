"""Real processes: a job under Lightning leaves its files, a killed run what can be read, a program its own step times.

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
        assert "communication" in {stage.name for stage in times.stages}
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
    assert "fault trace" not in out and "fault op_stats" not in out  # what was finished before is whole


def _has_written(run: Path) -> bool:
    try:
        times = read_stage_times(run)
        return (run / "op_stats.csv").is_file() and (times.last_step or 0) > 10 and len(losses_in(run)) > 10
    except (OSError, ValueError):
        return False


def losses_in(folder: Path) -> list[float]:
    return json.loads((folder / "metrics.json").read_text())["steps"]["loss"]


TIMED = """
import json, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.004)
        return super().forward(x)

model = Slow(64, 8)
optimizer = torch.optim.Adam(model.parameters())
rows = TensorDataset(torch.randn(1920, 64), torch.randint(0, 8, (1920,)))
own, last = {name: [] for name in ("forward", "backward", "optimizer", "step")}, time.perf_counter()
for x, y in DataLoader(rows, batch_size=32):
    marks = [time.perf_counter()]
    found = model(x)
    marks.append(time.perf_counter())
    loss = torch.nn.functional.cross_entropy(found, y)
    loss_made = time.perf_counter()
    loss.backward()
    marks += [loss_made, time.perf_counter()]
    optimizer.step()
    marks.append(time.perf_counter())
    optimizer.zero_grad()
    for name, of in zip(own, (marks[1] - marks[0], marks[3] - marks[2], marks[4] - marks[3], marks[4] - last)):
        own[name].append(of)
    last = marks[4]
json.dump(own, open(sys.argv[1], "w"))
"""


def test_the_steps_of_a_program_that_knows_nothing_of_it_are_those_of_its_own_clock(tmp_path):
    (tmp_path / "train.py").write_text(TIMED)
    own_clock = ["--", sys.executable, str(tmp_path / "train.py"), str(tmp_path / "own.json")]
    subprocess.run([sys.executable, str(SCRIPT), "--output", str(tmp_path / "run"), *own_clock], check=True)
    own, times = json.loads((tmp_path / "own.json").read_text()), read_stage_times(tmp_path / "run")
    recorded = {"step": times.step.host_s} | {stage.name: stage.host_s for stage in times.stages}
    for name, clock in own.items():
        seconds = clock[1:]  # the first step, cold, is not recorded
        ours, theirs = recorded[name].mean, sum(seconds) / len(seconds)
        print(f"{name}: {1e3 * ours:.4f} ms recorded, {1e3 * theirs:.4f} by the program, of {recorded[name].n} steps")
        assert recorded[name].n == len(seconds) and abs(ours - theirs) <= 0.01 * theirs + 2e-4
