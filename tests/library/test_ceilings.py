"""The limits of a machine that is known: a fake clock makes every rate exact."""

from typing import Any

import pytest
import torch

from boundby.machine import ceilings
from boundby.machine.ceilings import (
    Ceilings,
    ComputeCeiling,
    MemoryCeiling,
    SharedCache,
    cache_sizes,
    cached,
    matmul_precision,
    measure,
)
from boundby.timing.timer import QUEUE_DEPTH, Timer
from tests.fakes import FakeClock, FakeWatch, QueuedDevice

CPU = torch.device("cpu")
GIB = 2**30


class Machine:
    """Takes a known time per FLOP, per byte and per operator, instead of computing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.flops_per_s = {torch.float32: 2.0**33, torch.bfloat16: 2.0**30}
        self.faster = {"highest": 1.0, "high": 1.0, "medium": 2.0}
        self.sizes: list[int] = []
        self.reported = 2**25  # bytes of shared cache that it says it has
        self.cache = 2**25  # and that it has
        monkeypatch.setattr(torch, "mm", self.mm)
        monkeypatch.setattr(torch, "add", self.add)
        monkeypatch.setattr(
            torch.Tensor, "copy_", lambda out, source: self._move(4 * out.nbytes)
        )  # half as fast per byte
        monkeypatch.setattr(
            ceilings, "_filled", lambda shape, dtype, device, seed: torch.empty(shape, dtype=getattr(torch, dtype))
        )
        monkeypatch.setattr(ceilings, "_relative_error", lambda left, right: 0.0)
        monkeypatch.setattr(ceilings, "_touched", lambda count, device: torch.empty(count))
        monkeypatch.setattr(ceilings, "cache_sizes", lambda: (2**20, self.reported))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr("boundby.machine.environment.memory_limit_bytes", lambda: 2**34)

    def mm(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        n = len(left)
        self.sizes.append(n)
        speed = self.flops_per_s[left.dtype] * self.faster[torch.get_float32_matmul_precision()]
        self.clock.advance(2 * n**3 / speed)

    def add(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> None:
        if left.numel() == 1:
            self.clock.advance(2.0**-20)
            return
        self._move(3 * left.nbytes)
        if out is None:
            self.clock.advance(3 * left.nbytes / (8 * 2**30))  # the pages are new

    def _move(self, moved: int) -> None:
        self.clock.advance(moved / (GIB if moved > self.cache else 16 * GIB))


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def limits(machine: Machine, **options: Any) -> Ceilings:
    return measure(CPU, timer=Timer(machine.clock), watch=FakeWatch(), **options)


def test_the_peak_is_that_of_the_machine_for_each_dtype_and_setting(machine):
    machine_limits = limits(machine, dtypes=("float32", "bfloat16"))
    rates = {(ceiling.dtype, ceiling.precision): ceiling.flops_per_s for ceiling in machine_limits.compute}
    expected = {("float32", "highest"): 2.0**33, ("float32", "high"): 2.0**33, ("float32", "medium"): 2.0**34}
    assert rates == pytest.approx(expected | {("bfloat16", None): 2.0**30})
    assert [ceiling.precision for ceiling in machine_limits.compute if ceiling.is_configured] == ["highest", None]
    assert machine_limits.configured("float32").precision == "highest"
    assert machine_limits.best("float32").precision == "medium"
    assert machine_limits.limits("float32").flops_per_s.value == pytest.approx(2.0**33), (
        "though coarser products are faster"
    )
    assert machine_limits.configured("float16") is None and machine_limits.limits("float16") is None


def test_the_cost_of_an_operator_and_the_rates_of_memory_are_those_of_the_machine(machine):
    machine_limits = limits(machine, dtypes=("float32",))
    assert machine_limits.dispatch_s == 2.0**-20
    by_level = {ceiling.level: ceiling for ceiling in machine_limits.memory}
    assert by_level["private cache"].bytes_per_s == pytest.approx(16 * GIB)
    assert by_level["shared cache"].bytes_per_s == pytest.approx(16 * GIB)
    assert by_level["memory"].bytes_per_s == pytest.approx(GIB)
    assert by_level["memory"].operation == "add"  # a copy is half as fast here
    # of the addition's 12 bytes, 4 are new: 4 / GIB for writing and 12 / (8 GIB) for the pages, so 5.5 / GIB for 4
    assert by_level["new memory"].bytes_per_s == pytest.approx(4 / 5.5 * GIB)


class Clocks:
    reason, reasons = None, {}

    def __init__(self, gpu: "HotGpu", slowed: int) -> None:
        self.gpu, self.slowed = gpu, slowed

    def read(self) -> dict[str, float]:
        if self.gpu.is_hot:
            return {"gpu_sm_clock_mhz": 1500.0, "gpu_clock_event_reasons": self.slowed}
        return {"gpu_sm_clock_mhz": 1980.0, "gpu_clock_event_reasons": 0}


class HotGpu(Machine):
    """A GPU that after a third of a second of products makes three quarters of them."""

    busy_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.flops_per_s = {torch.float32: 2.0**45, torch.bfloat16: 2.0**46}
        monkeypatch.setattr(ceilings, "device_queue", lambda device: None)
        monkeypatch.setattr(ceilings, "describe", lambda device: {"type": "cuda"})
        monkeypatch.setattr(ceilings, "last_level_cache_bytes", lambda device: 2**25)

    @property
    def is_hot(self) -> bool:
        return self.busy_s > 1 / 3

    def mm(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        speed, before = self.flops_per_s[left.dtype], self.clock.now
        faster = 1.0 if torch.get_float32_matmul_precision() == "highest" or left.dtype != torch.float32 else 2.0
        self.clock.advance(2 * len(left) ** 3 / (speed * faster * (0.75 if self.is_hot else 1.0)))
        self.busy_s += self.clock.now - before


@pytest.mark.parametrize(("slowed", "doubts"), [(0x4, 0), (0x40, 1)])  # the power limit, which is usual; heat
def test_products_of_a_gpu_are_those_that_it_sustains_with_its_clock(monkeypatch, slowed, doubts):
    gpu = HotGpu(monkeypatch)
    source = Clocks(gpu, slowed)
    timer = Timer(gpu.clock)
    machine_limits = measure(torch.device("cuda"), timer=timer, watch=FakeWatch(), source=source, dtypes=("bfloat16",))
    [product] = machine_limits.compute
    assert (product.burst_flops_per_s, product.flops_per_s) == pytest.approx((2.0**46, 0.75 * 2.0**46))
    assert (product.sm_clock_mhz, product.clock_event_reasons) == (1500.0, slowed)
    assert len(machine_limits.doubts) == doubts


def test_a_block_of_short_launches_fits_into_the_queue_of_a_gpu(monkeypatch):
    """Beyond its depth the host waits until the device is let go, and has no more of a lead."""
    gpu, launched = HotGpu(monkeypatch), []

    class Queue(QueuedDevice):
        def mark(self) -> float:
            launched.append(0)
            return super().mark()

        def seconds_between(self, start: float, end: float) -> float:
            return 1.0

    def launch(*_: Any, out: torch.Tensor | None = None) -> None:
        gpu.clock.advance(2.0**-20)
        launched[-1:] = [count + 1 for count in launched[-1:]]

    monkeypatch.setattr(torch, "add", launch)
    monkeypatch.setattr(torch.Tensor, "copy_", launch)
    monkeypatch.setattr(ceilings, "device_queue", lambda device: Queue(gpu.clock))
    settings = {"timer": Timer(gpu.clock), "watch": FakeWatch(), "source": Clocks(gpu, 0)}
    measure(torch.device("cuda"), dtypes=("bfloat16",), **settings)
    assert 100 < max(launched) < QUEUE_DEPTH


def test_a_gpu_has_one_setting_of_tf32(monkeypatch):
    gpu = HotGpu(monkeypatch)
    for in_use, expected in (("highest", ["highest", "high"]), ("medium", ["highest", "medium"])):
        with matmul_precision(in_use):
            settings = {"timer": Timer(gpu.clock), "watch": FakeWatch(), "source": Clocks(gpu, 0)}
            machine_limits = measure(torch.device("cuda"), dtypes=("float32",), **settings)
        assert [ceiling.precision for ceiling in machine_limits.compute] == expected


def test_a_slow_dtype_stops_at_the_size_that_its_slot_allows(machine):
    machine.flops_per_s[torch.bfloat16] = 2.0**26
    limits(machine, dtypes=("bfloat16",))
    assert set(machine.sizes) == {256}
    assert len(machine.sizes) <= 4
    assert machine.clock.now < 10


def test_the_settings_in_use_are_left_as_they_were(machine):
    with matmul_precision("high"):
        machine_limits = limits(machine, dtypes=("float32",))
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    assert machine_limits.configured("float32").precision == "high"
    with pytest.raises(ZeroDivisionError), matmul_precision("medium"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"


def test_limits_hand_out_the_rate_of_the_nearest_level_that_holds_what_is_touched(machine):
    rates = limits(machine, dtypes=("float32",)).limits("float32")
    assert rates is not None
    assert rates.bandwidth(2**25).value == pytest.approx(16 * GIB)
    assert rates.bandwidth(2**25 + 1).value == rates.bandwidth(2**40).value == pytest.approx(GIB)
    assert rates.new_bytes_per_s is not None and rates.new_bytes_per_s.value < GIB


@pytest.mark.parametrize(("has", "measured"), [(2**25, 2**25), (2**29, 2**29), (2**19, None)])
def test_the_size_of_the_shared_cache_is_where_bytes_per_second_drop(machine, has, measured):
    machine.cache, machine.reported = has, 480 * 2**20
    machine_limits = limits(machine, dtypes=("float32",))
    assert machine_limits.shared_cache == SharedCache(480 * 2**20, measured)
    assert ("shared cache" in {ceiling.level for ceiling in machine_limits.memory}) == (measured is not None)
    assert machine_limits.memory[-2].level == "memory" and machine_limits.memory[-2].bytes_per_s == pytest.approx(GIB)


def test_a_slow_machine_leaves_out_the_settings_that_are_not_in_use_and_names_them(machine):
    machine.flops_per_s = {torch.float32: 2.0**24}
    machine_limits = limits(machine, dtypes=("float32",), budget_s=1.0)
    assert [ceiling.precision for ceiling in machine_limits.compute] == ["highest"]
    assert machine_limits.cut[-2:] == ("float32 matmul at precision 'medium'", "float32 matmul at precision 'high'")


def made(rate: float, doubts: tuple[str, ...] = ()) -> Ceilings:
    compute = (ComputeCeiling("float32", "highest", True, rate, rate, 256, 0.0),)
    memory = (MemoryCeiling("memory", 2**28, 100 / rate, 100 / rate, "add"),)
    return Ceilings({"type": "cpu"}, compute, memory, 1 / rate, 1 / rate, 2.0, doubts)


def test_ceilings_are_measured_once_for_a_machine(tmp_path, monkeypatch):
    taken = iter([made(1.0), made(2.0)])
    monkeypatch.setattr(ceilings, "measure", lambda device, dtypes: next(taken))
    first, path, is_new = cached(tmp_path, CPU, ("float32",))
    assert is_new and path.is_file()
    assert cached(tmp_path, CPU, ("float32",)) == (first, path, False)
    with matmul_precision("medium"):  # another setting is another machine
        assert cached(tmp_path, CPU, ("float32",))[0] == made(2.0)


@pytest.mark.parametrize("content", ["", "[]", '{"compute": 1}', '{"compute": [{"x": 1}], "memory": [], "doubts": []}'])
def test_a_damaged_file_is_measured_again(content, tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings, "measure", lambda device, dtypes: made(1.0))
    _, path, _ = cached(tmp_path, CPU, ("float32",))
    path.write_text(content)
    assert cached(tmp_path, CPU, ("float32",)) == (made(1.0), path, True)


def test_disturbed_ceilings_are_measured_again_and_not_kept(tmp_path, monkeypatch):
    busy = ("disturbed: other processes used 1.0 of 2 cores",)
    taken = iter([made(1.0, busy), made(2.0, busy), made(3.0, busy), made(4.0)])
    monkeypatch.setattr(ceilings, "measure", lambda device, dtypes: next(taken))
    machine_limits, path, _ = cached(tmp_path, CPU, ("float32",))
    assert machine_limits.doubts == busy and not path.exists()
    # the better of two for each limit, since a limit is what the machine can do
    assert (machine_limits.compute[0].flops_per_s, machine_limits.memory[0].bytes_per_s, machine_limits.dispatch_s) == (
        2.0,
        100.0,
        0.5,
    )
    machine_limits, path, _ = cached(tmp_path, CPU, ("float32",))
    assert machine_limits == made(4.0) and path.is_file()


def test_a_busy_machine_is_a_doubt_on_the_ceilings(machine):
    machine_limits = measure(
        CPU, dtypes=("float32",), timer=Timer(machine.clock), watch=FakeWatch(lambda window: 2.0 * (window < 1))
    )
    [doubt] = machine_limits.doubts
    assert "other processes used 2.0 of 2 cores" in doubt


def test_cache_sizes_are_the_kernels(tmp_path):
    caches = [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "512K"), ("3", "Unified", "32768K")]
    for index, (level, kind, size) in enumerate(caches):
        folder = tmp_path / "cpu0" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    assert cache_sizes(tmp_path) == (512 * 1024, 32 * 2**20)
    assert cache_sizes(tmp_path / "absent") == ceilings.ASSUMED_CACHE_BYTES


@pytest.mark.isa
def test_real_products_agree_with_float64_to_their_precision():
    error = ceilings._relative_error(*(ceilings._filled((64, 64), "float32", CPU, seed) for seed in (0, 1)))
    assert 0 < error < 1e-5
    coarse = ceilings._relative_error(*(ceilings._filled((64, 64), "bfloat16", CPU, seed) for seed in (0, 1)))
    assert 1e-4 < coarse < 0.05
