"""The predictor gives every text the label that the model's own forward gives it alone, whatever the way it takes."""

import random
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import Predictor, PredictorOptions, one_by_one, strategies, tokenize
from boundby.inference.reference import same_guard
from boundby.inference.strategies import Packed
from boundby.machine.device import host_threads
from tests import classifiers
from tests.classifiers import Spelled

MAX_LENGTH = 128
OPTIONS = PredictorOptions(MAX_LENGTH, token_budget=512)
TEXTS = 48


@pytest.fixture(scope="module")
def texts():
    reviews = classifiers.reviews(TEXTS)
    return [*reviews, "a", reviews[0], reviews[5], reviews[0]]


def built(family: str, tokenizer: Any, **changes: Any) -> Any:
    return classifiers.build(family, len(tokenizer), tokenizer.pad_token_id, **changes)


@pytest.fixture(scope="module", params=classifiers.FAMILIES)
def model(request, tokenizer):
    return built(request.param, tokenizer)


@pytest.fixture(scope="module")
def alone(model, tokenizer, texts):
    tokens = tokenize(tokenizer, texts, MAX_LENGTH)
    return one_by_one(model, tokens, range(len(texts)))


@pytest.fixture(scope="module")
def predictor(model, tokenizer, texts):
    return Predictor(model, tokenizer, OPTIONS, texts)


def test_every_family_is_packed_without_a_doubt_and_gives_the_labels_of_one_text_at_a_time(predictor, texts, alone):
    assert (predictor.strategy, predictor.doubts) == ("packed, sorted by length", ())
    assert predictor.check.same_labels == predictor.check.rows == 52
    prediction = predictor.predict(texts)
    assert prediction.logits.dtype == np.float32
    np.testing.assert_allclose(prediction.logits, alone, atol=1e-4 * np.abs(alone).max(), rtol=0)
    assert prediction.labels.tolist() == alone.argmax(axis=1).tolist()
    assert len(set(prediction.labels.tolist())) > 2  # the comparison could have failed
    assert prediction.computed_texts == len(set(texts)) < len(texts), "equal texts are computed once"
    assert prediction.useful_tokens == prediction.computed_tokens < prediction.lengths.sum()
    for budget in (1, 200, 5000):
        again = predictor.with_token_budget(budget).predict(texts)
        assert again.labels.tolist() == prediction.labels.tolist(), budget
    order = random.Random(0).sample(range(len(texts)), len(texts))
    shuffled = predictor.predict([texts[row] for row in order])
    np.testing.assert_allclose(shuffled.logits, prediction.logits[order], atol=1e-4, rtol=0)
    assert shuffled.labels.tolist() == prediction.labels[order].tolist()


@pytest.mark.isa
def test_float32_by_other_kernels_gives_the_same_labels_where_near_ties_are_computed_again(
    model, tokenizer, texts, alone
):
    before = torch.get_float32_matmul_precision()
    predictor = Predictor(model, tokenizer, PredictorOptions(MAX_LENGTH, "float32_fast", 512), texts)
    assert predictor.strategy == "packed, sorted by length"  # whatever the other kernels round to on this machine
    margin = same_guard(predictor.check.max_abs_difference, predictor.check.largest_logit)
    prediction = predictor.with_guard_margin(margin).predict(texts)
    assert prediction.labels.tolist() == alone.argmax(axis=1).tolist()
    assert torch.get_float32_matmul_precision() == before


def test_the_callers_model_is_left_as_it_was_and_shares_its_weights_in_float32(predictor, model, tokenizer, texts):
    attention, keys = model.config._attn_implementation, list(model.state_dict())
    kinds = {parameter.dtype for parameter in model.parameters()}
    Predictor(model, tokenizer, PredictorOptions(MAX_LENGTH, "bfloat16"), texts[:8]).predict(texts[:8])
    assert model.config._attn_implementation == attention
    assert list(model.state_dict()) == keys
    assert {parameter.dtype for parameter in model.parameters()} == kinds
    ours, theirs = ({parameter.data_ptr() for parameter in held.parameters()} for held in (predictor.model, model))
    assert ours == theirs


@pytest.mark.isa
def test_bfloat16_keeps_the_head_in_float32(model, tokenizer, texts, alone):
    predictor = Predictor(model, tokenizer, PredictorOptions(MAX_LENGTH, "bfloat16", 512), texts)
    logits = predictor.predict(texts).logits
    assert predictor.strategy == "packed, sorted by length"
    assert 0 < np.abs(logits - alone).max() < 0.15 * np.abs(alone).max()
    rounded = torch.from_numpy(logits).to(torch.bfloat16).float().numpy()
    assert (rounded != logits).any()


