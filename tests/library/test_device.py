"""Picking a device, its queue, and telling a lack of memory from other failures."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from boundby.formatting import first_line
from boundby.machine.ceilings import matmul_precision
from boundby.machine.device import (
    CudaQueue,
    arithmetic,
    describe,
    device_queue,
    float32_precision,
    gpu_source,
    has_bfloat16_matmul,
    is_out_of_memory,
    is_sticky,
    naming_loss,
    pick_device,
    raise_if_lost,
    release_memory,
    torch_build,
)
from boundby.machine.device import synchronizer as waiter
from boundby.machine.sampler import DeviceLostError
from boundby.timing.timer import DeviceTime, Timer

CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_is_the_cpu_and_a_gpu_is_refused():
    assert pick_device("auto") == pick_device() == CPU
    with pytest.raises(ValueError, match=rf"'cuda' is not available: torch {torch.__version__[:3]}.*sees no GPU"):
        pick_device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_with_gpus_auto_is_the_first_and_one_that_is_not_there_is_refused():
    for name, picked in (("auto", "cuda:0"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
        assert pick_device(name) == torch.device(picked)
    with pytest.raises(ValueError, match=r"'cuda:2' is not available: torch sees 2 GPU\(s\)"):
        pick_device("cuda:2")


def test_a_cpu_is_not_waited_for_and_has_no_cache_to_give_back_and_a_gpu_is_and_has(monkeypatch):
    waited: list[torch.device] = []
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    waiter(CPU)()
    release_memory(CPU)
    assert waited == emptied == []
    waiter(torch.device("cuda:1"))()
    release_memory(torch.device("cuda"))
    assert (waited, emptied) == ([torch.device("cuda:1")], [True])


class FakeCuda:
    """Two GPUs of 1 GHz and 2 GHz that run behind the host; the current one is the first.

    A stream is known by its device. The host sees that an event has passed once it has waited for the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.cycles_per_s = 0, [1e9, 2e9]
        self.queued_s, self.waited_s = [0.0, 0.0], [0.0, 0.0]
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device.index)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def sleep(self, cycles: int) -> None:
        self.queued_s[self.current] += cycles / self.cycles_per_s[self.current]

    def synchronize(self, device: torch.device) -> None:
        self.waited_s[device.index] = self.queued_s[device.index]

    def event(self, enable_timing: bool = False) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: int) -> None:
        self.stream, self.at_s = stream, self._cuda.queued_s[stream]

    def query(self) -> bool:
        return self._cuda.waited_s[self.stream] >= self.at_s

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query() and end.query()
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_a_cpu_has_no_queue_and_is_described_by_its_threads():
    assert device_queue(CPU) is None
    assert describe(CPU) == {"type": "cpu", "threads": torch.get_num_threads()}


FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
def test_a_gpu_is_held_for_the_seconds_asked_for(cuda, device):
    queue = device_queue(device)
    assert isinstance(queue, CudaQueue)
    before = list(cuda.queued_s)
    queue.hold(0.25)
    held = [now - then for now, then in zip(cuda.queued_s, before, strict=True)]
    assert held[device.index] == pytest.approx(0.25, rel=1e-6)
    assert held[1 - device.index] == 0.0
    assert cuda.current == 0


def test_a_gpu_whose_clock_rises_is_held_for_the_seconds_asked_for_from_the_second_time_on(cuda):
    queue = CudaQueue(FIRST)
    cuda.cycles_per_s[0] *= 5
    queue.hold(0.01)
    torch.cuda.synchronize(FIRST)
    before = cuda.queued_s[0]
    queue.hold(0.25)
    assert cuda.queued_s[0] - before == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("has", [True, False], ids=["A100", "T4"])
def test_a_gpu_that_emulates_bfloat16_has_no_products_in_it(has, cuda, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: asked.append(cuda.current) or including_emulation or has,
    )
    assert has_bfloat16_matmul(SECOND) == has
    assert asked == [1]


@pytest.mark.parametrize("settings", [torch.backends, torch.backends.cuda.matmul], ids=["for all", "for CUDA"])
def test_tf32_that_a_program_allows_by_torchs_other_setting_is_known_and_left(settings):
    before = settings.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "none"  # what holds for all holds for it, whatever ran before
    try:
        settings.fp32_precision = "tf32"  # after which torch.get_float32_matmul_precision raises
        assert float32_precision() == "high"
        with matmul_precision("highest"):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert (float32_precision(), torch.backends.cuda.matmul.fp32_precision) == ("high", "tf32")
    finally:
        settings.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


