"""Fixes of small classifiers with random weights: they compute what the model computes, or say why they cannot."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from boundby.bound.bench import Bench
from boundby.bound.trials import Candidate, try_out
from boundby.bound.verdict import Untried
from boundby.inference import Tokens, collate, fixes, forward
from boundby.timing.timer import Timer
from tests.fakes import FakeClock

transformers = pytest.importorskip("transformers")
CPU, WORDS = torch.device("cpu"), 64
LENGTHS = (9, 4, 6, 3, 7, 8, 2, 5)
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def subject(rows=range(4), **settings) -> fixes.Subject:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=WORDS, pad_token_id=0, **SIZE, **settings)
    model = transformers.BertForSequenceClassification(config).eval()
    rng = np.random.default_rng(0)
    tokens = Tokens([rng.integers(1, WORDS, length).astype(np.int32) for length in LENGTHS], truncated=0)
    tokenizer = SimpleNamespace(pad_token_id=0, padding_side="right")
    return fixes.Subject(model, tokenizer, tokens, collate(tokens, rows, 0, CPU), range(len(LENGTHS)))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def test_texts_without_padding_have_the_logits_and_the_labels_of_padded_ones():
    of = subject()
    candidate = fixes.without_padding(of)
    assert isinstance(candidate, Candidate)
    made = candidate.make()
    rows = sorted(of.batch.rows, key=lambda row: -LENGTHS[row])
    own = forward(of.model, collate(of.tokens, rows, 0, CPU))
    torch.testing.assert_close(made.work(), own, rtol=1e-4, atol=1e-5)
    kept = made.same_labels()
    assert (kept.same, kept.of, kept.share.value) == (8, 8, 1.0)
    assert 0.6 < kept.share.low < 0.7  # Wilson, of eight texts


def test_a_batch_without_padding_has_none_to_leave_out():
    assert fixes.without_padding(subject(rows=[2])) is None


def test_a_model_that_packs_its_texts_differently_is_not_timed(monkeypatch):
    monkeypatch.setattr(fixes, "tolerance", lambda effect: -1.0)
    candidate = try_out(lambda: None, [fixes.without_padding(subject())], Bench(Timer(FakeClock()), trials_s=100.0))
    assert [untried.kind for untried in candidate.untried] == ["failed"]
    assert "without padding its logits differ by" in candidate.untried[0].reason


def test_another_dtype_is_a_copy_and_the_model_stays_as_it_is():
    of = subject()
    made = fixes.in_another_dtype(of, torch.bfloat16).make()
    assert made.work().dtype == torch.bfloat16
    assert {parameter.dtype for parameter in of.model.parameters()} == {torch.float32}
    assert made.same_labels().of == len(LENGTHS)
    assert fixes.in_another_dtype(replace(of, has_labels=False), torch.bfloat16).make().same_labels() is None


def test_a_copy_that_may_not_fit_is_out_of_memory(monkeypatch):
    monkeypatch.setattr(fixes.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    candidate = try_out(
        lambda: None, [fixes.in_another_dtype(subject(), torch.bfloat16)], Bench(Timer(FakeClock()), trials_s=100.0)
    )
    assert [untried.kind for untried in candidate.untried] == ["out_of_memory"]


def test_labels_under_coarser_products_are_those_of_the_setting(monkeypatch):
    of, seen = subject(), []
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(
        fixes, "forward", lambda *given: (seen.append(torch.get_float32_matmul_precision()), forward(*given))[1]
    )
    fixes.with_reduced_precision_matmul(of, "medium", 4.0).make().same_labels()
    assert seen == [before, before, "medium", "medium"]  # two batches of four texts, with either


def test_what_cannot_be_compiled_says_so(monkeypatch):
    monkeypatch.setattr(fixes, "compile_obstacle", lambda device: "the C++ compiler g++ is missing")
    candidate = fixes.compiled(subject())
    assert isinstance(candidate, Untried) and candidate.kind == "not_possible"
    monkeypatch.setattr(fixes, "compile_obstacle", lambda device: None)
    assert fixes.compiled(subject()).setup_s == fixes.COMPILE_S


def test_the_input_is_made_beside_the_forward_and_before_the_end_of_it():
    done = []
    candidate = fixes.with_input_ahead(lambda: done.append("forward"), lambda: done.append("input"))
    made = candidate.make()
    made.work()
    made.close()
    assert sorted(done) == ["forward", "input"]
    candidate.base()
    assert done[2:] == ["input", "forward"]
