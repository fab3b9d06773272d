"""What setup/verify.py and setup/gpu_and_torch.py find on a machine, and what they make of it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_and_torch
import pytest
import verify
from gpu_and_torch import Driver, Gpu, Torch

from tests.fakes import fake_nvidia_smi, fake_program

ROOT = Path(__file__).resolve().parents[2]
H100 = Gpu("NVIDIA H100", "550.54", 85_899_345_920)
CPU_TORCH = Torch("2.13.0+cpu", None, f"{sys.prefix}/lib/torch/__init__.py", sees_gpu=False)
CUDA_TORCH = Torch("2.13.0", "13.0", "/image/torch/__init__.py", sees_gpu=True)
ROCM_TORCH = Torch("2.13.0+rocm7.1", None, "/image/torch/__init__.py", sees_gpu=True, rocm="7.1")
MACHINE = verify.Machine(
    python="3.11.7",
    driver=Driver(absent="there is no nvidia-smi"),
    torch=CPU_TORCH,
    torch_version="2.13.0+cpu",
    packages={"numpy": ("2.4.6", "2.4.6")},
    memory_bytes=25_000_000_000,
    disks=(verify.Disk("/project", 80_000_000_000, "ext4"),),
    results="/project/results",
    results_problem=None,
    secrets_set=(),
    switches_set={},
)


# --- gpu_and_torch.py


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", (2, 13)), ("2.9.0a0+145a3a7bda.nv25.10", (2, 9)), ("2.10.0.dev20251101", (2, 10)), ("git", (0, 0))],
)
def test_release_is_read_from_pre_releases_and_local_builds(version, expected):
    assert gpu_and_torch.release(version) == expected


def test_torch_for_rocm_is_kept_and_called_by_its_name_where_there_is_no_nvidia_smi():
    assert gpu_and_torch.why_unusable(ROCM_TORCH, MACHINE.driver) is None
    facts = dict(verify.facts(replace(MACHINE, torch=ROCM_TORCH)))
    assert "built for ROCm 7.1" in facts["torch"] and facts["GPU"] == "AMD, seen by torch"
    assert not [text for text in facts.values() if "nvidia" in text.lower() or "CPU build" in text]


def test_torch_is_usable_from_2_8_on_where_it_can_use_the_gpu():
    for version, usable in (("2.7.1+cu128", False), ("2.8.0a0+34c6371d24.nv25.8", True), ("2.10.0", True)):
        assert (gpu_and_torch.why_unusable(replace(CPU_TORCH, version=version), Driver()) is None) == usable
    assert "CPU build) cannot use the NVIDIA H100" in gpu_and_torch.why_unusable(CPU_TORCH, Driver((H100,), "12.4"))
    blind = replace(CUDA_TORCH, sees_gpu=False, problem="The NVIDIA driver on your system is too old")
    reason = gpu_and_torch.why_unusable(blind, Driver((H100,), "12.4"))
    for part in ("CUDA 13.0", "driver 550.54", "CUDA up to 12.4", "too old"):
        assert part in reason


def driver_of(folder: Path, monkeypatch) -> Driver:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpu_and_torch.find_driver()


GIB_80 = 81920 * 2**20


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("a100-535", Driver((Gpu("NVIDIA A100-SXM4-80GB", "535.161.08", GIB_80),), "12.2")),
        (
            "a100-535-mig",
            Driver(
                (Gpu("NVIDIA A100-SXM4-80GB", "535.161.08", None, "nvidia-smi answers [Insufficient Permissions]"),),
                "12.2",
            ),
        ),
        ("gb10-580", Driver((Gpu("NVIDIA GB10", "580.95.05", None, "nvidia-smi answers [N/A]"),), "13.0")),
        ("b200-610", Driver((Gpu("NVIDIA B200", "610.43.02", 183359 * 2**20),), "13.3")),
        (
            "h100-550-no-libcuda",
            Driver((Gpu("NVIDIA H100 80GB HBM3", "550.127.05", 81559 * 2**20),), cuda_unknown="nvidia-smi answers N/A"),
        ),
        (
            "h100-550-inforom",
            Driver(
                (Gpu("NVIDIA H100 80GB HBM3", "550.127.05", 81559 * 2**20),) * 2,
                "12.4",
                warnings=("WARNING: infoROM is corrupted at gpu 0000:3B:00.0",),
            ),
        ),
        ("no-devices", Driver(absent="nvidia-smi lists no device")),
        ("mismatch", Driver(problem="Failed to initialize NVML: Driver/library version mismatch")),
        ("lost", Driver(problem="Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error")),
    ],
)
def test_driver_is_read_as_nvidia_smi_answers_on_a_machine(tmp_path, monkeypatch, machine, expected):
    fake_nvidia_smi(tmp_path, machine)
    assert driver_of(tmp_path, monkeypatch) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Tesla T4, 550.54, 15360", Gpu("Tesla T4", "550.54", 15360 * 2**20)),
        ("Tesla T4, 550.54, 15360 MiB", Gpu("Tesla T4", "550.54", 15360 * 2**20)),
        ("Card, of two parts, 550.54, 15360", Gpu("Card, of two parts", "550.54", 15360 * 2**20)),
        (", , ", Gpu("GPU without a name", None, None, "nvidia-smi answers nothing")),
        ("[Unknown Error], [N/A], ERR!", Gpu("[Unknown Error]", None, None, "nvidia-smi answers ERR!")),
        ("Tesla T4, 550.54, 0", Gpu("Tesla T4", "550.54", None, "nvidia-smi answers 0")),
        (
            "Tesla T4, 550.54, [GPU requires reset]",
            Gpu("Tesla T4", "550.54", None, "nvidia-smi answers [GPU requires reset]"),
        ),
        (r"Tesla \xff T4, 550.54, -1", Gpu(r"Tesla \xff T4", "550.54", None, "nvidia-smi answers -1")),
    ],
)
def test_a_gpu_of_which_nvidia_smi_knows_little_is_a_gpu_with_the_reason(tmp_path, monkeypatch, line, expected):
    answer = f"WARNING: a, line, more\n\n{line}\n".replace(r"\xff", "\udcff")
    (tmp_path / "answer").write_bytes(answer.encode("utf-8", "surrogateescape"))
    fake_program(tmp_path, "nvidia-smi", f'if [ $# -gt 0 ]; then echo "$(<{tmp_path}/answer)"; fi')
    driver = driver_of(tmp_path, monkeypatch)
    assert driver == Driver((expected,), None, None, None, "nvidia-smi names none", ("WARNING: a, line, more",))
    machine = replace(MACHINE, driver=driver)
    assert expected.name in dict(verify.facts(machine))["GPU"] and "WARNING: a, line" in verify.doubts(machine)[0]
    assert verify.problems(machine)  # this torch computes on the CPU alone


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("exit 0", Driver(absent="nvidia-smi lists no device")),
        ("exit 255", Driver(problem="nvidia-smi ended with code 255")),
        ("kill -SEGV $$", Driver(problem="nvidia-smi ended with code -11")),
        ("echo Unknown Error", Driver(problem="Unknown Error")),
        ("echo 'Unknown Error' >&2; exit 255", Driver(problem="Unknown Error")),
        ("echo WARNING: odd; echo; echo ERR!; exit 1", Driver(problem="ERR!")),
        (r"printf 'caf\xe9\n'; exit 1", Driver(problem=r"caf\xe9")),
        ("printf '%0500d' 0; exit 1", Driver(problem="0" * 200)),
    ],
)
def test_an_answer_that_names_no_gpu_is_a_problem_in_its_words(tmp_path, monkeypatch, body, expected):
    fake_program(tmp_path, "nvidia-smi", body)
    assert driver_of(tmp_path, monkeypatch) == expected


def test_an_nvidia_smi_that_cannot_be_run_or_hangs_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert driver_of(tmp_path, monkeypatch) == Driver(problem="nvidia-smi gives no answer (OSError)")

    def hangs_for(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
        if command == ["nvidia-smi"]:
            raise subprocess.TimeoutExpired(command, seconds)
        return subprocess.CompletedProcess(command, 0, "Tesla T4, 550.54, 15360\n", "")

    monkeypatch.setattr(gpu_and_torch, "answer_of", hangs_for)
    assert gpu_and_torch.find_driver().cuda_unknown == "nvidia-smi gives no answer (TimeoutExpired)"


def test_a_torch_that_ends_the_process_or_says_more_is_no_traceback(tmp_path, monkeypatch):
    ended = ask_fake_torch(tmp_path, monkeypatch, "import os; print('bye'); os._exit(0)")
    assert ended == Torch("2.13.0", problem="import torch ends the process")


def ask_fake_torch(folder: Path, monkeypatch, source: str) -> Torch | None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(gpu_and_torch, "version_of", lambda _: "2.13.0")
    return gpu_and_torch.ask_torch()


def test_torch_that_cannot_be_imported_is_reported_with_the_reason(tmp_path, monkeypatch):
    torch = ask_fake_torch(tmp_path, monkeypatch, "raise ImportError('libcudnn.so.9: no such file')")
    assert torch == Torch("2.13.0", problem="ImportError: libcudnn.so.9: no such file")
    assert "cannot be imported: ImportError: libcudnn" in gpu_and_torch.why_unusable(torch, Driver())


def test_gpu_that_cannot_compute_is_found_by_an_addition(tmp_path, monkeypatch):
    source = """
