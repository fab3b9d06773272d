"""Choose the torch that the driver of this machine runs, before anything of it is fetched, for setup_environment.sh.

    python setup/choose_torch.py    the GB of disk it takes, and what to tell pip; exit code 3 and why where none fits

Run it with the Python to install into. It asks an index for its list of versions, some kilobytes, and needs pip alone.
"""

from __future__ import annotations  # a Python too old for us must still be able to say so

import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu_and_torch import (
    TORCH_LEAST,
    Driver,
    answer_of,
    ask_torch,
    find_driver,
    nvidia_smi,
    runs_up_to,
    version_of,
    why_unusable,
)

PIN = Path(__file__).with_name("requirements-torch.txt")
INDEXES = "https://download.pytorch.org/whl"
RETRIES, RETRY_TIMEOUT_S, INDEX_TIMEOUT_S = 1, 10, 60  # a network that lets nothing through costs half a minute
GB_WITH_CUDA, GB_WITHOUT = 9, 2  # unpacked 5 and 0.8 GB, and pip's copies of the wheels while it works
# The newest CUDA of a driver that does not name it, by the first driver of each.
CUDA_OF_DRIVERS = ((580, (13, 0)), (570, (12, 8)), (525, (12, 0)), (0, (11, 0)))
BLACKWELL = (10, 0)  # the compute capability from which on a card needs CUDA 12.8


@dataclass(frozen=True)
class Build:
    """The wheels of torch for one CUDA, and the least and the last compute capability that they have kernels for."""

    name: str
    cuda: tuple[int, int]
    least: tuple[int, int]
    last: tuple[int, int]

    def runs_on(self, cuda: tuple[int, int], card: tuple[int, int]) -> bool:
        """Tell whether a driver whose newest CUDA is `cuda` runs this build on a card of this compute capability.

        A driver runs all builds of its CUDA's major version and of those before, so that driver 525 runs CUDA 12.8
        ("minor version compatibility", docs.nvidia.com/deploy/cuda-compatibility). It cannot compile PTX of a newer
        CUDA, which a card needs that the build has no kernels for.
        """
        least = max(self.least, (8, 0)) if platform.machine() == "aarch64" else self.least
        known = card < BLACKWELL or cuda >= (12, 8)
        return cuda[0] >= self.cuda[0] and known and least <= card <= self.last


# Better ones first. Kernels: "PyTorch CUDA Support Matrix" in RELEASE.md of pytorch/pytorch, 2.8 to 2.13. The first is
# what PyPI has of 2.13 for x86-64, with PTX for later cards. The second exists of 2.13 too, the last up to 2.11.
BUILDS = (
    Build("cu130", (13, 0), (7, 5), (99, 0)),
    Build("cu126", (12, 6), (5, 0), (9, 0)),
    Build("cu128", (12, 8), (7, 5), (12, 9)),
)


class NoTorchError(Exception):
    """No torch would work here; the message is one line with what to do."""


@dataclass(frozen=True)
class Choice:
    """What pip has to install, and the GB that must be free for it."""

    gigabytes: int
    arguments: tuple[str, ...]


def choose(driver: Driver) -> Choice:
    """Return the pinned torch, or the newest before it, in a build that computes on this machine.

    Raises NoTorchError where there is none.
    """
    if driver.problem:
        raise NoTorchError(
            f"the GPU driver does not work: {driver.problem}; restart or change the machine, or measure its CPU: "
            "export CUDA_VISIBLE_DEVICES=-1"
        )
    if not driver.gpus:
        return _without_cuda()
    cuda = _newest_cuda(driver)
    cards = _compute_capabilities(driver, cuda)
    fitting = [build for build in BUILDS if all(build.runs_on(cuda, card) for card in cards)]
    fitting = fitting or [build for build in BUILDS if build.runs_on(cuda, cards[0])]  # one is measured, the first
    for build in fitting:
        if build is BUILDS[0] and platform.machine() == "x86_64":
            return Choice(GB_WITH_CUDA, ("-r", _shown(PIN)))
        index = f"{INDEXES}/{build.name}"
        version = _newest(_ask_index(index), build)
        if version:
            return Choice(GB_WITH_CUDA, (f"torch=={version}", "--index-url", index))
    raise NoTorchError(_why_none(driver, fitting, cards[0]))


def main() -> int:
    """Print the choice, or why there is none; return the exit code."""
    driver = find_driver()
    try:
        choice = choose(driver)
    except NoTorchError as error:
        print(error)
        return 3
    print(choice.gigabytes, *choice.arguments, *_again(choice, driver))
    return 0


