"""Plans for small models, and their stages run one after the other in this process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from boundby.partition import Chain, ExecutionPlanner, Link, PartitionPlan, Unit, VirtualNode
from boundby.staged.cuts import plan_at
from boundby.staged.cutting import Stages, skeleton, weights
from boundby.staged.stage import StageModel

UNITS = {
    "gpt2": [f"transformer.{name}" for name in ("wte", "wpe", "drop", "h.0", "h.1", "ln_f")] + ["lm_head"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "dropout", "classifier"],
    "qwen2": [f"model.{name}" for name in ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")] + ["lm_head"],
    "resnet": ["resnet.embedder", "resnet.encoder.stages.0", "resnet.encoder.stages.1", "resnet.pooler", "classifier"],
    "encoder": ["layers.0", "layers.1"],
}


def plan_of(units: Sequence[str], *cuts: int, seconds: float | Sequence[float] = 1e-3, **options: Any) -> PartitionPlan:
    """Return a plan with a node for every part between the cuts; links cost nothing unless `links` says so."""
    each = [seconds] * len(units) if isinstance(seconds, float) else seconds
    chain = Chain(tuple(Unit(name, s, cut_bytes=100, layers=(name,)) for name, s in zip(units, each, strict=True)))
    nodes = [VirtualNode(f"node_{place}", "cpu", ram_gb=1) for place in range(len(cuts) + 1)]
    links = options.pop("links", Link(float("inf")))
    like = ExecutionPlanner(chain, kind="cpu").generate_plan(nodes[:1], "throughput", links, **options)
    return plan_at(cuts, like, {"cpu": chain}, nodes, links)


def run_here(stages: Stages, inputs: Any) -> Any:
    """Return what the stages give for these inputs: each with its own weights alone."""
    values = dict(zip(stages.programs[0].arriving, stages.check_inputs(inputs), strict=True))
    output = None
    for program in stages.programs:
        stage = StageModel(skeleton(stages.model, stages.programs, "cpu"), program, "cpu")
        for names, tensor in weights(stages.model, program):
            stage.load(names, tensor.clone())
        values, output = stage.run(values)
    return output


class Fails(nn.Module):
    """Adds one; fails where an input is negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ArithmeticError("a negative number came in")
        return x + 1