from types import SimpleNamespace as fake
def fail(_): raise RuntimeError("no kernel image is available\\nsecond line")
__version__, version, cuda = "2.13.0", fake(cuda="13.0"), fake(is_available=lambda: True)
def zeros(*_, **__): return fake(add_=fail)
"""
    torch = ask_fake_torch(tmp_path, monkeypatch, source)
    assert (torch.sees_gpu, torch.problem) == (True, "no kernel image is available")
    assert "fails to compute on the GPU" in gpu_and_torch.why_unusable(torch, Driver((H100,), "13.0"))


# --- verify.py


def run_verify(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_verify_answers_before_anything_is_installed(tmp_path):
    answer = run_verify("-S", str(ROOT / "setup/verify.py"), PATH=str(tmp_path), HOME=str(tmp_path))  # -S: stdlib only
    assert answer.returncode == 3
    assert "problem   not installed for this Python: torch, datasets," in answer.stdout
    assert "run `bash setup_environment.sh`" in answer.stdout


def test_missing_gpu_is_a_fact_and_secrets_are_named_and_never_shown(tmp_path):
    program, positions = str(ROOT / "setup/verify.py"), {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    answer = run_verify(program, "--skip-torch", **positions)
    assert "GPU       none: there is no nvidia-smi" in answer.stdout and answer.stderr == ""
    assert verify.problems(MACHINE) == []
    answer = run_verify(program, "--skip-torch", "--json", **positions, HF_TOKEN="hf_abc")
    assert json.loads(answer.stdout)["machine"]["secrets_set"] == ["HF_TOKEN"] and "hf_abc" not in answer.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": "3.13.0"}, "Python 3.13.0 is not supported"),
        ({"driver": Driver(problem="NVML: Driver/library version mismatch")}, "the GPU driver does not work: NVML"),
        ({"packages": {"numpy": ("2.4.6", None)}}, "not installed for this Python: numpy;"),
        ({"torch": None, "torch_version": None}, "not installed for this Python: torch;"),
        (
            {"torch": replace(CPU_TORCH, version="2.7.1")},
            "torch 2.7.1 is older than 2.8; run `bash setup_environment.sh`",
        ),
        ({"disks": (verify.Disk("/project", 1_000_000_000, "ext4"),)}, "/project has 1 GB free; 2 GB are needed"),
        ({"results_problem": "Read-only file system"}, "/project/results cannot be written: Read-only file system"),
    ],
)
def test_each_lack_is_one_line_that_names_it(changes, expected):
    (line,) = verify.problems(replace(MACHINE, **changes))
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_version": "2.8.0+cu128"}, "torch 2.8.0+cu128 is untested"),
        ({"driver": Driver((H100,), "12.4", warnings=("WARNING: infoROM",))}, "nvidia-smi says: WARNING: infoROM"),
        ({"packages": {"numpy": ("2.4.6", "2.2.0")}}, "numpy 2.2.0 (pinned 2.4.6)"),
        ({"disks": (verify.Disk("/root/boundby", 80_000_000_000, "overlay"),)}, "lost when the pod stops"),
        ({"switches_set": {"HF_XET_HIGH_PERFORMANCE": "1"}}, "needs 64 GB of memory, here 25 GB"),
        ({"switches_set": {"HF_HUB_ENABLE_HF_TRANSFER": "1"}}, "HF_HUB_ENABLE_HF_TRANSFER has no effect"),
        ({"switches_set": {"SSH_CONNECTION": "1.2.3.4"}}, "start it inside `tmux`"),
    ],
)
def test_each_doubt_is_one_line_that_names_it(changes, expected):
    (line,) = verify.doubts(replace(MACHINE, **changes))
    assert expected in line


def test_harmless_switches_give_no_doubt():
    for switches in (
        {"HF_XET_HIGH_PERFORMANCE": "0"},
        {"SSH_CONNECTION": "1.2.3.4", "TMUX": "/tmp/tmux"},
        {"TMUX": "/tmp/tmux"},
    ):
        assert verify.doubts(replace(MACHINE, switches_set=switches)) == []


def test_asking_whether_a_folder_can_be_written_leaves_none(tmp_path):
    assert verify.write_problem(tmp_path / "results" / "deep") is None
    assert not (tmp_path / "results").exists()
