"""The whole pipeline on a small model: every file, real input, resume."""

import contextlib
import csv
import importlib
import io
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from boundby.cli import COMMANDS
from tests.tiny_models import LABELS, save_bert

pytestmark = pytest.mark.timeout(600)  # each runs several steps, some of them many times
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
STEPS = ("00_check_setup", "01_download_data", "02_baseline_inference", "03_detailed_profiling", "04_visualize_results")
TEXTS = ("card never arrived", "when will it come", "refund please, now", "top up failed again and again")


def write_texts(path: Path, rows: int = 40) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "labels"])
        writer.writerows(
            [f"{TEXTS[row % len(TEXTS)]} {row}" * (1 + row % 5), LABELS[row % len(LABELS)]] for row in range(rows)
        )
    return path


def command_line(folder: Path) -> list[str]:
    """Return the command line of a small run, with its model, data and results in `folder`."""
    return [
        "--config", str(ROOT / "configs" / "config.yaml"), f"model.name={save_bert(folder / 'model')}",
        "dataset.hf_name=null", f"dataset.file={write_texts(folder / 'texts.csv')}",
        f"dataset.local_path={folder / 'data' / 'val_df.csv'}", f"output.results_dir={folder / 'results'}",
        "profiling.batch_sizes=[1,2]", "profiling.num_measurement_runs=2", "profiling.num_warmup_runs=1",
        "profiling.max_seconds_per_batch_size=0.001", "trace.warmup_steps=0", "trace.active_steps=1",
        "layers.num_runs=2", "layers.warmup_runs=0",
    ]  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A run of all steps: its folder, its command line, how each ended and what --json said of it.

    `kept` is a copy of its results.
    """

    folder: Path
    arguments: list[str]
    codes: list[int]
    documents: list[dict]

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def kept(self) -> Path:
        return self.folder / "kept"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of all steps, which the tests share; its model and data serve runs with other results too."""
    folder = tmp_path_factory.mktemp("pipeline")
    arguments = command_line(folder)
    ended = [documented(step, arguments) for step in STEPS]
    run_of_all = Finished(folder, arguments, [code for code, _ in ended], [document for _, document in ended])
    shutil.copytree(run_of_all.results, run_of_all.kept)
    return run_of_all


@pytest.fixture
def arguments(finished, tmp_path):
    """The command line of the shared run, with its results below `tmp_path`."""
    return [*finished.arguments, f"output.results_dir={tmp_path / 'results'}"]


def run(step: str, arguments: list[str]) -> int:
    return importlib.import_module(f"scripts.{step}").main(arguments)


