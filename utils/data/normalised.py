"""The one form that every step reads, `row_id, text, labels, label_name`: how it is written, proven and read.

The receipt beside it says what it was made from, and whether that is what the configuration asks for now.
"""

import collections
import csv
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from boundby import files
from utils.command import InputError, Layout, contents, removed
from utils.data.checks import AcceptedRow, DatasetStatistics, TokenCounter, Validator
from utils.data.columns import Name
from utils.data.sources import LONGEST_CELL, DataSource, OpenedSource, open_file, open_source
from utils.models import DOWNLOAD, ModelSource, Progress, label_matcher
from utils.settings import DEFAULT_TASK, Config

COLUMNS = ("row_id", "text", "labels", "label_name")


class Row(NamedTuple):
    """One row of the dataset, its position among the rows, and the byte where it begins."""

    position: int
    offset: int
    row_id: int
    text: str
    label: int | None


@dataclass(frozen=True, eq=False)
class Rows:
    """Texts with their labels, in the order of the source; `row_ids` are the row numbers there.

    `labels` is None where the dataset has none.
    """

    row_ids: np.ndarray
    texts: Sequence[str]
    labels: np.ndarray | None

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Rows":
        """Return the rows as columns."""
        row_ids, texts, labels = [], [], []
        for row in rows:
            row_ids.append(row.row_id)
            texts.append(row.text)
            labels.append(row.label)
        are_labelled = None not in labels
        return cls(np.array(row_ids, dtype=np.int64), texts, np.array(labels, dtype=np.int64) if are_labelled else None)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.texts)

    def take(self, positions: np.ndarray) -> "Rows":
        """Return the rows at `positions`, in that order."""
        labels = None if self.labels is None else self.labels[positions]
        return Rows(self.row_ids[positions], [self.texts[position] for position in positions], labels)

    @cached_property
    def texts_sha256(self) -> str:
        """A hash of the texts in their order."""
        digest = hashlib.sha256()
        for text in self.texts:
            content = text.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()


def scan(path: Path, offset: int = 0, position: int = 0, digest: Any = None) -> Iterator[Row]:
    """Yield the rows from the one at `position` on, which begins at byte `offset`; 0 is the start of the file.

    `digest` is updated with every byte that is read.
    """
    csv.field_size_limit(LONGEST_CELL)
    try:
        with files.naming(path), path.open("rb") as file:
            file.seek(offset)
            here = offset

            def lines() -> Iterator[str]:
                nonlocal here
                for line in file:
                    here += len(line)
                    if digest is not None:
                        digest.update(line)
                    yield line.decode("utf-8")

            reader = csv.reader(lines(), strict=True)
            if offset == 0 and next(reader, None) != list(COLUMNS):
                raise InputError(f"{path}: does not have the columns {', '.join(COLUMNS)}; {DOWNLOAD}")
            begin = here
            for row_id, text, label, _ in reader:
                yield Row(position, begin, int(row_id), text, int(label) if label else None)
                position, begin = position + 1, here
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); {DOWNLOAD}") from None


def load_texts(layout: Layout, sha256: str | None = None) -> Rows:
    """Return the normalised rows; texts are exactly those of the source.

    With `sha256` they are proven to be read from a file of just that content. Raises InputError where not.
    """
    digest = hashlib.sha256()
    rows = Rows.of(scan(layout.dataset, digest=digest))
    if sha256 not in (None, digest.hexdigest()):
        raise InputError(f"{layout.dataset}: changed while it was read; {DOWNLOAD}")
    return rows


def sample(rows: Rows, size: int, seed: int = 0) -> Rows:
    """Return `size` rows in a random order, all of them when there are not so many.

    Samples of one seed are nested: the smaller is the start of the larger.
    """
    return rows.take(np.random.default_rng(seed).permutation(len(rows))[:size])


SCHEMA_VERSION = 1
Setting = str | int | bool | None


@dataclass(frozen=True)
class FileContent:
    """Which bytes a file holds."""

    path: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileContent":
        """Return what the file at `path` holds now."""
        return cls(str(path), path.stat().st_size, contents.sha256(path))


