"""What machine and software produced these numbers: an allow-list, so that no secret can slip in. Loads no torch."""

import contextlib
import functools
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from boundby.files import process_space, sha256_of
from boundby.machine.disturbance import CGROUP, usable_cpus

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "pandas",
    "scikit-learn",
    "safetensors",
)
# Packages that make tokens or compute with them, many of which torch and transformers take up by themselves where they
# are installed. Engines are not among them: a plan that computes with one names its version itself.
COMPUTING = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "pyarrow",
    "triton",
    "kernels",
    "flash-attn",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
    "apex",
    "intel-extension-for-pytorch",
    "torchao",
    "bitsandbytes",
    "sentencepiece",
    "tiktoken",
    "ftfy",
    "mkl",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
ROUNDING_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "ATEN_CPU_CAPABILITY",
    "OMP_THREAD_LIMIT",
    "OMP_DYNAMIC",
    "GLIBC_TUNABLES",
    "USE_HUB_KERNELS",
    "PYTORCH_TUNABLEOP_ENABLED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
SETTINGS = (  # environment variables that change numbers; their values are harmless
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "HF_HUB_OFFLINE",
    "CUDA_LAUNCH_BLOCKING",
    "RAYON_NUM_THREADS",
    "LD_PRELOAD",
    *ROUNDING_VARIABLES,
)
CPU_FACTS = Path("/proc/cpuinfo")
MOST_BYTES, MOST_W, MOST_MHZ = 2**50, 1e4, 1e4  # that a GPU may answer: drivers also say 0xFFFFFFFF
MARKS = ("(R)", "(TM)", "(tm)", " Processor", " CPU")  # of makers, in the names of CPUs
ROUNDING_FAMILIES = (
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "OPENBLAS_",
    "CUBLAS_",
    "CUDNN_",
    "ROCBLAS_",
    "HIPBLASLT_",
    "MIOPEN_",
    "TORCH_CUDNN_",
    "TORCH_BLAS_",
    "TORCH_MKLDNN_",
)
FAMILIES = (*ROUNDING_FAMILIES, "KMP_", "GOMP_", "TORCHINDUCTOR_")
ROUNDING = (*ROUNDING_VARIABLES, *ROUNDING_FAMILIES)
INSTRUCTIONS = ("avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm", "fphp")  # how their names begin
# Ends of names that say where to, not how; scikit-learn sets KMP_DUPLICATE_LIB_OK and
# KMP_INIT_AT_FORK wherever it is imported.
OFF_THE_NUMBERS = ("_VERBOSE", "_LOG", "_DIR", "_PATH", "_FILE", "_LIB_OK", "_AT_FORK")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return Python's version and that of each package; None where it is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def settings() -> dict[str, str]:
    """Return the allow-listed environment variables that are set."""
    return {name: os.environ[name] for name in sorted(os.environ) if name in SETTINGS or _is_of_numbers(name)}


def numerics() -> dict[str, str]:
    """Return those of `settings()` that change the last digits of a result, and not only how fast it comes."""
    return {name: value for name, value in settings().items() if name.startswith(ROUNDING) and "THREADS" not in name}


def _is_of_numbers(name: str) -> bool:
    return name.startswith(FAMILIES) and not name.endswith(OFF_THE_NUMBERS)


@functools.cache
def machine() -> dict[str, Any]:
    """Return the hardware that numbers depend on: CPU, cores this process may use, quota, memory, GPUs, driver.

    Of an NVIDIA GPU also how it is set: power limit, clocks, error correction, parts (MIG), as far as the driver tells.
    """
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(usable_cpus()),
        "cpu_quota_cores": _cpu_quota(CGROUP),
        "memory_bytes": memory_limit_bytes(),
        **_gpus(),
    }


@functools.cache
def host_id() -> str:
    """Return an opaque name shared by all processes of this machine or container, and by no others.

    It is another one after the machine has started anew: a process id means something where this is the same alone.
    """
    return sha256_of([platform.node(), process_space()])[:16]


def machine_fingerprint() -> str:
    """Return a short name of this machine's hardware, equal on equal machines."""
    return sha256_of(hardware())[:16]


def hardware() -> dict[str, Any]:
    """Return `machine()` without what tells of software or of one card: what is not known of a GPU, and the UUIDs."""
    known = {name: value for name, value in machine().items() if name != "gpus_reason"}
    kinds = [{name: value for name, value in gpu.items() if name != "uuid"} for gpu in known["gpus"]]
    return {**known, "gpus": kinds}


def cpu_in_words(hardware: Mapping[str, Any] | None = None) -> str:
    """Return the CPU, without the marks of its maker, and the cores this process may use; of `hardware()` if None."""
    known = machine() if hardware is None else hardware
    name, cores = known["cpu"].partition("@")[0], known.get("usable_cores")
    for mark in MARKS:
        name = name.replace(mark, "")
    return " ".join(name.split()) + (f" ({cores} {'core' if cores == 1 else 'cores'})" if cores else "")


