"""Which torch set-up keeps, fetches or refuses, by the driver and the card, before anything is fetched."""

import platform
import subprocess
import sys

import choose_torch
import gpu_and_torch
import pytest
from gpu_and_torch import Torch

from tests.fakes import RECORDED

ORG = "https://download.pytorch.org/whl"
PIN = "-r setup/requirements-torch.txt"
FOR_12_6 = f"torch==2.13.0+cu126 --index-url {ORG}/cu126"
FOR_12_8 = f"torch==2.11.0+cu128 --index-url {ORG}/cu128"
FOR_ARM = f"torch==2.13.0+cu130 --index-url {ORG}/cu130"
KEPT = "kept"
# What each index lists, by its address; None is pip's own. 2.12 was the first without CUDA 12.8.
INDEXES = {
    None: "2.15.0, 2.14.1, 2.13.0, 2.12.1, 2.11.0, 2.8.0, 2.7.1",
    f"{ORG}/cpu": "2.14.1+cpu, 2.13.0+cpu, 2.11.0+cpu",
    f"{ORG}/cu126": "2.14.1+cu126, 2.13.0+cu126, 2.12.1+cu126, 2.7.1+cu126, 2.13.0",
    f"{ORG}/cu128": "2.11.0+cu128, 2.10.0+cu128, 2.9.1+cu128, 2.8.0+cu128, 2.13.0, 2.13.0+cpu",
    f"{ORG}/cu130": "2.14.1+cu130, 2.13.0+cu130, 2.9.0+cu130",
}
# The CUDA of each torch, and the first and the last compute capability that it has kernels for.
BUILDS = {
    "2.7.1+cu126": ((12, 6), 5.0, 9.0),
    "2.8.0+cu128": ((12, 8), 7.0, 12.1),
    "2.9.1+cu128": ((12, 8), 7.0, 12.1),
    "2.11.0+cu128": ((12, 8), 7.5, 12.1),
    "2.11.0": ((13, 0), 7.5, 12.1),
    "2.13.0": ((13, 0), 7.5, 12.1),
    "2.13.0+cu126": ((12, 6), 5.0, 9.0),
    "2.13.0+cu130": ((13, 0), 7.5, 12.1),
    "2.13.0+cpu": (None, 0.0, 0.0),
}
ON_THE_MACHINE = (None, "2.8.0+cu128", "2.9.1+cu128", "2.11.0", "2.13.0")
# machine, its processor, then what set-up does with each of the above
TABLE = [
    (None, "x86_64", (f"{PIN} --index-url {ORG}/cpu", KEPT, KEPT, KEPT, KEPT)),
    ("no-devices", "x86_64", (f"{PIN} --index-url {ORG}/cpu", KEPT, KEPT, KEPT, KEPT)),
    ("a100-535", "x86_64", (FOR_12_6, KEPT, KEPT, FOR_12_6, FOR_12_6)),
    ("a100-535-mig", "x86_64", (FOR_12_6, KEPT, KEPT, FOR_12_6, FOR_12_6)),
    ("h100-550", "x86_64", (FOR_12_6, KEPT, KEPT, FOR_12_6, FOR_12_6)),
    ("h100-550-inforom", "x86_64", (FOR_12_6, KEPT, KEPT, FOR_12_6, FOR_12_6)),
    ("h200-570", "x86_64", (FOR_12_6, KEPT, KEPT, FOR_12_6, FOR_12_6)),
    ("b200-570", "x86_64", (FOR_12_8, KEPT, KEPT, FOR_12_8, FOR_12_8)),
    ("h200-580", "x86_64", (PIN, KEPT, KEPT, KEPT, KEPT)),
    ("h200-580", "aarch64", (FOR_ARM, KEPT, KEPT, KEPT, KEPT)),
    ("b200-610", "x86_64", (PIN, KEPT, KEPT, KEPT, KEPT)),
    ("gb10-580", "aarch64", (FOR_ARM, KEPT, KEPT, KEPT, KEPT)),
    ("v100-580", "x86_64", (FOR_12_6, KEPT, KEPT, FOR_12_6, FOR_12_6)),
]
CASES = [
    pytest.param(machine, processor, there, expected, id=f"{machine}-{processor}-{there}")
    for machine, processor, row in TABLE
    for there, expected in zip(ON_THE_MACHINE, row, strict=True)
]


