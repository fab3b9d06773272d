"""Texts, read row by row: of a dataset on the Hub, a CSV, TSV, text, Parquet or JSONL file, or the quickstart set."""

import codecs
import contextlib
import csv
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from boundby import files
from boundby.formatting import first_line
from utils.command import EnvironmentLacksError, InputError
from utils.data.columns import Columns, Name, Wanted, of_cells, of_header
from utils.models import Progress, hub
from utils.settings import Dataset

LONGEST_CELL = 2**27  # characters; more in one cell is a quote that was never closed, more in a line is no text
BATCH_ROWS = 1024
FIRST_ROWS = 20  # of a CSV, which tell whether it has a header


class Row(NamedTuple):
    """One row of a source: its 0-based number there, its text and its label as they are."""

    number: int
    text: Any
    label: Any


Reader = Callable[[Path, Wanted], tuple[Columns, Iterator[Row]]]


def read_rows(path: Path, wanted: Wanted) -> tuple[Columns, Iterator[Row]]:
    """Return which columns are taken, and the rows, read as they are asked for; labels are None where there are none.

    Raises InputError at once for a file that is not there, of unknown kind or without these columns, and in the midst
    for a structural fault.
    """
    readers: dict[str, Reader] = {
        ".csv": _csv_rows, ".tsv": _csv_rows, ".txt": _text_rows, ".parquet": _parquet_rows, ".jsonl": _json_rows
    }  # fmt: skip
    reader = readers.get(path.suffix.lower())
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; check dataset.file (relative to {Path.cwd()})")
    if reader is None:
        raise InputError(f"{path}: unknown kind of file '{path.suffix}'; dataset.file ends in {', '.join(readers)}")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: is empty (0 bytes)")
    with _explained(path):
        columns, rows = reader(path, wanted)
    return columns, _explained_rows(path, rows)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise _wrong_encoding(path) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _explained_rows(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    with _explained(path):
        yield from rows


def _csv_rows(path: Path, wanted: Wanted) -> tuple[Columns, Iterator[Row]]:
    with contextlib.closing(_csv_lines(path)) as lines:
        columns = of_cells(str(path), [cells for _, cells in islice(lines, FIRST_ROWS)], wanted)
    return columns, _csv_records(path, columns)


def _csv_records(path: Path, columns: Columns) -> Iterator[Row]:
    lines = _csv_lines(path)
    width, first = 0, "the header" if columns.has_header else "the first row"
    for number, (line, cells) in enumerate(lines, start=-1 if columns.has_header else 0):
        width = width or len(cells)
        if len(cells) != width:
            raise InputError(
                f"{path}: the row that ends in line {line} has {len(cells)} cells, {first} has {width}; "
                'a text with a comma, a quote or a line break stands in "…", with its quotes doubled'
                + ("; a file of plain texts, one per line, ends in .txt" if width == 1 else "")
            )
        if number >= 0:
            yield Row(number, cells[columns.text], None if columns.label is None else cells[columns.label])


def _csv_lines(path: Path) -> Generator[tuple[int, list[str]], None, None]:
    """Yield the number of the last line of each record and its cells, without blank lines."""
    csv.field_size_limit(LONGEST_CELL)  # the default of 131,072 characters refuses long texts
    with files.naming(path), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_lines(file, path), strict=True, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise InputError(
                    f"{path}: line {reader.line_num} is not CSV: {error}; a quote may not be closed or not be doubled"
                ) from None
            if cells:
                yield reader.line_num, cells


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raises InputError for one that may not fit into memory, before it is read whole."""
    number = 0
    while line := file.readline(LONGEST_CELL):
        number += 1
        if len(line) == LONGEST_CELL:
            raise InputError(f"{path}: line {number} has {LONGEST_CELL:,} characters or more; a text is on a line each")
        yield line


def _text_rows(path: Path, wanted: Wanted) -> tuple[Columns, Iterator[Row]]:
    def lines() -> Iterator[Row]:
        with files.naming(path), path.open(encoding="utf-8-sig", newline="\n") as file:
            texts = (line.rstrip("\r\n") for line in _lines(file, path))
            for number, text in enumerate(text for text in texts if text.strip()):
                yield Row(number, text, None)

    return Columns(0, None, ("line", None), False), lines()


def _parquet_rows(path: Path, wanted: Wanted) -> tuple[Columns, Iterator[Row]]:
    import pyarrow
    from pyarrow import parquet

    def records() -> Iterator[Row]:
        try:
            with parquet.ParquetFile(path) as file:
                number = 0
                for batch in file.iter_batches(BATCH_ROWS, columns=[name for name in columns.names if name]):
                    for text, label in _pairs(columns, lambda name: batch.column(name).to_pylist()):  # noqa: B023
                        yield Row(number, text, label)
                        number += 1
        except pyarrow.ArrowException as error:
            raise _unreadable(path, error) from None

    try:
        with parquet.ParquetFile(path) as file:
            columns = of_header(str(path), file.schema_arrow.names, wanted)
    except pyarrow.ArrowException as error:
        raise _unreadable(path, error) from None
    return columns, records()


def _pairs(columns: Columns, column: Callable[[Any], Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield text and label, None where there are no labels, of the rows of a batch."""
    text, label = columns.names
    yield from zip(column(text), repeat(None) if label is None else column(label), strict=label is not None)


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: is not a readable Parquet file: {first_line(error)}")


def _json_rows(path: Path, wanted: Wanted) -> tuple[Columns, Iterator[Row]]:
    def records() -> Generator[tuple[int, dict[str, object]], None, None]:
        with files.naming(path), path.open(encoding="utf-8-sig", newline="\n") as file:
            for line, content in enumerate(_lines(file, path), start=1):
                if content.strip():
                    yield line, _json_object(content, f"{path}: line {line}")

    with contextlib.closing(records()) as head:
        line, first = next(head, (1, {}))
    columns = of_header(f"{path}: line {line}", list(first), wanted, list(first.values()))
    text, label = map(str, columns.names)
    rows = (
        Row(number, record.get(text), None if columns.label is None else record.get(label))
        for number, (_, record) in enumerate(records())
    )
    return columns, rows


def _json_object(content: str, line: str) -> dict[str, object]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{line} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f'{line} is not an object such as {{"text": "…", "label": "…"}}')
    return record


