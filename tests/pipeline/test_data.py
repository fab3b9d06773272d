"""The normalised copy is exact, complete or absent, and refused where the configuration asks for other data."""

import csv
import errno
import functools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from boundby import files
from tests.tiny_models import LABELS
from utils import data
from utils.command.artifacts import Layout
from utils.command.errors import InputError
from utils.data.columns import Wanted, of_cells, of_header
from utils.data.sources import Row, read_rows
from utils.models.source import ModelSource, locate
from utils.settings.schema import Config, Model

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
BANKING, MINILM = SHARED / "data" / "banking77" / "test.csv", SHARED / "models" / "minilm-banking77"
TRUTH_ROWS = 370_000
PIECES = [
    '"', "'", ",", ";", "\n", "\r", "\r\n", "\t", " ", "=1+1", "@", "\u2028", "\x85", "\x0b", "\x1f",
    "\ufeff", "é", "日本", "😀", "a", "NA", "\\", "\\n", "0", "-", "\u200b",
]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    """Return a model of which nothing but its labels is read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"id2label": dict(enumerate(LABELS))}))
    return ModelSource("model", folder, "folder", None, "f" * 64)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    def make(**dataset: object) -> Config:
        settings = {
            "file": str(tmp_path / "source.csv"),
            "local_path": str(tmp_path / "data" / "val_df.csv"),
            **dataset,
        }
        return Config.model_validate({"model": {"name": "model"}, "dataset": settings})

    return make


def normalise(config: Config, model: ModelSource) -> data.DataReceipt:
    return data.normalise(config, Layout.of(config), model, progress=lambda text: None)


def write_source(config: Config, *rows: tuple) -> None:
    with Path(config.dataset.file).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(
            [(config.dataset.text_column, config.dataset.label_column), *rows]
        )


def prepared(config: Callable[..., Config], model: ModelSource) -> Config:
    """Return the settings of a dataset of one row, which is normalised."""
    settings = config()
    write_source(settings, ("one", "praise"))
    normalise(settings, model)
    return settings


def test_texts_survive_exactly(config, model):
    source = random.Random(0)
    texts = ["x" + "".join(source.choices(PIECES, k=source.randint(0, 12))) for _ in range(2000)]
    texts += [f"{piece}x" for piece in PIECES] + ["x" * 10**6]
    settings = config()
    write_source(settings, *((text, "praise") for text in texts))
    receipt = normalise(settings, model)
    rows = data.load_texts(Layout.of(settings))
    assert rows.texts == texts
    assert rows.row_ids.tolist() == list(range(len(texts))) and rows.row_ids.dtype == np.int64
    assert receipt.rows == len(rows) == len(texts)


def test_row_ids_are_row_numbers_of_the_source_and_rejected_rows_are_listed(config, model):
    settings = config()
    write_source(settings, ("one", "praise"), ("", "praise"), ("three", "2"), ("=4", ""), ("five", "Complaint"))
    receipt = normalise(settings, model)
    layout = Layout.of(settings)
    rows = data.load_texts(layout)
    assert (rows.row_ids.tolist(), rows.labels.tolist()) == ([0, 2, 4], [0, 2, 1])
    assert layout.dataset.read_text() == (
        "row_id,text,labels,label_name\n0,one,0,praise\n2,three,2,question\n4,five,1,complaint\n"
    )
    assert layout.rejected_rows.read_text() == "row,reason,excerpt\n1,text is empty,\n3,label is null,'=4\n"
    assert receipt.statistics.rejected == {"text is empty": 1, "label is null": 1}
    assert len(receipt.doubts) == 3  # matched loosely, names mixed with ids, rows left out


def test_label_mappings_hold_both_directions_and_the_counts(config, model):
    settings = config()
    write_source(settings, ("one", "praise"), ("two", "question"), ("three", "question"))
    normalise(settings, model)
    assert files.read_json(Layout.of(settings).label_mappings) == {
        "id2label": {"0": "praise", "1": "complaint", "2": "question"},
        "label2id": {"praise": 0, "complaint": 1, "question": 2},
        "counts": {"praise": 1, "complaint": 0, "question": 2},
    }


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_other_kinds_of_file_give_the_same_copy(config, model, tmp_path, suffix):
    texts, labels = ["a\nb", "NA", 'c "d"'], [0, 2, 1]
    path = tmp_path / f"source{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": texts, "labels": labels}), path)
    else:
        path.write_text(
            "".join(json.dumps({"text": t, "labels": i}) + "\n" for t, i in zip(texts, labels, strict=True))
        )
    settings = config(file=str(path))
    normalise(settings, model)
    rows = data.load_texts(Layout.of(settings))
    assert rows.texts == texts and rows.labels.tolist() == labels


def test_texts_without_labels_are_kept_and_what_is_about_labels_is_unknown(config, model, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("one\n\n two,\t2\none\n")
    settings = config(file=str(path))
    receipt = normalise(settings, model)
    layout = Layout.of(settings)
    rows = data.load_texts(layout)
    assert (rows.texts, rows.labels) == (["one", " two,\t2", "one"], None)
    statistics = receipt.statistics
    assert not receipt.has_labels and statistics.counts == dict.fromkeys(LABELS)
    assert (statistics.balance, statistics.contradicting_labels, statistics.duplicate_rows) == (None, None, 1)
    assert "Labels: none, so accuracy is not measured" in receipt.lines()
    assert data.check_receipt(settings, layout) == receipt
    copy = data.inspect(lambda: data.open_normalised(layout, receipt), model, lambda text: None)
    assert copy.statistics() == statistics


def test_labels_may_be_left_out(config, model):
    settings = config(label_column=None)
    with Path(settings.dataset.file).open("w") as file:
        file.write("text,labels\nfine,nobody knows this label\n")
    normalise(settings, model)
    assert data.load_texts(Layout.of(settings)).labels is None


def test_ids_from_one_are_read_as_those_from_zero(config, model):
    settings = config()
    write_source(settings, ("one", "1"), ("two", "3"), ("three", "2"))
    assert "go from 1 to 3" in normalise(settings, model).doubts[0]
    assert data.load_texts(Layout.of(settings)).labels.tolist() == [0, 2, 1]


def test_columns_have_the_names_that_the_configuration_gives(config, model):
    settings = config(text_column="review body", label_column="intent")
    write_source(settings, ("fine", "praise"))
    normalise(settings, model)
    assert data.load_texts(Layout.of(settings)).texts == ["fine"]


def test_refused_data_leaves_what_was_there(config, model):
    settings = config()
    layout = Layout.of(settings)
    write_source(settings, ("one", "praise"))
    normalise(settings, model)
    before = {path.name: path.read_bytes() for path in layout.dataset.parent.iterdir()}
    write_source(settings, ("one", "praise"), ("two", "unheard of"))
    with pytest.raises(InputError, match=r"source\.csv: the model does not know 1 label\(s\) of column 'labels'"):
        normalise(settings, model)
    assert {path.name: path.read_bytes() for path in layout.dataset.parent.iterdir()} == before


def test_receipt_is_accepted_by_the_configuration_it_was_made_with(config, model):
    settings = config()
    write_source(settings, ("one", "praise"), ("two", "question"))
    written = normalise(settings, model)
    assert data.check_receipt(settings, Layout.of(settings), model) == written
    assert written.source.kind == "file" and written.source.sha256 == files.sha256(settings.dataset.file)
    assert written.dataset.sha256 == files.sha256(Layout.of(settings).dataset)
    assert written.synthetic is False


def test_evaluating_another_number_of_rows_needs_no_other_data(config, model):
    settings = prepared(config, model)
    assert data.check_receipt(config(sample_sizes=[1]), Layout.of(settings)).rows == 1


def refusal(config: Config, model: ModelSource | None = None) -> str:
    with pytest.raises(InputError) as caught:
        data.check_receipt(config, Layout.of(config), model)
    assert caught.value.exit_code == 2 and "python scripts/01_download_data.py" in str(caught.value)
    return str(caught.value)


def test_missing_receipt_is_refused_with_the_command(config):
    assert "the data has not been fetched" in refusal(config())


def test_other_settings_are_refused_with_both_values(config, model):
    prepared(config, model)
    message = refusal(config(file=None, hf_name="org/set", text_column="body"))
    assert "dataset.hf_name is 'org/set', the data was made with None" in message
    assert "dataset.text_column is 'body', the data was made with 'text'" in message
    assert "dataset.label_column" not in message


def test_another_model_is_refused(config, model):
    settings = prepared(config, model)
    renamed = settings.model_copy(update={"model": settings.model.model_copy(update={"name": "another"})})
    assert "model.name is 'another', the data was made with 'model'" in refusal(renamed)
    retrained = ModelSource("model", model.path, "folder", None, "e" * 64)
    assert "matched with another content of model 'model'" in refusal(settings, retrained)


def test_data_that_the_receipt_does_not_match_is_refused(config, model):
    settings = prepared(config, model)
    dataset = Layout.of(settings).dataset
    dataset.write_text(dataset.read_text().replace("one", "two"))
    assert "holds data that the receipt does not match" in refusal(settings)
    dataset.unlink()
    assert "is missing, though its receipt is there" in refusal(settings)


def test_source_that_was_edited_since_is_refused_and_one_that_is_gone_is_not(config, model):
    settings = prepared(config, model)
    source = Path(settings.dataset.file)
    source.touch()
    assert data.check_receipt(settings, Layout.of(settings)).rows == 1
    write_source(settings, ("other", "praise"))
    assert "has changed since" in refusal(settings)
    source.unlink()
    assert data.check_receipt(settings, Layout.of(settings)).rows == 1


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "cannot be read"),
        ("[]", "is of version None"),
        ('{"schema_version": 99}', "is of version 99"),
        ('{"schema_version": 1, "rows": "many"}', "cannot be read"),
    ],
)
def test_damaged_receipt_is_refused(config, content, fault):
    path = Layout.of(config()).data_receipt
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert fault in refusal(config())


def test_copy_with_other_columns_is_refused(config):
    path = Layout.of(config()).dataset
    path.parent.mkdir(parents=True)
    path.write_text("text,labels\na,0\n")
    with pytest.raises(InputError, match="does not have the columns row_id, text, labels, label_name"):
        data.load_texts(Layout.of(config()))


def test_samples_of_one_seed_are_nested_and_repeatable():
    rows = data.Rows(np.arange(100), [f"text {index}" for index in range(100)], np.arange(100) % 7)
    small, large = data.sample(rows, 10, seed=3), data.sample(rows, 50, seed=3)
    assert small.texts == large.texts[:10] == data.sample(rows, 10, seed=3).texts
    assert small.texts != data.sample(rows, 10, seed=4).texts
    assert len(set(large.row_ids.tolist())) == 50
    assert [f"text {index}" for index in large.row_ids] == large.texts
    assert (large.labels == large.row_ids % 7).all()
    assert sorted(data.sample(rows, 1000, seed=3).row_ids) == list(range(100))


def test_dataset_tool_finds_the_same_in_source_and_copy(config, model):
    settings = config()
    write_source(settings, ("one", "praise"), ("one", "praise"), ("", "praise"), ("three", "question"))
    written = normalise(settings, model)
    source = functools.partial(data.open_source, settings.dataset, Path("unused"), lambda text: None)
    again = data.inspect(source, model, lambda text: None)
    copy = data.inspect(lambda: data.open_normalised(Layout.of(settings), written), model, lambda text: None)
    assert again.statistics() == written.statistics
    assert copy.statistics().counts == written.statistics.counts
    assert again.doubts(again.statistics()) == written.doubts


def test_synthetic_data_is_recorded_as_such(config, model, monkeypatch, tmp_path):
    from types import SimpleNamespace

    from utils.quickstart import cache

    made = tmp_path / "made.csv"
    made.write_text("text,label_name\nfine,praise\n")
    prepared = SimpleNamespace(validation_csv=made, content_hash="c" * 64)
    monkeypatch.setattr(cache, "prepare", lambda folder, progress: prepared, raising=False)
    settings = config(file=None, quickstart=True)
    receipt = normalise(settings, model)
    assert receipt.synthetic and receipt.source.kind == "quickstart" and receipt.source.sha256 == "c" * 64
    assert any("synthetic" in line for line in receipt.lines())


@pytest.mark.skipif(
    not BANKING.exists() or not MINILM.exists(), reason="the shared Banking77 data or model is not here"
)
def test_real_dataset_is_kept_whole_and_all_its_labels_are_mapped(tmp_path):
    model = locate(Model(name=str(MINILM)), Path("unused"))
    dataset = {"file": str(BANKING), "label_column": "category", "local_path": str(tmp_path / "val_df.csv")}
    settings = Config.model_validate({"model": {"name": str(MINILM)}, "dataset": dataset})
    receipt = normalise(settings, model)
    assert receipt.rows == 3080 and receipt.statistics.rejected == {} and receipt.doubts == []
    assert set(receipt.statistics.counts.values()) == {40} and len(receipt.statistics.counts) == 77
    with BANKING.open(encoding="utf-8", newline="") as file:
        assert data.load_texts(Layout.of(settings)).texts == [row["text"] for row in csv.DictReader(file)]


@pytest.mark.truth
def test_memory_stays_bounded_at_370_000_rows(config, model, tmp_path):
    """Normalising 370,000 rows (about 90 MB) takes less than 100 MB over an interpreter with the imports."""
    settings = config()
    source = random.Random(0)
    words = ["good", "bad", "late, broken", '"fine"', "where\nis it", "naïve", "日本"]
    texts = (
        f"{row} {' '.join(source.choices(words, k=max(3, int(source.lognormvariate(3.2, 0.8)))))}"
        for row in range(TRUTH_ROWS)
    )
    write_source(settings, *((text, source.choice(LABELS)) for text in texts))
    code = (
        "import sys, resource; from tests.pipeline.test_data import *\n"
        "from utils.settings.schema import Config; from utils.models.source import ModelSource\n"
        "settings, folder = Config.model_validate_json(sys.argv[1]), Path(sys.argv[2])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "receipt = normalise(settings, ModelSource('model', folder, 'folder', None, 'f' * 64))\n"
        "print(receipt.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, settings.model_dump_json(), str(model.path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows, grown_kib = map(int, done.stdout.split())
    assert rows == TRUTH_ROWS
    assert grown_kib < 100 * 1024, f"{grown_kib / 1024:.0f} MiB above the start"


QUESTION = "How do I locate my new card?"


@pytest.mark.parametrize(
    ("header", "wanted", "names"),
    [
        (["id", "text", "labels"], Wanted(), ("text", "labels")),
        (["text", "label"], Wanted(), ("text", "label")),
        (["Sentence", "Label"], Wanted(), ("Sentence", "Label")),
        (["", "review", "stars"], Wanted(), ("review", None)),
        (["title", "content", "intent"], Wanted(), ("content", "intent")),
        (["remark"], Wanted(), ("remark", None)),
        (["text"], Wanted(), ("text", None)),
        (["a", "b"], Wanted("b", "a"), ("b", "a")),
        (["text", "labels"], Wanted("text", None), ("text", None)),
    ],
)
def test_usual_names_are_found(header, wanted, names):
    columns = of_cells("x.csv", [header, ["1"] * len(header)], wanted)
    assert (columns.names, columns.has_header) == (names, True)
    assert columns.text == header.index(names[0])
    other_names = [name for name in names if name and name not in (wanted.text, wanted.label)]
    assert all(any(repr(name) in remark for remark in columns.remarks) for name in other_names)


@pytest.mark.parametrize(
    ("rows", "wanted", "names"),
    [
        ([[QUESTION, "card_arrival"], ["Where is it?", "lost"]], Wanted(), (1, 2)),
        ([["card_arrival", QUESTION], ["lost", "Where is it?"]], Wanted(), (2, 1)),
        ([["Great film", "3"], ["Poor", "1"]], Wanted(), (1, 2)),
        ([[QUESTION], ["Where is it?"]], Wanted(), (1, None)),
        ([["How old must I be?", "question"]], Wanted(), (1, 2)),
        ([["7", QUESTION, "lost"]], Wanted(2, 3), (2, 3)),
        ([["7", QUESTION, "lost"]], Wanted(2), (2, None)),
    ],
)
def test_file_without_a_header_is_read_from_its_first_row(rows, wanted, names):
    columns = of_cells("x.csv", rows, wanted)
    assert (columns.names, columns.has_header) == (names, False)
    assert bool(columns.remarks) != wanted.by_number, "what the settings say is no assumption"


@pytest.mark.parametrize(
    ("rows", "wanted", "message"),
    [
        ([["7", QUESTION, "lost"]], Wanted(), r"no header \(its first row is '7', .*dataset.text_column=2"),
        ([["uid", "remark", "stars"], ["7", QUESTION, "5"]], Wanted(), "There are: uid, .*dataset.text_column=remark"),
        ([["fine film", "good"]], Wanted(), "if that is a row of data.*text_column=1 dataset.label_column=2"),
        ([["text", "labels"]], Wanted("txet"), "no column 'txet'.*did you mean 'text'"),
        ([["text", "stars"]], Wanted("text", "star"), "did you mean 'stars'.*dataset.label_column=null"),
        ([["a", "b"]], Wanted(3, 1), "dataset.text_column is 3, but there are 2"),
        ([["a", "b"]], Wanted(1, "b"), "Give both as numbers, or both as names"),
        ([["text;label"]], Wanted(), "separated by ';'"),
        ([], Wanted(), "no column 'text'"),
    ],
)
def test_what_cannot_be_told_ends_with_what_to_type(rows, wanted, message):
    with pytest.raises(InputError) as caught:
        of_cells("x.csv", rows, wanted)
    assert re.search(message, str(caught.value)), caught.value


def test_columns_with_names_are_not_numbered():
    with pytest.raises(InputError, match="There are: text, labels"):
        of_header("x.parquet", ["text", "labels"], Wanted(1, 2))


def read(path: Path, text_column: str = "text", label_column: str = "label") -> list[Row]:
    return list(read_rows(path, Wanted(text_column, label_column))[1])


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


def test_wrong_encoding_is_refused_with_the_cure(tmp_path):
    path = saved(tmp_path / "a.csv", b"text,label\n" + "café,y\n".encode("latin-1"))
    assert f"iconv -f WINDOWS-1252 -t UTF-8 {path}" in refused(path)


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
    "cut character": ("a.csv", b"text,label\n\xc3", "is not UTF-8"),
    "UTF-16": ("a.csv", "text,label\na,x\n".encode("utf-16"), "iconv -f UTF-16"),
    "damaged Parquet": ("a.parquet", b"PAR1 and then nothing", "is not a readable Parquet file"),
    "no JSON": ("a.jsonl", '{"text": "a", "label": "x"}\n{not json}\n', "line 2 is not JSON"),
    "no object": ("a.jsonl", '{"text": "a", "label": "x"}\n[1]\n', "line 2 is not an object"),
    "deep JSON": ("a.jsonl", '{"text": "a", "label": "x"}\n' + "[" * 10**5 + "\n", "line 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_structural_fault_is_one_message_that_names_its_place(tmp_path, fault):
    name, content, message = FAULTS[fault]
    assert message in refused(saved(tmp_path / name, content))
