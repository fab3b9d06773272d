"""What a block of work held, and what this device cannot tell."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from boundby import memory
from boundby.known import Missing
from boundby.memory import CPU_REASON, MemoryMeter, MemoryUse, Peak, PeakModel, ProcessPeak, fit_peaks

CPU = torch.device("cpu")
BLOCK = 64 * 2**20


class Kernel(ProcessPeak):
    def __init__(self, peak: int | None, *, resets: bool = True) -> None:
        self._peak, self._resets = peak, resets

    def reset(self) -> bool:
        return self._resets

    def read(self) -> int | None:
        return self._peak


@pytest.fixture(autouse=True)
def _has_much_memory(monkeypatch):
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: 10**15)


def used(kernel: ProcessPeak, device: torch.device = CPU) -> MemoryUse:
    meter = MemoryMeter(device, kernel)
    meter.start()
    return meter.stop()


def test_a_cpu_has_the_process_and_a_reason_for_the_rest():
    use = used(Kernel(12345))
    assert use.process_peak_bytes == 12345
    assert 2**20 < use.process_bytes < psutil.virtual_memory().total
    assert (use.device_allocated_bytes, use.device_reserved_bytes, use.device_before_bytes) == (None, None, None)
    assert (use.device_peak_allocated_bytes, use.device_peak_reserved_bytes) == (None, None)
    assert use.device_total_bytes is None
    assert (use.reasons, use.doubts) == ((CPU_REASON,), ())


def test_a_peak_that_is_not_known_is_none_with_a_reason_and_nine_tenths_of_the_limit_are_a_doubt(monkeypatch):
    for kernel in (Kernel(None), Kernel(12345, resets=False)):  # or not of the block
        use = used(kernel)
        assert (use.process_peak_bytes, len(use.reasons)) == (None, 2)
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: 1_000_000_000)
    assert [len(used(Kernel(peak)).doubts) for peak in (899_999_999, 900_000_000)] == [0, 1]


def test_the_peak_is_that_of_the_block_and_not_of_what_came_before():
    if not ProcessPeak().reset():
        pytest.skip("this kernel cannot set the peak of a process back (/proc/self/clear_refs)")
    before = np.ones(4 * BLOCK, dtype=np.uint8)
    del before
    meter = MemoryMeter(CPU)
    meter.start()
    held = psutil.Process().memory_info().rss
    inside = np.ones(BLOCK, dtype=np.uint8)
    del inside
    use = meter.stop()
    assert use.process_peak_bytes is not None
    assert BLOCK / 2 < use.process_peak_bytes - held < 2 * BLOCK  # the kernel counts pages in batches per core


def test_the_peak_is_read_in_bytes_or_not_told(tmp_path):
    for status, peak in (("Name:\tx\nVmHWM:\t    2140 kB\n", 2140 * 1024), ("Name:\tx\n", None)):
        (tmp_path / "status").write_text(status)
        assert ProcessPeak(tmp_path).read() == peak
    kernel = ProcessPeak(tmp_path / "absent")
    assert (kernel.reset(), kernel.read()) == (False, None)


def test_the_counters_of_a_gpu_stand_in_their_fields(monkeypatch):
    calls: list[str] = []
    allocated = iter([11, 22])
    fakes = {
        "synchronize": lambda device: calls.append("synchronize"),
        "reset_peak_memory_stats": lambda device: calls.append("reset"),
        "memory_allocated": lambda device: next(allocated),
        "memory_reserved": lambda device: 33,
        "max_memory_allocated": lambda device: 44,
        "max_memory_reserved": lambda device: 95,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=100),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    use = used(Kernel(7), torch.device("cuda"))
    assert calls == ["synchronize", "reset"]
    assert (use.device_before_bytes, use.device_allocated_bytes) == (11, 22)
    assert (use.device_reserved_bytes, use.device_peak_reserved_bytes) == (33, 95)
    assert (use.device_peak_allocated_bytes, use.device_total_bytes, use.process_peak_bytes) == (44, 100, 7)
    assert use.reasons == ()
    [doubt] = use.doubts
    assert "device memory" in doubt


FIXED, PER_TOKEN, PER_PAIR = 500e6, 3000.0, 40.0


def peaks(sizes: list[int], lengths: list[int], per_token: float = PER_TOKEN, per_pair: float = 0.0) -> list[Peak]:
    return [Peak(n, t, int(FIXED + n * t * (per_token + t * per_pair))) for n in sizes for t in lengths]


@pytest.mark.parametrize(("lengths", "per_pair"), [([150], 0.0), ([64, 256], 0.0), ([64, 128, 256], PER_PAIR)])
def test_a_batch_that_was_not_measured_has_the_peak_of_its_tokens_and_of_their_pairs(lengths, per_pair):
    model = fit_peaks(peaks([1, 8, 32, 64], lengths, per_pair=per_pair))
    assert isinstance(model, PeakModel) and model.error < 1e-6
    [held_out] = peaks([300], lengths[-1:], per_pair=per_pair)
    assert model.bytes_at(300, lengths[-1]) == pytest.approx(held_out.bytes, rel=1e-6)


def test_the_largest_batch_that_fits_leaves_a_tenth_and_is_not_told_far_beyond_what_was_measured():
    model = fit_peaks(peaks([1, 8, 32, 64], [150]))
    assert isinstance(model, PeakModel)
    assert model.most_samples(150, 0.7e9) == (pytest.approx((0.9 * 0.7e9 - FIXED) / (150 * PER_TOKEN), abs=1), False)
    assert model.most_samples(150, 0.5e9) == (0, False)
    assert model.most_samples(150, 64e9) == (16 * 64, True)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (peaks([1, 8], [150]), "takes 3"),
        (peaks([1, 8, 32], [150], per_token=10), "hardly rises"),
        ([Peak(1, 100, 500), Peak(2, 100, 900), Peak(4, 100, 600), Peak(8, 100, 1500)], "do not follow"),
    ],
)
def test_the_reason_is_told_where_the_points_do_not_tell_the_peak(points, says):
    missing = fit_peaks(points)
    assert isinstance(missing, Missing) and says in missing.reason


@pytest.mark.gpu
def test_the_peak_of_a_gpu_holds_what_was_freed_within_the_block():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda:0")
    meter = MemoryMeter(device)
    meter.start()
    held = torch.empty(BLOCK, dtype=torch.uint8, device=device)
    freed = torch.empty(BLOCK, dtype=torch.uint8, device=device)
    del freed
    use = meter.stop()
    assert use.device_before_bytes is not None
    assert use.device_allocated_bytes == use.device_before_bytes + held.numel()
    assert use.device_peak_allocated_bytes == use.device_before_bytes + 2 * BLOCK
