"""The normalised copy is exact, complete or absent, and refused where the configuration asks for other data."""

import csv
import functools
import json
import random
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
from utils.artifacts import Layout
from utils.config import Config, Model
from utils.errors import InputError
from utils.model_source import ModelSource, locate

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
    found = receipt.statistics
    assert not receipt.has_labels and found.counts == dict.fromkeys(LABELS)
    assert (found.balance, found.contradicting_labels, found.duplicate_rows) == (None, None, 1)
    assert "Labels: none, so accuracy is not measured" in receipt.lines()
    assert data.check_receipt(settings, layout) == receipt
    copy = data.inspect(lambda: data.open_normalised(layout, receipt), model, lambda text: None)
    assert copy.statistics() == found


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
    settings = config()
    write_source(settings, ("one", "praise"))
    normalise(settings, model)
    assert data.check_receipt(config(sample_sizes=[1]), Layout.of(settings)).rows == 1


def refusal(config: Config, model: ModelSource | None = None) -> str:
    with pytest.raises(InputError) as caught:
        data.check_receipt(config, Layout.of(config), model)
    assert caught.value.exit_code == 2 and "python scripts/01_download_data.py" in str(caught.value)
    return str(caught.value)


def test_missing_receipt_is_refused_with_the_command(config):
    assert "the data has not been fetched" in refusal(config())


def test_other_settings_are_refused_with_both_values(config, model):
    settings = config()
    write_source(settings, ("one", "praise"))
    normalise(settings, model)
    message = refusal(config(file=None, hf_name="org/set", text_column="body"))
    assert "dataset.hf_name is 'org/set', the data was made with None" in message
    assert "dataset.text_column is 'body', the data was made with 'text'" in message
    assert "dataset.label_column" not in message


def test_another_model_is_refused(config, model):
    settings = config()
    write_source(settings, ("one", "praise"))
    normalise(settings, model)
    renamed = settings.model_copy(update={"model": settings.model.model_copy(update={"name": "another"})})
    assert "model.name is 'another', the data was made with 'model'" in refusal(renamed)
    retrained = ModelSource("model", model.path, "folder", None, "e" * 64)
    assert "matched with another content of model 'model'" in refusal(settings, retrained)


def test_data_that_the_receipt_does_not_match_is_refused(config, model):
    settings = config()
    write_source(settings, ("one", "praise"))
    normalise(settings, model)
    dataset = Layout.of(settings).dataset
    dataset.write_text(dataset.read_text().replace("one", "two"))
    assert "holds data that the receipt does not match" in refusal(settings)
    dataset.unlink()
    assert "is missing, though its receipt is there" in refusal(settings)


def test_source_that_was_edited_since_is_refused_and_one_that_is_gone_is_not(config, model):
    settings = config()
    write_source(settings, ("one", "praise"))
    normalise(settings, model)
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
        "from utils.config import Config; from utils.model_source import ModelSource\n"
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
