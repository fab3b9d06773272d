"""Rows pass one set of checks; what is left out is listed with its reason, what remains is counted."""

import pytest

from utils.command.errors import InputError
from utils.data import checks as statistics
from utils.data.checks import (
    EXCERPT_CHARACTERS,
    UNKNOWN_LABELS,
    AcceptedRow,
    TokenLengths,
    Validator,
    excerpt,
    fault_of,
)
from utils.data.sources import Row
from utils.models.tasks.sequence_classification.labels import LabelMatcher, ModelLabels

NAN = float("nan")


def validator(*names: str, count_tokens=None) -> Validator:
    return Validator(LabelMatcher(ModelLabels(names or ("a", "b", "c"))), count_tokens)


def accept(checks: Validator, *pairs: tuple) -> list[AcceptedRow]:
    rows = [Row(number, text, label) for number, (text, label) in enumerate(pairs)]
    return list(checks.accept(rows, "data.csv", "label"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "text is null"),
        (NAN, "text is null"),
        (3, "text is of type int"),
        (b"bytes", "text is of type bytes"),
        (["a"], "text is of type list"),
        ("", "text is empty"),
        (" \t\r\n\u00a0", "text is empty"),
        ("a\0b", "text holds a NUL byte"),
        ("half \ud83d", "text is not valid Unicode"),
    ],
)
def test_unusable_text_is_left_out_with_its_reason(text, reason):
    checks = validator()
    assert [row.row_id for row in accept(checks, ("good", "a"), (text, "a"), ("also good", "b"))] == [0, 2]
    assert [(row.row, row.reason) for row in checks.rejected] == [(1, reason)]


@pytest.mark.parametrize("label", [None, NAN, "", "  "])
def test_row_without_label_is_left_out(label):
    checks = validator()
    assert len(accept(checks, ("good", "a"), ("fine", label))) == 1
    assert [(row.row, row.reason, row.excerpt) for row in checks.rejected] == [(1, "label is null", "fine")]


@pytest.mark.parametrize("text", ["NA", "null", "nan", "0", " x ", "=1+1", "\u200b", "x" * 10**6])
def test_text_that_only_looks_odd_is_kept(text):
    assert fault_of(Row(0, text, "a")) is None


def test_excerpt_is_short_and_can_be_stored():
    shown = [excerpt("y" * 500), excerpt("a\0b\ud83d"), excerpt(None), excerpt([1] * 999)]
    assert shown[:3] == ["y" * EXCERPT_CHARACTERS, "a\\0b\\ud83d", "None"]
    assert all(len(text.encode()) <= EXCERPT_CHARACTERS for text in shown)


def test_column_that_holds_no_labels_is_refused_early():
    seen = []

    def rows():
        for number in range(10 * UNKNOWN_LABELS):
            seen.append(number)
            yield Row(number, "text", f"free text {number}")

    with pytest.raises(InputError, match="does not know"):
        list(validator().accept(rows(), "data.csv", "label"))
    assert len(seen) == UNKNOWN_LABELS + 1


def test_source_without_usable_rows_is_refused():
    with pytest.raises(InputError, match="data.csv: holds no rows"):
        accept(validator())
    with pytest.raises(InputError, match=r"none of the 3 rows can be used \(text is empty: 2, label is null: 1\)"):
        accept(validator(), ("", "a"), ("x", None), (" ", "b"))
    checks = validator()
    with pytest.raises(InputError, match="'d' in 2 row.*first in row 1") as caught:
        accept(checks, ("one", "a"), ("two", "d"), ("three", "b"), ("four", "d"))
    assert str(caught.value).startswith("data.csv: ") and caught.value.exit_code == 2


def test_statistics_count_classes_and_lengths():
    checks = validator()
    accept(checks, ("one", "a"), ("two", "b"), ("one", "a"), ("one", "b"), ("", "a"), ("three", "a"))
    summary = checks.statistics()
    assert (summary.rows, summary.rejected, summary.classes) == (5, {"text is empty": 1}, 3)
    assert summary.counts == {"a": 3, "b": 2, "c": 0} and summary.unseen == ["c"]
    assert summary.majority_share == pytest.approx(0.6)
    assert summary.duplicate_rows == 2 and summary.contradicting_labels == 1
    assert summary.tokens is None
    even, single = validator("a", "b"), validator("a", "b")
    accept(even, ("x", "a"), ("y", "b"))
    accept(single, ("x", "a"), ("y", "a"))
    assert even.statistics().balance == pytest.approx(1.0)
    assert single.statistics().balance == 0.0
    checks = validator(count_tokens=lambda texts: [len(text.split()) for text in texts])
    accept(checks, *(("w " * length, "a") for length in range(1, 101)))
    summary = checks.statistics()
    assert (summary.tokens.minimum, summary.tokens.maximum, summary.tokens.mean) == (1, 100, 50.5)
    assert summary.tokens.quantiles == {"p05": 5, "median": 50, "p95": 95, "p99": 99}
    assert summary.characters.quantiles["median"] == 100
    assert summary.tokens.every == 1
    checks = validator("a", "b")
    accept(checks, ("four", "a"), ("five5", "b"), ("", "b"), ("sixsix", "b"))
    assert checks.statistics().lines() == [
        "Rows: 3 kept, 1 rejected (text is empty: 1)",
        "Labels: 2 of the model's 2 occur; fewest rows 1 (a), most 2 (b, 66.7%)",
        "Class balance: 0.918 (entropy over its maximum; 1 is even)",
        "Duplicates: 0 rows repeat an earlier text (0.0%); 0 labels contradict another row with the same text",
        "Length in characters: 4 to 6, median 5, mean 5.0; 5 % have up to 4, 95 % up to 6, 99 % up to 6",
    ]
    checks = validator("a", "b")
    accept(checks, ("x", "a"), ("y", "b"))
    assert checks.doubts(checks.statistics()) == []


def test_token_lengths_of_many_texts_are_those_of_every_kth(monkeypatch):
    monkeypatch.setattr(statistics, "TOKENISED_ROWS", 100)
    monkeypatch.setattr(statistics, "TOKENISED_TOGETHER", 7)
    counted = []

    def count(texts: list[str]) -> list[int]:
        counted.extend(texts)
        return [int(text) for text in texts]

    lengths = TokenLengths(count)
    for number in range(1000):
        lengths.add(str(number))
    result = lengths.result()
    assert result.every == 16
    assert (result.minimum, result.maximum) == (0, 992)
    assert result.mean == sum(range(0, 1000, 16)) / len(range(0, 1000, 16))
    assert len(counted) < 300
    assert "(1 row in 16)" in result.line()


@pytest.mark.parametrize(
    ("pairs", "doubt"),
    [
        ([("x", "a"), ("y", "b"), (None, "a")], "1 row(s) were left out"),
        ([("x", "a"), ("y", "a")], "1 of the model's 2 labels never occur (b)"),
        ([("x", "a"), ("x", "a"), ("y", "b"), ("z", "b")], "25.0% of the rows repeat an earlier text"),
        ([("x", "a"), ("x", "b")], "1 label contradicts another row with the same text"),
        ([*((f"x{index}", "a") for index in range(9)), ("y", "b")], "90.0% of the rows have one label"),
        ([("x", "A"), ("y", "b")], "differ from the model's in case"),
    ],
)
def test_each_finding_is_a_doubt(pairs, doubt):
    checks = validator("a", "b")
    accept(checks, *pairs)
    assert any(doubt in text for text in checks.doubts(checks.statistics()))
