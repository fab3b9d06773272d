"""The peak of a batch that was not measured, predicted from smaller ones, in a process of its own for each model."""

import json
import os
import subprocess
import sys

import pytest

from boundby.machine.memory import KEPT_BELOW, Demand, Peak, PeakModel, ProcessPeak, fit_peaks

pytestmark = pytest.mark.truth

LENGTH, MEASURED, HELD_OUT = 256, (1, 4, 16, 32, 64), (48, 128, 384, 768)
MOST_ERROR, LARGE = 0.05, 2e9  # of held-out peaks of so many bytes; smaller ones lie in the range that is told
GIVEN_BACK = 2**20  # the size from which glibc gives back every freed block, where it is told so
PROGRAM = """
import json, sys, torch
from dataclasses import asdict
from boundby.machine.device import release_memory
from boundby.machine.memory import ProcessPeak, demand
from tests import classifiers
family, length, *sizes = sys.argv[1], *map(int, sys.argv[2:])
names = {"gpt2": ("n_embd", "n_inner", "n_positions", "n_layer"), "distilbert": ("dim", "hidden_dim",
    "max_position_embeddings", "n_layers")}.get(family, ("hidden_size", "intermediate_size", "max_position_embeddings",
    "num_hidden_layers"))
model = classifiers.build(family, 20000, 0, **dict(zip(names, (256, 1024, 512, 1))))
def forward(size):
    ids = torch.randint(3, 2000, (size, length))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    return model(input_ids=ids, attention_mask=mask)
kernel, found = ProcessPeak(), []
for size in sizes:
    release_memory(torch.device("cpu"))
    kernel.reset()
    with torch.inference_mode():
        for _ in range(4):
            forward(size)
    found.append(kernel.read())
print(json.dumps([found, asdict(demand(forward, length))]))
"""


@pytest.mark.parametrize(("family", "below"), [
    *((family, KEPT_BELOW) for family in ("bert", "gpt2", "qwen2", "distilbert")),
    *((family, GIVEN_BACK) for family in ("bert", "qwen2")),
])  # fmt: skip
def test_held_out_batch_sizes_take_the_predicted_peak(family, below):
    if not ProcessPeak().reset():
        pytest.skip("this kernel cannot set the peak of a process back (/proc/self/clear_refs)")
    sizes = [*MEASURED, *HELD_OUT]
    command = [sys.executable, "-c", PROGRAM, family, str(LENGTH), *map(str, sizes)]
    told_glibc = {} if below == KEPT_BELOW else {"MALLOC_MMAP_THRESHOLD_": str(below)}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | told_glibc)
    peaks, counted = json.loads(run.stdout.splitlines()[-1])
    held = dict(zip(sizes, peaks, strict=True))
    demand = Demand(LENGTH, tuple(map(tuple, counted["changes"])))
    model = fit_peaks([Peak(size, LENGTH, held[size]) for size in MEASURED], {LENGTH: demand}, below)
    assert isinstance(model, PeakModel), model
    for size in HELD_OUT:
        message = model.at(size)
        error = message.value / held[size] - 1
        print(f"{family}, {size} x {LENGTH}: {held[size] / 1e6:.0f} MB, predicted {error:+.1%}, "
              f"{message.low / 1e6:.0f} to {message.high / 1e6:.0f}, blocks below {below >> 20} MB kept")  # fmt: skip
        assert below < KEPT_BELOW or message.low <= held[size] <= message.high
        assert abs(error) <= MOST_ERROR or (below == KEPT_BELOW and held[size] < LARGE)
    assert held[HELD_OUT[-1]] >= LARGE
