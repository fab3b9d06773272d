"""Compiled layers: each process compiles for itself, and the bytes are the same."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from boundby.machine import compile_obstacle
from tests import evaluation_workplace as workplace
from utils.command.artifacts import EvaluationFolder
from utils.evaluation import plan as plans
from utils.evaluation import planning

LACKING = compile_obstacle(torch.device("cpu"))

pytestmark = [pytest.mark.truth, pytest.mark.skipif(LACKING is not None, reason=f"{LACKING}")]


@pytest.mark.timeout(1800)
def test_two_processes_that_compile_leave_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", workplace.SHARD_ROWS)
    settings = [*workplace.prepare(tmp_path, workplace.texts()), "evaluation.compile=on"]
    first, second = (EvaluationFolder(tmp_path / name / "evaluation") for name in ("first", "second"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled-first"))
    at_first, at_second = ([*settings, f"output.results_dir={folder.path.parent}"] for folder in (first, second))
    assert workplace.evaluate(at_first, *workplace.WHOLE) == [0, 0, 0]
    second.path.mkdir(parents=True)
    shutil.copy(first.plan, second.plan)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled-second"))  # nothing is reused
    subprocess.run([sys.executable, "scripts/evaluate.py", "run", *at_second], cwd=workplace.ROOT, check=True)
    assert workplace.evaluate(at_second, "finalize") == [0]
    made = plans.load(second)
    print(made.reasons.compile.reason)
    assert made.choices.compile
    assert workplace.results(first.path) == workplace.results(second.path)
    assert {second.part(shard.id).name for shard in made.shards} < set(workplace.results(second.path))
