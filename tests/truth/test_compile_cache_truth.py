"""Torch's own cache, open to everybody, stays as it is while a model is compiled: nothing is read or left there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from boundby.machine import compile_obstacle
from tests.tiny_models import save_bert

LACKING = compile_obstacle(torch.device("cpu"))
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.truth, pytest.mark.skipif(LACKING is not None, reason=f"{LACKING}")]

PROGRAM = """
import os, sys
shared = os.environ["TMPDIR"] + "/torchinductor_somebody"
met = []
sys.addaudithook(lambda event, given: met.append(str(given[0])) if event in ("open", "os.listdir") and given else None)
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from boundby.inference import Predictor, PredictorOptions
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
options = PredictorOptions(32, compile=True)
predictor = Predictor(model, AutoTokenizer.from_pretrained(sys.argv[1]), options, ["good bad", "late", "please"])
assert predictor.compiled, predictor.doubts
left = [os.path.join(folder, name) for folder, _, names in os.walk(shared) for name in names]
print("met", [path for path in met if path.startswith(shared)], "left", left)
"""


@pytest.mark.timeout(600)
def test_a_compiled_predictor_neither_reads_nor_writes_the_folder_that_torch_shares(tmp_path: Path) -> None:
    shared = tmp_path / "tmp" / "torchinductor_somebody"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(shared.parent), "LOGNAME": "somebody"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR_", "TRITON_"))}
    command = [sys.executable, "-c", PROGRAM, str(save_bert(tmp_path / "model"))]
    done = subprocess.run(command, cwd=ROOT, env={**kept, **home}, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("met [] left []\n"), (done.stdout, done.stderr)
    assert list((tmp_path / "cache" / "boundby" / "compiled").glob("*/fxgraph"))
