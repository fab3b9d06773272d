"""What to do next: derived from the figures, the most pressing first, with commands that work."""

import argparse
import shlex
from pathlib import Path

import pytest

import run_pipeline
from tests import baseline_document as results
from tests.diagnosed_rows import diagnosed
from tests.pipeline.test_report_golden import RUNS
from tests.report_reading import Reader, advised, commands, pod, section, traced
from utils.command.cli import DEFAULT_CONFIG, ROOT
from utils.report import advice, sources
from utils.settings.schema import read_settings


def test_advice_is_ordered_by_its_gain(read):
    rows = diagnosed(results.gpu_rows(), gpu=True)
    data = pod(read, results.gpu_document(rows), **traced(device=True))
    gains = [step.gain for step in advice.advice(data) if step.gain]
    assert gains == sorted(gains, reverse=True) and len(gains) == 4
    assert advised(data)[:4] == [
        "Run the model in bfloat16",
        "Use batch size 8",
        "Sort by length, in the fastest precision that keeps the labels",
        "Launch the work at once (CUDA graphs, torch.compile)",
    ]
    said = section(data, "What to do next")
    assert "Use batch size 8: measured 2.8× [" in said
    assert "257.7 samples/s against 90.71 at batch size 1; a batch then takes 31.67 ms instead of 11.91 ms." in said
    more = section(data, "More to do")
    assert "Launch the work at once (CUDA graphs, torch.compile): measured 1.5× [" in more


def test_command_keeps_the_settings_and_the_configuration_of_the_run(read, monkeypatch):
    data = pod(read, overrides=["model.dtype=float32", "profiling.dtypes=[float32,bfloat16]"])
    [command] = [step.command for step in advice.advice(data) if step.title == "Run the model in bfloat16"]
    folder = f"output.results_dir={data.layout.results}-bfloat16"
    assert command == f"python run_pipeline.py --from 2 model.dtype=bfloat16 profiling.dtypes=null {folder}"
    monkeypatch.chdir(ROOT)

    def command(config: Path) -> str:
        return sources.Command.of(
            argparse.Namespace(config=config, overrides=["a.b=c d"], trust_remote_code=True)
        ).run()

    assert command(DEFAULT_CONFIG) == "python run_pipeline.py --trust-remote-code 'a.b=c d'"
    assert command(ROOT / "configs" / "quickstart.yaml").startswith(
        "python run_pipeline.py --config configs/quickstart.yaml"
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_every_command_of_the_report_runs_as_printed(run, tmp_path, monkeypatch):
    """Each is parsed by the runner, and its settings by the schema; NAME and FILE are for the reader to fill in."""
    monkeypatch.chdir(tmp_path)
    for command in filter(None, (step.command for step in advice.advice(run(Reader(Path("results")))))):
        words = [word for word in shlex.split(command) if not word.startswith("OMP_NUM_THREADS=")]
        assert words[0] == "python" and (ROOT / words[1]).is_file()
        args = run_pipeline.arguments().parse_intermixed_args(words[2:])
        assert run_pipeline.chosen(args, run_pipeline.arguments())
        read_settings(ROOT / (args.config or DEFAULT_CONFIG), args.overrides)


def test_noisy_rows_are_measured_again_for_longer(read):
    data = read(results.document(results.cpu_rows(noisy=[4, 16])))
    command = commands(data)["Measure noisy batch sizes again"]
    assert "'profiling.batch_sizes=[4,16]' profiling.max_seconds_per_batch_size=30" in command
    assert "Measure noisy batch sizes again" not in advised(read(results.document(results.cpu_rows())))


def test_slow_tokenizer_is_advice(read):
    slow = results.Speed(results.CPU.fixed_s, results.CPU.token_s, tokenize_s=30e-6)
    title = "Tokenize in a background worker"
    data = read(results.document(diagnosed(results.cpu_rows(speed=slow))))
    [result] = [step for step in advice.advice(data) if step.title == title]
    assert 1 < result.gain <= 2
    fast = results.Speed(results.CPU.fixed_s, results.CPU.token_s, tokenize_s=1e-7)
    assert title not in advised(read(results.document(diagnosed(results.cpu_rows(speed=fast)))))


def test_larger_batches_and_bfloat16_are_advised_where_they_were_not_measured(read):
    data = pod(read, results.gpu_document(results.gpu_rows(["bfloat16"], [1, 4, 8], {})))
    assert "'profiling.batch_sizes=[8,16,32]'" in commands(data)["Try larger batch sizes"]
    assert "Try larger batch sizes" not in advised(read(results.document(results.cpu_rows())))
    data = pod(read, results.gpu_document(results.gpu_rows(["float32"])))
    assert "'profiling.dtypes=[float32,bfloat16]'" in commands(data)["Measure bfloat16 beside float32"]
    assert "Measure bfloat16 beside float32" not in advised(pod(read))
    data = read(results.document(diagnosed(results.cpu_rows())))
    assert "model.matmul_precision=medium" in commands(data)["Float32 matmul at precision 'medium'"]
    assert "Run in bfloat16" not in advised(data)  # only a bound is known, where other fixes were tried


def test_what_failed_or_does_not_fit_comes_first(read):
    rows = results.gpu_rows(["float32"], [1, 4], {"float32": 1})
    data = pod(read, results.gpu_document(rows, full_dataset_metrics=None))
    assert advised(data) == ["Make the model fit"]
    assert "profiling.max_length=256" in commands(data)["Make the model fit"]
    data = read(results.document(results.cpu_rows(failed=[4])))
    assert advised(data)[0] == "Find out why batch sizes failed"
    assert "Batch size 4 failed: RuntimeError: kernel missing." in section(data, "What to do next")


def test_missed_targets_point_to_what_would_meet_them(read):
    strict = {"targets": {"latency_per_sample_ms": 4.5, "throughput_samples_per_sec": 1e6, "gpu_memory_mb": 5000}}
    document = results.gpu_document(full_dataset_metrics=None)
    why = {step.title: step.why for step in advice.advice(pod(read, document, settings=strict))}
    assert "Meet the latency target" not in why  # batch size 8 takes 4.0 ms
    assert why["Meet the memory target"].startswith("Batch size 1 (90.71 samples/s in the sweep)")
    assert "The sweep reached 265.9 samples/s at batch size 16" in why["Meet the throughput target"]


def test_cut_texts_may_be_measured_longer_up_to_what_the_model_takes(read):
    full = results.full_metrics(truncated=7)
    data = read(results.document(results.cpu_rows([1]), full_dataset_metrics=full))
    assert "profiling.max_length=1024" in commands(data)["See whether the cut texts cost accuracy"]
    document = results.document(results.cpu_rows([1]), full_dataset_metrics=full, max_length=1024)
    assert "See whether the cut texts cost accuracy" not in advised(read(document))