PAD = 3
SPELLED = ["5 6 7 8 9", "5 6 3", "3 3 3 3", "3", "5 3 6 3 3", "8", "9 9 9 9 9 9 9 9 9", "4 5 6"]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((name, kind) for name in classifiers.FAMILIES for kind in ("grouped", "grouped, trimmed", "masked, trimmed")),
        *((name, kind) for name in ("qwen2", "gpt2") for kind in ("unmasked", "unmasked, trimmed")),
    ],
)
def test_the_padding_id_inside_a_text_means_what_it_means_to_the_model(family, kind, monkeypatch):
    """A decoder's head steps back over it, and takes the first token of a text of nothing else."""
    offered = strategies.candidates
    monkeypatch.setattr(
        "boundby.inference.selfcheck.candidates",
        lambda *given: [strategy for strategy in offered(*given) if strategy[0] == kind],
    )
    model = classifiers.build(family, 12, PAD)
    predictor = Predictor(model, Spelled(), PredictorOptions(16, token_budget=8), SPELLED)
    alone = one_by_one(model, tokenize(Spelled(), SPELLED, 16), range(len(SPELLED)))
    logits = predictor.predict(SPELLED).logits
    np.testing.assert_allclose(logits, alone, atol=1e-4 * np.abs(alone).max(), rtol=0)
    assert predictor.doubts == ()
    assert predictor.trim == kind.endswith("trimmed")


def test_a_decoder_without_a_padding_id_is_packed_or_takes_one_text_at_a_time_where_its_own_head_is_needed():
    from transformers import BloomConfig, BloomForSequenceClassification

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=12, hidden_size=32, n_layer=1, n_head=2, num_labels=3, pad_token_id=None)
    bloom = BloomForSequenceClassification(config).eval()
    for model, way in (
        (classifiers.build("qwen2", 12, None), "packed, sorted by length"),
        (bloom, "padded with a mask"),
    ):
        predictor = Predictor(model, Spelled(), PredictorOptions(16), SPELLED)
        alone = one_by_one(model, tokenize(Spelled(), SPELLED, 16), range(len(SPELLED)))
        assert predictor.strategy == way
        np.testing.assert_allclose(predictor.predict(SPELLED).logits, alone, atol=1e-4 * np.abs(alone).max(), rtol=0)


def test_a_wrong_head_is_found_and_the_stock_forward_taken_with_a_doubt(tokenizer, texts, monkeypatch):
    """The seeded bug reads the token before the last."""
    model = built("qwen2", tokenizer)
    right = strategies.Strategy.head_row
    monkeypatch.setattr(strategies.Strategy, "head_row", lambda self, ids: max(0, right(self, ids) - 1))
    predictor = Predictor(model, tokenizer, OPTIONS, texts)
    alone = one_by_one(model, tokenize(tokenizer, texts, MAX_LENGTH), range(len(texts)))
    assert predictor.strategy == "padded with a mask"
    assert not predictor.trim  # whose head reads from a row that was not computed
    ways = ["grouped, trimmed", "grouped", "unmasked, trimmed", "unmasked", "masked, trimmed"]
    assert [doubt.split(":")[0] for doubt in predictor.doubts] == [f"not {way}" for way in ways]
    assert "differ from the stock forward's" in predictor.doubts[0]
    prediction = predictor.predict(texts)
    assert prediction.labels.tolist() == alone.argmax(axis=1).tolist()
    assert 0.8 < prediction.useful_tokens / prediction.computed_tokens < 1, "padding is counted"


def test_a_model_that_cannot_be_run_that_way_is_run_as_it_is(tokenizer, texts, monkeypatch):
    def refuses(self, *_):
        raise TypeError("unexpected argument position_ids")

    monkeypatch.setattr(Packed, "logits", refuses)
    predictor = Predictor(built("qwen2", tokenizer), tokenizer, OPTIONS, texts)
    assert predictor.strategy == "padded on the right without a mask"
    assert "unexpected argument position_ids" in predictor.doubts[0]


def test_a_text_without_tokens_is_named_one_too_long_is_cut_and_no_texts_have_no_logits(predictor, texts):
    with pytest.raises(ValueError, match="text 1 has no tokens: ''"):
        predictor.predict(["good", ""])
    prediction = predictor.predict([" ".join(texts[:20]), "short"])
    assert (prediction.truncated, prediction.lengths[0]) == (1, MAX_LENGTH)
    prediction = predictor.predict([])
    assert prediction.logits.shape == (0, classifiers.LABELS)


