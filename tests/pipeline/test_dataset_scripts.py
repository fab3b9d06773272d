"""Step 01 and the dataset tool as a person types them: what they show, leave and return."""

import importlib
import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import save_bert

Command = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "source.csv"
    path.write_text("text,labels\ngood,praise\nbad,complaint\nwhere is my parcel,question\n")
    return path


@pytest.fixture
def run(model, source) -> Command:
    def start(script: str, *arguments: str) -> int:
        settings = [f"model.name={model}", "dataset.hf_name=null", f"dataset.file={source}", *arguments]
        return importlib.import_module(f"scripts.{script}").main(settings)

    return start


def test_step_01_shows_what_it_has_prepared(run, tmp_path, capsys):
    assert run("01_download_data") == 0
    shown, notes = capsys.readouterr()
    assert (
        "Rows: 3 kept, 0 rejected" in shown
        and "Length in tokens: 1 to 4" in shown
        and "Written: data/val_df.csv" in shown
    )
    assert "doubt" not in notes
    written = {path.name for path in (tmp_path / "data").iterdir()}
    assert written == {"val_df.csv", "val_df.receipt.json", "label_mappings.json", "rejected_rows.csv"}


def test_step_01_notes_its_doubts(run, source, capsys):
    source.write_text(source.read_text() + '"",praise\n')
    assert run("01_download_data") == 0
    assert "doubt: 1 row(s) were left out" in capsys.readouterr().err


def test_step_01_ends_with_2_for_unusable_data_and_leaves_no_copy(run, source, tmp_path, capsys):
    source.write_text("text,labels\ngood,applause\n")
    assert run("01_download_data") == 2
    assert "'applause' in 1 row(s), first in row 0" in capsys.readouterr().err
    assert not (tmp_path / "data" / "val_df.csv").exists()


def test_dataset_tool_finds_nothing_in_clean_data_and_writes_nothing(run, tmp_path, capsys):
    assert run("validate_dataset") == 0
    assert "Class balance: 1.000" in capsys.readouterr().out
    assert not (tmp_path / "data").exists() and not (tmp_path / "results").exists()


def test_dataset_tool_ends_with_1_for_a_finding(run, source, capsys):
    source.write_text("text,labels\ngood,praise\nbad,complaint\n")
    assert run("validate_dataset") == 1
    said = "1 of the model's 3 labels never occur (question)"
    assert f"finding: {said}" in capsys.readouterr().out
    assert run("validate_dataset", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert said in document["findings"][0] and document["statistics"]["counts"]["praise"] == 1


def test_step_00_shows_the_machine_as_json_and_nothing_else_on_stdout(run, capsys):
    assert run("00_check_setup", "--json") in (0, 3)  # 3 where a package has another version than the pinned one
    assert json.loads(capsys.readouterr().out)["machine"]["python"] == platform.python_version()


def test_dataset_tool_ends_with_2_for_unusable_data(run, capsys):
    assert run("validate_dataset", "dataset.text_column=body") == 2
    assert "no column 'body'" in capsys.readouterr().err


def test_dataset_tool_checks_the_copy_once_it_is_there(run, capsys):
    assert run("validate_dataset", "--normalised") == 2
    assert "the data has not been fetched" in capsys.readouterr().err
    assert run("01_download_data") == 0
    assert run("validate_dataset", "--normalised") == 0
