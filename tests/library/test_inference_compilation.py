"""Compiled layers give the logits of those that are not, or are not taken."""

from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import Predictor, PredictorOptions, last_layer, strategies
from boundby.machine import compile_obstacle
from tests import classifiers

OPTIONS = PredictorOptions(64, token_budget=128, compile=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiled_code_is_kept_with_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


def built(family: str, tokenizer: Any) -> Any:
    return classifiers.build(family, len(tokenizer), tokenizer.pad_token_id)


def compiled(model: Any) -> list[bool]:
    return [layer._compiled_call_impl is not None for layer in last_layer.layers(model)]


def test_the_layers_before_a_trimmed_one_are_compiled_once_for_batches_of_all_sizes(tokenizer, texts, monkeypatch):
    """Torch traces the layers and runs what it has traced as it is: all of compiling but the C++ compiler."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(strategies, "BACKEND", "eager")
    model = built("qwen2", tokenizer)
    predictor = Predictor(model, tokenizer, OPTIONS, texts)
    assert predictor.compiled and predictor.trim and predictor.doubts == ()
    assert (compiled(predictor.model), compiled(model)) == ([True, False], [False, False])
    graphs = counters["stats"]["unique_graphs"]
    eager = Predictor(model, tokenizer, PredictorOptions(64, token_budget=128), texts)
    assert not eager.compiled and eager.check.compile_s is None
    for budget in (40, 200, 1000):
        logits = predictor.with_token_budget(budget).predict(texts).logits
        expected = eager.with_token_budget(budget).predict(texts).logits
        np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert counters["stats"]["unique_graphs"] == graphs > 0
    torch._dynamo.reset()


def test_compiled_layers_that_compute_something_else_or_fail_to_compile_are_not_taken(tokenizer, texts, monkeypatch):
    def wrong(model, *, but_last):
        last_layer.layers(model)[0].register_forward_hook(lambda _module, _given, states: 1.1 * states)

    def fails(model, *, but_last):
        raise RuntimeError("Python.h: no such file\nand a thousand lines")

    model = built("bert", tokenizer)
    eager = Predictor(model, tokenizer, PredictorOptions(64, token_budget=128), texts)
    for compiler, doubt in (
        (wrong, "not compiled: logits then differ"),
        (fails, "not compiled: RuntimeError: Python.h: no such file"),
    ):
        monkeypatch.setattr(strategies, "compile_layers", compiler)
        predictor = Predictor(model, tokenizer, OPTIONS, texts)
        assert not predictor.compiled
        assert [doubt.split(" by up to")[0] for doubt in predictor.doubts] == [doubt]
        assert (predictor.predict(texts).logits == eager.predict(texts).logits).all()


def test_a_last_layer_that_is_not_trimmed_is_compiled_too_and_a_model_without_layers_to_compile_says_so(
    tokenizer, monkeypatch
):
    monkeypatch.setattr(strategies, "BACKEND", "eager")
    model = built("qwen2", tokenizer)
    strategies.compile_layers(model, but_last=False)
    assert compiled(model) == [True, True]
    one = classifiers.build("qwen2", len(tokenizer), tokenizer.pad_token_id, num_hidden_layers=1)
    model.config.num_hidden_layers = 3  # than which the model has fewer
    for given, reason in ((one, "the one layer is trimmed"), (model, "of an unknown structure")):
        with pytest.raises(ValueError, match=reason):
            strategies.compile_layers(given, but_last=True)


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert compile_obstacle(CPU) == f"the C++ compiler {tmp_path / 'no-compiler'} is missing; CXX names another"
    (tmp_path / "no-compiler").touch(mode=0o755)
    assert compile_obstacle(CPU) is None
    assert compile_obstacle(torch.device("meta")) == "not tried on meta"
