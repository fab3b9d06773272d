"""The checks that every row passes on its way into the pipeline, and what the rows that did look like."""

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from utils.command import InputError
from utils.data.columns import Name
from utils.data.sources import Row
from utils.models import NO_LABELS

TOKENISED_ROWS = 20_000  # kept lengths; a fuller sample is halved
TOKENISED_TOGETHER = 256
DUPLICATE_SHARE = 0.05  # above it, the rows are fewer independent observations than they seem
MAJORITY_SHARE = 0.8  # above it, always guessing the largest class scores that well
QUANTILES = {"p05": 0.05, "median": 0.5, "p95": 0.95, "p99": 0.99}

TokenCounter = Callable[[list[str]], list[int]]


@dataclass(frozen=True)
class Lengths:
    """How long texts are; `every` says that only every n-th row was looked at."""

    unit: str
    every: int
    minimum: int
    maximum: int
    mean: float
    quantiles: Mapping[str, int]

    def line(self) -> str:
        """Return the lengths as one line of text."""
        looked_at = f" (1 row in {self.every})" if self.every > 1 else ""
        quantiles = self.quantiles
        return (
            f"Length in {self.unit}{looked_at}: {self.minimum:,} to {self.maximum:,}, median {quantiles['median']:,}, "
            f"mean {self.mean:,.1f}; 5 % have up to {quantiles['p05']:,}, 95 % up to {quantiles['p95']:,}, "
            f"99 % up to {quantiles['p99']:,}"
        )


@dataclass(frozen=True)
class DatasetStatistics:
    """What the accepted rows of a dataset look like; where they have no labels, all that is about labels is None."""

    rows: int
    rejected: Mapping[str, int]
    classes: int
    counts: Mapping[str, int | None]
    balance: float | None
    duplicate_rows: int
    contradicting_labels: int | None
    characters: Lengths
    tokens: Lengths | None

    @property
    def has_labels(self) -> bool:
        """Whether the rows have labels."""
        return self.balance is not None

    @property
    def _seen(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count}

    @property
    def unseen(self) -> list[str]:
        """Return the model's labels that no row has."""
        return [name for name, count in self.counts.items() if count == 0]

    @property
    def majority_share(self) -> float:
        """Return the share of the largest class: the accuracy of always guessing it."""
        return max(self._seen.values(), default=0) / self.rows

    def lines(self) -> list[str]:
        """Return the statistics as lines of text."""
        contradicting = ""
        if self.has_labels:
            contradicting = f"; {self.contradicting_labels:,} labels contradict another row with the same text"
        return [
            f"Rows: {self.rows:,} kept, {sum(self.rejected.values()):,} rejected{listed(self.rejected)}",
            *(self._label_lines() if self.has_labels else ["Labels: none, so accuracy is not measured"]),
            f"Duplicates: {self.duplicate_rows:,} rows repeat an earlier text ({self.duplicate_rows / self.rows:.1%})"
            f"{contradicting}",
            self.characters.line(),
            *([self.tokens.line()] if self.tokens else []),
        ]

    def _label_lines(self) -> list[str]:
        seen = self._seen
        least, most = min(seen, key=seen.__getitem__), max(seen, key=seen.__getitem__)
        return [
            f"Labels: {len(seen)} of the model's {self.classes} occur; "
            f"fewest rows {seen[least]:,} ({least}), most {seen[most]:,} ({most}, {self.majority_share:.1%})",
            f"Class balance: {self.balance:.3f} (entropy over its maximum; 1 is even)",
        ]

    def doubts(self) -> list[str]:
        """Return what makes results on these rows doubtful, each with advice."""
        doubts = []
        if self.rejected:
            doubts.append(f"{sum(self.rejected.values())} row(s) were left out; they are listed in rejected_rows.csv")
        if self.has_labels and self.unseen:
            doubts.append(
                f"{len(self.unseen)} of the model's {self.classes} labels never occur ({', '.join(self.unseen)[:80]}); "
                "nothing is measured of them"
            )
        if self.duplicate_rows / self.rows > DUPLICATE_SHARE:
            rests = "accuracy rests" if self.has_labels else "results rest"
            doubts.append(
                f"{self.duplicate_rows / self.rows:.1%} of the rows repeat an earlier text; "
                f"{rests} on fewer texts than there are rows"
            )
        if self.contradicting_labels:
            contradict = "labels contradict" if self.contradicting_labels > 1 else "label contradicts"
            doubts.append(
                f"{self.contradicting_labels} {contradict} another row with the same text; "
                "no model can get all of these right"
            )
        if self.majority_share > MAJORITY_SHARE:
            doubts.append(
                f"{self.majority_share:.1%} of the rows have one label; always guessing it has that accuracy, "
                "so read the macro F1"
            )
        return doubts


class TokenLengths:
    """Token counts of every k-th text; k doubles whenever the sample is full, so that work stays bounded."""

    def __init__(self, count_tokens: TokenCounter) -> None:
        """Begin with every text."""
        self._count_tokens = count_tokens
        self._every, self._seen = 1, 0
        self._waiting: list[str] = []
        self._lengths = array("Q")

    def add(self, text: str) -> None:
        """Count one more text, if it is its turn."""
        if self._seen % self._every == 0:
            self._waiting.append(text)
            if len(self._waiting) == TOKENISED_TOGETHER:
                self._flush()
        self._seen += 1

    def result(self) -> Lengths:
        """Return the lengths of the texts that were counted."""
        self._flush()
        return lengths_of(self._lengths, "tokens", self._every)

    def _flush(self) -> None:
        self._lengths.extend(self._count_tokens(self._waiting) if self._waiting else [])
        self._waiting.clear()
        while len(self._lengths) > TOKENISED_ROWS:
            self._lengths = self._lengths[::2]
            self._every *= 2


