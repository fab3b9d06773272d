"""Batching changes no prediction, loses no row and keeps the budget."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from boundby.inference import TOKENIZER_CHUNK, Batch, Tokens, collate, forward, token_budget_batches, tokenize
from boundby.inference.batches import packs
from tests import classifiers

CPU = torch.device("cpu")
WORDS = 50
PAD = 0


def tokens_of(*lengths: int) -> Tokens:
    """Return texts of these lengths; no id is that of the padding."""
    return Tokens([np.arange(length, dtype=np.int32) % (WORDS - 1) + 1 for length in lengths], truncated=0)


@pytest.fixture(scope="module")
def tokenizer():
    """A fast tokenizer of the words w1, w2, … with a special token at either end."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": PAD, "[CLS]": 1, "[SEP]": 2} | {f"w{index}": index for index in range(3, WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[SEP]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")


def text_of(words: int) -> str:
    return " ".join(f"w{3 + index % (WORDS - 3)}" for index in range(words))


def test_ids_and_cuts_are_those_of_the_usual_call_over_all_chunks(tokenizer):
    texts = [*(text_of(words) for words in (5, 6, 7, 30, 1)), "w3 unknown [SEP] w4", " w5\n w6 [PAD]", "é w7"]
    usual = tokenizer(texts, truncation=True, max_length=8)
    tokenizer(texts[0])  # which takes the limit away again
    tokens = tokenize(tokenizer, texts, max_length=8)
    assert [ids.tolist() for ids in tokens.ids] == usual["input_ids"]
    assert tokens.lengths.tolist()[:5] == [7, 8, 8, 8, 3]  # two special tokens each; six words fit exactly
    assert tokens.truncated == sum(bool(encoding.overflowing) for encoding in usual.encodings) == 2
    words = [9 if row % 7 == 0 else 2 for row in range(2 * TOKENIZER_CHUNK + 5)]
    tokens = tokenize(tokenizer, [text_of(word) for word in words], max_length=8)
    assert tokens.lengths.tolist() == [min(word + 2, 8) for word in words]
    assert tokens.truncated == words.count(9)


def test_a_tokenizer_that_does_more_than_the_rust_one_is_called_as_it_is(tokenizer):
    class Marking(type(tokenizer)):
        def _encode_plus(self, text, *args, **named):
            return super()._encode_plus([f"w9 {part}" for part in text], *args, **named)

    marking = Marking(tokenizer_object=tokenizer.backend_tokenizer)
    assert tokenize(marking, ["w3", "w4"], max_length=8).ids[1].tolist() == [1, 9, 4, 2]


def test_a_tokenizer_written_in_python_cannot_tell_what_was_cut_and_a_text_without_tokens_is_named(tokenizer):
    class Encoded(dict):
        encodings = None

    def slow(texts, **options):
        return Encoded(input_ids=[[1] * len(text.strip()) for text in texts])

    tokens = tokenize(slow, ["abc", "d"], max_length=8)
    assert (tokens.truncated, tokens.lengths.tolist()) == (None, [3, 1])
    with pytest.raises(ValueError, match="text 1001 has no tokens: '   '"):
        tokenize(slow, ["a"] * 1001 + ["   ", ""], max_length=8)
    with pytest.raises(ValueError, match="text 0 has no tokens"):
        tokenize(slow, ["", "a"], max_length=8)
    tokens = tokenize(tokenizer, [], max_length=8)
    assert (tokens.ids, tokens.truncated, tokens.lengths.size) == ([], 0, 0)


def test_a_batch_is_padded_on_the_right_to_its_longest_text():
    tokens = tokens_of(9, 2, 4)
    batch = collate(tokens, [2, 1], pad_id=7, device=CPU)
    assert batch.rows == (2, 1)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [1, 2, 7, 7]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert (batch.tokens_real, batch.tokens_padded, batch.is_padded) == (6, 8, True)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    batch = collate(tokens_of(3, 3), [0, 1], pad_id=PAD, device=CPU)
    assert (batch.tokens_real, batch.tokens_padded, batch.is_padded) == (6, 6, False)
    batch = collate(tokens_of(2, 1), [0, 0, 1], pad_id=PAD, device=CPU)
    assert batch.input_ids.tolist() == [[1, 2], [1, 2], [1, 0]]


@pytest.mark.parametrize(("lengths", "copies"), [((3, 1), 2), ((3, 3), 1)], ids=["padded", "even"])
def test_a_gpu_is_sent_pinned_ids_without_a_wait_and_a_mask_only_where_it_is_read(lengths, copies, monkeypatch):
    sent: list[dict[str, Any]] = []

    def pinned(tensor):
        return SimpleNamespace(to=lambda device, **how: sent.append(how) or tensor)

    monkeypatch.setattr("boundby.inference.batches.is_gpu", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    batch = collate(tokens_of(*lengths), [0, 1], PAD, CPU)
    assert sent == [{"non_blocking": True}] * copies
    assert batch.attention_mask.sum() == batch.tokens_real


def test_only_a_padded_batch_goes_in_with_a_mask():
    seen: list[Any] = []

    def model(input_ids, attention_mask):
        seen.append(attention_mask)
        return SimpleNamespace(logits=input_ids)

    even, ragged = (collate(tokens_of(*lengths), [0, 1], PAD, CPU) for lengths in ((3, 3), (3, 1)))
    assert forward(model, even) is even.input_ids
    forward(model, ragged)
    assert seen[0] is None
    assert seen[1] is ragged.attention_mask


def padded_tokens(batch: list[int], lengths: list[int]) -> int:
    return len(batch) * max(lengths[row] for row in batch)


def own_tokens(batch: list[int], lengths: list[int]) -> int:
    return sum(lengths[row] for row in batch)


@pytest.mark.parametrize("budget", [1, 64, 100, 513, 100_000])
@pytest.mark.parametrize(("gather", "tokens_in"), [(token_budget_batches, padded_tokens), (packs, own_tokens)])
def test_batches_hold_each_row_once_longest_first_and_as_many_as_the_budget(gather, tokens_in, budget):
    lengths = [random.Random(0).randint(1, 120) for _ in range(500)]
    batches = gather(lengths, budget)
    order = [row for batch in batches for row in batch]
    assert order == sorted(range(500), key=lambda row: (-lengths[row], row))
    assert all(tokens_in(batch, lengths) <= budget or len(batch) == 1 for batch in batches)
    for batch, following in zip(batches, batches[1:], strict=False):
        assert tokens_in([*batch, following[0]], lengths) > budget


@pytest.mark.parametrize("gather", [token_budget_batches, packs])
def test_a_row_longer_than_the_budget_goes_alone_and_no_rows_have_no_batches(gather):
    lengths = [4, 100, 4]
    assert gather(lengths, 8) == gather(np.array(lengths), 8) == [[1], [0, 2]] and lengths == [4, 100, 4]
    assert gather([], 100) == []


@pytest.fixture(params=["bert", "qwen2"], scope="module")
def classifier(request):
    return classifiers.build(request.param, WORDS, PAD)


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    with torch.inference_mode():
        return forward(model, batch)


def test_a_text_has_the_same_logits_in_any_batch_and_without_padding_needs_no_mask(classifier, tokenizer):
    words = [1, 30, 4, 12, 12, 2, 7, 25, 3, 18]
    tokens = tokenize(tokenizer, [text_of(word) for word in words], max_length=64)
    alone = torch.cat([logits_of(classifier, collate(tokens, [row], PAD, CPU)) for row in range(len(words))])
    for batch in (range(len(words)), *token_budget_batches(tokens.lengths, budget=40)):
        logits = logits_of(classifier, collate(tokens, batch, PAD, CPU))
        torch.testing.assert_close(logits, alone[list(batch)], atol=1e-5, rtol=0)
    assert (alone[0] - alone[1]).abs().max() > 0.01  # the comparison above could have failed
    batch = collate(tokens_of(6, 6, 6), [0, 1, 2], PAD, CPU)
    with torch.inference_mode():
        masked = classifier(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    torch.testing.assert_close(logits_of(classifier, batch), masked, atol=1e-5, rtol=0)
