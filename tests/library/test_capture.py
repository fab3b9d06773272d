"""Captures of small models on the CPU, and what happens when the profiler or the model fails.

python -m pytest tests/library/test_capture.py
"""

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler as autograd_profiler

from boundby import files
from boundby.capture import CaptureManifest, CaptureOptions, capture
from boundby.capture.exclusion import AT_WORK
from boundby.trace import op_stats, operator_rows, read_trace

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
LAYERS, STEPS = 2, 3
PROBE = 1  # step that is recorded alone to learn its size


@pytest.fixture(autouse=True)
def no_profiler_outlives_a_test() -> Iterator[None]:
    yield
    assert not autograd_profiler._is_profiler_enabled


def small_step(number: int) -> None:
    torch.ones(4, 4) @ torch.ones(4, 4)


def record(folder: Path, step=small_step, *, steps=STEPS, warmup=1, **options) -> CaptureManifest:
    path = folder / "trace.json.gz"
    return capture(step, device=CPU, steps=steps, warmup=warmup, trace_path=path, options=CaptureOptions(**options))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> CaptureManifest:
    """A capture of a two-layer Qwen2 classifier whose matrix products outweigh everything else."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_labels=3,
        pad_token_id=0,
    )
    model = Qwen2ForSequenceClassification(config).eval()
    tokens = torch.randint(1, 50, (4, 64))

    def step(number: int) -> None:
        with torch.inference_mode():
            model(input_ids=tokens)

    folder = tmp_path_factory.mktemp("qwen")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine a thread that waits for another one makes any operator look slow
    manifest = record(folder, step, stacks_path=folder / "stacks.txt")
    torch.set_num_threads(threads)
    return manifest


def test_the_manifest_of_a_good_capture_has_no_remarks(qwen: CaptureManifest) -> None:
    assert (qwen.steps_expected, qwen.steps_recorded, qwen.activities) == (STEPS, STEPS, ("CPU",))
    assert (qwen.downgrades, qwen.warnings) == ((), ())
    assert qwen.torch_version == torch.__version__
    assert qwen.trace_bytes == qwen.trace_path.stat().st_size
    assert json.loads(files.encode_json(dataclasses.asdict(qwen)))["trace_path"] == str(qwen.trace_path)


def test_the_trace_has_what_a_viewer_needs(qwen: CaptureManifest) -> None:
    events = json.loads(gzip.decompress(qwen.trace_path.read_bytes()))["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert all({"ph", "name", "ts", "dur", "pid", "tid"} <= e.keys() for e in complete)
    assert sum(e["cat"] == "cpu_op" for e in complete) > 100
    assert {e["name"] for e in complete if e["name"].startswith("ProfilerStep")} == {
        f"ProfilerStep#{PROBE + k}" for k in (1, 2, 3)
    }
    assert any(e["name"] == "[memory]" for e in events)
    assert not any(e.get("cat") == "python_function" for e in events)


def test_operators_are_counted_exactly_and_matrix_products_lead(qwen: CaptureManifest) -> None:
    stats = op_stats(read_trace(qwen.trace_path))
    calls: Counter[str] = Counter()
    self_ns: Counter[str] = Counter()
    for stat in stats:
        calls[stat.name] += stat.calls
        self_ns[stat.name] += stat.cpu_self_ns
    assert calls["aten::linear"] == (7 * LAYERS + 1) * STEPS  # q, k, v, o, gate, up, down; and the classifier
    assert calls["aten::embedding"] == STEPS
    assert self_ns.most_common(1)[0][0] in ("aten::mm", "aten::addmm")
    down = [stat for stat in stats if stat.input_shapes == "[[256, 1024], [1024, 512]]"]
    assert [(stat.name, stat.calls) for stat in down] == [("aten::mm", LAYERS * STEPS)]
    assert sum(row["cpu_self_pct"] for row in operator_rows(stats)) == pytest.approx(100)


def test_calls_and_times_equal_the_table_of_torch(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    table = {row.key: row for row in profile.key_averages() if not row.is_user_annotation}
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    stats = {stat.name: stat for stat in op_stats(read_trace(tmp_path / "trace.json"))}
    assert {name: row.count for name, row in table.items()} == {name: stat.calls for name, stat in stats.items()}
    for name, stat in stats.items():
        assert stat.cpu_self_ns == pytest.approx(1000 * table[name].self_cpu_time_total, abs=1), name
        assert stat.cpu_total_ns == pytest.approx(1000 * table[name].cpu_time_total, abs=1), name


def test_the_stacks_lead_through_the_forward_of_the_model(qwen: CaptureManifest) -> None:
    lines = qwen.stacks_path.read_text().splitlines()
    assert all(re.fullmatch(r"\S+ [1-9]\d*", line) for line in lines)
    for frame in ("nn.Module:_Qwen2DecoderLayer_1", "modeling_qwen2.py", "test_capture.py", "built-in_function_linear"):
        assert any(frame in line for line in lines), frame
    assert not any("torch/profiler/profiler.py" in line for line in lines)


def test_only_the_named_files_remain(qwen: CaptureManifest) -> None:
    assert sorted(path.name for path in qwen.trace_path.parent.iterdir()) == ["stacks.txt", "trace.json.gz"]


def test_a_cpu_says_what_it_cannot_give(qwen: CaptureManifest) -> None:
    assert [remark.what for remark in qwen.unavailable] == ["device events", "memory snapshot"]


def test_the_suffix_decides_compression(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a" / "trace.json", tmp_path / "b" / "trace.json.gz"
    for path in (plain, packed):
        capture(small_step, device=CPU, steps=1, warmup=1, trace_path=path)
    assert json.loads(plain.read_bytes())["traceEvents"]
    assert json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]


def test_shapes_and_memory_can_be_left_out(tmp_path: Path) -> None:
    manifest = record(tmp_path, shapes=False, memory=False)
    assert {stat.input_shapes for stat in op_stats(read_trace(manifest.trace_path))} == {None}
    assert b"[memory]" not in gzip.decompress(manifest.trace_path.read_bytes())


def test_steps_are_numbered_on_through_probe_warmup_trace_and_stacks(tmp_path: Path) -> None:
    numbers: list[int] = []
    record(tmp_path, numbers.append, steps=3, warmup=2, stacks_path=tmp_path / "stacks.txt")
    assert numbers == list(range(PROBE + (2 + 3) + (2 + 1)))


@pytest.mark.parametrize(
    ("name", "steps", "warmup", "fault"),
    [("trace.txt", 1, 1, r"trace\.txt.*\.json"), ("t.json", 0, 1, "steps is 0"), ("t.json", 1, -1, "warmup is -1")],
)
def test_refuses_what_cannot_be_recorded(tmp_path: Path, name: str, steps: int, warmup: int, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        capture(small_step, device=CPU, steps=steps, warmup=warmup, trace_path=tmp_path / name)


# Failures of the program


@pytest.mark.parametrize(
    "at", [0, 1, 2, 3, 5]
)  # the probe; before, at the start of and inside the recording; the stacks
def test_an_error_of_the_program_passes_and_leaves_no_file(tmp_path: Path, at: int) -> None:
    def step(number: int) -> None:
        small_step(number)
        if number == at:
            raise ZeroDivisionError("the model")

    with pytest.raises(ZeroDivisionError, match="the model"):
        record(tmp_path, step, stacks_path=tmp_path / "stacks.txt")
    assert [path.name for path in tmp_path.iterdir()] == (["trace.json.gz"] if at == 5 else [])
    assert record(tmp_path).downgrades == ()


def test_warnings_of_the_program_reach_its_user(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="from the model"):
        record(tmp_path, lambda number: warnings.warn("from the model", stacklevel=1))


# Failures of the profiler


def failing(*args: object, **kwargs: object) -> None:
    raise RuntimeError("!stack.empty() INTERNAL ASSERT FAILED\nframe #0: c10::Error")


@pytest.mark.parametrize("method", ["__init__", "start", "step", "start_trace", "stop_trace", "export_chrome_trace"])
def test_a_failing_profiler_does_not_stop_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    numbers: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, method, failing)
        manifest = record(tmp_path, numbers.append)
    if method == "stop_trace":  # nothing else would switch torch's profiler off
        autograd_profiler._disable_profiler()
        autograd_profiler._run_on_profiler_stop()
    assert numbers == list(range(PROBE + 1 + STEPS))
    assert [remark.what for remark in manifest.downgrades] == ["size estimate", "trace"]
    assert manifest.downgrades[0].reason == "RuntimeError: !stack.empty() INTERNAL ASSERT FAILED"
    assert manifest.estimated_bytes is None
    assert (manifest.trace_path, manifest.trace_bytes, manifest.steps_recorded) == (None, None, 0)
    assert list(tmp_path.iterdir()) == []
    assert record(tmp_path).steps_recorded == STEPS


def test_failing_stacks_do_not_cost_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.profiler.profile.step
    monkeypatch.setattr(
        torch.profiler.profile, "step", lambda profile: failing() if profile.with_stack else step(profile)
    )
    manifest = record(tmp_path, stacks_path=tmp_path / "stacks.txt")
    assert (manifest.steps_recorded, manifest.stacks_path) == (STEPS, None)
    assert [remark.what for remark in manifest.downgrades] == ["stacks"]


def test_another_profiler_at_work_is_a_downgrade(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as others:
        manifest = record(tmp_path)
    assert [(remark.what, remark.reason) for remark in manifest.downgrades] == [
        ("size estimate", AT_WORK),
        ("trace", AT_WORK),
    ]
    assert "aten::mm" in {event.name for event in others.events()}


def test_warnings_of_the_profiler_are_kept_in_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.profiler.profile.start_trace

    def warning(profile: torch.profiler.profile) -> None:
        warnings.warn("CUPTI stopped early", stacklevel=1)
        start(profile)

    monkeypatch.setattr(torch.profiler.profile, "start_trace", warning)
    manifest = record(tmp_path)
    assert manifest.warnings == ("CUPTI stopped early",)
    assert manifest.steps_recorded == STEPS


def test_a_recording_without_warmup_says_what_that_costs(tmp_path: Path) -> None:
    manifest = record(tmp_path, warmup=0)
    assert [remark.what for remark in manifest.downgrades] == ["warm-up"]
    assert manifest.steps_recorded == STEPS


# Size


def bulky_step(number: int) -> None:
    ones = torch.ones(2, 2)
    for _ in range(200):
        ones.add(ones)


def growing_step(number: int) -> None:
    bulky_step(number)
    if number > PROBE:  # from the first recorded step on
        bulky_step(number)


def json_bytes(manifest: CaptureManifest) -> int:
    return len(gzip.decompress(manifest.trace_path.read_bytes()))


def test_the_size_of_one_step_tells_that_of_all(tmp_path: Path) -> None:
    manifest = record(tmp_path, bulky_step, steps=4)
    assert manifest.estimate_reason is None
    assert (
        json_bytes(manifest) <= manifest.estimated_bytes < 1.2 * json_bytes(manifest)
    )  # the header is counted 4 times
    assert manifest.cycles[0].json_bytes == json_bytes(manifest)


def test_one_step_needs_no_estimate_and_says_so(tmp_path: Path) -> None:
    numbers: list[int] = []
    manifest = record(tmp_path, numbers.append, steps=1)
    assert numbers == [0, 1]
    assert (manifest.estimated_bytes, manifest.estimate_reason) == (
        None,
        "one step was asked for, and nothing is smaller",
    )


def test_an_estimate_above_the_limit_shortens_the_recording(tmp_path: Path) -> None:
    numbers: list[int] = []

    def step(number: int) -> None:
        bulky_step(number)
        numbers.append(number)

    limit = json_bytes(record(tmp_path / "whole", bulky_step, steps=4)) * 3 // 5
    manifest = record(tmp_path / "part", step, steps=4, max_trace_bytes=limit)
    assert (manifest.steps_expected, manifest.steps_recorded) == (4, 2)
    assert numbers == list(range(PROBE + 1 + 2))  # no step is recorded in vain
    (remark,) = manifest.downgrades
    assert remark.what == "steps"
    assert re.fullmatch(r"4 step\(s\) would make about .* above the limit of .*; 2 instead", remark.reason)
    assert json_bytes(manifest) <= limit


def test_a_trace_above_the_limit_is_recorded_again_with_fewer_steps(tmp_path: Path) -> None:
    limit = json_bytes(record(tmp_path / "whole", growing_step, steps=4)) * 3 // 5
    manifest = record(tmp_path / "part", growing_step, steps=4, max_trace_bytes=limit)
    assert (manifest.steps_expected, manifest.steps_recorded) == (4, 2)
    (remark,) = manifest.downgrades
    assert remark.what == "steps"
    assert re.fullmatch(r"4 step\(s\) made .* above the limit of .*; 2 instead", remark.reason)
    assert json_bytes(manifest) <= limit


def test_one_step_above_the_limit_loses_shapes_and_memory_first(tmp_path: Path) -> None:
    lean = record(tmp_path / "lean", bulky_step, steps=1, shapes=False, memory=False)
    limit = len(gzip.decompress(lean.trace_path.read_bytes())) * 11 // 10
    manifest = record(tmp_path / "part", bulky_step, steps=1, max_trace_bytes=limit)
    assert [remark.what for remark in manifest.downgrades] == ["shapes and memory"]
    assert {stat.input_shapes for stat in op_stats(read_trace(manifest.trace_path))} == {None}


def test_a_limit_that_nothing_meets_leaves_no_trace(tmp_path: Path) -> None:
    manifest = record(tmp_path, steps=2, max_trace_bytes=10, stacks_path=tmp_path / "stacks.txt")
    assert [remark.what for remark in manifest.downgrades] == ["steps", "shapes and memory", "trace", "stacks"]
    assert (manifest.trace_path, manifest.stacks_path) == (None, None)
    assert list(tmp_path.iterdir()) == []


# The terminal


PROGRAM = """
import os, sys, torch
from pathlib import Path
from boundby.capture import capture
def step(number):
    os.write(2, b"the model speaks\\n")
    torch.ones(2) + 1
