"""What a block of work held, and what this device cannot tell."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from boundby.formatting import Missing
from boundby.machine import memory
from boundby.machine.memory import (
    CPU_REASON,
    Demand,
    MemoryMeter,
    MemoryUse,
    Peak,
    PeakModel,
    ProcessPeak,
    demand,
    fit_peaks,
)

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


FIXED, TOKENS, BELOW = 500e6, 100, 32e6
# Two blocks of 0.5 MB a sample at a time, the first of three freed before the last comes.
DEMAND = Demand(TOKENS, ((0, 5e5), (0, 5e5), (0, -5e5), (1000, 5e5), (-1000, -5e5), (0, -5e5)))


def peaks(sizes: list[int], kept: float = 0.0) -> list[Peak]:
    def held(size: int) -> float:
        return FIXED + DEMAND.live_bytes(size) + kept * DEMAND.most_small_bytes(size, BELOW)

    return [Peak(size, TOKENS, int(held(size))) for size in sizes]


def test_the_blocks_of_a_forward_are_counted_for_any_number_of_samples():
    weight = torch.ones(16, 16)

    def forward(samples: int) -> torch.Tensor:
        wide = torch.zeros(samples, 16) @ weight  # the zeros are freed here
        return (wide * 2).view(-1)[:4]

    counted = demand(forward, 16)
    assert isinstance(counted, Demand)
    for samples in (1, 4, 1000):
        assert counted.live_bytes(samples) == 2 * samples * 16 * 4  # no view, no weight
    other = demand(lambda samples: [torch.ones(4) for _ in range(samples)], 16)
    assert isinstance(other, Missing) and "other blocks" in other.reason


def test_smaller_blocks_are_most_before_they_outgrow_what_the_heap_keeps():
    assert DEMAND.live_bytes(63, BELOW) == pytest.approx(2 * 63 * 5e5 + 1000)
    assert DEMAND.live_bytes(65, BELOW) == 0
    assert DEMAND.most_small_bytes(1000, BELOW) == pytest.approx(2 * 63 * 5e5 + 1000)


@pytest.mark.parametrize("kept", [0.0, 0.8])
def test_a_batch_that_was_not_measured_has_the_live_bytes_and_what_the_allocator_may_keep(kept):
    model = fit_peaks(peaks([1, 4, 16, 32], kept), {TOKENS: DEMAND}, BELOW)
    assert isinstance(model, PeakModel)
    small = model.at(48)
    assert small.value == pytest.approx(peaks([48], kept)[0].bytes, rel=1e-3)
    large, live = model.at(8000), FIXED + DEMAND.live_bytes(8000)
    assert large.low == pytest.approx(live, rel=1e-3) and large.low <= large.value <= large.high < 1.02 * live


@pytest.mark.parametrize("kept", [0.0, 2.3])
def test_the_range_holds_what_the_allocator_keeps_in_another_run(kept):
    measured = peaks([4], 2.0) + peaks([16], 1.0) + peaks([32], 0.5)  # none shows what is held before any text
    model = fit_peaks(measured, {TOKENS: DEMAND}, BELOW)
    assert isinstance(model, PeakModel)
    peak = model.at(48)
    assert peak.low <= peaks([48], kept)[0].bytes <= peak.high


def test_a_gpu_keeps_no_blocks_by_their_size():
    reserved = [Peak(size, TOKENS, int(FIXED + rest + DEMAND.live_bytes(size))) for size, rest in
                ((1, 2e6), (8, 4e6), (64, 9e6))]  # fmt: skip
    model = fit_peaks(reserved, {TOKENS: DEMAND}, 0)
    assert isinstance(model, PeakModel)
    peak = model.at(1000)
    assert [round((end - DEMAND.live_bytes(1000) - FIXED) / 1e6) for end in (peak.low, peak.value, peak.high)] == [
        2,
        4,
        9,
    ]


def test_the_largest_batch_that_fits_leaves_a_tenth():
    model = fit_peaks(peaks([1, 4, 16, 32]), {TOKENS: DEMAND}, 0)
    assert isinstance(model, PeakModel)
    assert [model.most_samples(limit) for limit in (0.5e9, 8e9)] == [0, int((0.9 * 8e9 - FIXED - 1000) / 1e6)]


def test_the_reason_is_told_where_the_points_do_not_tell_the_peak():
    for points, says in ((peaks([1, 8]), "takes 3"), ([Peak(size, TOKENS, 10) for size in (1, 2, 3)], "at least")):
        missing = fit_peaks(points, {TOKENS: DEMAND}, BELOW)
        assert isinstance(missing, Missing) and says in missing.reason