class Nowhere:
    """A machine with recorded answers of nvidia-smi, a torch and indexes, in this process; `asked` are the indexes."""

    def __init__(self, monkeypatch, machine: str | None, processor: str = "x86_64", there: str | None = None) -> None:
        self.indexes, self.asked = dict(INDEXES), []
        self.there, self._machine = there, machine
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(gpu_and_torch, "answer_of", self._answer)
        monkeypatch.setattr(choose_torch, "answer_of", self._answer)
        monkeypatch.setattr(choose_torch, "version_of", lambda _: self.there)
        monkeypatch.setattr(choose_torch, "ask_torch", lambda: self.torch(self.there))

    def torch(self, version: str | None) -> Torch | None:
        """Return what a torch says of itself here: it sees the GPU where the driver is of its CUDA's major version."""
        return None if version is None else Torch(**facts_of(version, self.driver(), self.capability()))

    def driver(self) -> gpu_and_torch.Driver:
        return gpu_and_torch.find_driver()

    def capability(self) -> float:
        lines = gpu_and_torch.nvidia_smi("compute_cap").stdout.splitlines() if self._machine else []
        return float(lines[0]) if lines and lines[0][0].isdigit() else 0.0

    def _answer(self, command: list[str], _: int) -> subprocess.CompletedProcess[str]:
        if command[0] == "nvidia-smi":
            return recorded(self._machine, command[1:])
        url = command[command.index("--index-url") + 1] if "--index-url" in command else None
        self.asked.append(url)
        listed = self.indexes.get(url)
        said = f"torch ({listed.split(', ')[0]})\nAvailable versions: {listed}\n" if listed else "ERROR: No matching\n"
        return subprocess.CompletedProcess(command, 0 if listed else 1, stdout=said, stderr="")


def recorded(machine: str | None, asked: list[str]) -> subprocess.CompletedProcess[str]:
    if machine is None:
        raise FileNotFoundError("nvidia-smi")
    sections = (RECORDED / f"{machine}.txt").read_text(encoding="utf-8").split("$ ")[1:]
    said = {call: rest for call, _, rest in (section.partition("\n") for section in sections)}
    text, _, code = said[" ".join(["nvidia-smi", *asked])].partition("exit ")
    return subprocess.CompletedProcess(asked, int(code or 0), stdout=text, stderr="")


def facts_of(version: str, driver: gpu_and_torch.Driver, capability: float) -> dict[str, object]:
    cuda, first, last = BUILDS[version]
    newest = float(driver.cuda or 0)
    sees_gpu = cuda is not None and int(newest) >= cuda[0]
    problem = None if not sees_gpu or first <= capability <= last else "no kernel image is available"
    build = ".".join(map(str, cuda)) if cuda else None
    return {"version": version, "cuda": build, "path": "/torch", "sees_gpu": sees_gpu, "problem": problem}


def chosen_version(arguments: str) -> str:
    if not arguments.startswith("-r"):
        return arguments.split()[0].removeprefix("torch==")
    return "2.13.0+cpu" if arguments.endswith("/cpu") else "2.13.0"


@pytest.mark.parametrize(("machine", "processor", "there", "expected"), CASES)
def test_a_torch_that_computes_is_kept_and_else_one_that_will_is_chosen(
    monkeypatch, capsys, machine, processor, there, expected
):
    here = Nowhere(monkeypatch, machine, processor, there)
    torch = here.torch(there)
    if torch and gpu_and_torch.why_unusable(torch, here.driver()) is None:
        assert expected == KEPT
        return
    assert choose_torch.main() == 0
    gigabytes, _, arguments = capsys.readouterr().out.strip().partition(" ")
    assert arguments == expected
    assert gigabytes == ("2" if "cpu" in expected else "9")
    assert gpu_and_torch.why_unusable(here.torch(chosen_version(arguments)), here.driver()) is None


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (
            "t4-470",
            "no torch from 2.8 on runs with driver 470.256.02, for CUDA up to 11.4, on the Tesla T4; take a machine",
        ),
        ("h100-550-no-libcuda", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ("mismatch", "does not work: Failed to initialize NVML: Driver/library version mismatch; restart or change"),
        ("no-driver", "does not work: NVIDIA-SMI has failed because it couldn't communicate"),
        ("lost", "does not work: Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error; restart"),
    ],
)
def test_where_no_torch_would_compute_one_line_says_what_to_do_and_no_index_is_asked(
    monkeypatch, capsys, machine, said
):
    here = Nowhere(monkeypatch, machine)
    assert choose_torch.main() == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line
    assert here.asked == []