def lengths_of(values: "array[int]", unit: str, every: int = 1) -> Lengths:
    """Return the summary of lengths; each quantile is a length that occurs."""
    ordered = np.sort(np.frombuffer(values, dtype=np.uint64))
    return Lengths(
        unit=unit,
        every=every,
        minimum=int(ordered[0]),
        maximum=int(ordered[-1]),
        mean=float(ordered.mean()),
        quantiles={name: int(ordered[math.ceil(share * ordered.size) - 1]) for name, share in QUANTILES.items()},
    )


def listed(reasons: Mapping[str, int]) -> str:
    """Return reasons with their counts in brackets, the most frequent first; nothing when there are none."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{reason}: {count:,}' for reason, count in ordered)})" if ordered else ""


def normalised_entropy(counts: Sequence[int]) -> float:
    """Return the entropy of the class shares over that of even shares, from 0 (one class) to 1 (even)."""
    if len(counts) < 2:
        return 0.0
    shares = np.array([count for count in counts if count], dtype=float)
    shares /= shares.sum()
    return max(0.0, float(-(shares * np.log(shares)).sum() / math.log(len(counts))))


DIGEST_BYTES = 16  # of a text; two of 370,000 different texts agree by chance once in 10^27 datasets
EXCERPT_CHARACTERS = 80
UNKNOWN_LABELS = 1000  # after so many, the column does not hold labels and reading on says no more


class AcceptedRow(NamedTuple):
    """A row that the pipeline measures."""

    row_id: int
    text: str
    labels: int | None
    label_name: str | None


@dataclass(frozen=True)
class RejectedRow:
    """A row that was left out."""

    row: int
    reason: str
    excerpt: str


@dataclass
class Validator:
    """Passes rows through in one go: keeps the good ones, notes the rest, and counts.

    Without labels `has_labels` is false, and `matcher` gives the names of the model's classes alone. `count_tokens`
    returns the number of tokens of each text of a list; without it token lengths stay unknown.
    """

    matcher: Any
    count_tokens: TokenCounter | None = None
    has_labels: bool = True
    rejected: list[RejectedRow] = field(default_factory=list)
    _rows: int = 0
    _counts: Counter[int] = field(default_factory=Counter)
    _texts: bytearray = field(default_factory=bytearray)
    _labelled_texts: bytearray = field(default_factory=bytearray)
    _characters: "array[int]" = field(default_factory=lambda: array("Q"))

    def __post_init__(self) -> None:
        """Begin the sample of token lengths."""
        self._tokens = TokenLengths(self.count_tokens) if self.count_tokens else None

    def accept(self, rows: Iterable[Row], source: str, label_column: Name | None) -> Iterator[AcceptedRow]:
        """Yield the good rows; at the end raise InputError when labels are unknown or no row is good."""
        for row in rows:
            fault = fault_of(row, self.has_labels)
            if fault is not None:
                self.rejected.append(RejectedRow(row.number, fault, excerpt(row.text)))
                continue
            label = self.matcher.id_of(row.label, row.number) if self.has_labels else None
            if not self.has_labels:
                self._count(row.text, None)
                yield AcceptedRow(row.number, row.text, None, None)
            elif label is not None:
                self._count(row.text, label)
                yield AcceptedRow(row.number, row.text, label, self.matcher.names[label])
            elif len(self.matcher.unknown) > UNKNOWN_LABELS:
                break
        if self.matcher.unknown:
            raise InputError(f"{source}: {self.matcher.explanation(label_column)}")
        if self._rows == 0:
            raise InputError(f"{source}: {self._emptiness()}")

    def statistics(self) -> DatasetStatistics:
        """Return the statistics of the rows accepted so far, of which there is at least one."""
        names = self.matcher.names
        distinct, labelled = _distinct(self._texts), _distinct(self._labelled_texts)
        counts = [self._counts[index] for index in range(len(names))] if self.has_labels else []
        return DatasetStatistics(
            rows=self._rows,
            rejected=dict(Counter(row.reason for row in self.rejected)),
            classes=len(names),
            counts=dict(zip(names, counts, strict=True)) if counts else dict.fromkeys(names),
            balance=normalised_entropy(counts) if self.has_labels else None,
            duplicate_rows=self._rows - distinct,
            contradicting_labels=labelled - distinct if self.has_labels else None,
            characters=lengths_of(self._characters, "characters"),
            tokens=self._tokens.result() if self._tokens else None,
        )

    def doubts(self, statistics: DatasetStatistics) -> list[str]:
        """Return what is doubtful about the matching of labels and about the statistics, each with advice."""
        return [*self.matcher.doubts(), *statistics.doubts()]

    def _count(self, text: str, label: int | None) -> None:
        self._rows += 1
        if label is not None:
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
            f"check dataset.text_column and dataset.label_column{f'; {NO_LABELS}' if self.has_labels else ''}"
        )


def fault_of(row: Row, has_labels: bool = True) -> str | None:
    """Return why the row cannot be measured, or None when it can, its label, if there are any, being known."""
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
    if not has_labels:
        return None
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
