"""Compiled layers: each process compiles for itself, and the bytes are the same."""

import shutil
from pathlib import Path

import pytest
import torch

from boundby.inference import compile_obstacle
from tests import evaluation_workplace as workplace
from utils.artifacts import EvaluationFolder
from utils.evaluation import plan as plans
from utils.evaluation import planning

LACKING = compile_obstacle(torch.device("cpu"))

pytestmark = [pytest.mark.truth, pytest.mark.skipif(LACKING is not None, reason=f"{LACKING}")]


@pytest.mark.timeout(1800)
def test_one_and_two_workers_that_compile_leave_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planning.SHARD_ROWS, "cpu", workplace.SHARD_ROWS)
    settings = [*workplace.prepare(tmp_path, workplace.texts()), "evaluation.compile=on"]
    found = []
    for workers in (1, 2):
        folder = EvaluationFolder(tmp_path / str(workers) / "evaluation")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"compiled-{workers}"))  # nothing is reused
        if workers > 1:
            folder.path.mkdir(parents=True)
            shutil.copy(tmp_path / "1" / "evaluation" / "plan.json", folder.plan)
        here = [*settings, f"output.results_dir={folder.path.parent}", f"evaluation.workers={workers}"]
        assert workplace.evaluate(here, *(["plan"] if workers == 1 else []), "run", "finalize") == [0] * (4 - workers)
        found.append(workplace.results(folder.path))
    made = plans.load(folder)
    print(f"{made.reasons['compile']}")
    assert made.choices.compile
    assert found[0] == found[1]
    assert {folder.part(each.id).name for each in made.shards} < set(found[0])
