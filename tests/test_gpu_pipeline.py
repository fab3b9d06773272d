"""The pod's pipeline end to end on the stand-in card: a Qwen2 classifier of 24 layers, every step and GPU column."""

import csv
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import classifiers
from tests.gpu_double import H100, environment
from tests.tiny_models import LABELS, WORDS

pytestmark = pytest.mark.timeout(900)  # one run of all steps, of a minute and a half where nothing else runs
ROOT = Path(__file__).resolve().parents[1]
LAYERS = 24  # of Qwen2.5-0.5B, which the pod's model is; its launches, 1,109 in bfloat16, are more than a queue holds
CARD = H100.slower(14, host=40)  # the model is 14 times narrower; a slow host fills its seconds with fewer calls
DEVICE_COLUMNS = (
    "memory_allocated_mb", "memory_reserved_mb", "memory_peak_mb", "memory_peak_reserved_mb", "gpu_utilization_pct",
    "gpu_power_w", "gpu_sm_clock_mhz", "device_per_batch_ms", "enqueue_per_batch_ms", "transfer_per_batch_ms",
    "energy_per_sample_j", "flops_per_sec", "share_of_ceiling_pct", "bound",
)  # fmt: skip


FILES = (
    "baseline_metrics.json", "detailed_metrics.csv", "evaluation/predictions.csv", "card.txt", "report.html",
    "baseline_summary_report.txt", "profiler_traces/trace.json.gz", "layers/model_summary.json", "plots/roofline.png",
    "variants.json",
)  # fmt: skip


def save_model(folder: Path) -> Path:
    """Save the pod's model with its layers and heads, and hidden states of 64."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = classifiers.tokenizer(list(WORDS))
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=172, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(LABELS)), label2id={name: index for index, name in enumerate(LABELS)},
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # the initial weights hardly tell two texts apart
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_texts(path: Path, rows: int) -> Path:
    chance = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "labels"])
        for row in range(rows):
            words = min(30, max(3, int(chance.lognormvariate(2.0, 0.5))))
            writer.writerow([" ".join(chance.choices(WORDS, k=words)), LABELS[row % len(LABELS)]])
    return path


@dataclass(frozen=True)
class Run:
    """A finished run: its code, what it printed, and its folder of results."""

    code: int
    said: str
    results: Path

    @property
    def metrics(self) -> dict[str, Any]:
        return json.loads((self.results / "baseline_metrics.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("pod")
    arguments = [
        f"model.name={save_model(folder / 'model')}", "dataset.hf_name=null",
        f"dataset.file={save_texts(folder / 'texts.csv', 96)}", f"dataset.local_path={folder / 'data' / 'val.csv'}",
        f"output.results_dir={folder / 'results'}", "profiling.batch_sizes=[1,16]", "profiling.num_warmup_runs=1",
        "profiling.num_measurement_runs=4", "profiling.max_seconds_per_batch_size=2", "trace.warmup_steps=1",
        "trace.active_steps=1", "layers.num_runs=2", "layers.warmup_runs=1", "variants.max_seconds=5",
        "evaluation.min_agreement=0.5",  # labels of random weights are near ties: they differ in another dtype
    ]  # fmt: skip
    child = subprocess.run(
        [sys.executable, "run_pipeline.py", *arguments],
        env=environment(CARD, {**os.environ, "OMP_NUM_THREADS": "1"}), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return Run(child.returncode, child.stdout + child.stderr, folder / "results")


def test_every_step_ends_well_and_leaves_its_files(run):
    assert run.code == 0, run.said[-3000:]
    for name in FILES:
        assert (run.results / name).stat().st_size > 0, name


def test_the_model_runs_in_its_own_dtype_on_the_card(run):
    assert {row["dtype"] for row in run.metrics["batch_sizes"]} == {"bfloat16"}
    assert run.metrics["device"]["name"] == CARD.name


@pytest.mark.parametrize("column", DEVICE_COLUMNS)
def test_every_gpu_column_of_every_row_is_there(run, column):
    for row in run.metrics["batch_sizes"]:
        assert row[column] is not None, row["reasons"].get(column)


def test_a_model_of_more_launches_than_a_queue_holds_has_the_device_s_time(run):
    for row in run.metrics["batch_sizes"]:
        assert 0 < row["device_per_batch_ms"] < row["latency_per_batch_ms_mean"]
        assert row["enqueue_per_batch_ms"] > CARD.queue_depth * CARD.launch_s * 1e3
    padded = run.metrics["batch_sizes"][-1]
    assert padded["enqueue_per_batch_ms"] == pytest.approx(1109 * CARD.launch_s * 1e3, rel=0.01)


def test_a_host_that_cannot_keep_up_is_said_and_a_graph_is_the_way_out(run):
    (verdict,) = [row["verdict"] for row in run.metrics["batch_sizes"] if row["batch_size"] == 1]
    assert verdict["bound"] == "launch"


def test_the_trace_holds_kernels_that_the_device_ran(run):
    analysis = json.loads((run.results / "profiler_traces" / "trace_analysis.json").read_text())
    assert "kernel" in json.dumps(analysis)


def test_the_report_names_the_card(run):
    assert CARD.name in (run.results / "baseline_summary_report.txt").read_text()
