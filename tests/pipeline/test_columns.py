"""Columns are found where that is certain, what was assumed is said, and what cannot be told ends with what to type."""

import re

import pytest

from utils.data.columns import Wanted, of_cells, of_header
from utils.errors import InputError

QUESTION = "How do I locate my new card?"


@pytest.mark.parametrize(
    ("header", "wanted", "names"),
    [
        (["id", "text", "labels"], Wanted(), ("text", "labels")),
        (["text", "label"], Wanted(), ("text", "label")),
        (["Sentence", "Label"], Wanted(), ("Sentence", "Label")),
        (["", "review", "stars"], Wanted(), ("review", None)),
        (["title", "content", "intent"], Wanted(), ("content", "intent")),
        (["remark"], Wanted(), ("remark", None)),
        (["text"], Wanted(), ("text", None)),
        (["a", "b"], Wanted("b", "a"), ("b", "a")),
        (["text", "labels"], Wanted("text", None), ("text", None)),
    ],
)
def test_usual_names_are_found(header, wanted, names):
    found = of_cells("x.csv", [header, ["1"] * len(header)], wanted)
    assert (found.names, found.has_header) == (names, True)
    assert found.text == header.index(names[0])
    other_names = [name for name in names if name and name not in (wanted.text, wanted.label)]
    assert all(any(repr(name) in remark for remark in found.remarks) for name in other_names)


@pytest.mark.parametrize(
    ("rows", "wanted", "names"),
    [
        ([[QUESTION, "card_arrival"], ["Where is it?", "lost"]], Wanted(), (1, 2)),
        ([["card_arrival", QUESTION], ["lost", "Where is it?"]], Wanted(), (2, 1)),
        ([["Great film", "3"], ["Poor", "1"]], Wanted(), (1, 2)),
        ([[QUESTION], ["Where is it?"]], Wanted(), (1, None)),
        ([["How old must I be?", "question"]], Wanted(), (1, 2)),
        ([["7", QUESTION, "lost"]], Wanted(2, 3), (2, 3)),
        ([["7", QUESTION, "lost"]], Wanted(2), (2, None)),
    ],
)
def test_file_without_a_header_is_read_from_its_first_row(rows, wanted, names):
    found = of_cells("x.csv", rows, wanted)
    assert (found.names, found.has_header) == (names, False)
    assert bool(found.remarks) != wanted.by_place, "what the settings say is no assumption"


@pytest.mark.parametrize(
    ("rows", "wanted", "told"),
    [
        ([["7", QUESTION, "lost"]], Wanted(), r"no header \(its first row is '7', .*dataset.text_column=2"),
        ([["uid", "remark", "stars"], ["7", QUESTION, "5"]], Wanted(), "There are: uid, .*dataset.text_column=remark"),
        ([["fine film", "good"]], Wanted(), "if that is a row of data.*text_column=1 dataset.label_column=2"),
        ([["text", "labels"]], Wanted("txet"), "no column 'txet'.*did you mean 'text'"),
        ([["text", "stars"]], Wanted("text", "star"), "did you mean 'stars'.*dataset.label_column=null"),
        ([["a", "b"]], Wanted(3, 1), "dataset.text_column is 3, but there are 2"),
        ([["a", "b"]], Wanted(1, "b"), "give both as numbers, or both as names"),
        ([["text;label"]], Wanted(), "separated by ';'"),
        ([], Wanted(), "no column 'text'"),
    ],
)
def test_what_cannot_be_told_ends_with_what_to_type(rows, wanted, told):
    with pytest.raises(InputError) as caught:
        of_cells("x.csv", rows, wanted)
    assert re.search(told, str(caught.value)), caught.value


def test_columns_with_names_are_not_numbered():
    with pytest.raises(InputError, match="There are: text, labels"):
        of_header("x.parquet", ["text", "labels"], Wanted(1, 2))
