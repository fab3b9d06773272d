"""Where the labelled texts come from: a dataset on the Hub, a CSV, Parquet or JSONL file, or the quickstart set.

Rows are read one by one, in bounded memory.
"""

import codecs
import contextlib
import csv
import difflib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from boundby import files
from utils import hub
from utils.config import Dataset
from utils.errors import EnvironmentLacksError, InputError
from utils.model_source import Progress

LONGEST_CELL = 2**27  # characters; more in one cell is a quote that was never closed
BATCH_ROWS = 1024
CHUNK_BYTES = 2**20


class Row(NamedTuple):
    """One row of a source: its 0-based number there, its text and its label as they are."""

    number: int
    text: Any
    label: Any


Reader = Callable[[Path, str, str], Iterator[Row]]


def read_rows(path: Path, text_column: str, label_column: str) -> Iterator[Row]:
    """Return the rows of the file, which are read as they are asked for.

    Raises InputError at once for a file that is not there or of unknown kind, and in the midst for a structural fault.
    """
    readers: dict[str, Reader] = {".csv": _csv_rows, ".parquet": _parquet_rows, ".jsonl": _json_rows}
    reader = readers.get(path.suffix.lower())
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; check dataset.file (relative to {Path.cwd()})")
    if reader is None:
        raise InputError(f"{path}: unknown kind of file '{path.suffix}'; dataset.file ends in {', '.join(readers)}")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: is empty (0 bytes)")
    return _explained(path, reader(path, text_column, label_column))


