"""The profile by layer in step 03: what it writes and owns, what it does without the trace, and its budget."""

import errno
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from boundby.capture.export import Exported
from boundby.layers.measurement import LEAST_RUNS
from boundby.layers.report import read_profile
from tests import layer_profiles as profiles
from tests.tiny_models import save_bert
from utils.tracing.layers import profiling

Command = Callable[..., int]
QUICK = ["layers.num_runs=2", "layers.warmup_runs=0", "trace.warmup_steps=0", "trace.active_steps=1"]
LAYER_FILES = {"model_metrics.jsonl", "model_summary.json", "model_dashboard.html", "logs/model.log"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture
def results(tmp_path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def run(model, results, tmp_path, monkeypatch) -> Command:
    """Return what runs step 03 on two texts, without measuring the limits of the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "limits_of_machine", lambda *args: None)
    source = tmp_path / "source.csv"
    source.write_text("text,labels\ngood parcel,praise\nwhere is my refund,question\nbad,complaint\n")
    settings = [
        f"model.name={model}", "model.device=cpu", "dataset.hf_name=null", f"dataset.file={source}",
        f"output.results_dir={results}", "profiling.batch_sizes=[2]", *QUICK,
    ]  # fmt: skip

    def start(*arguments: str, step: str = "03_detailed_profiling") -> int:
        return importlib.import_module(f"scripts.{step}").main([*settings, *arguments])

    assert start(step="01_download_data") == 0
    return start


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_layers_alone_are_profiled_on_a_batch_of_texts_and_owned_by_the_receipt(run, results, model, capsys):
    assert run("trace.enabled=false") == 0
    assert files_in(results / "layers") == LAYER_FILES
    assert not (results / "profiler_traces").exists()
    profile = read_profile(results / "layers" / "model_summary.json")
    assert profile.model_name == str(model) and profile.num_runs == 2
    assert profile.layers[0].input_shapes[0].startswith("int64[2, ")
    said = capsys.readouterr().out
    assert "layers in 2 runs of the batch of 2 × " in said and "bert.encoder.layer.0" in said
    assert said.endswith(f"wrote {results / 'layers'}\n")
    receipt = json.loads((results / ".receipts" / "03.json").read_text())
    owned = {Path(output["path"]).resolve() for output in receipt["outputs"]}
    assert {(results / "layers" / name).resolve() for name in LAYER_FILES} == owned


def test_trace_and_layers_show_the_one_batch_that_the_sweep_calls_typical(run, results, model):
    assert run() == 0
    manifest, analysis, layers = (
        json.loads((results / name).read_text())
        for name in (
            "profiler_traces/manifest.json",
            "profiler_traces/trace_analysis.json",
            "layers/model_summary.json",
        )
    )
    assert manifest["shape"] == analysis["shape"] == layers["shape"]
    samples, tokens = map(int, manifest["shape"].removesuffix(" tokens").split(" × "))
    assert layers["profile"]["layers"][0]["input_shapes"][0] == f"int64[{samples}, {tokens}]"
    assert f"<title>Layers: {model}, {manifest['shape']}" in (results / "layers" / "model_dashboard.html").read_text()


def test_resume_keeps_the_layers_and_a_changed_setting_makes_them_anew_with_the_earlier_ones_moved_aside(run, results):
    run("trace.enabled=false")
    summary = results / "layers" / "model_summary.json"
    before, content = summary.stat().st_mtime_ns, summary.read_bytes()
    assert run("trace.enabled=false", "--resume") == 0 and summary.stat().st_mtime_ns == before
    assert run("trace.enabled=false", "layers.num_runs=3", "--resume") == 0
    kept = list((results / "previous").rglob("layers/model_summary.json"))
    assert [path.read_bytes() for path in kept] == [content]
    assert read_profile(summary).num_runs == 3


def test_without_layers_the_trace_alone_is_recorded_with_the_ranges_asked_for(run, results, monkeypatch):
    ranges = []
    monkeypatch.setattr("torch.cuda.nvtx.range_push", ranges.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: None)
    assert run("layers.enabled=false", "trace.nvtx=true") == 0
    assert (results / "profiler_traces" / "manifest.json").is_file() and not (results / "layers").exists()
    assert ranges[:2] == ["step_0", "step_1"]


def test_stacks_that_the_disk_did_not_take_leave_the_step_incomplete_and_resume_makes_it_anew(
    run, results, monkeypatch, capsys
):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Exported, "write_stacks", fail)
        assert run("layers.enabled=false") == 4
    assert "stacks: OSError: [Errno 5] Input/output error" in capsys.readouterr().out
    assert run("layers.enabled=false", "--resume") == 0
    assert (results / "profiler_traces" / "flame_graph.html").is_file()


def test_with_neither_nothing_is_recorded(run, results, capsys):
    assert run("layers.enabled=false", "trace.enabled=false") == 0
    assert "trace.enabled and layers.enabled are false: nothing to record" in capsys.readouterr().err
    assert not (results / "layers").exists() and not (results / "profiler_traces").exists()


def test_runs_are_lowered_to_the_budget(run, results, capsys):
    assert run("trace.enabled=false", "layers.num_runs=50", "layers.max_seconds=1e-9") == 0
    profile = read_profile(results / "layers" / "model_summary.json")
    assert profile.num_runs == LEAST_RUNS and f"runs: {LEAST_RUNS} of 50 fitted into 1e-09 s" in profile.doubts
    assert "50 runs with probes and as many without, or what fits into 1e-09 s" in capsys.readouterr().err


def test_terminal_shows_trust_first_and_the_longest_blocks():
    profile = replace(profiles.gpt2(), doubts=("disturbed: other processes",))
    trust, *rows = profiling.console_lines(profile)
    called = sum(layer.calls > 0 for layer in profile.layers)
    assert trust == f"profiled {called} layers in 60 runs: coverage 100.4 % (pass), overhead +0.4 %"
    assert len(rows) == profiling.SHOWN and rows[0].endswith("lm_head")
    shares = [float(row.split()[0]) for row in rows]
    assert shares == sorted(shares, reverse=True)