def test_bfloat16_products_that_a_program_allows_on_the_cpu_are_known_and_left():
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "bf16"
        assert float32_precision() == "medium"
        with matmul_precision("highest"):
            assert float32_precision() == "highest"
        assert (float32_precision(), settings.fp32_precision) == ("medium", "bf16")
    finally:
        settings.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


def test_a_mark_is_passed_once_the_gpu_has_come_to_it_and_a_call_is_timed_behind_the_backlog(cuda):
    queue = CudaQueue(FIRST)
    start = queue.mark()
    queue.hold(0.25)
    end = queue.mark()
    assert (queue.has_passed(start), queue.has_passed(end)) == (True, False)
    torch.cuda.synchronize(FIRST)
    assert queue.has_passed(end)
    assert queue.seconds_between(start, end) == pytest.approx(0.25, rel=1e-6)
    timer = Timer(synchronize=waiter(FIRST))
    device_time = timer.on_device(lambda: cuda.sleep(4_000_000), CudaQueue(FIRST), enqueue_s=0.0)
    assert device_time == DeviceTime(pytest.approx(0.004, rel=1e-6), by="backlog")


@pytest.fixture
def three_gpus(monkeypatch):
    """Three GPUs of which the environment shows the last and the first of the machine, in this order."""
    uuids = {0: "uuid-2", 1: "uuid-0"}
    names = {"name": "a GPU", "total_memory": 2**37, "major": 9, "minor": 4, "multi_processor_count": 304}

    def properties(device):
        return SimpleNamespace(uuid=uuids[device.index], gcnArchName="gfx942", **names)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(("device", "uuid"), [(FIRST, "uuid-2"), (SECOND, "uuid-0")], ids=str)
def test_the_driver_is_asked_for_a_gpu_by_its_uuid_and_not_by_the_number_that_torch_gives_it(device, uuid, monkeypatch):
    monkeypatch.setattr("boundby.machine.device.nvml_source", lambda asked: asked)
    assert gpu_source(device) == uuid
    assert gpu_source(CPU).reason == "the device is not a GPU"


@pytest.mark.usefixtures("three_gpus", "no_gpu")
def test_with_torch_for_rocm_no_message_names_cuda_or_nvml_and_amdsmi_is_asked(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    with pytest.raises(ValueError, match=r"\(ROCm 7.1.0\) sees no GPU"):
        pick_device("cuda")
    description = describe(SECOND)
    assert (description["rocm"], description["architecture"]) == ("7.1.0", "gfx942")
    monkeypatch.setattr(torch.cuda, "_get_amdsmi_handler", lambda device: ("handle", device), raising=False)
    monkeypatch.setattr("boundby.machine.device.AmdSource", lambda handle: handle)
    assert gpu_source(SECOND) == ("handle", SECOND)
    monkeypatch.delattr(torch.cuda, "_get_amdsmi_handler")
    assert gpu_source(SECOND).reason.startswith("amdsmi: ")


@pytest.mark.usefixtures("three_gpus")
def test_what_kernels_are_chosen_by_is_told_of_a_gpu_and_of_a_cpu(monkeypatch):
    assert arithmetic(SECOND) == {"capability": "9.4", "multiprocessors": "304"}
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    assert arithmetic(SECOND)["architecture"] == "gfx942"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("boundby.machine.environment.instructions", lambda: ("avx", "avx2"))
    assert arithmetic(CPU) == {"capability": "AVX2", "instructions": ("avx", "avx2")}


def test_another_build_of_torch_is_told_and_another_processor_is_none(monkeypatch):
    hashes = []
    for built in ("GCC 13\n  - CPU capability usage: AVX2", "GCC 13\n  - CPU capability usage: AVX512", "GCC 12"):
        torch_build.cache_clear()
        monkeypatch.setattr(torch.__config__, "show", lambda built=built: built)
        hashes.append(torch_build())
    torch_build.cache_clear()
    assert hashes[0] == hashes[1] != hashes[2]


REFUSALS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA driver error: Out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("unable to mmap 4096 bytes from file </model.safetensors>: Cannot allocate memory (12)"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
)
OTHER_FAILURES = (
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),  # also a shape that no kernel takes
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Expected all tensors to be on the same device"),
    ValueError("the text 'out of memory' has no label"),
    KeyboardInterrupt(),
)