@dataclass(frozen=True)
class DataReceipt:
    """The record beside the normalised dataset, written last.

    `request` are the settings that decide what is fetched; `model` is the one that the labels were matched with,
    `labels_sha256` a hash of its label names in order; `dataset` is the normalised file. `columns` are the columns of
    the source that texts and labels were read from; None for labels where there are none.
    """

    schema_version: int
    request: dict[str, Setting]
    source: DataSource
    model: ModelSource
    labels_sha256: str
    dataset: FileContent
    rows: int
    synthetic: bool
    statistics: DatasetStatistics
    doubts: list[str]
    columns: tuple[Name, Name | None] | None = None  # unknown to older receipts
    assumed: tuple[str, ...] = ()

    @property
    def has_labels(self) -> bool:
        """Whether the rows have labels."""
        return self.statistics.has_labels

    def lines(self) -> list[str]:
        """Return what was prepared from what, as lines of text."""
        source, model = self.source, self.model
        split = f", split {source.split}" if source.split else ""
        synthetic = ", synthetic" if self.synthetic else ""
        return [
            f"Model: {model.name} ({model.origin}{_at(model.revision)})",
            f"Dataset: {source.name} ({source.kind}{split}{_at(source.revision)}){synthetic}",
            *(f"Columns: {text}" for text in self.assumed),
            *self.statistics.lines(),
            f"Written: {self.dataset.path} ({self.dataset.bytes / 1e6:,.1f} MB)",
        ]


def request_of(config: Config) -> dict[str, Setting]:
    """Return the settings that decide what data and which model step 01 fetches."""
    dataset = config.dataset.model_dump(mode="json", exclude={"sample_sizes"})
    request = {
        "model.name": config.model.name,
        "model.revision": config.model.revision,
        **({} if config.model.task == DEFAULT_TASK else {"model.task": config.model.task}),  # older receipts lack it
        **{f"dataset.{key}": value for key, value in dataset.items()},
    }
    return removed(request)  # type: ignore[no-any-return]


def check_receipt(config: Config, layout: Layout, model: ModelSource | None = None) -> DataReceipt:
    """Return the receipt, once it is certain that the data on disk is what the configuration asks for.

    With `model`, also that the labels were matched with just that model. Raises InputError with the command to run.
    """
    receipt = _read(layout.data_receipt)
    _check_request(receipt, request_of(config), layout.data_receipt)
    _check_dataset(receipt, layout)
    matched = receipt.model.fingerprint
    if model is not None and model.fingerprint != matched:
        raise InputError(
            f"{layout.data_receipt}: the labels were matched with another content of model '{model.name}' "
            f"(fingerprint {matched[:12]}, now {model.fingerprint[:12]}); {DOWNLOAD}"
        )
    if receipt.source.kind == "file":
        _check_source_file(receipt.source, layout)
    return receipt


def _read(path: Path) -> DataReceipt:
    try:
        content = files.read_json(path)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(f"{path}: is of version {version}, this program reads {SCHEMA_VERSION}; {DOWNLOAD}")
        return msgspec.convert(content, DataReceipt, dec_hook=lambda kind, value: kind(value))  # of a path
    except FileNotFoundError:
        raise InputError(f"{path}: the data has not been fetched; {DOWNLOAD}") from None
    except (OSError, ValueError) as error:  # msgspec's error is a ValueError
        raise InputError(f"{path}: cannot be read ({error}); {DOWNLOAD}") from None


def _check_request(receipt: DataReceipt, wanted: Mapping[str, Setting], path: Path) -> None:
    keys = dict.fromkeys([*wanted, *receipt.request])
    differing = [
        f"{key} is {wanted.get(key)!r}, the data was made with {receipt.request.get(key)!r}"
        for key in keys
        if wanted.get(key) != receipt.request.get(key)
    ]
    if differing:
        raise InputError(f"{path}: the configuration asks for other data: {'; '.join(differing)}; {DOWNLOAD}")


def _check_dataset(receipt: DataReceipt, layout: Layout) -> None:
    path = layout.dataset
    if not path.is_file():
        raise InputError(f"{path}: is missing, though its receipt is there; {DOWNLOAD}")
    there, stated = FileContent.of(path), receipt.dataset
    if (there.bytes, there.sha256) != (stated.bytes, stated.sha256):
        raise InputError(
            f"{path}: holds data that the receipt does not match ({there.bytes} bytes, sha256 {there.sha256[:12]}; "
            f"the receipt says {stated.bytes} bytes, {stated.sha256[:12]}); {DOWNLOAD}"
        )