capture(step, device=torch.device("cpu"), steps=1, warmup=1, trace_path=Path(sys.argv[1]))
print(os.environ.get("KINETO_LOG_LEVEL"))
"""


def test_the_terminal_belongs_to_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "trace.json")],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("None\n", "the model speaks\n" * 2)


def test_a_log_level_set_by_the_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    start = torch.profiler.profile.start
    monkeypatch.setenv("KINETO_LOG_LEVEL", "4")
    monkeypatch.setattr(
        torch.profiler.profile, "start", lambda profile: seen.append(os.environ["KINETO_LOG_LEVEL"]) or start(profile)
    )
    record(tmp_path, steps=1)
    assert (seen, os.environ["KINETO_LOG_LEVEL"]) == (["4"], "4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
def test_a_gpu_gives_device_times(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    matrix = torch.ones(512, 512, device=device)
    path = tmp_path / "trace.json.gz"
    manifest = capture(lambda number: matrix @ matrix, device=device, steps=STEPS, warmup=2, trace_path=path)
    assert (manifest.activities, manifest.downgrades, manifest.unavailable) == (("CPU", "CUDA"), (), ())
    stats = {stat.name: stat for stat in op_stats(read_trace(path))}
    assert stats["aten::mm"].calls == STEPS
    assert stats["aten::mm"].device_total_ns > 0
