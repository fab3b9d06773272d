"""How names and numbers are written, and the lines they stand in."""

import pytest

from utils.render.formatting import WIDTH, clean, command_lines, number, paragraph, table, times


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.012345, "0.01235"), (4.3214, "4.321"), (99.999, "100.00"), (1264.4, "1,264"), (301_412.3, "301,412"),
     (1e-7, "1.000e-07"), (2.5e12, "2.500e+12")],
)  # fmt: skip
def test_numbers_have_four_digits(value, shown):
    assert number(value) == shown


def test_factors_are_short():
    assert [times(factor) for factor in (1.0849, 4.907, 31.4)] == ["1.08", "4.9", "31"]


def test_long_names_lose_their_middle():
    assert clean("a" * 100 + "z" * 100, longest=11) == "aaaaa...zzz"
    assert clean("two\n words\x1b") == "two words"


def test_percent_sign_stays_with_its_number():
    lines = paragraph("word " * 19 + "9999 % more")
    assert lines[0].endswith("word") and lines[1] == "9999 % more"


def test_table_is_aligned():
    assert table(["size\n", "a\nname"], [["1", "x"], ["100", "yy"]], left=[1]) == [
        "size  a",
        "      name",
        "----  ----",
        "   1  x",
        " 100  yy",
    ]


def test_long_command_is_continued_where_its_words_end():
    lines = command_lines("python run.py " + " ".join(f"key{index}=value" for index in range(20)), "  ")
    assert all(len(line) <= WIDTH for line in lines) and len(lines) > 1
    joined = " ".join(line.rstrip("\\").strip() for line in lines)
    assert joined == "python run.py " + " ".join(f"key{index}=value" for index in range(20))
    assert all(line.endswith(" \\") for line in lines[:-1])