def _check_source_file(source: DataSource, layout: Layout) -> None:
    """Refuse a local source that was edited since; one that is gone is no fault, its copy is here."""
    path = Path(source.name)
    try:
        sha256 = contents.sha256(path)
    except OSError:
        return
    if sha256 != source.sha256:
        raise InputError(f"{path}: has changed since {layout.dataset} was made from it; {DOWNLOAD}")


def _at(revision: str | None) -> str:
    return f", commit {revision}" if revision else ""


NOTED_ROWS = 100_000  # rows between two notes of progress


def normalise(
    config: Config,
    layout: Layout,
    model: ModelSource,
    *,
    progress: Progress,
    count_tokens: TokenCounter | None = None,
) -> DataReceipt:
    """Write the dataset in its normalised form, label mappings and rejected rows beside it; return its receipt.

    The receipt is written last, so that a reader who finds one that matches finds everything.
    """

    def write(rows: Iterable[AcceptedRow]) -> None:
        files.write_table(layout.dataset, (row._asdict() for row in rows), COLUMNS)

    source = functools.partial(open_source, config.dataset, layout.dataset.parent, progress)
    opened, validator = _checked(source, model, progress, count_tokens, write)
    matcher = validator.matcher
    statistics = validator.statistics()
    mappings = {
        "id2label": {str(index): name for index, name in enumerate(matcher.names)},
        "label2id": {name: index for index, name in enumerate(matcher.names)},
        "counts": statistics.counts,
    }
    files.write_json(layout.label_mappings, mappings)
    files.write_csv(layout.rejected_rows, map(asdict, validator.rejected), ("row", "reason", "excerpt"))
    receipt = DataReceipt(
        schema_version=SCHEMA_VERSION,
        request=request_of(config),
        source=opened.source,
        model=model,
        labels_sha256=files.sha256_of(list(matcher.names)),
        dataset=FileContent.of(layout.dataset),
        rows=statistics.rows,
        synthetic=config.dataset.quickstart,
        statistics=statistics,
        doubts=validator.doubts(statistics),
        columns=opened.columns.names,
        assumed=opened.columns.remarks,
    )
    files.write_json(layout.data_receipt, asdict(receipt))
    return receipt


def inspect(
    source: Callable[[], OpenedSource],
    model: ModelSource,
    progress: Progress,
    count_tokens: TokenCounter | None = None,
) -> Validator:
    """Return what the checks find in the rows of a source, which are read but not written."""
    return _checked(source, model, progress, count_tokens, collections.deque[AcceptedRow](maxlen=0).extend)[1]


def _checked(
    source: Callable[[], OpenedSource],
    model: ModelSource,
    progress: Progress,
    count_tokens: TokenCounter | None,
    take: Callable[[Iterable[AcceptedRow]], object],
) -> tuple[OpenedSource, Validator]:
    """Give `take` the rows that pass the checks; return the source and what the checks found.

    Where all labels but one are ids of the model and that one is the number of its classes, they count from 1, and the
    rows are read again.
    """
    for first_id in (0, 1):
        opened = source()
        matcher = label_matcher(model, opened.class_names)
        if first_id:
            matcher.first_id = first_id
        validator = Validator(matcher, count_tokens, has_labels=opened.columns.label is not None)
        rows = validator.accept(opened.rows, str(opened.source), opened.columns.names[1])
        try:
            take(_noted(rows, progress))
            break
        except InputError:
            if not matcher.counts_from_one:
                raise
    return opened, validator


def open_normalised(layout: Layout, receipt: DataReceipt) -> OpenedSource:
    """Return the normalised dataset as a source, to be inspected like any other."""
    return open_file(layout.dataset, "text", "labels" if receipt.has_labels else None)


def _noted(rows: Iterable[AcceptedRow], progress: Progress) -> Iterator[AcceptedRow]:
    for count, row in enumerate(rows, start=1):
        if count % NOTED_ROWS == 0:
            progress(f"{count:,} rows read")
        yield row