def _wrong_encoding(path: Path) -> InputError:
    with files.naming(path), path.open("rb") as file:
        is_wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "UTF-16" if is_wide else "WINDOWS-1252"
    return InputError(
        f"{path}: is not UTF-8; save it as UTF-8, for example with "
        f"`iconv -f {encoding} -t UTF-8 {path} > utf8{path.suffix}`"
    )


SPLITS = ("test", "validation", "train")  # without dataset.split, the first that exists
CSV_OPTIONS = {"keep_default_na": False}  # else the text "NA" of a CSV on the Hub would become null


@dataclass(frozen=True)
class DataSource:
    """What identifies a source; what a kind of source does not have is None."""

    kind: Literal["hub", "file", "quickstart"]
    name: str
    config_name: str | None = None
    split: str | None = None
    revision: str | None = None
    bytes: int | None = None
    sha256: str | None = None

    def __str__(self) -> str:
        """Return what messages call it."""
        details = [part for part in (self.config_name, self.split) if part]
        return f"{self.name} ({', '.join(details)})" if details else self.name


@dataclass(frozen=True)
class OpenedSource:
    """A source with its rows, to be read once; `class_names` are those of a Hub dataset's integer labels."""

    source: DataSource
    columns: Columns
    rows: Iterator[Row]
    class_names: Sequence[str] | None = None


def open_source(dataset: Dataset, quickstart_folder: Path, progress: Progress) -> OpenedSource:
    """Return the rows of the source that the configuration names. May use the network and make the quickstart set."""
    if dataset.quickstart:
        return _open_quickstart(quickstart_folder, progress, has_labels=dataset.label_column is not None)
    if dataset.file is not None:
        return open_file(Path(dataset.file).expanduser(), dataset.text_column, dataset.label_column)
    return _open_hub(dataset, progress)


