"""Which texts are timed together, by texts whose tokens are their words."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from utils import selection as module
from utils.selection import Selection

CPU = torch.device("cpu")
PAD = 7


class FakeTokenizer:
    """Makes one token of each word: its number; notes every call."""

    pad_token_id = PAD

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.calls.append((texts, options))
        words = [text.split() for text in texts]
        encodings = [SimpleNamespace(overflowing=each[options["max_length"] :]) for each in words]
        ids = [[int(word) for word in each[: options["max_length"]]] for each in words]
        return type("Encoded", (dict,), {"encodings": encodings})(input_ids=ids)


def texts_of(*lengths: int) -> list[str]:
    """Return texts whose words are all the number of the text."""
    return [" ".join([str(number)] * length) for number, length in enumerate(lengths)]


def of(texts: list[str], max_length: int = 512) -> Selection:
    return Selection.of(texts, FakeTokenizer(), max_length, CPU)


MIXED = texts_of(*(1 + (row * row) % 97 for row in range(320)))


def test_a_batch_holds_its_texts_in_the_order_asked_for_padded_with_the_tokenizers_token() -> None:
    batch = of(texts_of(3, 1, 2)).batch([1, 0])
    assert batch.rows == (1, 0)
    assert batch.input_ids.tolist() == [[1, PAD, PAD], [0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert (batch.tokens_real, batch.tokens_padded) == (4, 6)


def test_batches_are_on_the_device() -> None:
    selection = Selection.of(MIXED, FakeTokenizer(), 512, torch.device("meta"))
    assert {each.input_ids.device.type for each in selection.batches(4, 3)} == {"meta"}


@pytest.mark.parametrize(("batch_size", "count"), [(1, 10), (4, 10), (8, 3), (64, 5)])
def test_there_are_as_many_batches_as_asked_for_and_no_text_twice(batch_size: int, count: int) -> None:
    batches = of(MIXED).batches(batch_size, count)
    assert [len(each.rows) for each in batches] == [batch_size] * count
    rows = [row for each in batches for row in each.rows]
    assert len(set(rows)) == batch_size * count


@pytest.mark.parametrize(("batch_size", "count"), [(1, 10), (2, 5), (4, 10), (64, 2)])
def test_the_mean_length_is_that_of_all_texts(batch_size: int, count: int) -> None:
    selection = of(MIXED)
    batches = selection.batches(batch_size, count)
    mean = sum(each.tokens_real for each in batches) / (batch_size * count)
    assert mean == pytest.approx(selection.tokens.lengths.mean(), rel=0.01)


def test_one_draw_alone_would_miss_the_mean_length(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = of(MIXED)

    def worst_miss() -> float:
        found = [selection.batches(1, count) for count in (5, 10, 20, 40)]
        means = [sum(each.tokens_real for each in batches) / len(batches) for batches in found]
        return max(abs(mean / selection.tokens.lengths.mean() - 1) for mean in means)

    best = worst_miss()
    monkeypatch.setattr(module, "DRAWS", 1)
    assert best < 0.01 < 0.1 < worst_miss()


def test_the_draw_depends_on_nothing_else_and_touches_nothing() -> None:
    first, again = of(MIXED), of(MIXED)
    expected = [each.rows for each in first.batches(4, 10)]
    random.seed(1)
    again.batches(8, 3)
    assert [each.rows for each in again.batches(4, 10)] == expected
    random.seed(5)
    expected = random.random()
    random.seed(5)
    of(MIXED).batches(4, 10)
    assert random.random() == expected


def test_texts_are_not_sorted_by_length() -> None:
    batches = of(MIXED).batches(8, 10)
    assert sum(each.is_padded for each in batches) == 10
    assert max(each.tokens_padded / each.tokens_real for each in batches) > 1.5  # what arrives together is padded


@pytest.mark.parametrize(
    ("batch_size", "count", "rows"), [(2, 3, [0, 1, 2, 0, 1, 2]), (3, 1, [0, 1, 2]), (4, 1, [0, 1, 2, 0])]
)
def test_all_texts_are_taken_in_turn_where_there_are_no_more(batch_size: int, count: int, rows: list[int]) -> None:
    batches = of(texts_of(1, 2, 3)).batches(batch_size, count)
    assert [row for each in batches for row in each.rows] == rows
    assert len(batches) == count


def test_texts_are_cut_and_counted() -> None:
    selection = of(texts_of(5, 2, 4), max_length=3)
    assert selection.tokens.lengths.tolist() == [3, 2, 3]
    assert selection.tokens.truncated == 2


def test_a_server_would_tokenize_the_texts_of_one_batch() -> None:
    selection = of(texts_of(1, 2, 3), max_length=2)
    tokenizer = selection.tokenizer
    tokenizer.calls.clear()
    selection.tokenize(selection.batch([2, 0]))
    assert tokenizer.calls == [(["2 2 2", "0"], {"truncation": True, "max_length": 2})]


def test_no_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="no texts"):
        of([])
