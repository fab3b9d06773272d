"""The peak of a batch that was not measured, predicted from smaller ones, in a process of its own for each model."""

import json
import subprocess
import sys

import pytest

from boundby.memory import Peak, PeakModel, ProcessPeak, fit_peaks

pytestmark = pytest.mark.truth

LENGTH, MEASURED, HELD_OUT = 192, (1, 4, 16, 32, 64, 96), (24, 48, 128, 192)
MOST_ERROR = 0.05  # of a held-out peak
PROGRAM = """
import json, sys, torch
from boundby.device import release_memory
from boundby.memory import ProcessPeak
from tests import classifiers
family, length, *sizes = sys.argv[1], *map(int, sys.argv[2:])
names = ("n_embd", "n_inner", "n_positions") if family == "gpt2" else \
    ("hidden_size", "intermediate_size", "max_position_embeddings")
model = classifiers.build(family, 2000, 0, **dict(zip(names, (256, 1024, 512))))
kernel, found = ProcessPeak(), []
for size in sizes:
    ids = torch.randint(3, 2000, (size, length))
    mask = torch.ones_like(ids)
    mask[1:, length // 2 :] = 0
    release_memory(ids.device)
    kernel.reset()
    with torch.inference_mode():
        for _ in range(3):
            model(input_ids=ids, attention_mask=mask)
    found.append(kernel.read())
print(json.dumps(found))
"""


@pytest.mark.parametrize("family", ["bert", "gpt2", "qwen2"])
def test_held_out_batch_sizes_take_the_predicted_peak(family):
    if not ProcessPeak().reset():
        pytest.skip("this kernel cannot set the peak of a process back (/proc/self/clear_refs)")
    sizes = [*MEASURED, *HELD_OUT]
    command = [sys.executable, "-c", PROGRAM, family, str(LENGTH), *map(str, sizes)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    held = dict(zip(sizes, json.loads(run.stdout.splitlines()[-1]), strict=True))
    model = fit_peaks([Peak(size, LENGTH, held[size]) for size in MEASURED])
    assert isinstance(model, PeakModel), model
    errors = {size: model.bytes_at(size, LENGTH) / held[size] - 1 for size in HELD_OUT}
    for size, error in errors.items():
        print(f"{family}, {size} x {LENGTH}: {held[size] / 1e6:.0f} MB, predicted {error:+.1%}")
    assert max(map(abs, errors.values())) <= MOST_ERROR
