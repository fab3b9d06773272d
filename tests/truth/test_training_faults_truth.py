"""Thirteen real loops with one fault each, recorded as a user would: the first advice is the one against it.

Stages that need other processes, or a model that generates, only wait here for as long; the marks around them are real.
"""

import gc
import json
import time

import pytest
import torch

from boundby.capture import Schedule
from boundby.training import ProfilerManager

pytestmark = pytest.mark.truth
STEPS, SLOW_S = 40, 0.02
ADVICE = {
    "data": "load_ahead",
    "collate": "load_ahead",
    "h2d": "hide_copies",
    "optimizer": "cheaper_update",
    "clip": "clip_on_device",
    "scheduler": "cheaper_schedule",
    "logging": "log_less",
    "checkpoint": "save_beside",
    "evaluation": "evaluate_less",
    "garbage": "collect_rarely",
    "recompile": "compile_ahead",
    "communication": "hide_communication",
    "rollout": "generate_faster",
}


def spin(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(200))


@pytest.mark.parametrize("fault", ADVICE)
def test_the_first_advice_is_against_the_fault(fault, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    rubbish = []
    torch._dynamo.reset()
    forward = torch.compile(model, backend="eager", dynamic=False) if fault == "recompile" else model
    torch._dynamo.config.recompile_limit = 10 * STEPS

    def batches():
        for step in range(STEPS):
            if fault in ("data", "collate"):
                (time.sleep if fault == "data" else spin)(SLOW_S)
            yield torch.randn(16 + (step if fault == "recompile" else 0), 64)

    def slow(stage, profiler):
        with profiler.stage(stage):
            if fault == stage:
                time.sleep(SLOW_S)

    with ProfilerManager(tmp_path, schedule=Schedule(10, 2, 3), device=torch.device("cpu")) as profiler:
        for batch in profiler.timed(batches()):
            slow("rollout", profiler)
            slow("h2d", profiler)
            with profiler.stage("forward"):
                if fault == "garbage":
                    rubbish[:] = [[number] for number in range(100_000)]
                    gc.collect()
                loss = forward(batch).square().mean()
            with profiler.stage("backward"):
                loss.backward()
            slow("communication", profiler)
            slow("clip", profiler)
            with profiler.stage("optimizer"):
                if fault == "optimizer":
                    time.sleep(SLOW_S)
                optimizer.step()
                optimizer.zero_grad()
            for stage in ("scheduler", "logging", "checkpoint"):
                slow(stage, profiler)
            if fault == "evaluation":
                with profiler.excluded("evaluation"):
                    time.sleep(SLOW_S)
            profiler.step()
    document = json.loads((tmp_path / "profiler_summary.json").read_text())
    verdict, of_trace = document["verdict"], document["trace_verdict"]
    print(fault, verdict["text"], of_trace["bound"], [gain["kind"] for gain in of_trace["gains"]])
    assert verdict["gains"][0]["kind"] == ADVICE[fault]
    if fault in ("data", "collate"):
        assert of_trace["bound"] == "input", "the stages stand in the trace, which says the same"
