"""Whole programs on the card, each beside nothing else: the pipeline, one that loses its GPU, training, Nsight."""

import csv
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import evaluation_workplace as workplace

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280.0
DONE, INCOMPLETE, LACKING = 0, 4, 3
SHORT = (
    "profiling.batch_sizes=[1,8]",
    "profiling.max_seconds_per_batch_size=2",
    "layers.num_runs=5",
    "layers.max_seconds=10",
    "variants.max_seconds=20",
)
# A kernel whose assertion fails in the middle of the sweep: every later call of CUDA is refused for that.
LOSES = """
import runpy, sys, torch
calls, linear = 0, torch.nn.functional.linear
def failing(inputs, *more):
    global calls
    calls += inputs.is_cuda
    if calls == 5000:
        inputs.new_zeros(2)[torch.tensor([7], device=inputs.device)]
    return linear(inputs, *more)
torch.nn.functional.linear = failing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def program(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a program of this checkout without a network."""
    known = {**os.environ, "HF_HUB_OFFLINE": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=known, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error that a program ended with, or the last thing it said; nothing where it ended well."""
    lines = [""] + done.stderr.strip().splitlines() if done.returncode else [""]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])


@pytest.mark.gpu(
    low=0,
    high=0,
    unit="things that went wrong",
    reason="all steps run on a small model, every batch size has a device time, and the report is there",
    limit_s=LIMIT_S,
)
def test_the_pipeline(tmp_path, measured):
    settings = workplace.prepare(tmp_path, workplace.texts(400), None, "evaluation.token_budget=null")
    began = time.monotonic()
    done = program(sys.executable, "run_pipeline.py", *settings, "--skip-download", *SHORT)
    results = tmp_path / "results"
    rows: list[dict[str, str]] = []
    if (results / "detailed_metrics.csv").is_file():
        with (results / "detailed_metrics.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    is_right = [
        done.returncode in (DONE, INCOMPLETE),
        (results / "report.html").is_file(),
        (results / "variants.json").is_file(),
        bool(rows) and all(row["device_per_batch_ms"] for row in rows),
    ]
    measured(is_right.count(False), exit=done.returncode, seconds=time.monotonic() - began, said=last_line(done))


@pytest.mark.gpu(
    low=0,
    high=0,
    unit="things that went wrong",
    reason="an error of CUDA that stays ends the step with one line that names --resume; what was measured is kept",
    limit_s=LIMIT_S,
)
def test_a_gpu_that_is_lost_in_the_sweep(tmp_path, measured):
    settings = workplace.prepare(tmp_path, workplace.texts(), None, "evaluation.enabled=false")
    done = program(sys.executable, "-c", LOSES, "scripts/02_baseline_inference.py", *settings, *SHORT)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    is_right = [
        done.returncode in (1, LACKING),
        len(errors) == 1 and "--resume" in errors[0],
        "Traceback" not in done.stderr,
        (tmp_path / "results" / "baseline_metrics.json").is_file(),
    ]
    measured(is_right.count(False), exit=done.returncode, said=errors or last_line(done))


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
@pytest.mark.gpu(
    low=1,
    high=1,
    unit="recordings",
    reason="the example of the callback leaves one",
    limit_s=LIMIT_S,
)
def test_callback(tmp_path, measured, card, framework):
    done = program(sys.executable, f"examples/train_with_{framework}.py", tmp_path)
    if done.returncode == LACKING:
        card.lacks(last_line(done))
    recorded = [path for path in tmp_path.rglob("*stage_times.json") if path.stat().st_size]
    measured(len(recorded) if done.returncode == DONE else 0, exit=done.returncode, said=last_line(done))


@pytest.mark.gpu(low=1, high=1, unit="reports", reason="a range between the profiler's start and stop is recorded")
def test_range_of_nsight_systems(tmp_path, measured, card):
    result = shutil.which("nsys")
    if result is None:
        card.lacks("nsys is not installed")
    code = (
        "import torch; one = torch.ones(1, device='cuda'); torch.cuda.profiler.start(); "
        "torch.cuda.nvtx.range_push('a check'); one.add_(1).item(); torch.cuda.nvtx.range_pop(); "
        "torch.cuda.profiler.stop()"
    )
    options = ["-t", "cuda,nvtx", "-c", "cudaProfilerApi", "--capture-range-end=stop", "-o", tmp_path / "it"]
    done = program(result, "profile", *options, sys.executable, "-c", code)
    measured(len(list(tmp_path.glob("it*.nsys-rep"))) * (done.returncode == DONE), said=last_line(done))