def open_file(path: Path, text_column: Name, label_column: Name | None) -> OpenedSource:
    """Return the rows of a local file, identified by its content."""
    columns, rows = read_rows(path, Wanted(text_column, label_column))
    try:
        size, sha256 = path.stat().st_size, files.sha256(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    source = DataSource("file", str(path), bytes=size, sha256=sha256)
    return OpenedSource(source, columns, rows)


def _open_quickstart(folder: Path, progress: Progress, *, has_labels: bool) -> OpenedSource:
    from utils.quickstart import cache

    made = cache.prepare(folder, progress=progress)
    source = DataSource("quickstart", "quickstart", split="validation", sha256=made.content_hash)
    columns, rows = read_rows(made.validation_csv, Wanted("text", "label_name" if has_labels else None))
    return OpenedSource(source, columns, rows)


def _open_hub(dataset: Dataset, progress: Progress) -> OpenedSource:
    """Download the dataset where it is not cached, and choose its split; the rows stay memory-mapped on disk."""
    repository = hub.Repository("dataset", str(dataset.hf_name), dataset.revision)
    commit = None if hub.is_offline() else hub.dataset_commit(repository)
    announced = hub.announced(f"reading {repository} from the Hub", progress)
    with announced, _hub_explained(dataset), hub.explained(repository):
        builder = _builder(dataset, commit)
        builder.download_and_prepare()
        splits = builder.as_dataset()
    if commit is None:
        _check_cached_revision(repository, builder.hash)
    split = _choose_split(list(splits), dataset)
    table = splits[split]
    wanted = Wanted(dataset.text_column, dataset.label_column)
    columns = of_header(f"{repository}, split '{split}'", table.column_names, wanted)
    text, label = columns.names
    class_names = getattr(table.features[label], "names", None) if label else None
    return OpenedSource(
        source=DataSource("hub", str(dataset.hf_name), table.info.config_name, split, builder.hash),
        columns=columns,
        rows=_table_rows(table.select_columns([text, label] if label else [text]), columns, class_names is not None),
        class_names=class_names and list(class_names),
    )


def _builder(dataset: Dataset, commit: str | None) -> Any:
    """Return what builds the dataset at `commit`; without one, from the newest copy in the cache."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # a log file has `hub.announced`
    datasets.utils.logging.set_verbosity_error()  # what matters is raised
    choice = (f"hf://datasets/{dataset.hf_name}", dataset.config_name)  # never a folder of that name
    if commit is not None:
        builder = datasets.load_dataset_builder(*choice, revision=commit)
        if hasattr(builder.config, "keep_default_na"):
            builder = datasets.load_dataset_builder(*choice, revision=commit, **CSV_OPTIONS)
        return builder
    try:
        return datasets.load_dataset_builder(*choice)
    except ValueError:  # cached with the options of a CSV
        return datasets.load_dataset_builder(*choice, **CSV_OPTIONS)


@contextlib.contextmanager
def _hub_explained(dataset: Dataset) -> Iterator[None]:
    """Turn what `datasets` says about the content of a repository into one message."""
    from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
    from datasets.load import EmptyDatasetError

    name = f"dataset '{dataset.hf_name}'"
    try:
        yield
    except (DataFilesNotFoundError, EmptyDatasetError) as error:
        raise InputError(f"{name} holds no data files that can be read: {first_line(error)}") from error
    except DatasetGenerationError as error:
        raise InputError(f"{name} cannot be read: {first_line(error.__cause__ or error)}") from error
    except ValueError as error:
        if "config" not in str(error).lower():
            raise
        said = " ".join(str(error).split())  # names the configurations there are, in several lines
        raise InputError(f"{name}: dataset.config_name is {dataset.config_name!r}: {said}") from error


def _check_cached_revision(repository: hub.Repository, cached: str) -> None:
    """Refuse a cached copy of which it is not certain, offline, that it is the revision asked for."""
    if repository.revision not in (None, cached):
        raise EnvironmentLacksError(
            f"HF_HUB_OFFLINE is set, and the cached copy of {repository} is of commit {cached}, which may not be "
            f"'{repository.revision}'; unset HF_HUB_OFFLINE, or set dataset.revision to that commit"
        )


def _choose_split(splits: list[str], dataset: Dataset) -> str:
    wanted = [dataset.split] if dataset.split else SPLITS
    split = next((split for split in wanted if split in splits), None)
    if split is None:
        raise InputError(
            f"dataset '{dataset.hf_name}' has no split {' or '.join(map(repr, wanted))}; "
            f"set dataset.split to one of: {', '.join(splits)}"
        )
    return split


def _table_rows(table: Any, columns: Columns, names_a_class: bool) -> Iterator[Row]:
    number = 0
    for batch in table.iter(BATCH_ROWS):
        for text, label in _pairs(columns, batch.__getitem__):
            yield Row(number, text, None if names_a_class and label == -1 else label)  # -1 is the Hub's "no label"
            number += 1
