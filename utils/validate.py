"""The checks that every row passes on its way into the pipeline, and the statistics of the rows that did."""

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from utils.data.statistics import DatasetStatistics, TokenCounter, TokenLengths, lengths_of, listed, normalised_entropy
from utils.data.tables import Row
from utils.errors import InputError
from utils.labels import Reconciler

DIGEST_BYTES = 16  # of a text; two of 370,000 different texts agree by chance once in 10^27 datasets
EXCERPT_CHARACTERS = 80
UNKNOWN_LABELS = 1000  # after so many, the column does not hold labels and reading on says no more


class AcceptedRow(NamedTuple):
    """A row that the pipeline measures."""

    row_id: int
    text: str
    labels: int
    label_name: str


@dataclass(frozen=True)
class RejectedRow:
    """A row that was left out."""

    row: int
    reason: str
    excerpt: str


@dataclass
class Validator:
    """Passes rows through in one go: keeps the good ones, notes the rest, and counts.

    `count_tokens` returns the number of tokens of each text of a list; without it token lengths stay unknown.
    """

    reconciler: Reconciler
    count_tokens: TokenCounter | None = None
    rejected: list[RejectedRow] = field(default_factory=list)
    _rows: int = 0
    _counts: Counter[int] = field(default_factory=Counter)
    _texts: bytearray = field(default_factory=bytearray)
    _labelled_texts: bytearray = field(default_factory=bytearray)
    _characters: array = field(default_factory=lambda: array("Q"))

    def __post_init__(self) -> None:
        """Begin the sample of token lengths."""
        self._tokens = TokenLengths(self.count_tokens) if self.count_tokens else None

    def accept(self, rows: Iterable[Row], place: str, label_column: str) -> Iterator[AcceptedRow]:
        """Yield the good rows; at the end raise InputError when labels are unknown or no row is good."""
        for row in rows:
            fault = fault_of(row)
            if fault is not None:
                self.rejected.append(RejectedRow(row.number, fault, excerpt(row.text)))
                continue
            label = self.reconciler.id_of(row.label, row.number)
            if label is not None:
                self._count(row.text, label)
                yield AcceptedRow(row.number, row.text, label, self.reconciler.labels.names[label])
            elif len(self.reconciler.unknown) > UNKNOWN_LABELS:
                break
        if self.reconciler.unknown:
            raise InputError(f"{place}: {self.reconciler.explanation(label_column)}")
        if self._rows == 0:
            raise InputError(f"{place}: {self._emptiness()}")

    def statistics(self) -> DatasetStatistics:
        """Return the statistics of the rows accepted so far, of which there is at least one."""
        names = self.reconciler.labels.names
        distinct, labelled = _distinct(self._texts), _distinct(self._labelled_texts)
        return DatasetStatistics(
            rows=self._rows,
            rejected=dict(Counter(row.reason for row in self.rejected)),
            classes=len(names),
            counts={name: self._counts[index] for index, name in enumerate(names)},
            balance=normalised_entropy([self._counts[index] for index in range(len(names))]),
            duplicate_rows=self._rows - distinct,
            contradicting_labels=labelled - distinct,
            characters=lengths_of(self._characters, "characters"),
            tokens=self._tokens.result() if self._tokens else None,
        )

    def doubts(self, statistics: DatasetStatistics) -> list[str]:
        """Return what is doubtful about the matching of labels and about the statistics, each with advice."""
        return [*self.reconciler.doubts(), *statistics.doubts()]

    def _count(self, text: str, label: int) -> None:
        self._rows += 1
        self._counts[label] += 1
        self._characters.append(len(text))
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES)
        self._texts += digest.digest()
        digest.update(f"\0{label}".encode())  # no accepted text holds a NUL
        self._labelled_texts += digest.digest()
        if self._tokens:
            self._tokens.add(text)

    def _emptiness(self) -> str:
        if not self.rejected:
            return "holds no rows"
        reasons = listed(Counter(row.reason for row in self.rejected))
        return (
            f"none of the {len(self.rejected)} rows can be used{reasons}; "
            "check dataset.text_column and dataset.label_column"
        )


def fault_of(row: Row) -> str | None:
    """Return why the row cannot be measured, or None when it can, its label being known."""
    text, label = row.text, row.label
    if text is None or _is_nan(text):
        return "text is null"
    if not isinstance(text, str):
        return f"text is of type {type(text).__name__}"
    if not text.strip():
        return "text is empty"
    if "\0" in text:
        return "text holds a NUL byte"
    if not _is_unicode(text):
        return "text is not valid Unicode"
    if label is None or _is_nan(label) or (isinstance(label, str) and not label.strip()):
        return "label is null"
    return None


def excerpt(value: Any) -> str:
    """Return the start of a value as a table can show it."""
    text = value[:EXCERPT_CHARACTERS] if isinstance(value, str) else str(value)[:EXCERPT_CHARACTERS]
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can hold
        return False
    return True


def _distinct(digests: bytearray) -> int:
    if not digests:
        return 0
    return len(np.unique(np.frombuffer(digests, dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8), axis=0))
