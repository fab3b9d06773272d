"""Say what the GPU driver and the installed torch can do together, for setup_environment.sh and verify.py.

    python setup/gpu_and_torch.py                 version, CUDA build and path; exit code 3 with the reason if unusable

Needs nothing installed.
"""

from __future__ import annotations  # a Python too old for us must still be able to say so

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

TORCH_LEAST = (2, 8)
TORCH_TIMEOUT_S = 120  # a first import from a cold network disk takes most of a minute; a hung driver takes for ever
NVIDIA_SMI_TIMEOUT_S = 20  # without persistence mode each call wakes the driver, seconds on a machine of eight GPUs
HIDE_ALL = ("", "-1", "NoDevFiles")  # what CUDA_VISIBLE_DEVICES says where no GPU shall be seen; the last is Slurm's
VERSION = re.compile(r"\d+(\.\d+)+")
NO_VALUE = re.compile(r"\[.*\]|N/A|ERR!|Unknown Error|Not Supported|", re.IGNORECASE)  # in place of one, by nvidia-smi
LONGEST_ANSWER = 200  # characters of a line that is shown


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it; memory in bytes, None with the reason in `memory_unknown`."""

    name: str
    driver: str | None
    memory_bytes: int | None
    memory_unknown: str | None = None


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says: the GPUs and the newest CUDA that the driver runs, or why there is none or no answer.

    `cuda` is None with the reason in `cuda_unknown`; `warnings` are lines beside those of the GPUs.
    """

    gpus: tuple[Gpu, ...] = ()
    cuda: str | None = None
    absent: str | None = None
    problem: str | None = None
    cuda_unknown: str | None = None
    warnings: tuple[str, ...] = ()


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
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDE_ALL:
        return Driver(absent="CUDA_VISIBLE_DEVICES hides every GPU")
    try:
        listing = nvidia_smi("name,driver_version,memory.total")
    except FileNotFoundError:
        return Driver(absent="there is no nvidia-smi")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(problem=f"nvidia-smi gives no answer ({type(error).__name__})")
    lines = [line.strip()[:LONGEST_ANSWER] for line in _lines(listing)]
    gpus = tuple(gpu for gpu in map(_gpu, lines) if gpu)
    others = sorted((line for line in lines if not _gpu(line)), key=lambda line: line.startswith("WARNING"))
    if gpus:  # whatever the code: 14 comes with a full list and a warning that the infoROM is corrupted
        cuda, unknown = _newest_cuda()
        return Driver(gpus, cuda, cuda_unknown=unknown, warnings=tuple(others))
    if any("no devices" in line.lower() for line in others) or (listing.returncode == 0 and not others):
        return Driver(absent="nvidia-smi lists no device")
    return Driver(problem=others[0] if others else f"nvidia-smi ended with code {listing.returncode}")


def nvidia_smi(query: str | None = None) -> subprocess.CompletedProcess[str]:
    """Return what nvidia-smi answers to a query of GPUs, as CSV without a header, or to none.

    Raises OSError where it cannot be run and subprocess.TimeoutExpired where it hangs.
    """
    asked = [f"--query-gpu={query}", "--format=csv,noheader,nounits"] if query else []
    return answer_of(["nvidia-smi", *asked], NVIDIA_SMI_TIMEOUT_S)


def ask_torch() -> Torch | None:
    """Return what the installed torch says of itself; None when there is none.

    It is asked in a process of its own, so that a driver that hangs or crashes takes only that one with it.
    """
    version = version_of("torch")
    if version is None:
        return None
    try:
        answer = answer_of([sys.executable, __file__, "--probe"], TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Torch(version, problem=f"import torch gives no answer in {TORCH_TIMEOUT_S} s")
    if answer.returncode != 0:
        return Torch(version, problem=answer.stderr.strip().rpartition("\n")[2] or f"exit code {answer.returncode}")
    said = [line for line in answer.stdout.splitlines() if line.startswith('{"version":')]
    return Torch(**json.loads(said[-1])) if said else Torch(version, problem="import torch ends the process")


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
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def why_unusable(torch: Torch, driver: Driver) -> str | None:
    """Return why this torch cannot be used on this machine; None when it can."""
    this = f"torch {torch.version} ({torch.build})"
    said = f": {torch.problem}" if torch.problem else ""
    if release(torch.version) < TORCH_LEAST:
        return f"torch {torch.version} is older than {'.'.join(map(str, TORCH_LEAST))}"
    if torch.path is None:
        return f"torch {torch.version} cannot be imported{said}"
    if driver.gpus and not torch.sees_gpu:
        return f"{this} cannot use the {driver.gpus[0].name} ({runs_up_to(driver)}){said}"
    if torch.sees_gpu and said:
        return f"{this} fails to compute on the GPU{said}"
    return None


def runs_up_to(driver: Driver) -> str:
    """Return the version of the driver and the newest CUDA that it runs, as one says it."""
    cuda = driver.cuda or f"an unknown version ({driver.cuda_unknown or 'not asked'})"
    return f"driver {driver.gpus[0].driver or 'of unknown version'}, for CUDA up to {cuda}"


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


def answer_of(command: list[str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    """Return what a program answers, with what is no UTF-8 shown by its bytes.

    Raises OSError where it cannot be run and subprocess.TimeoutExpired where it hangs.
    """
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="backslashreplace", timeout=timeout_s, check=False
    )


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


def _gpu(line: str) -> Gpu | None:
    """Return the GPU of a line of name, driver and memory; None for any other line. A name may hold commas."""
    fields = [field.strip() for field in line.rsplit(",", 2)]
    if len(fields) != 3 or not (VERSION.fullmatch(fields[1]) or NO_VALUE.fullmatch(fields[1])):
        return None
    name, driver, memory = fields
    mebibytes = re.fullmatch(r"0*([1-9]\d*)( MiB)?", memory)
    return Gpu(
        name or "GPU without a name",
        driver if VERSION.fullmatch(driver) else None,
        int(mebibytes[1]) * 2**20 if mebibytes else None,
        # parts of a card (MIG) answer [Insufficient Permissions], chips that share the host's memory (GB10) [N/A]
        None if mebibytes else f"nvidia-smi answers {memory or 'nothing'}",
    )


def _newest_cuda() -> tuple[str | None, str | None]:
    """Return the newest CUDA that the driver runs, and why it is not known."""
    try:
        header = nvidia_smi().stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi gives no answer ({type(error).__name__})"
    said = re.search(r"CUDA[\w ]* Version *: *([^\s|]+)", header)  # CUDA UMD Version from driver 610 on
    number = said and re.match(r"\d+\.\d+", said[1])
    if not said or not number:
        return None, f"nvidia-smi answers {said[1]}" if said else "nvidia-smi names none"
    return number[0], None


def _lines(answer: subprocess.CompletedProcess[str]) -> list[str]:
    text = answer.stdout if answer.stdout.strip() else answer.stderr
    return [line for line in text.splitlines() if line.strip()]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # for a console that cannot show the name of a GPU
    sys.exit(main(sys.argv[1:]))
