"""Say in about two seconds what this machine has and what it lacks. Loads no model and needs nothing installed.

    python setup/verify.py [--json] [--skip-torch]

Exit code 0: nothing is lacking; 3: something is, one line each with the way out. A GPU that is not there is a fact;
a GPU that torch cannot use is a problem.
"""

from __future__ import annotations  # a Python too old for us must still be able to say so

import argparse
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_and_torch import (
    TORCH_LEAST,
    Driver,
    Gpu,
    Torch,
    ask_torch,
    find_driver,
    pins,
    release,
    runs_up_to,
    version_of,
    why_unusable,
)

PYTHON_SUPPORTED = ((3, 11), (3, 12))
TORCH_TESTED = ((2, 11), (2, 13))
LEAST_FREE_BYTES = 2e9  # a trace of 400 MB, its compressed copy and the tables, with room to write them twice
XET_MEMORY_BYTES = 64e9  # what huggingface_hub asks for before HF_XET_HIGH_PERFORMANCE is switched on
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RUNPOD_API_KEY", "VAST_API_KEY", "JUPYTER_PASSWORD", "WANDB_API_KEY")
SWITCHES = ("HF_XET_HIGH_PERFORMANCE", "HF_HUB_ENABLE_HF_TRANSFER", "SSH_CONNECTION", "TMUX", "STY")
INSTALL = "run `bash setup_environment.sh`"


@dataclass(frozen=True)
class Disk:
    """A folder, the free bytes of its disk, and the file system (None where the machine does not say)."""

    folder: str
    free_bytes: int
    filesystem: str | None


@dataclass(frozen=True)
class Machine:
    """All that was found; `packages` maps each core requirement to its pinned and its installed version."""

    python: str
    driver: Driver
    torch: Torch | None
    torch_version: str | None
    packages: dict[str, tuple[str, str | None]]
    memory_bytes: int | None
    disks: tuple[Disk, ...]
    results: str
    results_problem: str | None
    secrets_set: tuple[str, ...]
    switches_set: dict[str, str]


def look(with_torch: bool = True) -> Machine:
    """Return what this machine has, from nvidia-smi, package metadata, cgroups and one import of torch."""
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    results = Path.cwd() / "results"
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        driver=find_driver(),
        torch=ask_torch() if with_torch else None,
        torch_version=version_of("torch"),
        packages={name: (pin, version_of(name)) for name, pin in pins().items()},
        memory_bytes=find_memory_bytes(),
        disks=(find_disk(results.parent), find_disk(cache)),
        results=str(results),
        results_problem=write_problem(results),
        secrets_set=tuple(name for name in SECRETS if os.environ.get(name)),
        switches_set={name: os.environ[name] for name in SWITCHES if os.environ.get(name)},
    )


def find_memory_bytes() -> int | None:
    """Return the bytes of memory this process may use: the machine's, or the container's limit where lower."""
    limits = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):  # no such cgroup, or "max"
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def find_disk(folder: Path) -> Disk:
    """Return the free bytes and the file system of the disk that `folder` is on, or will be made on."""
    there = _nearest_existing(folder)
    stat = os.statvfs(there)
    return Disk(str(folder), stat.f_bavail * stat.f_frsize, _filesystem(there))


def write_problem(folder: Path) -> str | None:
    """Return why no file can be written in `folder` (or where it would be made); None when one can."""
    try:
        with tempfile.TemporaryFile(dir=_nearest_existing(folder)) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        return error.strerror
    return None


def problems(machine: Machine) -> list[str]:
    """Return what the machine lacks, one line each with the way out."""
    lines = []
    if release(machine.python) not in PYTHON_SUPPORTED:
        lines.append(f"Python {machine.python} is not supported; install 3.11 or 3.12, then {INSTALL}")
    if machine.driver.problem:
        lines.append(f"the GPU driver does not work: {machine.driver.problem}; restart or change the machine")
    installed = {"torch": machine.torch_version, **{name: has for name, (_, has) in machine.packages.items()}}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        lines.append(f"not installed for this Python: {', '.join(missing)}; {INSTALL} and use the Python it makes")
    unusable = machine.torch and why_unusable(machine.torch, machine.driver)
    if unusable:
        lines.append(f"{unusable}; {INSTALL}, which finds one for this machine where there is one")
    for disk in machine.disks:
        if disk.free_bytes < LEAST_FREE_BYTES:
            lines.append(f"{disk.folder} has {_gb(disk.free_bytes)} free; {_gb(LEAST_FREE_BYTES)} are needed there")
    if machine.results_problem:
        lines.append(f"{machine.results} cannot be written: {machine.results_problem}; make it writable")
    return lines


def doubts(machine: Machine) -> list[str]:
    """Return what may spoil a run or lose its results, one line each with the way out."""
    said = [f"nvidia-smi says: {line}" for line in machine.driver.warnings]
    return [*said, *_software_doubts(machine), *_pod_doubts(machine)]


