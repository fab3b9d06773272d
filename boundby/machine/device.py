"""Pick a device, wait for it, describe it, and tell a lack of memory and a lost GPU from other failures."""

import ctypes
import functools
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from boundby import files
from boundby.formatting import first_line
from boundby.machine import environment
from boundby.machine.sampler import AmdSource, DeviceLostError, NoSource, Source, nvml_source

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
HEAP_BLOCK_BYTES = 32 * 2**20 - 65536  # the largest that glibc learns from, and room for its own header
ASSUMED_GPU_CACHE_BYTES = 40 * 2**20
LEAST_FLOAT16_MAJOR = 7  # of the compute capability: before Volta float16 is stored, and multiplied as float32
# Texts of errors, in lower case, that mean memory and carry no type of their own. "NOT_SUPPORTED" from cuDNN is not
# among them: it also stands for shapes that no kernel takes.
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "cublas_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
)
# cudaError_t, and hipError_t with the same numbers, after which "any further CUDA work will return the same error":
# unknown, external device, and what kernels, memory and links of the card do.
STICKY_CODES = frozenset((46, 100, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911, 999))
# The same in words: of the runtime, of the driver, of libraries on top of it, of NVML and of the kernel's log. That
# "device-side assertions" may be compiled in stands below every error of torch.
STICKY_TEXTS = re.compile(
    r"illegal memory access|illegal instruction was|misaligned address|device-side assert triggered"
    r"|unspecified launch failure|hardware stack error|invalid program counter|on global/shared address space"
    r"|launch timed out|uncorrectable (ecc|nvlink)|context is destroyed|fallen off the bus|gpu is lost|\bxid\W+79\b"
    r"|no (cuda|hip|rocm)-capable device|busy or unavailable|(cuda|hip)\w*( driver)?( error)?\]?: unknown error"
    r"|(cu|roc|hip)blas_status_execution_failed"
    r"|(cuda|hip)_?error_?(assert|illegal|misaligned|launch_?(fail|time)|hardware_?stack|invalid_?(address_?space|pc)"
    r"|ecc|nvlink|contained|context_?is_?destroyed|no_?device|devices?_?unavailable|unknown)",
    re.IGNORECASE,
)


def pick_device(name: str = "auto") -> torch.device:
    """Return the device called `name`; "auto" is the first GPU, or the CPU where there is none.

    Raises ValueError when a GPU is asked for that torch does not see.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {name!r} is not available: torch {torch.__version__} ({built_for()}) sees no GPU")
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise ValueError(f"device {name!r} is not available: torch sees {torch.cuda.device_count()} GPU(s)")
        return torch.device("cuda", index)
    return device


def built_for() -> str:
    """Return for which GPUs the installed torch was built, with the version: those of ROCm answer as "cuda", too."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"


def is_host(device: torch.device | str) -> bool:
    """Tell whether the device is the host: calls are done when they return, memory is the process's own."""
    return torch.device(device).type == "cpu"


def is_gpu(device: torch.device | str) -> bool:
    """Tell whether the device is a GPU that this program can time and read: queued work, events, an allocator."""
    return torch.device(device).type == "cuda"


def runtime(device: torch.device | str) -> Any:
    """Return torch's module for the GPUs of this vendor: streams, events, memory and names."""
    return torch.get_device_module(device)


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Return the block in which the device is the current one: a graph is captured on the current GPU alone."""
    return runtime(device).device(device) if is_gpu(device) else nullcontext()


@contextmanager
def host_threads(number: int) -> Iterator[None]:
    """Let torch compute with `number` threads on the host in the block, and with those of before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def busy_threads(device: torch.device) -> int:
    """Return how many threads of the host work on this device keeps busy: one issues it to a GPU."""
    return torch.get_num_threads() if is_host(device) else 1


def has_bfloat16_matmul(device: torch.device) -> bool:
    """Tell whether the device multiplies in bfloat16, rather than emulating it slower than float32 (T4, V100)."""
    if is_gpu(device):
        with made_current(device):  # which is the one that torch asks
            return bool(runtime(device).is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def has_float16_matmul(device: torch.device) -> bool:
    """Tell whether the device multiplies in float16 faster than in float32: GPUs from Volta on, a few CPUs."""
    if is_gpu(device):
        return bool(runtime(device).get_device_properties(device).major >= LEAST_FLOAT16_MAJOR)
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(known.get("avx512_fp16") or known.get("amx_fp16"))


def multiplies_in(device: torch.device, dtype: str) -> bool:
    """Tell whether the device computes matmuls in this dtype itself, not emulated and slower than in float32."""
    known = {"bfloat16": has_bfloat16_matmul, "float16": has_float16_matmul}
    return known[dtype](device) if dtype in known else True


def has_int8_matmul(device: torch.device) -> bool:
    """Tell whether the device accumulates int8 matmuls in 32 bits, as VNNI and AMX do on a CPU.

    Other CPUs add in 16 bits and saturate, and so does oneDNN where it is told to use less than the CPU has: hence the
    largest values are tried, too.
    """
    if not is_host(device) or not (torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()):
        return False
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t().contiguous()) == 64 * 127**2).all())