def test_a_tokenizer_that_marks_tokens_by_type_is_refused(tokenizer):
    class Typed(classifiers.Spelled):
        def __call__(self, texts, max_length, **_):
            ids = super().__call__(texts, max_length)
            return type(ids)(ids, token_type_ids=[[0] * (len(row) - 1) + [2] for row in ids["input_ids"]])

    with pytest.raises(ValueError, match="token_type_ids"):
        Predictor(built("bert", tokenizer), Typed(), OPTIONS, ["1 2 3"])


def test_logits_that_are_not_finite_are_refused_with_the_place_of_the_text(tokenizer):
    model = built("bert", tokenizer)
    predictor = Predictor(model, tokenizer, OPTIONS, ["good", "fine"])
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))  # its weights are shared
    with pytest.raises(ValueError, match="text 0 has logits that are not finite in float32"):
        predictor.predict(["good", "fine"])


@pytest.mark.parametrize(
    ("changes", "padding", "sample", "says"),
    [
        ({"num_labels": 1}, "right", ["good"], "a regression gives no labels"),
        ({"problem_type": "regression"}, "right", ["good"], "a regression gives no labels"),
        ({"problem_type": "multi_label_classification"}, "right", ["good"], "any number of labels per text"),
        ({}, "right", [("good", "bad")], "text 0 is a pair, .*pairs are not supported"),
        ({}, "right", "good", "one text was given as it is"),
        ({}, "left", ["good"], "pads on the left"),
        ({}, "right", [], "needs some texts to check itself on"),
    ],
)
def test_what_cannot_be_predicted_is_refused(tokenizer, changes, padding, sample, says):
    given = tokenizer if padding == "right" else SimpleNamespace(padding_side="left", pad_token_id=0)
    with pytest.raises(ValueError, match=says):
        Predictor(built("bert", tokenizer, **changes), given, OPTIONS, sample)


def test_shards_in_a_row_are_predicted_as_each_alone(predictor, texts):
    shards = [texts[:4], texts[4:20], texts[20:24]]
    together = list(predictor.predict_each(shards))
    assert len(together) == 3
    for prediction, shard in zip(together, shards, strict=True):
        assert (prediction.logits == predictor.predict(shard).logits).all()


def test_several_batches_at_once_share_the_threads_and_give_the_same_logits(tokenizer, texts, monkeypatch):
    predictor = Predictor(built("bert", tokenizer), tokenizer, OPTIONS, texts).with_token_budget(300)
    logits, used = Packed.logits, []

    def told(self, tokens, rows):
        used.append((threading.current_thread().name, torch.get_num_threads(), int(tokens.lengths[rows].sum())))
        return logits(self, tokens, rows)

    monkeypatch.setattr(Packed, "logits", told)
    by_threads = {}
    for threads in (1, 2, 3):
        used.clear()
        with host_threads(threads):
            by_threads[threads] = predictor.predict(texts).logits
            assert torch.get_num_threads() == threads
        streams = {name for name, _, _ in used}
        assert len(streams) <= threads and {shared for _, shared, _ in used} == {1}
        assert (threading.current_thread().name in streams) == (threads == 1)
        if threads > 1:
            assert len(used) % threads == 0, "all end together"
            assert max(size for *_, size in used) - min(size for *_, size in used) < max(map(len, texts))
    for logits_then in (by_threads[2], by_threads[3]):
        np.testing.assert_allclose(logits_then, by_threads[1], atol=1e-5, rtol=0)


def test_an_error_of_one_batch_ends_those_beside_it(tokenizer, texts, monkeypatch):
    predictor = Predictor(built("bert", tokenizer), tokenizer, OPTIONS, texts).with_token_budget(100)
    tried: list[int] = []

    def broken(self, tokens, rows):
        tried.append(len(rows))
        raise RuntimeError("a broken kernel")

    monkeypatch.setattr(Packed, "logits", broken)
    with host_threads(2), pytest.raises(RuntimeError, match="a broken kernel"):
        predictor.predict(texts)
    assert len(tried) <= 2


def test_positions_that_depend_on_the_texts_before_are_computed_one_batch_at_a_time(tokenizer, texts, monkeypatch):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    predictor = Predictor(built("qwen2", tokenizer, rope_parameters=rope), tokenizer, OPTIONS, texts)
    threads: set[str] = set()
    logits = Packed.logits
    monkeypatch.setattr(Packed, "logits", lambda *given: threads.add(threading.current_thread().name) or logits(*given))
    with host_threads(2):
        predictor.with_token_budget(200).predict(texts)
    assert threads <= {threading.current_thread().name}