def documented(step: str, arguments: list[str]) -> tuple[int, dict]:
    """Run a step with --json; return its code and the one document on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(step, [*arguments, "--json"])
    return code, json.loads(out.getvalue())


def test_all_steps_leave_every_file_of_the_contract(finished):
    assert finished.codes == [0] * len(STEPS)
    expected = {
        "run.json", "baseline_metrics.json", "detailed_metrics.csv", "raw_samples.csv", "evaluation/plan.json",
        "evaluation/part-00000.parquet", "evaluation/predictions.csv", "evaluation/per_class.csv",
        "evaluation/confusion_matrix.csv", "evaluation/confident_mistakes.csv", "evaluation/quality.json",
        "profiler_traces/trace.json.gz", "profiler_traces/stacks.txt", "profiler_traces/op_stats.csv",
        "profiler_traces/manifest.json", "layers/model_summary.json", "layers/model_metrics.jsonl",
        "layers/model_dashboard.html", "plots/batch_size_comparison.png", "plots/metrics_heatmap.png",
        "plots/confusion_matrix.png", "plots/calibration.png", "plots/operators.png", "plots/layers.png",
        "baseline_summary_report.txt", "report.html", "plots/roofline.png",
        *(f".receipts/{number}.json" for number in ("00", "01", "02", "03", "04")),
        *(f"logs/{number}.log" for number in ("00", "01", "02", "03", "04")),
    }  # fmt: skip
    results = finished.kept
    present = {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}
    assert expected <= present
    assert all((results / name).stat().st_size > 0 for name in expected)
    beside = {path.name for path in (finished.folder / "data").iterdir()}
    assert beside - {"ceilings"} == {"val_df.csv", "label_mappings.json", "rejected_rows.csv", "val_df.receipt.json"}
    steps = json.loads((results / "run.json").read_text())["steps"]
    assert {number: step["status"] for number, step in steps.items()} == dict.fromkeys(
        ("00", "01", "02", "03", "04"), "ok"
    )


def test_json_of_the_steps_says_how_they_ended_where_the_files_are_and_what_was_found(finished):
    check, download, baseline, profile, report = finished.documents
    assert [document["step"] for document in finished.documents] == ["00", "01", "02", "03", "04"]
    assert {document["status"] for document in finished.documents} == {"ok"}
    assert all(Path(path).exists() for document in finished.documents for path in document["files"])
    assert check["machine"]["python"] and download["dataset"]["rows"] == 40
    assert [row["batch_size"] for row in baseline["batch_sizes"]] == [1, 2] and baseline["optimal"]["batch_size"]
    assert str(finished.results / "profiler_traces") in profile["files"]
    assert report["card"] == (finished.kept / "card.txt").read_text().rstrip().splitlines()


# What each command is given beside --json, where a finished run lies: RESULTS, SETTINGS stand for its own.
JSON = {
    "run": ["SETTINGS", "--dry-run"],
    "check": ["SETTINGS", "--resume"],
    "view": ["RESULTS"],
    "report": ["SETTINGS", "--resume"],
    "compare": ["RESULTS", "RESULTS"],
    "summary": ["RESULTS", "--for-agents"],
    "export": ["RESULTS", "--tensorboard", "board"],
    "evaluate": ["finalize", "SETTINGS"],
    "download": ["SETTINGS", "--resume"],
    "baseline": ["SETTINGS", "--resume"],
    "profile": ["SETTINGS", "--resume"],
    "variants": ["SETTINGS", "variants.enabled=false"],
    "trace": ["RESULTS/profiler_traces/trace.json.gz"],
    "layers": ["--model", "RESULTS/../model", "--num-samples", "2", "--sequence-length", "8", "--output", "layers"],
    "plan": ["RESULTS/layers/model_summary.json"],
    "run-plan": ["plan.json", "--simulate"],
    "train": ["--output", "run", "--", sys.executable, "-c", "print('of the program')"],
    "check-profile": ["RESULTS"],
    "validate": ["SETTINGS"],
    "monitor": ["RESULTS"],
}


@pytest.mark.parametrize("word", COMMANDS)
def test_json_is_one_document_on_stdout_whatever_the_command(word, finished, tmp_path, monkeypatch, capfd):
    folder = str(finished.kept if "SETTINGS" not in JSON[word] else finished.results)
    given = [item.replace("RESULTS", folder) for item in JSON[word]]
    at = given.index("SETTINGS") if "SETTINGS" in given else len(given)
    monkeypatch.setattr("utils.training.monitor.server.serve", lambda *_: print("what serves may print"))
    monkeypatch.setattr("utils.training.monitor.server.check", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    if word == "run-plan":
        _, plan = documented("plan_partition", [f"{folder}/layers/model_summary.json"])
        Path("plan.json").write_text(json.dumps(plan))
    settings = finished.arguments if at < len(given) else []
    code = main_of(word)(["--json", *given[:at], *settings, *given[at + 1 :]])
    shown, notes = capfd.readouterr()
    assert code in (0, 1), notes
    assert isinstance(json.loads(shown, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize("word", COMMANDS)
def test_errors_are_a_document_too(word, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main_of(word)(["--json", "--no-such-flag"])
    assert json.loads(capfd.readouterr().out)["exit_code"] == ended.value.code == 2


def main_of(word: str):
    """Return what a command runs."""
    return importlib.import_module(COMMANDS[word][0].removesuffix(".py").replace("/", ".")).main


def test_resume_of_a_finished_run_does_nothing(finished, capsys):
    kinds = (".csv", ".png", ".gz")
    before = {path: path.read_bytes() for path in finished.results.rglob("*") if path.suffix in kinds}
    capsys.readouterr()
    for step in STEPS[1:]:
        assert run(step, [*finished.arguments, "--resume"]) == 0
    assert capsys.readouterr().err.count("kept (up to date)") == 4
    assert {path: path.read_bytes() for path in before} == before


def test_file_names_of_the_metrics_are_honoured_by_writer_and_reader(arguments, tmp_path):
    named = [*arguments, "output.metrics_file=my.json", "output.detailed_metrics_file=my.csv"]
    for step in (STEPS[2], STEPS[4]):
        assert run(step, named) == 0
    results = tmp_path / "results"
    assert (results / "my.json").exists() and (results / "my.csv").exists()
    assert not (results / "baseline_metrics.json").exists()
    assert "Batch sizes" in (results / "baseline_summary_report.txt").read_text()


def test_a_subset_is_evaluated_on_request(arguments, tmp_path):
    subset = [*arguments, "dataset.sample_sizes=[5, 10]", "profiling.batch_sizes=[1]"]
    assert run(STEPS[2], subset) == 0
    full = json.loads((tmp_path / "results" / "baseline_metrics.json").read_text())["full_dataset_metrics"]
    assert full["samples"] == 10
    assert [item["samples"] for item in full["samples_of"]] == [5, 10]
    with (tmp_path / "results" / "evaluation" / "predictions.csv").open(newline="") as file:
        correct = {int(row["row_id"]): int(row["correct"]) for row in csv.DictReader(file)}
    order = np.random.default_rng(0).permutation(40)[:10].tolist()  # samples of one seed are nested
    assert set(correct) == set(order)
    assert full["samples_of"][0]["accuracy"] == sum(correct[row] for row in order[:5]) / 5
    assert full["correct"] == sum(correct.values())


def test_each_dtype_has_its_rows(arguments, tmp_path):
    assert run(STEPS[2], [*arguments, "profiling.dtypes=[float32, bfloat16]", "evaluation.enabled=false"]) == 0
    result = json.loads((tmp_path / "results" / "baseline_metrics.json").read_text())
    rows = [(row["dtype"], row["batch_size"]) for row in result["batch_sizes"]]
    assert rows == [("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)]
    assert result["full_dataset_metrics"] is None and result["full_dataset_reason"] == "evaluation.enabled is false"


def test_later_steps_refuse_other_data_than_the_receipt(arguments, tmp_path, capsys):
    other = [*arguments, f"dataset.file={write_texts(tmp_path / 'other.csv', rows=8)}"]
    assert run(STEPS[2], other) == 2
    assert "01_download_data.py" in capsys.readouterr().err


def test_later_steps_notice_a_changed_dataset(finished, arguments, tmp_path, capsys):
    shutil.copytree(finished.folder / "data", tmp_path / "data")
    with (tmp_path / "data" / "val_df.csv").open("a") as file:
        file.write("40,extra,0,a\n")
    assert run(STEPS[2], [*arguments, f"dataset.local_path={tmp_path / 'data' / 'val_df.csv'}"]) == 2
    assert "val_df.csv" in capsys.readouterr().err


@pytest.fixture(scope="module")
def banking77():
    model, data = SHARED / "models" / "minilm-banking77", SHARED / "data" / "banking77" / "test.csv"
    if not (model.is_dir() and data.is_file()):
        pytest.skip("needs the classifier and the texts in ../shared, which are not here")
    return model, data


def plain_loop(model_folder: Path, data: Path) -> int:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, dtype=torch.float32).eval()
    with data.open(encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: len(row["text"]))
    right = 0
    for start in range(0, len(rows), 64):
        batch = rows[start : start + 64]
        inputs = tokenizer([row["text"] for row in batch], padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            result = model(**inputs).logits.argmax(dim=1).tolist()
        right += sum(model.config.id2label[index] == row["category"] for index, row in zip(result, batch, strict=True))
    return right


def test_real_model_on_real_texts_gets_what_a_plain_loop_gets(banking77, tmp_path):
    model, data = banking77
    arguments = [
        f"model.name={model}", "model.dtype=float32",  # its own, bfloat16, rounds otherwise on another processor
        "dataset.hf_name=null", f"dataset.file={data}", "dataset.text_column=text",
        "dataset.label_column=category", f"dataset.local_path={tmp_path / 'val_df.csv'}",
        f"output.results_dir={tmp_path / 'results'}", "profiling.batch_sizes=[1]",
        "profiling.num_measurement_runs=1", "profiling.max_seconds_per_batch_size=0.1",
    ]  # fmt: skip
    for step in STEPS[1:3]:
        assert run(step, arguments) == 0
    full = json.loads((tmp_path / "results" / "baseline_metrics.json").read_text())["full_dataset_metrics"]
    assert (full["correct"], full["samples"]) == (2883, 3080)
    assert plain_loop(model, data) == 2883