def fast_float32_precision(device: torch.device) -> str | None:
    """Return torch's matmul precision that is fastest for float32 on this device; None where all are alike."""
    return {"cpu": "medium", "cuda": "high"}.get(device.type)


def float32_precision() -> str:
    """Return torch's precision of float32 matmuls: "highest", "high" or "medium".

    Torch's own function raises where the precision was set through `torch.backends`, as transformers does for `tf32`.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            return "high"
        of_host = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made when torch is imported
        return "medium" if of_host.fp32_precision == "bf16" else "high"


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return a callable that waits until the device has done all queued work; on a CPU it does nothing."""
    if is_gpu(device):
        return lambda: runtime(device).synchronize(device)
    return lambda: None


class CudaQueue:
    """The current stream of a GPU as a `boundby.timing.timer.DeviceQueue`."""

    _CALIBRATION_CYCLES = 20_000_000  # about 10 ms on a GPU of 2 GHz

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._sleep(self._CALIBRATION_CYCLES)  # loads the kernel and wakes the clock
        self._hold(self._CALIBRATION_CYCLES)
        torch.cuda.synchronize(device)
        self._cycles_per_s = self._held_rate()

    @staticmethod
    def _sleep(cycles: int) -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def hold(self, seconds: float) -> None:
        """Queue a kernel that spins for about this long.

        By the fastest clock that a passed one found: an idle GPU's is a fifth of that under load. A hold
        that is too long costs time, one that is too short the measurement.
        """
        if self.has_passed(self._held[2]):
            self._cycles_per_s = max(self._cycles_per_s, self._held_rate())
        self._hold(int(seconds * self._cycles_per_s))

    def _held_rate(self) -> float:
        cycles, start, end = self._held
        return cycles / self.seconds_between(start, end)

    def _hold(self, cycles: int) -> None:
        with torch.cuda.device(self._device):
            start = self.mark()
            self._sleep(cycles)
            self._held = cycles, start, self.mark()

    def mark(self) -> torch.cuda.Event:
        """Queue an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Tell whether the stream has passed the event."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events that the stream has passed."""
        return float(start.elapsed_time(end)) / 1e3


def device_queue(device: torch.device) -> CudaQueue | None:
    """Return the queue of an asynchronous device; None for a CPU, where a call is done when it returns."""
    return CudaQueue(device) if is_gpu(device) else None


class Allocator:
    """The counters of a GPU's caching allocator, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._runtime = device, runtime(device)

    def reset_peaks(self) -> None:
        """Wait for the device, and set the peaks back to what is held now."""
        self._runtime.synchronize(self._device)
        self._runtime.reset_peak_memory_stats(self._device)

    @property
    def allocated(self) -> int:
        """Bytes of tensors now."""
        return int(self._runtime.memory_allocated(self._device))

    @property
    def reserved(self) -> int:
        """Bytes taken from the device now."""
        return int(self._runtime.memory_reserved(self._device))

    @property
    def peak_allocated(self) -> int:
        """Most bytes of tensors since the peaks were set back."""
        return int(self._runtime.max_memory_allocated(self._device))

    @property
    def peak_reserved(self) -> int:
        """Most bytes taken from the device since the peaks were set back."""
        return int(self._runtime.max_memory_reserved(self._device))

    @property
    def total(self) -> int:
        """Bytes that the device has."""
        return int(self._runtime.get_device_properties(self._device).total_memory)


def allocator(device: torch.device) -> Allocator | None:
    """Return the allocator's counters, or None for a CPU, whose allocator keeps none."""
    return Allocator(device) if is_gpu(device) else None


def last_level_cache_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU's last cache, as far as it tells; None for a device that is none."""
    if not is_gpu(device):
        return None
    return getattr(runtime(device).get_device_properties(device), "L2_cache_size", 0) or ASSUMED_GPU_CACHE_BYTES


def describe(device: torch.device) -> dict[str, Any]:
    """Return name, memory in bytes and, for a GPU, what it can run, its multiprocessors and torch's versions for it."""
    if not is_gpu(device):
        return {"type": device.type, "threads": torch.get_num_threads()}
    properties = runtime(device).get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        **({"rocm": torch.version.hip, "architecture": properties.gcnArchName} if torch.version.hip else {}),
    }


