"""Which texts are timed together, by texts whose tokens are their words."""

import pytest
import torch

from tests.fakes import FakeTokenizer
from utils.selection import Selection

CPU = torch.device("cpu")


def texts_of(*lengths: int) -> list[str]:
    """Return texts whose words are all the number of the text."""
    return [" ".join([str(number)] * length) for number, length in enumerate(lengths)]


def of(texts: list[str], max_length: int = 512) -> Selection:
    return Selection.of(texts, FakeTokenizer(), max_length, CPU)


MIXED = texts_of(*(1 + (row * row) % 97 for row in range(320)))


def test_a_batch_holds_its_texts_in_the_order_asked_for_padded_with_the_tokenizers_token() -> None:
    batch = of(texts_of(3, 1, 2)).batch([1, 0])
    assert batch.rows == (1, 0)
    assert batch.input_ids.tolist() == [[19, 7, 7], [18, 18, 18]]  # tokens of "1" and "0", and of padding
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert (batch.tokens_real, batch.tokens_padded) == (4, 6)


def test_batches_are_on_the_device() -> None:
    selection = Selection.of(MIXED, FakeTokenizer(), 512, torch.device("meta"))
    assert {each.input_ids.device.type for each in selection.batches(4, 3)} == {"meta"}


def test_the_dataset_is_taken_whole_in_order_of_arrival() -> None:
    selection = of(texts_of(3, 1, 2, 5, 4))
    arrivals = selection.arrivals(2)
    assert [list(arrivals.rows(index)) for index in range(len(arrivals))] == [[0, 1], [2, 3], [4]]
    assert [str(arrivals.shape(index)) for index in range(3)] == ["2 × 3 tokens", "2 × 5 tokens", "1 × 4 tokens"]
    assert arrivals.tokens_real.tolist() == [4, 7, 4]
    assert [batch.rows for batch in selection.batches(2, 9)] == [(0, 1), (4,), (2, 3)]  # all there are


@pytest.mark.parametrize(
    ("lengths", "batch_size", "rows"),
    [
        ((1, 9, 4, 5, 2), 1, (2,)),  # 4.2 on average
        ((9, 9, 1, 4, 5, 3, 4), 2, (4, 5)),  # padded to 9, 4 and 5; the last one holds one text and is none
        ((1, 4, 2, 4, 3, 4, 4, 4), 2, (2, 3)),  # all are padded to 4: then the typical share of padding decides
        ((3, 1), 4, (0, 1)),  # the last one is the only one
    ],
)
def test_the_reference_batch_is_the_one_of_typical_cost(lengths, batch_size, rows) -> None:
    reference = of(texts_of(*lengths)).reference(batch_size)
    assert reference.rows == rows
    assert str(reference.shape) == f"{len(rows)} × {max(lengths[row] for row in rows)} tokens"


@pytest.mark.parametrize(("batch_size", "count"), [(1, 10), (4, 10), (8, 3), (64, 5)])
def test_batches_are_spread_over_the_lengths_of_all(batch_size: int, count: int) -> None:
    selection = of(MIXED)
    batches = selection.batches(batch_size, count)
    assert len({batch.rows for batch in batches}) == count
    mean = sum(batch.shape.tokens for batch in batches) / count
    assert mean == pytest.approx(selection.arrivals(batch_size).longest.mean(), rel=0.1)


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
