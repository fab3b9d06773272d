"""Which column holds the texts and which the labels, found without asking where that is certain, explained where not.

A name of the settings is taken at its word. Only the default names have stand-ins, and only a file that cannot have a
header is read without one; what was assumed is said, and what cannot be told ends with the override to type.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils.command import InputError
from utils.models import NO_LABELS
from utils.settings import LABEL_COLUMN, TEXT_COLUMN

TEXTS = (
    "text", "sentence", "content", "review", "body", "utterance", "message", "comment", "question", "query", "document",
    "review_text", "review_body", "texts", "sentences",
)  # fmt: skip
LABELS = ("labels", "label", "intent", "category", "class", "sentiment", "target", "label_name")
NAME = re.compile(r"[A-Za-z_][\w-]*(?: [\w-]+){0,2}")  # at most three words without punctuation
NAME_CHARACTERS = 30
MOST_WORDS = 5  # of a name; more is a text
SHOWN_COLUMNS, SHOWN_CHARACTERS = 8, 40

Name = str | int


@dataclass(frozen=True)
class Columns:
    """Where texts and labels stand, from 0; `label` is None where there are none.

    `names` are what messages call the two; `remarks` say what was assumed.
    """

    text: int
    label: int | None
    names: tuple[Name, Name | None]
    has_header: bool = True
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """The columns that the settings ask for; a number counts from 1 and says that there is no header."""

    text: Name = TEXT_COLUMN
    label: Name | None = LABEL_COLUMN

    @property
    def by_number(self) -> bool:
        """Whether a column is given by its number."""
        return isinstance(self.text, int) or isinstance(self.label, int)


def of_header(
    source: str, names: Sequence[str], wanted: Wanted, row: Sequence[Any] = (), no_header: str = ""
) -> Columns:
    """Return the columns of a source whose columns have `names`; `row` is its first one, for advice.

    `no_header` is what to do where the names are not names. Raises InputError with the columns there are and the
    override that names one of them.
    """
    if wanted.by_number:
        raise InputError(
            f"{source}: its columns have names, so name them: dataset.text_column and dataset.label_column are numbers "
            f"only for a CSV without a header. There are: {_listed(names)}"
        )
    text = _column_named(source, "text_column", names, str(wanted.text), TEXTS if wanted.text == TEXT_COLUMN else ())
    remarks = []
    if text is None:
        if len(names) != 1 or wanted.text != TEXT_COLUMN:
            raise InputError(_no_text(source, names, str(wanted.text), row) + no_header)
        text = names[0]
    if text != wanted.text:
        doubtful = no_header if text.casefold() not in TEXTS else ""
        remarks.append(f"the texts are read from column {text!r}, since there is no {wanted.text!r}{doubtful}")
    if wanted.label is None:
        return Columns(names.index(text), None, (text, None), remarks=tuple(remarks))
    others, no_labels = [name for name in names if name != text], f"; {NO_LABELS}"
    label = _column_named(
        source, "label_column", others, str(wanted.label), LABELS if wanted.label == LABEL_COLUMN else ()
    )
    if label is None and wanted.label != LABEL_COLUMN:
        raise InputError(
            f"{source}: there is no column {wanted.label!r} (dataset.label_column){_close(wanted.label, others)} "
            f"There are: {_listed(names)}; {NO_LABELS}{no_header}"
        )
    if label is None:
        remarks += [f"none of the others holds labels by its name ({_listed(others)})"] if others else []
        return Columns(names.index(text), None, (text, None), remarks=tuple(remarks))
    if label != wanted.label:
        usual = label.casefold() in LABELS[:2]
        remarks.append(
            f"the labels are read from column {label!r}, since there is no {wanted.label!r}{'' if usual else no_labels}"
        )
    return Columns(names.index(text), names.index(label), (text, label), remarks=tuple(remarks))


def of_cells(source: str, rows: Sequence[Sequence[str]], wanted: Wanted) -> Columns:
    """Return the columns of a CSV that begins with `rows`, whose first may be a header or the first text.

    Raises InputError, with what was found and what to type, where that cannot be told.
    """
    first = rows[0] if rows else []
    if wanted.by_number:
        return _by_number(source, first, wanted)
    if sign := _separator_hint(first):
        raise InputError(
            f"{source}: there is no column {wanted.text!r} (dataset.text_column). There is: {first[0]}{sign}"
        )
    is_default = (wanted.text, wanted.label) in ((TEXT_COLUMN, LABEL_COLUMN), (TEXT_COLUMN, None))
    names_something = _has_known_name(first) and not any(_is_text(cell) for cell in first)
    if not is_default or names_something or all(_is_name(cell) or (not cell and not n) for n, cell in enumerate(first)):
        advice = "; if that is a row of data, and not a header, set dataset.text_column=1"
        advice += " dataset.label_column=2 (the numbers of the columns)" if len(first) > 1 else ""
        return of_header(source, first, wanted, rows[1] if len(rows) > 1 else (), advice)
    shown = f"the file has no header (its first row is {_listed(first, quoted=True)})"
    if len(first) > 2:
        raise InputError(
            f"{source}: {shown}; say which columns to read by their numbers, from 1 to {len(first)}: "
            f"dataset.text_column={_longest(rows) + 1} dataset.label_column=… (null for none); or write a header with "
            "the names text and labels"
        )
    text = _longest(rows)
    if len(first) == 1 or wanted.label is None:
        return Columns(text, None, (text + 1, None), False, (f"{shown}; column {text + 1} is read as the texts",))
    label = 1 - text
    remark = f"{shown}; column {text + 1} is read as the texts and column {label + 1} as the labels; {NO_LABELS}"
    return Columns(text, label, (text + 1, label + 1), False, (remark,))


def _by_number(source: str, first: Sequence[str], wanted: Wanted) -> Columns:
    numbers = {"text_column": wanted.text, "label_column": wanted.label}
    if wanted.label == LABEL_COLUMN:  # the default, which asks for nothing
        numbers["label_column"] = None
    for setting, number in numbers.items():
        if isinstance(number, str):
            raise InputError(
                f"{source}: dataset.{setting} is the name {number!r} and the other column a number; numbers are for a "
                "file without a header. Give both as numbers, or both as names"
            )
        if number is not None and number > len(first):
            raise InputError(f"{source}: dataset.{setting} is {number}, but there are {len(first)} column(s)")
    text, label = numbers.values()
    assert isinstance(text, int) and not isinstance(label, str)
    return Columns(text - 1, label - 1 if label else None, (text, label), False)


def _column_named(source: str, setting: str, names: Sequence[str], wanted: str, usual: Sequence[str]) -> str | None:
    """Return the column called `wanted`, or one of the `usual` names in any case; None where there is none."""
    if names.count(wanted) > 1:
        raise InputError(
            f"{source}: column {wanted!r} (dataset.{setting}) stands {names.count(wanted)} times; rename one"
        )
    if wanted in names:
        return wanted
    known = {name.strip().casefold(): name for name in reversed(names)}
    return next((known[name] for name in usual if name in known), None)


def _no_text(source: str, names: Sequence[str], wanted: str, row: Sequence[Any]) -> str:
    lengths = [len(value) if isinstance(value, str) else 0 for value in row]
    likely = names[lengths.index(max(lengths))] if len(lengths) == len(names) and any(lengths) else None
    choice = f"; the longest texts seem to be in {likely!r}: dataset.text_column={_typed(likely)}" if likely else ""
    return (
        f"{source}: there is no column {wanted!r} (dataset.text_column){_close(wanted, names)} "
        f"There are: {_listed(names)}{choice}"
    )


def _close(wanted: Name, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(wanted), names, n=1)
    return f", did you mean {close[0]!r}?" if close else "."


def _typed(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else f"'{name}'"


def _listed(cells: Sequence[Any], quoted: bool = False) -> str:
    shown = [str(cell) if len(str(cell)) <= SHOWN_CHARACTERS else f"{str(cell)[:SHOWN_CHARACTERS]}…" for cell in cells]
    rest = [f"… {len(shown) - SHOWN_COLUMNS} more"] if len(shown) > SHOWN_COLUMNS else []
    return ", ".join([*(repr(cell) if quoted else cell for cell in shown[:SHOWN_COLUMNS]), *rest])


def _separator_hint(columns: Sequence[str]) -> str:
    """Return what to do about a CSV whose header shows that something else than commas separates its cells."""
    header = columns[0] if len(columns) == 1 else ""
    sign = next((sign for sign in ";\t|" if sign in header and _has_known_name(header.split(sign))), None)
    return f" (separated by {sign!r}: save the file with commas)" if sign else ""


def _has_known_name(cells: Sequence[str]) -> bool:
    return len(cells) > 0 and not {cell.strip().casefold() for cell in cells}.isdisjoint({*TEXTS, *LABELS})


def _is_name(cell: str) -> bool:
    return len(cell) <= NAME_CHARACTERS and NAME.fullmatch(cell.strip()) is not None


def _is_text(cell: str) -> bool:
    words = cell.split()
    return len(words) > MOST_WORDS or (len(words) > 1 and cell.rstrip()[-1] in ".!?")


def _longest(rows: Sequence[Sequence[str]]) -> int:
    """Return the column with the most characters."""
    columns = range(min(map(len, rows), default=1))
    return max(columns, key=lambda column: sum(len(row[column]) for row in rows))
