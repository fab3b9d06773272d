"""Rotary positions that follow from the length: every text gets what a fresh model gives it alone, in any order."""

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import (
    PRECISIONS,
    Predictor,
    PredictorOptions,
    Sample,
    Tokens,
    batches_in_order,
    collate,
    fixes,
    forward,
    one_by_one,
    rotary_of,
)
from boundby.inference.planning import PrecisionRule, choose_precision
from boundby.inference.selfcheck import logits_of
from boundby.inference.strategies import Packed, candidates
from tests.classifiers import HEADS, LABELS, SIZES, WIDTH, Spelled

ORIGINAL, LONGEST, VOCABULARY, PAD = 12, 40, 50, 0
HALF = WIDTH // HEADS // 2
LENGTHS = [1, 2, 3, 5, 8, 11, 12, 12, 13, 14, 20, 25, 12, 30, 12, 9, 6, 13, 12, 17, LONGEST]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * HALF,
    "long_factor": [1.0 + 3 * position for position in range(HALF)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
BY_LAYER = ["full_attention", "sliding_attention"]
GROWS, SWITCHES = {"max_position_embeddings": ORIGINAL}, {"max_position_embeddings": 64}
MODERN = {"cls_token_id": 1, "sep_token_id": 2, "layer_types": BY_LAYER, "local_attention": 8}
GEMMA = {"head_dim": WIDTH // HEADS, "layer_types": BY_LAYER, "sliding_window": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": ("Phi3", {**SWITCHES, "original_max_position_embeddings": ORIGINAL, "rope_parameters": LONG}),
    "llama longrope": ("Llama", {**SWITCHES, "rope_parameters": LONG}),
    "qwen2 longrope": ("Qwen2", {**SWITCHES, "rope_parameters": LONG}),
    "llama dynamic": ("Llama", {**GROWS, "rope_parameters": DYNAMIC}),
    "qwen2 dynamic": ("Qwen2", {**GROWS, "rope_parameters": DYNAMIC}),
    "modernbert dynamic in some layers": (
        "ModernBert",
        {**GROWS, **MODERN, "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN}},
    ),
    "gemma3 longrope in some layers": (
        "Gemma3Text",
        {**SWITCHES, **GEMMA, "rope_parameters": {"full_attention": LONG, "sliding_attention": PLAIN}},
    ),
}


def built(family: str, settings: dict[str, Any]) -> Any:
    import transformers

    sizes = SIZES | {"vocab_size": VOCABULARY, "pad_token_id": PAD, "num_labels": LABELS}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2} | ({} if family == "ModernBert" else {"num_key_value_heads": 2})
    config = getattr(transformers, f"{family}Config")(**sizes | copy.deepcopy(settings))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def spelled() -> Any:
    tokenizer = Spelled()
    tokenizer.pad_token_id = PAD  # type: ignore[attr-defined]
    return tokenizer


def tokens_of(lengths: list[int]) -> Tokens:
    rng = np.random.default_rng(0)
    return Tokens([rng.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths], 0)


def alone(fresh: Any, tokens: Tokens) -> np.ndarray:
    """Return the logits that a fresh model gives to each text, the only one that it ever sees."""
    with torch.inference_mode():
        logits = [copy.deepcopy(fresh)(input_ids=torch.from_numpy(ids).long()[None]).logits[0] for ids in tokens.ids]
    return torch.stack(logits).numpy()


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Any:
    fresh = built(*CASES[request.param])
    tokens = tokens_of(LENGTHS)
    expected = alone(fresh, tokens)
    used = copy.deepcopy(fresh)  # the caller has had a long text before
    with torch.inference_mode():
        used(input_ids=torch.arange(3, VOCABULARY)[None])
    return SimpleNamespace(model=used, fresh=fresh, tokens=tokens, alone=expected, name=request.param)


def shuffled(case: Any) -> list[tuple[list[int], Tokens]]:
    orders = [np.argsort(LENGTHS).tolist(), np.argsort(LENGTHS)[::-1].tolist()]
    orders += [random.Random(seed).sample(range(len(LENGTHS)), len(LENGTHS)) for seed in range(2)]
    return [(order, Tokens([case.tokens.ids[row] for row in order], 0)) for order in orders]


def require_equal(logits: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert logits.argmax(axis=1).tolist() == expected.argmax(axis=1).tolist()


def test_the_lengths_tell_the_cases_apart(case):
    """Else no test of this file could fail: together, and after one another, texts get other labels."""
    model = copy.deepcopy(case.fresh)
    batch = collate(case.tokens, range(len(LENGTHS)), PAD, torch.device("cpu"))
    with torch.inference_mode():
        together = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.numpy()
        after = [model(input_ids=torch.from_numpy(ids).long()[None]).logits[0].numpy() for ids in case.tokens.ids]
    assert np.abs(together - case.alone).max() > 0.02 * np.abs(case.alone).max()
    assert np.array_equal(np.stack(after), case.alone) == ("longrope" in case.name)


def test_one_by_one_has_no_memory_of_other_texts(case):
    for order, tokens in shuffled(case):
        assert np.array_equal(one_by_one(case.model, tokens, range(len(order))), case.alone[order])


def test_every_strategy_gives_each_text_what_a_fresh_model_gives_it_alone(case):
    tokenizer, precision = spelled(), PRECISIONS["float32"]
    for name, make in candidates(case.model, tokenizer, precision, trims=True):
        if name == "grouped" and "modernbert" in case.name:
            continue  # its head is none of the known
        strategy = make()
        for order, tokens in shuffled(case):
            result = logits_of(strategy, tokens, range(len(order)), 256, precision)
            require_equal(result, case.alone[order])
            for batch in strategy.batches(tokens.lengths, 256):
                sides = {tokens.ids[row].size > ORIGINAL for row in batch}
                assert len(sides) == 1, "short and long texts share a forward"


def test_the_predictor_takes_its_fastest_way_for_all_lengths_even_if_it_was_checked_on_short_texts(case):
    tokenizer = spelled()
    texts = [" ".join(map(str, ids)) for ids in case.tokens.ids]
    short = [text for text, length in zip(texts, LENGTHS, strict=True) if length <= ORIGINAL]
    for check_texts in (texts, short):
        predictor = Predictor(case.model, tokenizer, PredictorOptions(64, token_budget=256), check_texts)
        assert predictor.doubts == () or "modernbert" in case.name
        for order, _ in shuffled(case):
            require_equal(predictor.predict([texts[row] for row in order]).logits, case.alone[order])
        near_ties = predictor.with_guard_margin(float(np.abs(case.alone).max()))
        require_equal(near_ties.predict(texts).logits, case.alone)


def test_a_predictor_leaves_the_memory_of_the_callers_model_to_the_caller(case):
    model, texts = copy.deepcopy(case.fresh), [" ".join(map(str, ids)) for ids in case.tokens.ids]
    medium = torch.arange(3, 3 + ORIGINAL + 2)[None]
    with torch.no_grad():
        model(input_ids=torch.arange(3, VOCABULARY)[None])
        before = model(input_ids=medium).logits
        Predictor(model, spelled(), PredictorOptions(64), texts).predict(texts)
        assert torch.equal(model(input_ids=medium).logits, before)
        one_by_one(model, case.tokens, [len(LENGTHS) - 1])
        model(input_ids=medium)  # outside of inference mode, as it was


def test_the_precision_is_chosen_against_a_reference_without_memory(case):
    texts = [" ".join(map(str, ids)) for ids in case.tokens.ids]
    sample = Sample(texts, is_all=True)
    choice = choose_precision(case.model, spelled(), sample, PrecisionRule("same"), PredictorOptions(64))
    assert np.array_equal(choice.reference, case.alone)
    assert choice.report.same_labels == len(texts)


def test_fixes_compare_labels_of_texts_that_may_share_a_forward(case):
    tokenizer, rows = spelled(), range(len(LENGTHS))
    subject = fixes.Subject(
        case.model, tokenizer, case.tokens, collate(case.tokens, rows, PAD, torch.device("cpu")), rows
    )
    with torch.inference_mode():
        assert subject.labels.tolist() == case.alone.argmax(axis=1).tolist()
        if "modernbert" in case.name:
            return
        made = fixes.without_padding(subject).make()  # which raises where logits differ from padded ones
        assert made.work().shape == case.alone.shape
        assert made.same_labels().same == len(LENGTHS)


def test_batches_in_order_are_divided_where_texts_must_not_meet():
    tokens = tokens_of([3, 20, 12, 13, 20, 5])
    lengths = {
        name: batches_in_order(rotary_of(built(*CASES[name])), tokens, range(6), 4)
        for name in ("qwen2 longrope", "qwen2 dynamic")
    }
    assert lengths == {
        "qwen2 longrope": [[1, 3], [0, 2], [4], [5]],
        "qwen2 dynamic": [[1], [3], [0, 2], [4], [5]],
    }
    plain = built("Qwen2", SWITCHES)
    assert not rotary_of(plain) and batches_in_order(rotary_of(plain), tokens, range(6), 4) == [[0, 1, 2, 3], [4, 5]]


def test_texts_that_long_factors_turn_no_otherwise_share_a_forward():
    equal = {**LONG, "long_factor": LONG["short_factor"]}
    assert not rotary_of(built("Qwen2", {**SWITCHES, "rope_parameters": equal}))


@pytest.mark.parametrize("kind", ["dynamic", "default"])
def test_a_module_that_answers_nobody_is_taken_by_its_kind(kind):
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope_type, self.inv_freq = kind, torch.ones(2)

        def forward(self, *_: object) -> None:
            raise TypeError("a sequence, please")

    assert [rows.tolist() for rows in rotary_of(Own()).groups([3, 5, 3])] == (
        [[1], [0, 2]] if kind == "dynamic" else [[0, 1, 2]]
    )


@pytest.mark.parametrize("name", ["qwen2 longrope", "qwen2 dynamic"])
def test_a_text_that_ends_in_padding_is_turned_as_the_whole_text(name):
    """The head of a decoder steps back over it; cut there, a long text would be a short one."""
    fresh, tokens = built(*CASES[name]), tokens_of([4, 20, 16, 11])
    for row, real in ((1, 9), (2, 8)):
        tokens.ids[row][real:] = PAD
    expected = alone(fresh, tokens)
    strategy = dict(candidates(fresh, spelled(), PRECISIONS["float32"], trims=True))["grouped, trimmed"]()
    assert isinstance(strategy, Packed) and strategy.trims
    require_equal(logits_of(strategy, tokens, range(4), 256, PRECISIONS["float32"]), expected)


def test_what_a_length_has_is_asked_of_a_few_lengths(monkeypatch):
    rotary = rotary_of(built(*CASES["qwen2 longrope"]))
    asked: list[int] = []
    turning: Any = rotary._modules[0]
    frequencies: Callable[[int], bytes] = turning.frequencies
    monkeypatch.setattr(type(turning), "frequencies", lambda _, length: asked.append(length) or frequencies(length))
    groups = rotary.groups(np.arange(1, 4097))
    assert [len(group) for group in groups] == [4096 - ORIGINAL, ORIGINAL]
    assert len(asked) < 30


def test_a_forward_of_the_sweep_takes_back_what_the_one_before_has_left():
    fresh, tokens = built(*CASES["qwen2 dynamic"]), tokens_of([30, ORIGINAL])
    expected = alone(fresh, tokens)
    with torch.inference_mode():
        for row in (0, 1):
            batch = collate(tokens, [row], PAD, torch.device("cpu"))
            assert np.array_equal(forward(fresh, batch).numpy()[0], expected[row])
