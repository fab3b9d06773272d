"""The checks of `make gpu`: what they expect, that none can cost another, and what they find on the stand-in card."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import conftest as gpu
from tests.gpu import test_card, test_models, test_programs
from tests.gpu.subject import Card
from tests.gpu_double import H100, environment

ROOT = Path(__file__).resolve().parents[1]
CHECKS = {
    name.removeprefix("test_"): next(mark for mark in check.pytestmark if mark.name == "gpu").kwargs
    for module in (test_card, test_models, test_programs)
    for name, check in vars(module).items()
    if name.startswith("test_")
}
# What is known of sound cards: read off data sheets, reckoned (H200: docs/gpu-reading.md), or what must be so.
SOUND = {
    "depth_of_the_launch_queue": [1022, 1024, 4000],
    "attention_kernels": [0],
    "sustained_products": [0.75, 0.9, 1.0, 900 / 1590],  # a T4 at its 70 W
    "energy_counter": [0.85, 1.0, 1.2],
    "peak_of_memory": [0.0],
    "broken_capture": [0.0],
    "device_time": [0.7, 0.95, 1.1],
    "graph_replay_of_a_padded_batch": [0.9, 1.0, 4.0],  # bound by arithmetic, or by launches
    "packed_texts_against_float32_one_by_one": [0.05, 0.6],
    "packed_texts_against_stock_in_the_same_dtype": [0.4, 1.0, 2.0],
    "norms_in_one_kernel": [(1008 - 245) / 1008],
    "out_of_memory_in_a_sweep": [0],
    "sweep_of_a_classifier": [0],
    "evaluation_of_a_whole_set": [0.42, 0.55, 0.85],  # an H200 at both ends, padded float32 on a T4
    "layers_of_gpt_2": [0.9, 1.0, 1.03],
    "the_pipeline": [0],
    "a_gpu_that_is_lost_in_the_sweep": [0],
    "callback": [1],
    "range_of_nsight_systems": [1],
}
WRONG = {  # what each must not let pass
    "depth_of_the_launch_queue": [100],
    "attention_kernels": [1],
    "sustained_products": [0.2, 3.0],
    "energy_counter": [0.0, 1000.0],
    "peak_of_memory": [2.0],
    "broken_capture": [64.0],
    "device_time": [0.1, 10.0],
    "graph_replay_of_a_padded_batch": [0.5],
    "packed_texts_against_float32_one_by_one": [1.1],
    "packed_texts_against_stock_in_the_same_dtype": [30.0],
    "norms_in_one_kernel": [1.0],
    "out_of_memory_in_a_sweep": [1],
    "sweep_of_a_classifier": [1],
    "evaluation_of_a_whole_set": [0.05, 2.0],
    "layers_of_gpt_2": [0.3, 2.0],
    "the_pipeline": [1],
    "a_gpu_that_is_lost_in_the_sweep": [1],
    "callback": [0],
    "range_of_nsight_systems": [0],
}


def is_in(value: float, expected: dict) -> bool:
    return expected["low"] <= value and (expected["high"] is None or value <= expected["high"])


@pytest.mark.parametrize("name", CHECKS)
def test_a_range_has_a_reason_takes_what_a_sound_card_gives_and_refuses_what_it_does_not(name):
    expected = CHECKS[name]
    assert expected["reason"] and expected["unit"]
    assert [value for value in SOUND[name] if not is_in(value, expected)] == []
    assert [value for value in WRONG[name] if is_in(value, expected)] == []
    assert expected.get("limit_s", gpu.LIMIT_S) < gpu.SECONDS


CONFTEST = """
from pathlib import Path
from tests.gpu import conftest as gpu
from tests.gpu.conftest import *
gpu.HERE, gpu.NODES = Path(__file__).parent, ""
gpu._card = lambda: {}
gpu.SECONDS, gpu.LEAST_S = {}, 0.0
"""
SCRATCH = """
import os, subprocess, sys, time, pytest
def check(limit_s=60.0):
    return pytest.mark.gpu(low=0, high=2, unit="s", reason="so it is", limit_s=limit_s)
