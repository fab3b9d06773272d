"""Energy of machines whose power is known by construction, read through counters that move in ticks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from boundby.machine import energy, environment
from boundby.machine.energy import EnergyMeter, EnergyUse, GpuEnergy, RaplCounter
from boundby.machine.sampler import DeviceLostError, DriverSource, NoSource
from boundby.timing.timer import Timer

POLL_S = 1 / 1024  # one look at the counter
TICK_S = 1 / 16


class Machine:
    """Takes 16 W idle and 64 W at work; its counter shows the joules as of its last tick. It is its own clock."""

    IDLE_W, BUSY_W = 16.0, 64.0

    def __init__(self, tick_s: float = TICK_S) -> None:
        self.now = self.queued_s = self._used_j = self._shown_j = 0.0
        self._tick_s = self.next_tick = tick_s
        self.synchronizations = 0

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float, watts: float = IDLE_W) -> None:
        end = self.now + seconds
        while self.now < end:
            until = min(end, self.next_tick)
            self._used_j += watts * (until - self.now)
            self.now = until
            if self.now == self.next_tick:
                self._shown_j = self._used_j
                self.next_tick += self._tick_s

    def joules(self) -> float:
        self.spend(POLL_S)
        return self._shown_j

    def work(self) -> None:
        self.queued_s += 0.5

    def synchronize(self) -> None:
        self.synchronizations += 1
        self.spend(self.queued_s, self.BUSY_W)
        self.queued_s = 0.0

    def meter(self, sleep: Callable[[float], None] | None = None) -> EnergyMeter:
        return EnergyMeter(self, Timer(self.clock, self.synchronize), sleep or self.spend)


@pytest.mark.parametrize("tick_s", [1 / 64, 1 / 16, 1 / 2])
def test_the_tick_of_the_counter_is_measured_from_one_to_the_next_and_a_window_begins_right_after_one(tick_s):
    for phase in range(0, 64, 7):
        machine = Machine(tick_s)
        machine.spend(phase * POLL_S)
        meter = machine.meter()
        assert meter.tick_s == tick_s
        machine.spend(phase * POLL_S)  # elsewhere the ends would cut off, or add, up to a tick: 1.25 % of this window
        assert meter.of(machine.work).joules_per_call == pytest.approx(32.0, rel=1e-3)


@pytest.mark.parametrize(("tick_s", "window_s"), [(1 / 16, 5.0), (1 / 8, 6.25), (1 / 2, 25.0)])
def test_a_window_lasts_5_s_or_50_ticks(tick_s, window_s):
    machine = Machine(tick_s)
    meter = machine.meter()
    assert meter.least_window_s == window_s
    use = meter.of(machine.work)
    assert window_s <= use.seconds <= window_s + 0.5 + 2 * POLL_S  # the last call begins within the window


@pytest.mark.parametrize(("tick_s", "window_s"), [(1 / 64, 5.0), (1 / 16, 5.0), (1 / 8, 6.25)])
def test_net_energy_is_what_the_calls_took_beyond_a_machine_that_waits_for_one_window(tick_s, window_s):
    machine, waits = Machine(tick_s), []
    meter = machine.meter(lambda seconds: waits.append(seconds) or machine.spend(seconds))
    idle_w = meter.idle_w()
    assert waits == [window_s] and idle_w == pytest.approx(16.0, rel=1e-3)
    net = meter.of(machine.work).net_joules_per_call(idle_w)
    assert net == pytest.approx((64.0 - 16.0) * 0.5, rel=0.02)  # a tick more or less


def test_the_energy_of_a_call_is_its_power_times_its_time_without_what_was_queued_before():
    use = EnergyUse(joules=320.0, seconds=5.0, calls=10)
    assert (use.joules_per_call, use.net_joules_per_call(idle_w=16.0)) == (32.0, 24.0)
    machine = Machine()
    use = machine.meter().of(machine.work)
    assert (use.calls, use.seconds) == (10, 10 * 0.5 + POLL_S)
    assert use.joules == 10 * 32.0 - (64.0 - 16.0) * POLL_S  # the first look at the counter found an idle machine
    assert use.joules_per_call == use.joules / 10
    assert machine.queued_s == 0.0
    assert machine.synchronizations == 1 + use.calls  # each call is done before its end is looked for
    machine.queued_s = 64.0
    assert machine.meter().of(machine.work).joules_per_call == pytest.approx(32.0, rel=1e-3)


def test_a_counter_that_does_not_move_is_an_os_error():
    with pytest.raises(OSError, match="the energy counter did not move within 1 s"):
        Machine(tick_s=2.0).meter()
    machine = Machine()
    meter = machine.meter()
    machine.next_tick = float("inf")
    for asked in (lambda: meter.of(machine.work), meter.idle_w):
        with pytest.raises(OSError, match="did not move"):
            asked()


MAX_UJ = 262143328850  # 2**32 units of 61 uJ


class Rapl:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "intel-rapl").mkdir()

    def zone(self, name: str, energy_uj: int, label: str = "package-0") -> None:
        zone = self.folder / name
        zone.mkdir(exist_ok=True)
        (zone / "name").write_text(f"{label}\n")
        (zone / "energy_uj").write_text(f"{energy_uj}\n")
        (zone / "max_energy_range_uj").write_text(f"{MAX_UJ}\n")


@pytest.fixture
def rapl(tmp_path):
    return Rapl(tmp_path)


@pytest.mark.parametrize(
    ("zones", "joules"),
    [
        ({"0": (1_500_000, "package-0"), "0:0": (64_000_000, "core"), "1": (250_000, "package-1")}, 1.75),
        ({"0": (500_000, "package-0")}, 0.5),
        ({"0": (1_500_000, "package-0"), "1": (64_000_000, "psys")}, 1.5),
        ({str(number): (1_000_000, f"package-{number}") for number in range(12)}, 12.0),
    ],
    ids=["parts of packages", "a counter that began anew before its first look", "the whole platform", "more than ten"],
)
def test_cpu_energy_is_the_sum_of_the_packages_alone(rapl, zones, joules):
    for name, (energy_uj, label) in zones.items():
        rapl.zone(f"intel-rapl:{name}", energy_uj, label)
    assert RaplCounter(rapl.folder).joules() == joules


@pytest.mark.parametrize("laps", [1, 2, 3])
def test_a_counter_that_began_anew_goes_on_counting(rapl, laps):
    rapl.zone("intel-rapl:0", MAX_UJ - 1_000_000)
    rapl.zone("intel-rapl:1", 5_000_000)  # this one does not
    counter = RaplCounter(rapl.folder)
    start = counter.joules()
    for _ in range(laps):
        rapl.zone("intel-rapl:0", 500_000)
        counter.joules()
        rapl.zone("intel-rapl:0", MAX_UJ - 1_000_000)
        counter.joules()
    rapl.zone("intel-rapl:0", 500_000)
    rapl.zone("intel-rapl:1", 7_000_000)
    assert counter.joules() - start == pytest.approx(laps * MAX_UJ / 1e6 + 1.5 + 2.0, abs=1e-5)


def test_a_machine_without_a_package_or_with_one_that_only_root_may_read_is_an_os_error(rapl, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(OSError, match="has no intel-rapl package"):
        RaplCounter(rapl.folder)
    rapl.zone("intel-rapl:0", 1_500_000)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Permission denied"):
        RaplCounter(rapl.folder)


@pytest.mark.parametrize("jump", [-1e6, 1e9], ids=["backwards", "too far"])
def test_a_counter_that_runs_as_no_machine_does_tells_nothing(jump):
    machine = Machine()

    def sleep(seconds: float) -> None:
        machine._used_j += jump
        machine.spend(seconds)

    meter = machine.meter(sleep)
    with pytest.raises(OSError, match="as no machine does"):
        meter.idle_w()
    machine = Machine()
    meter = machine.meter()

    def jumps() -> None:
        machine.work()
        machine._used_j += jump

    with pytest.raises(OSError, match="as no machine does"):
        meter.of(jumps)


def test_what_a_lost_gpu_has_taken_is_not_known_and_hides_no_error(monkeypatch):
    class Lost(DriverSource):
        library = "NVML"

        def joules(self) -> float:
            raise DeviceLostError("NVML: GPU is lost")

    monkeypatch.setattr("boundby.machine.energy.nvml_source", lambda uuid: Lost(OSError))
    with pytest.raises(OSError, match="GPU is lost"):
        GpuEnergy(["GPU-0"]).joules()


@pytest.fixture
def gpus(monkeypatch):
    """Set the GPUs of a machine, a letter for each kind; gives those that are read. Their joules are 1, 10, 100."""
    energy.gpu_energy.cache_clear()
    read: list[str] = []

    class Source(DriverSource):
        def __init__(self, uuid: str) -> None:
            self.uuid = uuid

        def joules(self) -> float:
            read.append(self.uuid)
            return 10.0 ** int(self.uuid.removeprefix("GPU-"))

    def source(uuid: str) -> Source | NoSource:
        return Source(uuid) if uuid.startswith("GPU-") else NoSource("NVML: Not Found")

    def machine(kinds: str, visible: str | None) -> list[str]:
        known = [{"name": kind, "uuid": f"GPU-{at}"} for at, kind in enumerate(kinds)]
        monkeypatch.setattr(environment, "machine", lambda: {"gpus": known})
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return read

    monkeypatch.setattr(energy, "nvml_source", source)
    yield machine
    energy.gpu_energy.cache_clear()


@pytest.mark.parametrize(
    ("kinds", "visible", "joules"),
    [("A", None, 1.0), ("AAA", None, 111.0), ("AAA", "1", 10.0), ("AAA", "2,0", 101.0), ("AB", "GPU-1", 10.0)],
)
def test_the_energy_is_that_of_the_gpus_that_this_process_may_use(gpus, kinds, visible, joules):
    gpus(kinds, visible)
    assert energy.gpu_energy().joules() == joules


@pytest.mark.parametrize(
    ("kinds", "visible", "why"),
    [
        ("", None, "there is no GPU"),
        ("A", "", "there is no GPU"),
        ("AB", "1", "numbers GPUs that differ"),
        ("A", "7", "NVML: Not Found"),
        ("A", "MIG-1", "NVML: Not Found"),
    ],
)
def test_energy_of_gpus_that_are_not_known_is_none(gpus, kinds, visible, why):
    read = gpus(kinds, visible)
    with pytest.raises(OSError, match=why):
        energy.gpu_energy()
    assert read == []
