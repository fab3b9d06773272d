"""Say what the GPU driver and the installed torch can do together, for setup_environment.sh and verify.py.

    python setup/gpu_and_torch.py                 version, CUDA build and path; exit code 3 with the reason if unusable

Needs nothing installed.
"""

from __future__ import annotations  # a Python too old for us must still be able to say so

import importlib.metadata
import json
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

TORCH_LEAST = (2, 9)
TORCH_TIMEOUT_S = 120  # a first import from a cold network disk takes most of a minute; a hung driver takes for ever
NVIDIA_SMI_TIMEOUT_S = 20  # without persistence mode each call wakes the driver, seconds on a machine of eight GPUs


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it; memory in bytes."""

    name: str
    driver: str
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says: the GPUs and the newest CUDA that the driver runs, or why there is none or no answer."""

    gpus: tuple[Gpu, ...] = ()
    cuda: str | None = None
    absent: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Torch:
    """The installed torch; `path` is None when it cannot be imported, `problem` is the first line of what failed."""

    version: str
    cuda: str | None = None
    path: str | None = None
    sees_gpu: bool = False
    problem: str | None = None
    rocm: str | None = None

    @property
    def build(self) -> str:
        """Return what the build computes on, as one says it."""
        if self.rocm:
            return f"built for ROCm {self.rocm}"
        return f"built for CUDA {self.cuda}" if self.cuda else "CPU build"


def find_driver() -> Driver:
    """Return the GPUs and the driver from nvidia-smi; `absent` says why there is none, `problem` why it is broken."""
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        listing = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"], NVIDIA_SMI_TIMEOUT_S)
        header = _run(["nvidia-smi"], NVIDIA_SMI_TIMEOUT_S).stdout
    except FileNotFoundError:
        return Driver(absent="there is no nvidia-smi")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(problem=f"nvidia-smi gives no answer ({type(error).__name__})")
    text = (listing.stdout or listing.stderr).strip()
    if "No devices" in text or (listing.returncode == 0 and not text):
        return Driver(absent="nvidia-smi lists no device")
    if listing.returncode != 0:
        return Driver(problem=_first_line(text) or f"nvidia-smi ended with code {listing.returncode}")
    cuda = re.search(r"CUDA[\w ]* Version:\s*(\d+\.\d+)", header)
    return Driver(tuple(_gpu(line) for line in text.splitlines()), cuda.group(1) if cuda else None)


def ask_torch() -> Torch | None:
    """Return what the installed torch says of itself; None when there is none.

    It is asked in a process of its own, so that a driver that hangs or crashes takes only that one with it.
    """
    version = version_of("torch")
    if version is None:
        return None
    try:
        answer = _run([sys.executable, __file__, "--probe"], TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Torch(version, problem=f"import torch gives no answer in {TORCH_TIMEOUT_S} s")
    if answer.returncode != 0:
        return Torch(version, problem=answer.stderr.strip().rpartition("\n")[2] or f"exit code {answer.returncode}")
    return Torch(**json.loads(answer.stdout.splitlines()[-1]))


def probe_torch() -> Torch:
    """Return the facts of torch in this process, after one addition on the GPU when it sees one."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sees_gpu = torch.cuda.is_available()
    problem = None
    if not sees_gpu and caught:  # torch says here that the driver is too old for it
        problem = _first_line(str(caught[0].message))
    if sees_gpu:
        try:  # an addition launches a kernel, which a build older than the card has not got; zeros alone would not
            torch.zeros(1, device="cuda").add_(1).item()
        except RuntimeError as error:
            problem = _first_line(str(error))
    rocm = getattr(torch.version, "hip", None)
    return Torch(str(torch.__version__), torch.version.cuda, torch.__file__, sees_gpu, problem, rocm)


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version, of pre-releases and local builds too: '2.9.0a0+145a3a7' is (2, 9)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def why_unusable(torch: Torch, driver: Driver) -> str | None:
    """Return why this torch cannot be used on this machine, with the way out; None when it can."""
    this = f"torch {torch.version} ({torch.build})"
    said = f": {torch.problem}" if torch.problem else ""
    if release(torch.version) < TORCH_LEAST:
        return f"torch {torch.version} is older than {'.'.join(map(str, TORCH_LEAST))}; install the pinned one"
    if torch.path is None:
        return f"torch {torch.version} cannot be imported{said}; install the pinned one"
    if driver.gpus and not torch.sees_gpu:
        return (
            f"{this} cannot use the {driver.gpus[0].name} (driver {driver.gpus[0].driver}, for CUDA up to "
            f"{driver.cuda or 'unknown'}){said}; take a machine with a newer driver, or install into this environment "
            "a torch built for an older CUDA, which is then kept: https://pytorch.org/get-started/locally"
        )
    if torch.sees_gpu and said:
        return f"{this} fails to compute on the GPU{said}; install a build that fits this GPU"
    return None


def pins() -> dict[str, str]:
    """Return the pinned version of each core requirement."""
    text = Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==([^\s#]+)", text, flags=re.MULTILINE))


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(asked: list[str]) -> int:
    """Answer one question of setup_environment.sh; return the exit code."""
    if asked == ["--probe"]:
        print(json.dumps(asdict(probe_torch())))
        return 0
    torch = ask_torch()
    if torch is None:
        return 3
    print(torch.version, torch.cuda or "cpu", torch.path, sep="\t")
    reason = why_unusable(torch, find_driver())
    if reason:
        print(reason, file=sys.stderr)
    return 3 if reason else 0


def _gpu(line: str) -> Gpu:
    name, driver, mebibytes = (part.strip() for part in line.split(","))
    return Gpu(name, driver, int(mebibytes) * 2**20)


def _run(command: list[str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
