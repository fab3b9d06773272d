"""`boundby.explain`: one call on a module with inputs, or on any callable."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import boundby
from boundby.bound.card import MOST_LINES

SECONDS = 0.4


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.modes: set[bool] = set()

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.modes.add(self.training)
        return {"out": self.inner(ids) * scale}


def test_explains_a_module_and_leaves_it_as_it_was():
    model = Named().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    explanation = boundby.explain(model, {"ids": torch.randn(8, 64), "scale": 2.0}, name="<b>mine</b>", seconds=SECONDS)
    assert model.training and model.modes == {False}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    lines = str(explanation).splitlines()
    assert lines[0].startswith("<b>mine</b> on ") and "· float32 · batch 8 × 64" in lines[0]
    assert len(lines) <= MOST_LINES and repr(explanation) == str(explanation)
    shown = explanation._repr_html_()
    assert "&lt;b&gt;mine" in shown and "<b>mine" not in shown
    document = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
    assert document["card"] == lines and document["verdict"]["bound"] == explanation.verdict.bound


def test_explains_a_training_step_with_its_gradients():
    model = nn.Linear(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, before = torch.randn(16, 32), model.weight.detach().clone()

    def training_step() -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    explanation = boundby.explain(training_step, seconds=SECONDS)
    assert str(explanation).startswith("training_step on ") and explanation.verdict.bound != "inconclusive"
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [(nn.Linear(2, 2), None, "got Linear and no batch"), (len, torch.ones(2), "got builtin_function_or_method and Te")],
)
def test_refuses_a_module_without_inputs_and_inputs_without_a_module(model, batch, message):
    with pytest.raises(TypeError, match=message):
        boundby.explain(model, batch)


def test_what_the_model_raises_comes_through_and_its_mode_comes_back():
    model = nn.Linear(4, 4).train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        boundby.explain(model, torch.ones(2, 3), seconds=SECONDS)
    assert model.training


def test_importing_the_package_loads_no_torch():
    printed = subprocess.run(
        [sys.executable, "-c", "import boundby, sys; print('torch' in sys.modules, hasattr(boundby, 'nothing'))"],
        capture_output=True,
        text=True,
    )
    assert printed.stdout.split() == ["False", "False"]
