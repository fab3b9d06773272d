"""What others may have written where we wrote: a document of the wrong shape is one message, or as good as absent."""

import json
import os
from pathlib import Path

import pytest

from boundby import files
from tests import foreign
from tests.monitor_runs import write_run
from utils.baseline import rounds as visits
from utils.baseline.document import read_document
from utils.command.artifacts import METRICS_VERSION, Layout
from utils.command.errors import InputError
from utils.settings import SettingsError
from utils.settings.schema import Config
from utils.settings.yaml_file import load
from utils.steps import steps
from utils.training.monitor.runs import Index

DEEP = "[" * 100_000
SHAPES = ["", "null", "[]", "3", '"text"', "{}", '{"a": ', "[null]", "NaN", DEEP, '{"x": ' * 10_000]
INSIDE = ["null", "[]", "[3]", "3", '"text"', "[null]", '{"": null}']
KEYS = ("model", "source", "steps", "optimal", "parts", "outputs", "schema_version", "batch_sizes", "plan")


@pytest.mark.parametrize("content", [*SHAPES, *(f'{{"{key}": {value}}}' for key in KEYS for value in INSIDE)])
def test_a_step_decides_and_records_whatever_shape_its_documents_have(tmp_path, content):
    config = Config.model_validate(
        {
            "model": {"name": "some/model"},
            "dataset": {"hf_name": "some/set", "local_path": str(tmp_path / "val_df.csv")},
            "output": {"results_dir": str(tmp_path)},
        }
    )
    layout = Layout.of(config)
    documents = [layout.run, layout.metrics, layout.data_receipt, layout.receipt("02"), layout.marker("02")]
    for path in documents:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    assert all(steps.decide(number, config, layout).run for number in steps.STEPS)
    assert steps.continuation("02", steps.parts("02", config, layout), layout).run
    steps.record("02", layout, config, {"status": "ok"})
    assert json.loads(layout.run.read_text())["steps"]["02"] == {"status": "ok"}


@pytest.mark.parametrize("rows", ["3", "[3]", "[null]", '[{"verdict": 3}]', '[{"verdict": {"trials": 3}}]', '"x"'])
def test_a_sweep_of_the_wrong_shape_is_one_error_that_names_the_file(tmp_path, rows):
    path = tmp_path / "metrics.json"
    path.write_text(f'{{"schema_version": {METRICS_VERSION}, "batch_sizes": {rows}}}')
    with pytest.raises(ValueError):
        read_document(path, METRICS_VERSION)


def test_a_document_without_its_sweep_is_not_taken_for_one_that_measured_nothing(tmp_path):
    documents = foreign.left_by_the_steps(tmp_path)[:2]  # as the report and the comparison read it
    for document in documents:
        whole = json.loads(document.whole)
        del whole["batch_sizes"]
        document.path.write_text(json.dumps(whole))
        with pytest.raises((InputError, ValueError), match="batch_sizes"):
            document.read()


@pytest.mark.parametrize("content", SHAPES)
def test_what_is_no_record_is_one_error_that_names_the_file(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json cannot be read"):
        files.read_as(tmp_path / "x.json", steps.Receipt)


@pytest.mark.parametrize("line", [*SHAPES[1:], '{"batch_size": "x", "round": 0}', '{"batch_size": 1}'])
def test_a_visit_of_the_wrong_shape_spoils_itself_alone(tmp_path, line):
    path = tmp_path / "visits.jsonl"
    whole = visits.Visit("float32", 1, 0, "ok", "session")
    visits.append(path, whole)
    with path.open("a") as log:
        log.write(f"{line}\n")
    visits.append(path, whole)
    assert visits.read(path) == [whole]


def test_a_document_is_a_plain_file_of_bounded_size_and_a_log_loses_its_torn_lines_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "large.json").write_bytes(b"[")
    os.truncate(tmp_path / "large.json", files.LARGEST_DOCUMENT + 1)  # sparse: takes no room on the disk
    for name, fault in (("pipe.json", "no plain file"), ("large.json", "more than 64 MiB")):
        for read in (files.read_json, lambda path: files.read_as(path, steps.Receipt)):
            with pytest.raises(ValueError, match=rf"{name} .*{fault}"):
                read(tmp_path / name)
    (tmp_path / "log.jsonl").write_text("1\n[1,2,3,4]\n[1,2,3,4,\n3")
    assert files.read_json_lines(tmp_path / "log.jsonl") == [1, [1, 2, 3, 4], 3]


def test_one_damaged_training_run_hides_no_other(tmp_path):
    write_run(tmp_path / "sound", 2)
    document = json.loads((tmp_path / "sound" / "stage_times.json").read_text())
    damages = {"deep": DEEP, "infinite": json.dumps({**document, "elapsed_s": float("inf")})}
    damages |= {"text": json.dumps({**document, "rank": "0"}), "many": json.dumps({**document, "world_size": 10**18})}
    for name, content in damages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage_times.json").write_text(content)
    runs = {entry.path: entry for entry in Index(tmp_path).runs()}
    assert runs["sound"].status == "finished"
    assert all(runs[name].fault for name in damages)


def config_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path / "config.yaml"


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev", "fifo"])
def test_settings_are_read_from_files_alone(tmp_path, path):
    if path == "fifo":
        path = str(tmp_path / path)
        os.mkfifo(path)
    with pytest.raises(SettingsError, match="is not a file"):
        load(Config, path)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("profiling.max_seconds_per_batch_size=.inf", "should be a finite number"),
        ("targets.accuracy=.nan", "should be a finite number"),
        (f"profiling.batch_sizes={'[' * 3000}", "is not YAML"),
        ("output.results_dir=/proc/x", "is on no disk"),
        ("dataset.local_path=/dev/x.csv", "is on no disk"),
    ],
)
def test_a_value_that_no_setting_can_have_is_refused_before_anything_runs(tmp_path, override, fault):
    path = config_of(tmp_path, "model: {name: a/b}\ndataset: {file: x.csv}\n")
    with pytest.raises(SettingsError, match=f"command line.*({fault})"):
        load(Config, path, [override])


def test_results_in_shared_memory_are_fine(tmp_path):
    path = config_of(tmp_path, "model: {name: a/b}\ndataset: {file: x.csv}\n")
    assert load(Config, path, ["output.results_dir=/dev/shm/x"]).output.results_dir == "/dev/shm/x"


@pytest.mark.parametrize(("make", "count"), [(foreign.documents, 60), (foreign.configs, 150), (foreign.corpora, 25)])
def test_whatever_is_read_is_taken_whole_or_refused_in_one_message(tmp_path, make, count):
    assert sum(make(count, tmp_path).values()) == count