def _software_doubts(machine: Machine) -> list[str]:
    lines = []
    torch = machine.torch_version
    if torch and release(torch) >= TORCH_LEAST and release(torch) not in TORCH_TESTED:
        tested = " and ".join(f"{major}.{minor}" for major, minor in TORCH_TESTED)
        lines.append(f"torch {torch} is untested with this program (tested: {tested}); it is used as it is")
    other = [f"{name} {has} (pinned {pin})" for name, (pin, has) in machine.packages.items() if has and has != pin]
    if other:
        lines.append(f"versions other than the pinned ones: {', '.join(other)}; {INSTALL} to get those")
    return lines


def _pod_doubts(machine: Machine) -> list[str]:
    lines = []
    disk, switches, memory = machine.disks[0], machine.switches_set, machine.memory_bytes
    if disk.filesystem == "overlay":
        lines.append(f"{disk.folder} is on the container's own disk and lost when the pod stops; `make bundle` before")
    xet = switches.get("HF_XET_HIGH_PERFORMANCE", "0").lower() in ("1", "on", "yes", "true")
    if xet and memory is not None and memory < XET_MEMORY_BYTES:
        lines.append(
            f"HF_XET_HIGH_PERFORMANCE is set and needs {_gb(XET_MEMORY_BYTES)} of memory, here {_gb(memory)}: "
            "a download may be killed; export HF_XET_HIGH_PERFORMANCE=0"
        )
    if "HF_HUB_ENABLE_HF_TRANSFER" in switches:
        lines.append("HF_HUB_ENABLE_HF_TRANSFER has no effect since huggingface_hub 1.0; unset it")
    if "SSH_CONNECTION" in switches and not switches.keys() & {"TMUX", "STY"}:
        lines.append("over SSH and not in tmux: a lost connection ends the run; start it inside `tmux`")
    return lines


def facts(machine: Machine) -> list[tuple[str, str]]:
    """Return what was found as (name, text) pairs, in the order in which a person asks."""
    driver = machine.driver
    gpus = ", ".join(map(_gpu_text, driver.gpus))
    is_amd = machine.torch is not None and machine.torch.rocm is not None and machine.torch.sees_gpu
    as_pinned = sum(pin == installed for pin, installed in machine.packages.values())
    return [
        ("Python", f"{machine.python} ({sys.executable})"),
        ("torch", _torch_text(machine)),
        ("GPU", gpus or (f"none: {driver.absent or driver.problem}" if not is_amd else "AMD, seen by torch")),
        *([] if is_amd else [("driver", runs_up_to(driver).removeprefix("driver ") if driver.gpus else "none")]),
        ("memory", _gb(machine.memory_bytes) if machine.memory_bytes else "unknown"),
        *(
            ("disk", f"{_gb(disk.free_bytes)} free at {disk.folder} ({disk.filesystem or '?'})")
            for disk in machine.disks
        ),
        ("packages", f"{as_pinned} of {len(machine.packages)} as pinned"),
        ("secrets", f"{', '.join(machine.secrets_set) or 'none'} (names only)"),
    ]


def main() -> int:
    """Print what was found; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--skip-torch", action="store_true", help="do not import torch, which takes most of the time")
    asked = parser.parse_args()
    machine = look(with_torch=not asked.skip_torch)
    lacking, doubtful = problems(machine), doubts(machine)
    if asked.json:
        print(json.dumps({"machine": asdict(machine), "doubts": doubtful, "problems": lacking}, indent=2))
    else:
        lines = [*facts(machine), *(("doubt", text) for text in doubtful), *(("problem", text) for text in lacking)]
        print("\n".join(f"{name:<9} {text}" for name, text in lines))
    return 3 if lacking else 0


def _gpu_text(gpu: Gpu) -> str:
    return f"{gpu.name} " + (_gb(gpu.memory_bytes) if gpu.memory_bytes else f"of unknown memory ({gpu.memory_unknown})")


def _torch_text(machine: Machine) -> str:
    torch = machine.torch
    if torch is None:
        return f"{machine.torch_version} (not imported)" if machine.torch_version else "not installed"
    if torch.path is None:
        return f"{torch.version}, which cannot be imported"
    own = Path(sys.prefix) in Path(torch.path).parents
    return f"{torch.version} ({torch.build}), {'installed here' if own else f'kept from {torch.path}'}"


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _filesystem(folder: Path) -> str | None:
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    above = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    inside = [(len(point), kind) for point, kind in mounts if point.replace("\\040", " ") in above]
    return max(inside, key=lambda mount: mount[0])[1] if inside else None


def _gb(number_of_bytes: float) -> str:
    return f"{number_of_bytes / 1e9:.0f} GB"


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # for a console that cannot show the name of a GPU or a folder
    sys.exit(main())