def test_lack_of_memory_is_known_by_type_or_text_and_other_failures_are_none():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**52, dtype=torch.float32)
    assert [error for error in (*REFUSALS, raised.value) if not is_out_of_memory(error)] == []
    assert [error for error in OTHER_FAILURES if is_out_of_memory(error)] == []


@pytest.mark.gpu
def test_a_gpu_is_understood_when_it_refuses():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2**52, dtype=torch.float32, device="cuda")
    assert is_out_of_memory(raised.value)


@pytest.mark.gpu
def test_a_gpu_is_described_by_name_memory_and_capability():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    description = describe(pick_device("cuda"))
    assert description["type"] == "cuda"
    assert description["name"] == torch.cuda.get_device_name(0)
    assert description["memory_bytes"] > 2**30
    assert description["capability"] == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert description["multiprocessors"] > 0


BELOW = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def with_code(code: int) -> BaseException:
    error = torch.AcceleratorError("CUDA error: in a language of its own")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    "error",
    [
        *(
            kind(f"CUDA error: {text}{BELOW}")
            for kind in (torch.AcceleratorError, RuntimeError)
            for text in (
                "device-side assert triggered", "an illegal memory access was encountered", "misaligned address",
                "uncorrectable ECC error encountered", "an illegal instruction was encountered", "unknown error",
                "the launch timed out and was terminated", "unspecified launch failure", "invalid program counter",
                "operation not supported on global/shared address space", "hardware stack error",
                "no CUDA-capable device is detected",
            )
        ),
        with_code(719), with_code(710), with_code(999),
        RuntimeError("HIP error: an illegal memory access was encountered"), RuntimeError("HIP error: unknown error"),
        RuntimeError("CUDA driver error: unknown error"), RuntimeError("Triton Error [CUDA]: misaligned address"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`"),
        RuntimeError("cuBLAS: cudaErrorLaunchFailure"), RuntimeError("hipErrorIllegalAddress"),
        RuntimeError("CUDA_ERROR_ECC_UNCORRECTABLE"),
        OSError("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."), RuntimeError("see XID 79"),
        Exception("GPU is lost"), DeviceLostError("NVML: GPU is lost"),
    ],
    ids=lambda error: f"{type(error).__name__}: {first_line(error)} {getattr(error, 'error_code', '')}",
)  # fmt: skip
def test_after_a_sticky_error_a_process_can_do_nothing_more_with_its_gpu(error):
    assert is_sticky(error) and not is_out_of_memory(error)
    with pytest.raises(DeviceLostError):
        raise_if_lost(error)
    try:
        raise ValueError("the compiler failed") from error
    except ValueError as wrapped:
        assert is_sticky(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        *(
            torch.AcceleratorError(f"CUDA error: {text}{BELOW}")
            for text in (
                "out of memory", "invalid argument", "invalid configuration argument", "operation not supported",
                "no kernel image is available for execution on the device", "too many resources requested for launch",
                "operation not permitted when stream is capturing",
                "operation failed due to a previous error during capture",
            )
        ),
        with_code(2), with_code(209), with_code(901),
        torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("NVML: Unknown Error"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"),
        ValueError("an unknown error"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: f"{type(error).__name__}: {first_line(error)} {getattr(error, 'error_code', '')}",
)  # fmt: skip
def test_after_other_errors_the_gpu_works_on(error):
    assert not is_sticky(error)
    raise_if_lost(error)


def test_a_loss_names_its_cause_and_what_was_at_work_first():
    with pytest.raises(DeviceLostError) as lost, naming_loss("all of it"), naming_loss("batch size 8"):
        try:
            raise torch.AcceleratorError(f"CUDA error: device-side assert triggered{BELOW}")
        except RuntimeError as error:
            raise ValueError("the compiler failed: CUDA error: device-side assert triggered") from error
    assert str(lost.value) == "batch size 8: AcceleratorError: CUDA error: device-side assert triggered"
    with pytest.raises(ValueError, match="another"), naming_loss("batch size 8"):
        raise ValueError("another")


def test_a_gpu_that_cannot_even_give_memory_back_is_lost(monkeypatch):
    def fails():
        raise torch.AcceleratorError("CUDA error: in a language of its own")

    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    with pytest.raises(DeviceLostError, match="in a language of its own"):
        release_memory(torch.device("cuda"))
