"""What leaves a run: the bounded summary for language models, and exports read back by their own clients."""

import base64
import importlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from boundby import files
from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from tests.report_reading import answered, traced
from utils.command.artifacts import Layout
from utils.report import export
from utils.report import run_summary as summary

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
CARD = "quickstart on AMD EPYC\nLimited by  padding\n"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout.of(results.config(tmp_path / "results"))
    results.store(made, results.document(answered(diagnosed(results.cpu_rows()))), **traced())
    files.write_text(made.card, CARD)
    files.write_bytes(made.plots / "roofline.png", PNG)
    return made


@pytest.mark.parametrize("form", ["json", "markdown"])
def test_a_summary_fits_into_4_kb_and_its_ids_point_to_the_figures(layout, form, capsys) -> None:
    options = ["--json"] if form == "json" else []
    code = importlib.import_module("scripts.summary").main([str(layout.results), "--for-agents", *options])
    shown = capsys.readouterr().out
    assert code == 0 and len(shown.encode()) <= summary.MOST_BYTES
    result = summary.of(layout)
    for row in result["rows"]:
        kept = summary.at(layout, row["id"])
        assert (kept["dtype"], kept["batch_size"]) == (row["dtype"], row["batch_size"])
        assert kept["throughput_samples_per_sec_mean"] == pytest.approx(row["samples_per_sec"], rel=1e-3)
        assert row["id"] in shown
    assert summary.at(layout, result["answer"]["id"])["bound"] == result["answer"]["bound"]
    for tried in result["tried_on_the_batch"]:
        assert summary.at(layout, tried["id"])["measured"]["value"] == pytest.approx(tried["speed"], rel=1e-3)
    assert result["card"] == CARD.splitlines()
    if form == "json":
        assert json.loads(shown) == result


def test_a_summary_stays_bounded_and_says_what_it_leaves_out_and_cannot_answer(layout) -> None:
    document = files.read_json(layout.metrics)
    row = document["batch_sizes"][0]
    document["batch_sizes"] += [{**row, "batch_size": 64 + size} for size in range(200)]
    document["doubts"] = ["d" * 500] * 50
    document["full_dataset_metrics"], document["full_dataset_reason"] = None, "evaluation.enabled is false"
    files.write_json(layout.metrics, document)
    result = summary.of(layout)
    assert max(len(summary.as_json(result).encode()), len(summary.as_markdown(result).encode())) <= summary.MOST_BYTES
    assert result["rows_left_out"] + len(result["rows"]) == len(document["batch_sizes"])
    assert result["cannot_be_answered"]["accuracy"] == "evaluation.enabled is false"
    assert "variants.json is not there" in result["cannot_be_answered"]["which variant to use"]


@pytest.mark.parametrize("script", ["summary", "export"])
def test_a_folder_without_results_ends_with_2(script, tmp_path, capsys) -> None:
    option = {"summary": ["--for-agents"], "export": ["--tensorboard", str(tmp_path / "out")]}[script]
    assert importlib.import_module(f"scripts.{script}").main([str(tmp_path), *option]) == 2
    assert "is missing; give a results folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module",
    ["utils.report.run_summary", "utils.report.export", "utils.comparison.baselines", "utils.comparison.blocks"],
)
def test_what_only_reads_results_loads_neither_torch_nor_pictures(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'matplotlib', 'pandas') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def throughput(layout: Layout) -> dict[int, float]:
    rows = files.read_json(layout.metrics)["batch_sizes"]
    return {row["batch_size"]: row["throughput_samples_per_sec_mean"] for row in rows if row["dtype"] == "float32"}


NAME = "float32/throughput_samples_per_sec_mean"


def test_tensorboard_reads_rows_card_and_pictures_back(layout, tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    export.to_tensorboard(export.read(layout), tmp_path / "board")
    read = EventAccumulator(str(tmp_path / "board"), size_guidance={"images": 0, "scalars": 0, "tensors": 0}).Reload()
    assert {scalar.step: scalar.value for scalar in read.Scalars(NAME)} == pytest.approx(throughput(layout), rel=1e-6)
    assert read.Images("plots/roofline")[0].encoded_image_string == PNG
    [card] = read.Tensors("boundby/card")
    assert b"Limited by  padding" in tensor_util.make_ndarray(card.tensor_proto).item()


def test_mlflow_reads_rows_card_and_pictures_back(layout, tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "store").as_uri()
    export.to_mlflow(export.read(layout), uri)
    client = MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name(export.PROJECT).experiment_id])
    figures = client.get_metric_history(run.info.run_id, NAME)
    assert {figure.step: figure.value for figure in figures} == pytest.approx(throughput(layout), rel=1e-6)
    assert run.data.params["model"] == "quickstart" and run.info.status == "FINISHED"
    folder = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert (folder / "plots" / "roofline.png").read_bytes() == PNG and (folder / "card.txt").read_text() == CARD


def test_weights_and_biases_keeps_rows_card_and_pictures_offline(layout, tmp_path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    export.to_wandb(export.read(layout), tmp_path / "runs")
    [log] = (tmp_path / "runs").glob("wandb/offline-run-*/*.wandb")
    records = [Record.FromString(content) for content in log_records(log.read_bytes())]
    rows = [{".".join(item.nested_key) or item.key: item.value_json for item in one.history.item} for one in records]
    result = {int(row["batch_size"]): float(row[NAME]) for row in rows if NAME in row}
    assert result == pytest.approx(throughput(layout), rel=1e-6)
    assert any("Limited by  padding" in item.value_json for one in records for item in one.summary.update)
    [picture] = log.parent.glob("files/media/images/pictures/roofline*.png")
    assert picture.read_bytes().startswith(PNG[:8])


def log_records(content: bytes) -> list[bytes]:
    """Return the records of a log of LevelDB's format, which has a header of seven bytes of its own."""
    records, whole, at = [], b"", 7
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # the rest of a block holds no header
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(whole)
            whole = b""
    return records