def arithmetic(device: torch.device) -> dict[str, str | tuple[str, ...]]:
    """Return what kernels are chosen by on this device, beside its name: where it differs, results round otherwise.

    Of a CPU its instructions, and those that torch uses of them; of a GPU what it can run, and its multiprocessors.
    """
    if is_gpu(device):
        known = describe(device)
        return {name: str(known[name]) for name in ("capability", "multiprocessors", "architecture") if name in known}
    return {"capability": torch.backends.cpu.get_cpu_capability(), "instructions": environment.instructions()}


@functools.cache
def torch_build() -> str:
    """Return a hash of how torch was built, with which libraries: two builds of one version may round otherwise."""
    built = torch.__config__.show().splitlines()
    return files.sha256_of([line for line in built if "CPU capability usage" not in line])[:12]


def uuid_of(device: torch.device) -> str | None:
    """Return the identifier NVML knows this GPU by, since its numbers differ from CUDA's; None for other devices."""
    return str(runtime(device).get_device_properties(device).uuid) if is_gpu(device) else None


def visible_gpus(device: torch.device) -> int:
    """Return how many GPUs torch sees beside a GPU, itself among them; 0 for another device."""
    return int(runtime(device).device_count()) if is_gpu(device) else 0


def gpu_source(device: torch.device) -> Source:
    """Return the readings of this GPU by the library of its driver, or `NoSource` with the reason.

    torch numbers the GPUs that the environment shows to it (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES), the driver all.
    """
    if not is_gpu(device):
        return NoSource("the device is not a GPU")
    try:
        return AmdSource(torch.cuda._get_amdsmi_handler(device)) if torch.version.hip else nvml_source(uuid_of(device))
    except Exception as error:  # amdsmi, or a GPU for this torch, may be missing, each with its own type
        raise_if_lost(error)
        return NoSource(f"{'amdsmi' if torch.version.hip else 'the GPU is not known'}: {error}")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether `error` means that the device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY_TEXTS)


def is_sticky(error: BaseException) -> bool:
    """Tell whether after `error`, or one that it came of, this process can do nothing more with its GPU."""
    return _sticky(error) is not None


def _sticky(error: BaseException | None) -> BaseException | None:
    """Return the first of the errors that `error` came of, itself included, that is sticky; a loss if one is known."""
    cause = None
    while error is not None and not isinstance(cause, DeviceLostError):
        is_of_device = isinstance(error, getattr(torch, "AcceleratorError", ()))
        has_code = is_of_device and getattr(error, "error_code", None) in STICKY_CODES
        if isinstance(error, DeviceLostError) or has_code or STICKY_TEXTS.search(str(error)):
            cause = error
        error = error.__cause__ or error.__context__
    return cause


def raise_if_lost(error: BaseException, point: str | None = None) -> None:
    """Raise DeviceLostError where `error` is sticky: whoever carries on after an error asks this first.

    `point` is what was at work, unless that is known already.
    """
    cause = _sticky(error)
    if isinstance(cause, DeviceLostError):
        raise DeviceLostError(cause.reason, cause.point or point) from error
    if cause is not None:
        raise DeviceLostError(f"{type(cause).__name__}: {first_line(cause)}", point) from error


@contextmanager
def naming_loss(point: str) -> Iterator[None]:
    """Raise a sticky error of the block as DeviceLostError, which says that `point` was at work."""
    try:
        yield
    except (Exception, DeviceLostError) as error:
        raise_if_lost(error, point)
        raise


def keep_freed_blocks(device: torch.device) -> None:
    """Have glibc keep the pages of freed blocks below 32 MB, rather than fault them in anew for every batch.

    It takes the largest block freed so far, up to 32 MB, for the size from which it asks the kernel (mallopt(3),
    M_MMAP_THRESHOLD). This one is never written to.
    """
    if is_host(device):
        torch.empty(HEAP_BLOCK_BYTES, dtype=torch.uint8)


def release_memory(device: torch.device) -> None:
    """Give back what the allocator keeps; call it outside the `except` block, whose traceback holds the tensors.

    Raises DeviceLostError where the GPU fails to: a sound one never does, whatever went wrong before.
    """
    gc.collect()
    if is_host(device) and _trim is not None:  # glibc keeps what is smaller than 32 MB
        _trim(0)
    if is_gpu(device):
        try:
            runtime(device).empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(f"{type(error).__name__}: {first_line(error)}") from error