def _explained(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    try:
        yield from rows
    except UnicodeDecodeError:
        raise _wrong_encoding(path) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def find_columns(place: str, columns: Sequence[str], text_column: str, label_column: str) -> tuple[int, int]:
    """Return the positions of the two columns. Raises InputError with the columns there are."""
    for setting, name in (("text_column", text_column), ("label_column", label_column)):
        if name not in columns:
            close = difflib.get_close_matches(name, columns, n=1)
            hint = f", did you mean '{close[0]}'?" if close else "."
            raise InputError(
                f"{place}: there is no column '{name}' (dataset.{setting}){hint} There are: {', '.join(columns)}"
                f"{_separator_hint(columns)}"
            )
        if columns.count(name) > 1:
            raise InputError(
                f"{place}: column '{name}' (dataset.{setting}) stands {columns.count(name)} times; rename one"
            )
    return columns.index(text_column), columns.index(label_column)


def _separator_hint(columns: Sequence[str]) -> str:
    """Return what to do about a CSV whose header shows that something else than commas separates its cells."""
    sign = next((sign for sign in ";\t|" if len(columns) == 1 and sign in columns[0]), None)
    return f" (separated by {sign!r}: save the file with commas)" if sign else ""


def _csv_rows(path: Path, text_column: str, label_column: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL)  # the default of 131,072 characters refuses long texts
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = _csv_lines(csv.reader(file, strict=True), path)
        _, header = next(lines, (1, []))
        text, label = find_columns(str(path), header, text_column, label_column)
        for number, (line, cells) in enumerate(lines):
            if len(cells) != len(header):
                raise InputError(
                    f"{path}: the row that ends in line {line} has {len(cells)} cells, the header has {len(header)}; "
                    'a text with a comma, a quote or a line break stands in "…", with its quotes doubled'
                )
            yield Row(number, cells[text], cells[label])


def _csv_lines(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the last line of each record and its cells, without blank lines."""
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


def _parquet_rows(path: Path, text_column: str, label_column: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            find_columns(str(path), file.schema_arrow.names, text_column, label_column)
            number = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=[text_column, label_column]):
                texts, labels = batch.column(text_column).to_pylist(), batch.column(label_column).to_pylist()
                for text, label in zip(texts, labels, strict=True):
                    yield Row(number, text, label)
                    number += 1
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: is not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _json_rows(path: Path, text_column: str, label_column: str) -> Iterator[Row]:
    number = 0
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for line, content in enumerate(file, start=1):
            if not content.strip():
                continue
            record = _json_object(content, f"{path}: line {line}")
            if number == 0:
                find_columns(f"{path}: line {line}", list(record), text_column, label_column)
            yield Row(number, record.get(text_column), record.get(label_column))
            number += 1


def _json_object(content: str, place: str) -> dict[str, object]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f'{place} is not an object such as {{"text": "…", "label": "…"}}')
    return record


def _wrong_encoding(path: Path) -> InputError:
    """Return where the first byte stands that is not UTF-8, and how to convert the file."""
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return _conversion(path, 0, "UTF-16")
        file.seek(0)
        decoder = codecs.getincrementaldecoder("utf-8")()
        read = 0
        while True:
            chunk = file.read(CHUNK_BYTES)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return _conversion(path, read - waiting + error.start, "WINDOWS-1252")
            read += len(chunk)
            if not chunk:
                return InputError(f"{path}: changed while it was read; run the step again")


def _conversion(path: Path, offset: int, encoding: str) -> InputError:
    return InputError(
        f"{path}: is not UTF-8 (byte {offset}); save it as UTF-8, for example with "
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
    mtime_ns: int | None = None
    sha256: str | None = None

    def __str__(self) -> str:
        """Return what messages call it."""
        details = [part for part in (self.config_name, self.split) if part]
        return f"{self.name} ({', '.join(details)})" if details else self.name


@dataclass(frozen=True)
class OpenedSource:
    """A source with its rows, to be read once; `class_names` are those of a Hub dataset's integer labels."""

    source: DataSource
    label_column: str
    rows: Iterator[Row]
    class_names: Sequence[str] | None = None


def open_source(dataset: Dataset, quickstart_folder: Path, progress: Progress) -> OpenedSource:
    """Return the rows of the source that the configuration names. May use the network and make the quickstart set."""
    if dataset.quickstart:
        return _open_quickstart(quickstart_folder, progress)
    if dataset.file is not None:
        return open_file(Path(dataset.file).expanduser(), dataset.text_column, dataset.label_column)
    return _open_hub(dataset, progress)


def open_file(path: Path, text_column: str, label_column: str) -> OpenedSource:
    """Return the rows of a local file, identified by its content."""
    rows = read_rows(path, text_column, label_column)
    try:
        status, sha256 = path.stat(), files.sha256(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    source = DataSource("file", str(path), bytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=sha256)
    return OpenedSource(source, label_column, rows)


def _open_quickstart(folder: Path, progress: Progress) -> OpenedSource:
    from utils.quickstart import cache

    made = cache.prepare(folder, progress=progress)
    source = DataSource("quickstart", "quickstart", split="validation", sha256=made.content_hash)
    return OpenedSource(source, "label_name", read_rows(made.validation_csv, "text", "label_name"))


def _open_hub(dataset: Dataset, progress: Progress) -> OpenedSource:
    """Download the dataset where it is not cached, and choose its split; the rows stay memory-mapped on disk."""
    repository = hub.Repository("dataset", str(dataset.hf_name), dataset.revision)
    commit = None if hub.is_offline() else hub.dataset_commit(repository)
    told = hub.announced(f"reading {repository} from the Hub", progress)
    with told, _hub_explained(dataset), hub.explained(repository):
        builder = _builder(dataset, commit)
        builder.download_and_prepare()
        splits = builder.as_dataset()
    if commit is None:
        _check_cached_revision(repository, builder.hash)
    split = _choose_split(list(splits), dataset)
    table = splits[split]
    find_columns(f"{repository}, split '{split}'", table.column_names, dataset.text_column, dataset.label_column)
    feature = table.features[dataset.label_column]
    return OpenedSource(
        source=DataSource("hub", str(dataset.hf_name), table.info.config_name, split, builder.hash),
        label_column=dataset.label_column,
        rows=_table_rows(table.select_columns([dataset.text_column, dataset.label_column]), dataset),
        class_names=list(feature.names) if hasattr(feature, "names") else None,
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
        raise InputError(f"{name} holds no data files that can be read: {_first_line(error)}") from error
    except DatasetGenerationError as error:
        raise InputError(f"{name} cannot be read: {_first_line(error.__cause__ or error)}") from error
    except ValueError as error:
        if "config" not in str(error).lower():
            raise
        said = " ".join(str(error).split())  # names the configurations there are, in several lines
        raise InputError(f"{name}: dataset.config_name is {dataset.config_name!r}: {said}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _check_cached_revision(repository: hub.Repository, cached: str) -> None:
    """Refuse a cached copy of which it is not certain, offline, that it is the revision asked for."""
    if repository.revision not in (None, cached):
        raise EnvironmentLacksError(
            f"HF_HUB_OFFLINE is set, and the cached copy of {repository} is of commit {cached}, which may not be "
            f"'{repository.revision}'; unset HF_HUB_OFFLINE, or set dataset.revision to that commit"
        )


def _choose_split(splits: list[str], dataset: Dataset) -> str:
    wanted = [dataset.split] if dataset.split else SPLITS
    found = next((split for split in wanted if split in splits), None)
    if found is None:
        raise InputError(
            f"dataset '{dataset.hf_name}' has no split {' or '.join(map(repr, wanted))}; "
            f"set dataset.split to one of: {', '.join(splits)}"
        )
    return found


def _table_rows(table: Any, dataset: Dataset) -> Iterator[Row]:
    names_a_class = hasattr(table.features[dataset.label_column], "names")
    number = 0
    for batch in table.iter(BATCH_ROWS):
        for text, label in zip(batch[dataset.text_column], batch[dataset.label_column], strict=True):
            yield Row(number, text, None if names_a_class and label == -1 else label)  # -1 is the Hub's "no label"
            number += 1
