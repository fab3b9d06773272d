"""Local files become rows exactly, and each structural fault is one message that names its place."""

import errno
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from utils.data.sources import CHUNK_BYTES, Row, read_rows
from utils.errors import InputError


def read(path: Path, text_column: str = "text", label_column: str = "label") -> list[Row]:
    return list(read_rows(path, text_column, label_column))


def saved(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(path: Path, **columns: str) -> str:
    with pytest.raises(InputError) as caught:
        read(path, **columns)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def test_csv_texts_come_as_they_are(tmp_path):
    path = saved(tmp_path / "a.csv", '\ufefflabel,text\r\nx,"He said ""no"",\r\nthen left"\r\ny, padded \r\n')
    assert read(path) == [Row(0, 'He said "no",\r\nthen left', "x"), Row(1, " padded ", "y")]
    words = ["NA", "null", "NaN", "None", "nan", "-"]
    path = saved(tmp_path / "a.csv", "text,label\n" + "".join(f"{word},x\n" for word in words))
    assert [row.text for row in read(path)] == words
    assert read(saved(tmp_path / "a.csv", "text,label\n\na,x\n\n\nb,y\n")) == [Row(0, "a", "x"), Row(1, "b", "y")]
    text = "long " * 200_000
    assert read(saved(tmp_path / "a.csv", f'text,label\n"{text}",x\n'))[0].text == text
    assert read(saved(tmp_path / "a.csv", "text,label\n")) == []


def test_what_is_no_file_or_cannot_be_read_is_refused(tmp_path, monkeypatch):
    assert "there is no such file" in refused(tmp_path / "absent.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "there is no such file" in refused(tmp_path / "folder.csv")
    path = saved(tmp_path / "a.csv", "text,label\na,x\n")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    assert "cannot be read: Input/output error" in refused(path)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_missing_column_is_refused_with_the_columns_there_are(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.table({"body": ["a"], "labels": ["x"]}), path)
    else:
        saved(path, "body,labels\na,x\n" if suffix == ".csv" else '{"body": "a", "labels": "x"}\n')
    message = refused(path, text_column="body")
    assert "no column 'label' (dataset.label_column), did you mean 'labels'? There are: body, labels" in message


def test_wrong_encoding_is_refused_with_the_byte_and_the_cure(tmp_path):
    start = "text,label\n" + "é,x\n" * (CHUNK_BYTES // 2)  # the fault stands beyond several chunks, which cut an é
    path = saved(tmp_path / "a.csv", start.encode() + "café,y\n".encode("latin-1"))
    message = refused(path)
    assert f"byte {len(start.encode()) + 3}" in message
    assert f"iconv -f WINDOWS-1252 -t UTF-8 {path}" in message


def test_parquet_values_keep_their_types(tmp_path):
    parquet.write_table(
        pyarrow.table({"label": [1, None, 2], "text": ["a", None, "c"], "other": [1, 2, 3]}), tmp_path / "a.parquet"
    )
    assert read(tmp_path / "a.parquet") == [Row(0, "a", 1), Row(1, None, None), Row(2, "c", 2)]


def test_jsonl_rows_are_read_and_a_missing_key_is_null(tmp_path):
    lines = [{"text": "a\nb", "label": 0}, {"label": 1}, {"text": 3, "label": True}]
    path = saved(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, lines)))
    assert read(path) == [Row(0, "a\nb", 0), Row(1, None, 1), Row(2, 3, True)]


FAULTS = {
    "kind": ("a.xlsx", "text,label\na,x\n", ".csv, .tsv, .txt, .parquet, .jsonl"),
    "no kind": ("a", "text,label\na,x\n", ".csv, .tsv, .txt, .parquet, .jsonl"),
    "packed": ("a.csv.gz", "text,label\na,x\n", ".csv, .tsv, .txt, .parquet, .jsonl"),
    "empty CSV": ("a.csv", "", "is empty (0 bytes)"),
    "empty Parquet": ("a.parquet", "", "is empty (0 bytes)"),
    "empty JSONL": ("a.jsonl", "", "is empty (0 bytes)"),
    "semicolons": ("a.csv", "text;label\na;x\n", "separated by ';'"),
    "two columns of a name": (
        "a.csv",
        "text,label,text\na,x,b\n",
        "column 'text' (dataset.text_column) stands 2 times",
    ),
    "ragged line": (
        "a.csv",
        'text,label\n"two\nlines",x\nno, quotes,y\n',
        "the row that ends in line 4 has 3 cells, the header has 2",
    ),
    "open quote": ("a.csv", 'text,label\n"open,x\nb,y\n', "line 3 is not CSV"),
    "cut character": ("a.csv", b"text,label\n\xc3", "byte 11"),
    "UTF-16": ("a.csv", "text,label\na,x\n".encode("utf-16"), "iconv -f UTF-16"),
    "damaged Parquet": ("a.parquet", b"PAR1 and then nothing", "is not a readable Parquet file"),
    "no JSON": ("a.jsonl", '{"text": "a", "label": "x"}\n{not json}\n', "line 2 is not JSON"),
    "no object": ("a.jsonl", '{"text": "a", "label": "x"}\n[1]\n', "line 2 is not an object"),
    "deep JSON": ("a.jsonl", '{"text": "a", "label": "x"}\n' + "[" * 10**5 + "\n", "line 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_structural_fault_is_one_message_that_names_its_place(tmp_path, fault):
    name, content, told = FAULTS[fault]
    assert told in refused(saved(tmp_path / name, content))