@pytest.mark.parametrize("listed", [None, "2.7.1+cu126, 2.14.1+cu126, 2.13.0, 2.13.0rc1+cu126, nonsense+cu126"])
def test_an_index_without_a_torch_that_runs_is_told_in_one_line(monkeypatch, capsys, listed):
    here = Nowhere(monkeypatch, "h100-550")
    here.indexes = {f"{ORG}/cu126": listed}
    assert choose_torch.main() == 3
    (line,) = capsys.readouterr().out.splitlines()
    for part in ("driver 550.127.05, for CUDA up to 12.4", f"{ORG}/cu126", "2.8 to 2.13.0", "driver 580 or newer"):
        assert part in line


def test_the_newest_torch_up_to_the_pin_is_taken_from_the_best_index_that_answers(monkeypatch, capsys):
    here = Nowhere(monkeypatch, "h100-550")
    here.indexes = {f"{ORG}/cu128": "2.14.0+cu128, 2.9.1+cu128, 2.10.0+cu128, 2.7.1+cu128"}
    assert choose_torch.main() == 0
    assert capsys.readouterr().out == f"9 torch==2.10.0+cu128 --index-url {ORG}/cu128\n"
    assert here.asked == [f"{ORG}/cu126", f"{ORG}/cu128"]


def test_without_a_gpu_and_another_index_the_pin_is_asked_of_pips_own(monkeypatch, capsys):
    here = Nowhere(monkeypatch, None)
    here.indexes = {None: "2.14.1, 2.13.0+cpu, 2.13.0"}
    assert choose_torch.main() == 0
    assert (capsys.readouterr().out, here.asked) == (f"2 {PIN}\n", [None])
    here.indexes = {}
    assert choose_torch.main() == 0
    assert capsys.readouterr().out == f"9 {PIN}\n"


def test_a_build_that_cannot_compute_is_replaced_by_the_same_version(monkeypatch, capsys):
    here = Nowhere(monkeypatch, "h200-580", there="2.13.0+cpu")
    assert choose_torch.main() == 0
    assert capsys.readouterr().out == f"9 {PIN} --force-reinstall\n"
    here.there = "2.7.1+cu126"
    assert choose_torch.main() == 0
    assert capsys.readouterr().out == f"9 {PIN}\n"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"CUDA Version: 12.4": "CUDA Version: ERR!"}, FOR_12_6),  # what its own version says
        ({"\n9.0\n": "\n[N/A]\n"}, FOR_12_6),  # a driver of CUDA 12.4 knows no later card
        ({"\n9.0\n": "\n[N/A]\n", "12.4": "12.8"}, FOR_12_8),  # computes on all that such a driver knows
        ({"\n9.0\n": "\n10.0\n"}, "take a machine with driver 580 or newer"),
        ({"\n9.0\n": "\n3.7\n"}, "take another GPU"),
        ({"\n9.0\n": "\n7.0\n", "12.4": "13.0"}, FOR_12_6),
        ({"CUDA Version: 12.4": "", "550.127.05, 81559": "[N/A], 81559"}, "nor its own version"),
    ],
)
def test_what_nvidia_smi_does_not_know_is_no_reason_to_fetch_what_cannot_work(
    monkeypatch, capsys, tmp_path, answers, expected
):
    text = (RECORDED / "h100-550.txt").read_text(encoding="utf-8")
    for old, new in answers.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "changed.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "RECORDED", tmp_path)
    Nowhere(monkeypatch, "changed")
    code = choose_torch.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert (code, expected in line) == ((0 if expected.startswith("torch") else 3), True)


@pytest.mark.parametrize(
    ("processor", "expected"), [("x86_64", PIN), ("aarch64", "on the NVIDIA T4G; take another GPU")]
)
def test_a_turing_card_beside_an_arm_processor_has_no_torch(monkeypatch, capsys, tmp_path, processor, expected):
    text = (RECORDED / "h200-580.txt").read_text(encoding="utf-8")
    text = text.replace("NVIDIA H200", "NVIDIA T4G").replace("\n9.0\n", "\n7.5\n")
    (tmp_path / "t4g.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "RECORDED", tmp_path)
    here = Nowhere(monkeypatch, "t4g", processor)
    assert choose_torch.main() == (0 if processor == "x86_64" else 3)
    assert expected in capsys.readouterr().out and here.asked == []


def test_hidden_gpus_are_none(monkeypatch):
    here = Nowhere(monkeypatch, "mismatch")
    for value in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert here.driver() == gpu_and_torch.Driver(absent="CUDA_VISIBLE_DEVICES hides every GPU")
