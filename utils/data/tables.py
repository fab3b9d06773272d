"""Read the text and the label of each row of a CSV, Parquet or JSONL file, in bounded memory."""

import codecs
import csv
import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import InputError

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


def _json_object(content: str, place: str) -> dict[str, Any]:
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