@check()
def test_fine(measured):
    measured(1, process=os.getpid())
@check(limit_s=0.5)
def test_hangs(measured):
    subprocess.Popen(["sleep", "300"], pass_fds=[int(os.environ["WRITER"])])
    time.sleep(300)
@check()
def test_dies(measured):
    os._exit(7)
@check()
def test_raises(measured):
    raise RuntimeError("CUDA error: an illegal memory access\\nmore")
@check()
def test_wrong(measured):
    measured(3, way="another")
@check()
def test_unknown(measured):
    measured(None)
@check()
def test_silent(measured):
    pass
@check()
def test_lacks(measured):
    pytest.skip("nsys is not installed")
@check()
def test_last(measured):
    measured(2, process=os.getpid())
"""


def pytest_in(folder: Path, *arguments: object, env: dict[str, str] | None = None, **settings: object):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    known = {**(env or os.environ), "PYTHONPATH": os.pathsep.join([str(ROOT), (env or {}).get("PYTHONPATH", "")])}
    known.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, **settings)


def lines_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scratch(folder: Path, card: str = '{"device": "a stand-in"}', seconds: float = 480.0, **settings: object):
    """Run the checks of `SCRATCH` in a folder, and return how pytest ended."""
    (folder / "conftest.py").write_text(CONFTEST.format(card, seconds))
    (folder / "test_scratch.py").write_text(SCRATCH)
    alone = ["-c", os.devnull, "--rootdir", folder, folder, "--lines", folder / "lines.jsonl"]
    return pytest_in(folder, *alone, **settings)


def test_a_check_that_hangs_dies_or_raises_costs_no_other_and_what_it_began_is_ended(tmp_path):
    reader, writer = os.pipe()
    known = {**os.environ, "WRITER": str(writer)}
    done = scratch(tmp_path, env=known, pass_fds=[writer])
    os.close(writer)
    assert os.read(reader, 1) == b"", "nobody else has it open any more"
    os.close(reader)
    assert done.returncode == 1, done.stdout + done.stderr
    head, *result = lines_in(tmp_path / "lines.jsonl")
    assert head == {"device": "a stand-in"}
    assert {line["name"]: (line["verdict"], line["why"]) for line in result} == {
        "fine": ("ok", None),
        "hangs": ("failed", "no answer within 0 s"),
        "dies": ("failed", "its process ended with 7"),
        "raises": ("failed", "RuntimeError: CUDA error: an illegal memory access"),
        "wrong": ("look", "3 s, expected 0 to 2: so it is"),
        "unknown": ("look", "None s, expected 0 to 2: so it is"),
        "silent": ("failed", "it measured nothing"),
        "lacks": ("not here", "nsys is not installed"),
        "last": ("ok", None),
    }
    first, last = result[0], result[-1]
    assert first["facts"]["process"] != last["facts"]["process"]
    assert {name: value for name, value in first.items() if name not in ("seconds", "facts")} == {
        "name": "fine", "value": 1, "expected": [0, 2], "unit": "s", "reason": "so it is", "verdict": "ok", "why": None,
    }  # fmt: skip
    shown = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert shown == result, "each is printed as it is written"


def test_a_check_for_which_no_time_is_left_is_not_here_and_no_failure(tmp_path):
    assert scratch(tmp_path, seconds=-1.0).returncode == 0
    result = lines_in(tmp_path / "lines.jsonl")[1:]
    assert {(line["verdict"], line["why"]) for line in result} == {("not here", "no time was left for it")}


def test_other_tests_of_the_same_run_are_run_as_ever(tmp_path):
    checks = tmp_path / "checks"
    checks.mkdir()
    (checks / "conftest.py").write_text(CONFTEST.format("{}", 480.0))
    (checks / "test_scratch.py").write_text(SCRATCH)
    other = "import os\ndef test_it(): open('ran', 'w').write(str(os.getppid()))\n"
    (tmp_path / "test_other.py").write_text(other)
    alone = ["-c", os.devnull, "--rootdir", tmp_path, "-k", "it or fine", "--lines", tmp_path / "lines.jsonl"]
    done = pytest_in(tmp_path, *alone, checks / "test_scratch.py", tmp_path / "test_other.py")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
    assert (tmp_path / "ran").read_text() == str(os.getpid()), "in the process of pytest"
    assert [line["name"] for line in lines_in(tmp_path / "lines.jsonl")[1:]] == ["fine"]


def test_a_card_that_cannot_be_used_is_one_line_and_3(tmp_path):
    done = scratch(tmp_path, card='"the GPU cannot be used: CUDA error: device busy"')
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "the GPU cannot be used: CUDA error: device busy\n"
    assert not (tmp_path / "lines.jsonl").exists()


def test_without_a_card_there_is_one_line_and_3():
    done = pytest_in(ROOT, "tests/gpu", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1 and "run this on a machine with one" in done.stderr


@pytest.mark.parametrize(
    ("asked", "left"), [(["tests"], 1), (["tests/gpu"], 2), (["tests/gpu/test_card.py::a", "b"], 2)]
)
def test_a_run_of_other_tests_leaves_the_checks_out(asked, left):
    items = [SimpleNamespace(path=ROOT / "tests" / name) for name in ("gpu/test_card.py", "test_docs.py")]
    out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: out.extend(items))
    config = SimpleNamespace(args=asked, invocation_params=SimpleNamespace(dir=ROOT), hook=hook)
    gpu.pytest_collection_modifyitems(config, items)
    assert (len(items), len(out)) == (left, 2 - left)


def test_make_gpu_runs_them():
    said = subprocess.run(["make", "-n", "gpu", "ARGS=-k depth"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "-m pytest -q tests/gpu -k depth" in said and "setup_environment.sh --gpu" in said


def test_what_the_checks_import_asks_for_no_gpu():
    """CUDA cannot be used in a process that was forked from one that has asked for its GPUs."""
    code = (
        "import sys, torch, traceback\n"
        "def asked(*_, **__): traceback.print_stack(); sys.exit(1)\n"
        "for name in ('device_count', 'is_available', '_lazy_init'): setattr(torch.cuda, name, asked)\n"
        "import tests.gpu.subject, tests.gpu.test_card, tests.gpu.test_models, tests.gpu.test_programs"
    )
    known = environment(H100, {**os.environ, "PYTHONPATH": str(ROOT)})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def on_the_double(folder: Path, card: object, *arguments: str) -> list[dict]:
    """Return the lines of checks with small models on a stand-in card."""
    done = pytest_in(ROOT, *arguments, "--small", "--lines", folder / "lines.jsonl", env=environment(card))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    head, *result = lines_in(folder / "lines.jsonl")
    assert head["device"]["name"] == card.name
    return result


def verdicts(found: list[dict]) -> dict[str, str]:
    return {line["name"]: f"{line['verdict']} {line['why'] or ''}".strip() for line in found}


def test_the_card_itself_is_as_expected_on_the_stand_in(tmp_path):
    result = verdicts(on_the_double(tmp_path, H100.slower(3000), "tests/gpu/test_card.py"))
    assert set(result.values()) == {"ok"} and len(result) == 6, result


def test_models_are_as_expected_on_the_stand_in(tmp_path):
    slow = H100.slower(60_000, host=40).with_(bytes_per_s=H100.bytes_per_s)
    words = "not device_time or (24 and bfloat16)"
    result = verdicts(on_the_double(tmp_path, slow, "tests/gpu/test_models.py", "-k", words))
    assert set(result.values()) == {"ok"} and len(result) == 9, result


@pytest.mark.truth
def test_a_gpu_that_fails_in_the_sweep_ends_as_expected_on_the_stand_in(tmp_path):
    fails = H100.slower(2000, host=20).with_(fails_at=9000)
    result = verdicts(on_the_double(tmp_path, fails, "tests/gpu/test_programs.py", "-k", "lost"))
    assert result == {"a gpu that is lost in the sweep": "ok"}


class Judged(list):
    """Stands in for `measured`: keeps the value that a check has handed over."""

    def __call__(self, value, **facts):
        self.append(value)


def ran(leaves: dict[str, str], code: int, folder: Path):
    """Stand in for a program that leaves these files and ends with this code."""

    def program(*command: object) -> SimpleNamespace:
        for name, text in leaves.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return SimpleNamespace(returncode=code, stdout="", stderr="error: it broke\n" * bool(code))

    return program


REPORT = {"results/report.html": "x", "results/variants.json": "{}"}
TIMED, UNTIMED = (
    {"results/detailed_metrics.csv": f"batch_size,device_per_batch_ms\n1,2.5\n8,{ms}\n"} for ms in ("3", "")
)


@pytest.mark.parametrize(
    ("leaves", "code", "wrong"),
    [({**REPORT, **TIMED}, 0, 0), ({**REPORT, **TIMED}, 4, 0), ({**REPORT, **TIMED}, 1, 1), (TIMED, 0, 2)]
    + [({**REPORT, **UNTIMED}, 0, 1), (REPORT, 0, 1), ({}, 3, 4)],
)
def test_the_pipeline_is_judged_by_its_exit_its_report_and_its_device_times(tmp_path, monkeypatch, leaves, code, wrong):
    monkeypatch.setattr(test_programs.workplace, "prepare", lambda *_: [])
    monkeypatch.setattr(test_programs, "program", ran(leaves, code, tmp_path))
    test_programs.test_the_pipeline(tmp_path, judged := Judged())
    assert judged == [wrong]


@pytest.mark.parametrize(
    ("said", "code", "kept", "wrong"),
    [
        ("error: the GPU is lost: go on with --resume", 3, True, 0),
        ("error: the GPU is lost", 3, True, 1),
        ("Traceback\nerror: go on with --resume", 1, True, 1),
        ("error: go on with --resume\nerror: twice", 3, True, 1),
        ("error: go on with --resume", 0, False, 2),
    ],
)
def test_a_lost_gpu_is_judged_by_its_one_line_and_by_what_is_kept(tmp_path, monkeypatch, said, code, kept, wrong):
    leaves = {"results/baseline_metrics.json": "{}"} if kept else {}
    done = ran(leaves, code, tmp_path)

    def program(*command: object) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(done()), "stderr": said})

    monkeypatch.setattr(test_programs.workplace, "prepare", lambda *_: [])
    monkeypatch.setattr(test_programs, "program", program)
    test_programs.test_a_gpu_that_is_lost_in_the_sweep(tmp_path, judged := Judged())
    assert judged == [wrong]


@pytest.mark.parametrize(
    ("leaves", "code", "value"), [(["run/a_stage_times.json"], 0, 1), ([], 0, 0), (["run/stage_times.json"], 1, 0)]
)
def test_callbacks_are_judged_by_what_they_leave(tmp_path, monkeypatch, leaves, code, value):
    monkeypatch.setattr(test_programs, "program", ran(dict.fromkeys(leaves, "{}"), code, tmp_path))
    test_programs.test_callback(tmp_path, judged := Judged(), None, "trainer")
    assert judged == [value]


def test_a_range_of_nsight_is_judged_by_its_report_and_not_here_without_nsys(tmp_path, monkeypatch):
    monkeypatch.setattr(test_programs, "program", ran({"it.nsys-rep": "x"}, 0, tmp_path))
    monkeypatch.setattr(test_programs.shutil, "which", lambda name: name)
    test_programs.test_range_of_nsight_systems(tmp_path, judged := Judged(), None)
    assert judged == [1]
    monkeypatch.setattr(test_programs.shutil, "which", lambda name: None)
    card = Card(torch.device("cpu"))
    with pytest.raises(pytest.skip.Exception, match="nsys is not installed"):
        test_programs.test_range_of_nsight_systems(tmp_path, judged, card)


@pytest.mark.truth
def test_a_card_with_a_short_queue_is_to_be_looked_at(tmp_path):
    [line] = on_the_double(tmp_path, H100.with_(queue_depth=256), "tests/gpu/test_card.py", "-k", "depth")
    assert (line["verdict"], line["value"]) == ("look", 254)
