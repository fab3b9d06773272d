"""The last layer computes one token of each text, and the logits stay those of the model's own forward."""

from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import Predictor, PredictorOptions, Tokens, last_layer, one_by_one, strategies
from boundby.inference.precision import PRECISIONS
from boundby.inference.reference import in_dtype
from tests import classifiers
from tests.classifiers import Spelled

WORDS, PAD = 50, 0
LENGTHS = (30, 9, 9, 4, 1)
OPTIONS = PredictorOptions(64, token_budget=128)
AFTER_ATTENTION = ("mlp", "intermediate", "ffn")
QUERIES = {"qwen2": "q_proj", "bert": "query", "roberta": "query", "distilbert": "q_lin"}


@pytest.fixture(scope="module")
def tokens():
    return Tokens([np.arange(1, length + 1, dtype=np.int32) for length in LENGTHS], 0)


TEXTS = [
    " ".join(str(1 + (word * step) % (WORDS - 1)) for word in range(length)) for step, length in enumerate(LENGTHS)
]


def built(family: str) -> Any:
    return classifiers.build(family, WORDS, PAD)


def ways(family: str) -> list[str]:
    return ["grouped", *(["unmasked"] if family in ("qwen2", "gpt2") else []), "masked"]


@pytest.mark.parametrize(("family", "way"), [(name, way) for name in classifiers.FAMILIES for way in ways(name)])
def test_only_the_token_that_the_head_reads_goes_through_the_last_layer(family, way, tokens):
    model = built(family)
    offered = dict(strategies.candidates(model, None, PRECISIONS["float32"], True))
    strategy = offered[f"{way}, trimmed"]()
    computed: list[int] = []
    queries: list[int] = []
    for name, module in strategy.model.named_modules():
        if name.endswith(AFTER_ATTENTION):
            module.register_forward_hook(lambda _, __, states: computed.append(_rows(states)))
        if name.endswith(QUERIES.get(family, "none")):
            module.register_forward_pre_hook(lambda _, states: queries.append(_rows(states[0])))
    with torch.inference_mode():
        logits = strategy.logits(tokens, range(len(LENGTHS))).numpy()
    alone = one_by_one(model, tokens, range(len(LENGTHS)))
    np.testing.assert_allclose(logits, alone, atol=1e-5 * np.abs(alone).max(), rtol=0)
    assert computed == [strategy.cells(tokens.lengths), len(LENGTHS)]
    assert way != "grouped" or family not in QUERIES or queries == [sum(LENGTHS), len(LENGTHS)]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "qwen2"])
def test_keys_and_values_of_the_last_layer_are_not_computed_where_they_are_plain_products(family, tokens):
    model = built(family)
    strategy = dict(strategies.candidates(model, None, PRECISIONS["float32"], True))["grouped, trimmed"]()
    deferred = [name for name, module in strategy.model.named_modules() if isinstance(module, last_layer.Deferred)]
    last = f".{model.config.num_hidden_layers - 1}."
    assert len(deferred) == (0 if family == "qwen2" else 2), "rotary positions come between product and score"
    assert all(last in name for name in deferred)


def test_attention_through_the_weights_of_keys_and_values_is_attention():
    """Two groups of texts, of which one sees a part of its tokens, and a scale that is not the usual one."""
    torch.manual_seed(0)
    heads, width, lengths, scale = 3, 4, ((2, 5), (3, 2)), 0.7
    linears = [torch.nn.Linear(heads * width, heads * width) for _ in range(2)]
    module = torch.nn.Module()
    module.key, module.value = (last_layer.Deferred(linear, heads, torch.float32) for linear in linears)
    states, query = torch.randn(16, heads * width), torch.randn(heads, 5, width)
    parts = [(slice(0, 10), *lengths[0]), (slice(10, 16), *lengths[1])]
    sees = torch.tensor([[[True, False, True, True, False]], [[False, True, True, False, False]]])
    assert not last_layer.defers(module), "its keys are there"
    setattr(module, last_layer.DEFERRED, ("key", "value"))
    assert last_layer.defers(module)
    with torch.inference_mode():
        answer = last_layer.attend_deferred(module, query, states, parts, [sees, None], scale)
        keys, values = (linear(states).view(16, heads, width) for linear in linears)
        first = 0
        for (part, texts, length), mask in zip(parts, (sees, None), strict=True):
            k, v = (tensor[part].view(texts, length, heads, width).transpose(1, 2) for tensor in (keys, values))
            q = query[:, first : first + texts].transpose(0, 1)[:, :, None]
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, None if mask is None else mask[:, None], scale=scale
            )
            np.testing.assert_allclose(answer[first : first + texts], attended[:, :, 0], atol=1e-5)
            first += texts


def _rows(states: torch.Tensor) -> int:
    return states.shape[:-1].numel()


def test_a_layer_of_unknown_structure_is_left_whole_without_a_doubt():
    """ALBERT has one layer for all depths, whose names are its own."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(vocab_size=WORDS, embedding_size=16, num_labels=classifiers.LABELS, **classifiers.SIZES)
    model = AlbertForSequenceClassification(config).eval()
    predictor = Predictor(model, Spelled(), OPTIONS, TEXTS)
    assert not predictor.trim and not predictor.check.trim
    assert not any("trimmed" in doubt for doubt in predictor.doubts)
    with pytest.raises(ValueError, match="unknown structure"):
        last_layer.trim(model)


def test_it_can_be_left_off_and_a_wrong_trim_is_found_and_left_off_with_a_doubt(monkeypatch):
    """The seeded bug computes the token beside the one that is read."""
    off = Predictor(built("qwen2"), Spelled(), PredictorOptions(64, token_budget=128, trim=False), TEXTS)
    assert not off.trim and off.doubts == ()
    model = built("bert")
    right = last_layer.reading
    monkeypatch.setattr(last_layer, "reading", lambda rows: right((rows + 1) % sum(LENGTHS)))
    predictor = Predictor(model, Spelled(), OPTIONS, TEXTS)
    assert predictor.strategy == "packed, sorted by length" and not predictor.trim
    assert len(predictor.doubts) == 1
    assert predictor.doubts[0].startswith("not grouped, trimmed: its logits differ from the stock forward's")
    ids = Tokens([np.array(text.split(), dtype=np.int32) for text in TEXTS], 0)
    alone = one_by_one(model, ids, range(len(TEXTS)))
    assert predictor.predict(TEXTS).labels.tolist() == alone.argmax(axis=1).tolist()


def test_a_trimmed_copy_leaves_the_callers_model_alone_and_computes_all_unless_told_or_where_it_failed_before(tokens):
    model = built("qwen2")
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    copied = in_dtype(model, torch.float32)
    last_layer.trim(copied)
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
    with pytest.raises(IndexError), last_layer.reading(torch.tensor([31])):
        one_by_one(copied, tokens, [0])
    assert (one_by_one(copied, tokens, range(5)) == one_by_one(model, tokens, range(5))).all()


@pytest.mark.parametrize("family", classifiers.FAMILIES)
def test_half_precision_is_trimmed_too(family):
    options = PredictorOptions(64, "bfloat16", 128)
    predictor = Predictor(built(family), Spelled(), options, TEXTS)
    assert predictor.trim and predictor.doubts == ()
