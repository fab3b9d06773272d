"""Reading what the steps left, drawing what there are rows for, and step 04 as a whole."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from boundby import files
from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from tests.report_reading import draw, drawings, run_in
from utils.baseline.columns import NAMES, NOT_DIAGNOSED
from utils.baseline.sweep import Result
from utils.command.artifacts import METRICS_VERSION, Layout
from utils.command.cli import ROOT
from utils.command.errors import InputError
from utils.data.normalised import FileContent
from utils.data.sources import DataSource
from utils.report import sources


def test_documents_of_these_tests_are_like_the_real_one(tmp_path):
    run = run_in(tmp_path / "results")
    fixture = results.document([], full_dataset_metrics=None)
    receipt = SimpleNamespace(
        source=DataSource(**fixture["dataset"]["source"]),
        dataset=FileContent(**{key: fixture["dataset"][key] for key in ("path", "bytes", "sha256")}),
        rows=2000,
        columns=("text", "label_name"),
        has_labels=True,
        labels_sha256="",
        synthetic=True,
        doubts=[],
    )
    real = Result(run, receipt).document(complete=False, rows=[])
    assert list(real) == list(fixture)
    assert set(real["dataset"]) == set(fixture["dataset"])
    assert real["optimal"] == fixture["optimal"]


def test_missing_metrics_name_the_command(tmp_path):
    run = run_in(tmp_path / "nothing", overrides=["model.dtype=float16"])
    with pytest.raises(
        InputError, match=r"no metrics to report; run `python run_pipeline.py --from 1 model.dtype=float16`"
    ):
        sources.read(run)
    files.write_text(run.layout.metrics, "{")
    with pytest.raises(InputError, match="baseline_metrics.json: cannot be read"):
        sources.read(run)
    files.write_json(run.layout.metrics, {"schema_version": 99})
    with pytest.raises(InputError, match=f"is of version 99, this program reads {METRICS_VERSION}"):
        sources.read(run)
    files.write_json(run.layout.metrics, results.document([], max_length="long"))
    with pytest.raises(InputError, match=r"Expected `int \| null`, got `str` - at `\$.max_length`"):
        sources.read(run)


def test_pictures_without_rows_are_not_drawn_and_old_ones_go(read):
    data = read(results.document([], complete=False, full_dataset_metrics=None))
    for name in ("batch_size_comparison.png", "roofline.png", "operators.png"):
        files.write_text(data.layout.plots / name, "of an earlier run")
    assert drawings(data) == {
        "confusion_matrix.png": "not drawn: the dataset was not evaluated: evaluation.enabled is false",
        "calibration.png": "not drawn: the dataset was not evaluated: evaluation.enabled is false",
        "breakdown.png": "not drawn: the time of no batch was split",
        "batch_size_comparison.png": "not drawn: no batch size was measured yet",
        "metrics_heatmap.png": "not drawn: no batch size was measured yet",
        "roofline.png": "not drawn: no batch size was measured yet",
        "operators.png": "not drawn: step 03 has not run, or was skipped",
        "trace_timeline.png": "not drawn: step 03 has not run, or was skipped",
        "layers.png": "not drawn: step 03 has not run",
        "trace_memory.png": "not drawn: step 03 has not run, or was skipped",
    }
    draw(data)
    assert list(data.layout.plots.iterdir()) == []


def test_roofline_without_a_verdict_says_why_it_is_not_drawn(read):
    data = read(results.document(results.cpu_rows([1])))
    assert drawings(data)["roofline.png"] == f"not drawn: {NOT_DIAGNOSED}"


def test_diagnosed_rows_of_these_tests_have_the_columns_of_real_ones():
    for rows in (diagnosed(results.cpu_rows([1])), diagnosed(results.gpu_rows(["bfloat16"], [1], {}), gpu=True)):
        [row] = rows
        assert set(row) - {"whole"} == {*NAMES, "doubt_kinds", "reasons", "verdict"}
        assert NOT_DIAGNOSED not in row["reasons"].values()


def step_04(tmp_path: Path, *overrides: str) -> int:
    step = importlib.import_module("scripts.04_visualize_results")
    config = str(ROOT / "configs" / "quickstart.yaml")
    return step.main(["--config", config, f"output.results_dir={tmp_path / 'results'}", *overrides])


def test_step_04_draws_and_writes_with_what_there_is(tmp_path, capsys):
    layout = Layout.of(results.config(tmp_path / "results"))
    results.store(layout, results.document(diagnosed(results.cpu_rows([1, 2]))))
    assert step_04(tmp_path) == 0
    said = capsys.readouterr().out
    drawn = {path.name for path in layout.plots.iterdir() if path.read_bytes()[:4] == b"\x89PNG"}
    assert drawn == {"batch_size_comparison.png", "metrics_heatmap.png", "roofline.png"}
    answer = layout.card.read_text(encoding="utf-8")
    assert answer in said and answer in layout.report.read_text(encoding="utf-8")
    assert said.startswith("drew 3 pictures") and said.splitlines()[-1].startswith(f"open {layout.html_report} ")
    page = layout.html_report.read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3 and "not drawn: step 03 has not run" in page


def test_step_04_without_metrics_ends_with_exit_code_2(tmp_path, capsys):
    assert step_04(tmp_path) == 2
    assert "there are no metrics to report; run `python run_pipeline.py" in capsys.readouterr().err
