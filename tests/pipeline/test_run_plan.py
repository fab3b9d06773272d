"""`scripts/run_plan.py`: stages in processes of their own, what is refused, and a plan computed without any."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boundby.layers.report import write_summary
from tests.layer_models import profiled, small

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(script: str, *arguments: Any) -> tuple[int, str, str]:
        code = importlib.import_module(f"scripts.{script}").main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small BERT, its profile, and two nodes of which neither holds all of it."""
    folder = tmp_path_factory.mktemp("planned")
    model, inputs = small("bert")
    model.save_pretrained(folder / "model")
    write_summary(folder / "small_summary.json", profiled(model, inputs, folder).profile)
    nodes = [{"name": name, "kind": "cpu", "ram_gb": 9e-5, "machine": "pod"} for name in ("one", "two")]
    (folder / "nodes.yaml").write_text(json.dumps({"nodes": nodes}))  # which is YAML too
    return folder


@pytest.fixture
def plan(folder: Path, run: Command) -> Path:
    code, out, _ = run(
        *("plan_partition", folder, "--nodes", folder / "nodes.yaml", "--objective", "throughput", "--json"),
        *("--model", folder / "model"),
    )
    assert code == 0 and len(json.loads(out)["plan"]["stages"]) == 2
    (folder / "plan.json").write_text(out)
    return folder / "plan.json"


def test_a_plan_is_run_in_a_process_for_each_stage_with_the_outputs_of_the_whole_model(run, plan) -> None:
    code, out, err = run("run_plan", plan, "--requests", 6)
    assert code == 0, err
    assert "equal to those of the whole model" in out and max(map(len, out.splitlines())) <= 100
    kept = json.loads(plan.with_name("plan.run.json").read_text())
    assert kept["label"] == "measured" and kept["difference"] <= 1e-5 and kept["requests"] == 6
    assert [stage["busy_compute"]["n"] for stage in kept["stages"]] == [6, 6] and kept["latency"]["n"] == 20
    assert kept["transfers"][0]["size_bytes"] == 2 * 6 * 32 * 4 and kept["transfers"][0]["link"]["is_measured"]
    assert [error["predicted"] for error in kept["comparison"]["stages"]] == [
        stage["compute_s"] for stage in json.loads(plan.read_text())["plan"]["stages"]
    ]
    parts = sum(stage["compute"]["minimum"] for stage in kept["stages"]) + kept["transfers"][0]["seconds"]["minimum"]
    assert 0 < parts <= kept["latency"]["minimum"]


def test_a_plan_of_another_model_is_refused(run, plan, tmp_path, monkeypatch) -> None:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = run("run_plan", plan, "--model", tmp_path)
    assert (code, out) == (2, "") and "of another model" in err


def test_a_plan_is_simulated_without_any_process(run, plan, monkeypatch) -> None:
    monkeypatch.setattr("utils.partition.running.start", None)
    code, out, _ = run("run_plan", plan, "--simulate", "--requests", 8)
    kept = json.loads(plan.with_name("plan.simulated.json").read_text())
    stages = json.loads(plan.read_text())["plan"]
    assert code == 0 and "no process was started" in " ".join(out.split()) and kept["label"] == "simulated"
    assert len(kept["finishes_s"]) == 8 and kept["first_finish_s"] == pytest.approx(stages["latency_s"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda values: {**values, "schema_version": 2}, "older or newer version (2, here 3)"),
        (lambda values: {**values, "plan": None, "reason": "too large"}, "holds no plan to run: too large"),
        (lambda values: {**values, "plan": {"stages": [{}]}}, "cannot be read"),
        (lambda values: {key: values[key] for key in values if key != "model"}, "cannot be read"),
        (lambda values: [], "is no plan of this version"),
    ],
)
def test_a_file_that_holds_no_plan_of_this_version_ends_with_two(run, plan, tmp_path, change, says) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(change(json.loads(plan.read_text()))))
    code, out, err = run("run_plan", path)
    assert (code, out) == (2, "") and says in err and "plan.json" in err


def test_what_cannot_be_used_ends_with_two(run, plan, monkeypatch, tmp_path) -> None:
    assert "is not there" in run("run_plan", tmp_path / "none.json")[2]
    assert "--requests 0: give 1 or more" in run("run_plan", plan, "--requests", 0)[2]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, _, err = run("run_plan", plan)
    assert code == 2 and "2 stages, and torchrun started 3 processes" in err
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("run_plan", plan, "--model", "somewhere")
    assert code == 2 and "no preset and no folder here" in err