def memory_limit_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes of main memory this process may use: the smaller of the machine's and the cgroup's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _first_line(cgroup / "memory.max") or _first_line(cgroup / "memory" / "memory.limit_in_bytes")
    return min(total, int(limit)) if limit.isdecimal() else total


def _cpu_quota(cgroup: Path) -> float | None:
    """Return the cores that the quota of a cgroup allows (version 2, or version 1), or None where there is none."""
    folder = cgroup / "cpu"
    pair = _first_line(cgroup / "cpu.max") or " ".join(
        _first_line(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    quota, _, period = pair.partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def instructions() -> tuple[str, ...]:
    """Return the vector instructions of this CPU, by which libraries choose their kernels; () where nothing tells."""
    flags = _cpu_fact("flags", "Features").split()
    return tuple(sorted(flag for flag in flags if flag.startswith(INSTRUCTIONS)))


def libc() -> str:
    """Return the C library, whose functions of mathematics torch calls, with its version."""
    return " ".join(platform.libc_ver()).strip()


def _cpu_name() -> str:
    return _cpu_fact("model name") or platform.processor() or platform.machine()


def _cpu_fact(*names: str) -> str:
    """Return what Linux says of the first CPU under one of these names; nothing where it does not."""
    try:
        lines = CPU_FACTS.read_text().splitlines()
    except OSError:
        return ""
    facts = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in facts if name.strip() in names), "")


def _gpus() -> dict[str, Any]:
    """Return `gpus` and `driver`; an empty list with `gpus_reason` where no driver's library answers."""
    nvidia = _nvidia_gpus()
    return nvidia if nvidia["gpus"] else _amd_gpus() or nvidia


def _amd_gpus() -> dict[str, Any] | None:
    """Return the same by amdsmi; None where it is not installed or finds no driver."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
        gpus = [
            {
                "name": amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"],
                "memory_bytes": amdsmi.amdsmi_get_gpu_memory_total(handle, amdsmi.AmdSmiMemoryType.VRAM),
                "uuid": amdsmi.amdsmi_get_gpu_device_uuid(handle),
            }
            for handle in handles
        ]
        driver = amdsmi.amdsmi_get_gpu_driver_info(handles[0])["driver_version"] if handles else None
    except Exception:  # its library may be missing, too old or without a driver, each with its own type
        return None
    return {"gpus": gpus, "driver": driver} if gpus else None


def _nvidia_gpus() -> dict[str, Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError) as error:
        return {"gpus": [], "driver": None, "gpus_reason": str(error)}
    except pynvml.NVMLError as error:
        return {"gpus": [], "driver": None, "gpus_reason": f"NVML: {error}"}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cards = [_nvidia_gpu(pynvml, handle) for handle in handles]
        unknown = "; ".join(dict.fromkeys(reason for _, reasons in cards for reason in reasons))
        why = {"gpus_reason": unknown} if unknown else {}
        return {"gpus": [card for card, _ in cards], "driver": _text(pynvml.nvmlSystemGetDriverVersion()), **why}
    except (pynvml.NVMLError, ValueError) as error:  # ValueError: a name that is no text
        return {"gpus": [], "driver": None, "gpus_reason": f"NVML: {error}"}
    finally:
        pynvml.nvmlShutdown()


def _nvidia_gpu(nvml: Any, handle: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a card and how it is set, as far as the driver tells, and why the rest is not known.

    Two cards of one kind under other power limits, clocks or error correction have other limits.
    """
    reasons: list[str] = []

    def asked(name: str, ask: Callable[[], Any], most: float | None = None) -> dict[str, Any]:
        try:
            answer = ask()
            if most is not None and not 1 <= answer <= most:
                raise ValueError(f"answered {answer:g}, which no GPU has")
        except AttributeError:  # an older pynvml
            return {}
        except Exception as error:  # a driver refuses by its own types, and may answer what is no number
            reasons.append(f"{name}: NVML: {error}")
            return {}
        return {name: answer}

    def parts() -> list[str]:
        names = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if nvml.nvmlDeviceGetMigMode(handle)[0] else 0):
            with contextlib.suppress(nvml.NVMLError):  # as many as there could be
                names.append(_text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
        return sorted(names)

    card = {
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "memory_bytes": None,
        "uuid": None,
        **asked("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total, MOST_BYTES),
        **asked("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        **asked("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3, MOST_W),
        **asked("max_clock_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM), MOST_MHZ),
        **asked("set_clock_mhz", lambda: nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM), MOST_MHZ),
        **asked("ecc", lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
        **asked("mig", parts),
    }
    return card, reasons


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