def test_memory_that_runs_out_halves_the_batch_and_is_counted(tokenizer, texts, monkeypatch):
    predictor = Predictor(built("qwen2", tokenizer), tokenizer, OPTIONS, texts).with_token_budget(10_000)
    whole = predictor.predict(texts)
    logits = Packed.logits

    def small_memory(self, tokens, rows):
        if len(rows) > 14:
            raise MemoryError
        return logits(self, tokens, rows)

    monkeypatch.setattr("boundby.inference.predictor.release_memory", lambda _: None)
    monkeypatch.setattr(Packed, "logits", small_memory)
    prediction = predictor.predict(texts)
    assert prediction.halvings == 3 and whole.halvings == 0
    np.testing.assert_allclose(prediction.logits, whole.logits, atol=1e-4, rtol=0)


def test_near_ties_are_computed_again_alone(tokenizer, texts, monkeypatch):
    """Logits of a batch that are off by less than half a margin cannot change a label that is guarded."""
    model = built("qwen2", tokenizer)
    alone = one_by_one(model, tokenize(tokenizer, texts, MAX_LENGTH), range(len(texts)))
    margin = float(np.median(np.sort(alone, axis=1)[:, -1] - np.sort(alone, axis=1)[:, -2]))
    predictor = Predictor(model, tokenizer, OPTIONS, texts)
    compute = Packed.logits

    def off(self, tokens, rows):
        answer = compute(self, tokens, rows)
        generator = torch.Generator().manual_seed(len(rows))
        return answer + (torch.rand(answer.shape, generator=generator) - 0.5) * 0.98 * margin

    monkeypatch.setattr(Packed, "logits", off)
    right = alone.argmax(axis=1).tolist()
    assert predictor.predict(texts).labels.tolist() != right
    guarded = predictor.with_guard_margin(margin).predict(texts)
    assert guarded.labels.tolist() == right
    assert 0 < guarded.guarded_texts < guarded.computed_texts


def test_near_ties_of_a_coarse_precision_are_computed_again_in_batches_of_float32(tokenizer, texts, monkeypatch):
    model, alone_rows = built("qwen2", tokenizer), []
    coarse = Predictor(model, tokenizer, replace(OPTIONS, precision="bfloat16"), texts)
    margin = 4 * coarse.check.max_abs_difference
    guarded = coarse.with_guard_margin(margin)

    def told(stock, tokens, rows):
        alone_rows.extend(rows)
        return one_by_one(stock, tokens, rows)

    monkeypatch.setattr("boundby.inference.predictor.one_by_one", told)
    prediction = guarded.predict(texts)
    expected = one_by_one(model, tokenize(tokenizer, texts, MAX_LENGTH), range(len(texts)))
    assert prediction.labels.tolist() == expected.argmax(axis=1).tolist()
    assert prediction.guarded_texts > 3 > len(alone_rows), "of these, only what is a near tie in float32 too is alone"


def test_on_a_gpu_the_next_shard_is_tokenized_while_one_computes(tokenizer, texts, monkeypatch):
    """The batches of the first shard wait for the tokens of the second, and no shard after it has been read."""
    predictor = Predictor(built("qwen2", tokenizer), tokenizer, OPTIONS, texts)
    expected = [predictor.predict(shard).logits for shard in (texts[:5], texts[5:10], texts[10:15])]
    predictor.device = torch.device("cuda")  # of the flow alone: the model stays where it is
    tokenized = [threading.Event() for _ in range(3)]
    read: list[int] = []
    tokenize_texts, logits = predictor.tokenize, Packed.logits

    def told(shard):
        made = tokenize_texts(shard)
        tokenized[texts.index(shard[0]) // 5].set()
        return made

    def waits(self, *given):
        assert tokenized[min(len(read), 3) - 1].wait(60)
        return logits(self, *given)

    def shards():
        for number in range(3):
            read.append(number)
            yield texts[5 * number : 5 * number + 5]

    monkeypatch.setattr(predictor, "tokenize", told)
    monkeypatch.setattr(Packed, "logits", waits)
    predictions = []
    for prediction in predictor.predict_each(shards()):
        predictions.append(prediction.logits)
        assert len(read) == min(len(predictions) + 1, 3)
    for mine, theirs in zip(predictions, expected, strict=True):
        assert (mine == theirs).all()