def _without_cuda() -> Choice:
    """Return the pinned torch as the default index has it, or as a build without CUDA where that is another one's."""
    asked = ("-r", _shown(PIN))
    build = f"{_pinned()}+cpu"
    if build in _ask_index():
        return Choice(GB_WITHOUT, asked)
    index = f"{INDEXES}/cpu"
    if build in _ask_index(index):
        return Choice(GB_WITHOUT, (*asked, "--index-url", index))
    return Choice(GB_WITH_CUDA, asked)


def _newest_cuda(driver: Driver) -> tuple[int, int]:
    """Return the newest CUDA that the driver runs: as it says, or as its version tells."""
    if driver.cuda:
        major, minor = driver.cuda.split(".")
        return int(major), int(minor)
    if (driver.cuda_unknown or "").endswith(" N/A"):  # NVML's answer where it does not find libcuda
        raise NoTorchError(
            "the GPU's driver is here without its CUDA library (CUDA Version: N/A); start the container with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    version = driver.gpus[0].driver
    if not version:
        raise NoTorchError(
            f"which CUDA the GPU's driver runs is not known: {driver.cuda_unknown}, nor its own version; restart or "
            "change the machine"
        )
    return next(cuda for least, cuda in CUDA_OF_DRIVERS if int(version.partition(".")[0]) >= least)


def _compute_capabilities(driver: Driver, cuda: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the compute capability of each GPU; where one is unknown, of the first and last that it may have."""
    try:
        lines = nvidia_smi("compute_cap").stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    matches = [re.fullmatch(r"(\d+)\.(\d+)", line.strip()) for line in lines]
    known = tuple((int(match[1]), int(match[2])) for match in matches if match)
    if len(known) == len(driver.gpus):
        return known
    return ((8, 0), (12, 0)) if cuda >= (12, 8) else ((8, 0),)


def _ask_index(url: str | None = None) -> tuple[str, ...]:
    """Return the versions of torch for this Python and machine that an index lists, pip's own where none is named.

    Nothing where it does not answer. Other sources that pip is configured for are listed with it.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    command += ["--retries", str(RETRIES), "--timeout", str(RETRY_TIMEOUT_S), *(["--index-url", url] if url else [])]
    try:
        answer = answer_of(command, INDEX_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ()
    listed = re.search(r"^Available versions: (.+)$", answer.stdout, re.MULTILINE)
    return tuple(listed[1].strip().split(", ")) if listed else ()


def _newest(versions: tuple[str, ...], build: Build) -> str | None:
    """Return the newest of a build that is old enough to be tested and new enough to be used."""
    numbers = {
        version: _numbers(version) for version in versions if version.endswith(f"+{build.name}") and _numbers(version)
    }
    usable = [version for version, number in numbers.items() if (*TORCH_LEAST, 0) <= number <= _numbers(_pinned())]
    return max(usable, key=lambda version: numbers[version], default=None)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; none for any other version."""
    public = version.partition("+")[0]
    return tuple(map(int, public.split("."))) if re.fullmatch(r"\d+(\.\d+)+", public) else ()


def _again(choice: Choice, driver: Driver) -> tuple[str, ...]:
    """Return what makes pip replace a torch that is unusable and that it would be content with."""
    wanted = _pinned() if choice.arguments[0] == "-r" else choice.arguments[0].removeprefix("torch==")
    there = version_of("torch") or ""
    if wanted not in (there, there.partition("+")[0]):  # 2.13.0 asks for any build of it
        return ()
    torch = ask_torch()
    return ("--force-reinstall",) if torch and why_unusable(torch, driver) else ()


def _why_none(driver: Driver, fitting: list[Build], card: tuple[int, int]) -> str:
    gpu, least = driver.gpus[0].name, ".".join(map(str, TORCH_LEAST))
    if not any(build.runs_on((99, 0), card) for build in BUILDS):  # whatever the driver
        return f"no torch from {least} on computes on the {gpu}; take another GPU"
    if not fitting:
        runs = f"runs with {runs_up_to(driver)}, on the {gpu}"
        return f"no torch from {least} on {runs}; take a machine with driver 580 or newer"
    asked = " and ".join(f"{INDEXES}/{build.name}" for build in fitting)
    return (
        f"{asked} lists no torch from {least} to {_pinned()} or does not answer, and others do not run with "
        f"{runs_up_to(driver)}, on the {gpu}; open the way there, take a machine with driver 580 or newer, or install "
        f"one that works into {sys.prefix}, which is then kept"
    )


def _pinned() -> str:
    return PIN.read_text(encoding="utf-8").partition("torch==")[2].split()[0]


def _shown(path: Path) -> str:
    return str(path.relative_to(path.parents[1]))  # setup_environment.sh stands above it


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
