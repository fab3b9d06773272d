"""What counts as a disturbance, and how the counters of a host are read. Every /proc and cgroup here is made up."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boundby.machine.disturbance import Conditions, HostCounters, Reference, Watch, changed_clock, usable_cpus
from tests.fakes import FakeClock

QUIET = Conditions(
    seconds=10.0,
    cores=4,
    foreign_cores=0.05,
    stolen_share=0.0,
    throttled_s=0.0,
    switches_per_s=20.0,
    slowdown=1.0,
    gpu_clock_event_reasons=0,
    gpu_processes=0,
    gpu_sm_clock_mhz=(1980.0,),
    gpu_temperature_c=(45.0,),
)


def kinds(threads: int = 4, **changes: Any) -> list[str]:
    return [disturbance.kind for disturbance in replace(QUIET, **changes).disturbances(threads)]


def test_a_quiet_window_and_counters_that_a_machine_lacks_disturb_nothing():
    assert kinds() == []
    assert Conditions(seconds=10.0, cores=4).disturbances(threads=4) == ()


BLIND: dict[str, Any] = {"foreign_cores": None}


@pytest.mark.parametrize(
    ("kind", "threads", "harmless", "disturbing"),
    [  # just below and just above the limit in a window of 10 s on 4 cores
        ("foreign_load", 4, {"foreign_cores": 0.107}, {"foreign_cores": 0.109}),  # 0.1, and two ticks for each core
        ("foreign_load", 2, {"foreign_cores": 2.1}, {"foreign_cores": 2.11}),  # cores that the work leaves free
        ("foreign_load", 1, {"foreign_cores": 3.1}, {"foreign_cores": 3.11}),
        ("foreign_load", 9, {"foreign_cores": 0.1}, {"foreign_cores": 0.11}),
        ("foreign_load", 4, {"foreign_cores": 0.64, "seconds": 0.0625}, {"foreign_cores": 0.64}),  # a tick per core
        ("stolen_time", 4, {"stolen_share": 0.0209}, {"stolen_share": 0.0211}),  # 2 %, and one tick for each core
        ("stolen_time", 4, {"stolen_share": 0.16, "seconds": 0.0625}, {"stolen_share": 0.16}),
        ("quota", 4, {"throttled_s": 0.399}, {"throttled_s": 0.401}),  # 1 % of the time of 4 cores
        ("slow_machine", 4, {"slowdown": 1.5}, {"slowdown": 1.51}),
        ("gpu_shared", 4, {"gpu_processes": 0}, {"gpu_processes": 1}),
        # being pushed off a core stands for the load of others where that cannot be read
        ("preemption", 4, BLIND | {"switches_per_s": 250.0}, BLIND | {"switches_per_s": 250.1}),
        ("preemption", 4, {"switches_per_s": 1000.0}, BLIND | {"switches_per_s": 1000.0}),
        *(  # a clock that is idle, set by the user, synchronized or for a display
            ("gpu_throttled", 4, {"gpu_clock_event_reasons": bit}, {"gpu_clock_event_reasons": 0x8})
            for bit in (None, 0x0, 0x1, 0x2, 0x10, 0x100, 0x1 | 0x2 | 0x10 | 0x100)
        ),
    ],
)
def test_a_counter_disturbs_beyond_its_limit(kind, threads, harmless, disturbing):
    assert (kinds(threads, **harmless), kinds(threads, **disturbing)) == ([], [kind])


def test_heat_or_power_brake_throttles_a_gpu_and_its_power_limit_is_no_disturbance_and_hides_none():
    for bits in (bit | harmless for bit in (0x8, 0x20, 0x40, 0x80) for harmless in (0x0, 0x1, 0x100)):
        (disturbance,) = replace(QUIET, gpu_clock_event_reasons=bits).disturbances(threads=4)
        assert (disturbance.kind, disturbance.is_passing) == ("gpu_throttled", True)
        assert f"clock events {bits:#x}" in disturbance.text
    assert kinds(gpu_clock_event_reasons=0x4 | 0x1) == []
    assert kinds(gpu_clock_event_reasons=0x4 | 0x40) == ["gpu_throttled"]


EVERYTHING: dict[str, Any] = {"foreign_cores": 1.26, "stolen_share": 0.154, "throttled_s": 2.5}
EVERYTHING |= {"switches_per_s": 240.4, "slowdown": 1.84, "gpu_clock_event_reasons": 0x4 | 0x20, "gpu_processes": 2}


def test_all_disturbances_of_a_window_are_told_with_their_figures():
    assert [
        (disturbance.text, disturbance.is_passing)
        for disturbance in replace(QUIET, **EVERYTHING).disturbances(threads=4)
    ] == [
        ("other processes used 1.3 of 4 cores", True),
        ("the hypervisor kept 15 % of the cores' time for others", True),
        ("the container's CPU quota stopped this process for 6 % of the time", False),  # a repeat meets it too
        ("a fixed piece of work took 1.8 times as long as at its best in this session", True),
        ("the GPU slowed its clock down for heat or power (NVML clock events 0x24)", True),
        ("2 other process(es) held the GPU", True),
    ]
    (disturbance,) = replace(QUIET, throttled_s=30.0).disturbances(threads=4)
    assert "300 %" not in disturbance.text, "a quota never stops a process for longer than the window"


class Host:
    """A /proc and a cgroup folder whose counters a test moves; times in ticks of 0.01 s."""

    USER, NICE, SYSTEM, IDLE, IOWAIT, IRQ, SOFTIRQ, STEAL, GUEST, GUEST_NICE = range(10)

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.clock = FakeClock(now=64.0)
        self.own_s, self.switches = 100.0, 1000
        self.fields = 10
        self._ticks = {number: [1000] * 10 for number in (0, 1, 2, 10, 11)}
        (self.cgroup / "cpu").mkdir(parents=True)
        self.proc.mkdir()
        self.spend(0, self.USER, 0)

    def counters(self, *cpus: int) -> HostCounters:
        return HostCounters(self.proc, self.cgroup, cpus, self.clock, lambda: (self.own_s, self.switches))

    def spend(self, cpu: int, field: int, ticks: int) -> None:
        self._ticks[cpu][field] += ticks
        rows = {"cpu": [sum(row) for row in zip(*self._ticks.values(), strict=True)]}
        rows |= {f"cpu{number}": row for number, row in self._ticks.items()}
        lines = [" ".join([name, *map(str, row[: self.fields])]) for name, row in rows.items()]
        text = "\n".join(lines).replace("cpu ", "cpu  ", 1)  # the kernel writes two blanks
        (self.proc / "stat").write_text(f"{text}\nintr 12345 0 9\nctxt 6789\nbtime 1700000000\n")


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def window(host: Host, counters: HostCounters, work: Callable[[], object]) -> Conditions:
    """Return the conditions of a window of 4 s in which `work` moves the counters."""
    start = counters.read()
    work()
    host.clock.advance(4.0)
    return counters.between(start, counters.read())


def test_foreign_load_is_the_busy_time_of_our_cores_beyond_our_own(host):
    def work():
        host.spend(0, host.USER, 300)
        host.spend(1, host.USER, 100)
        host.own_s += 1.5

    conditions = window(host, host.counters(0, 1), work)
    assert (conditions.seconds, conditions.cores) == (4.0, 2)
    assert conditions.foreign_cores == pytest.approx((4.0 - 1.5) / 4.0, rel=1e-9)


@pytest.mark.parametrize("field", range(10))
def test_busy_is_all_but_idle_waiting_and_stolen_time_and_guests_count_once(host, field):
    conditions = window(host, host.counters(0, 1), lambda: host.spend(1, field, 200))
    is_busy = field in (host.USER, host.NICE, host.SYSTEM, host.IRQ, host.SOFTIRQ)
    assert conditions.foreign_cores == pytest.approx(0.5 if is_busy else 0.0, abs=1e-9)
    assert conditions.stolen_share == pytest.approx(
        0.25 if field == host.STEAL else 0.0, abs=1e-9
    )  # 2 s of 2 cores x 4 s


@pytest.mark.parametrize(("ours", "others"), [((0, 1), (2, 10, 11)), ((10,), (0, 1, 11))])
def test_cores_that_we_may_not_use_do_not_count(host, ours, others):
    def work():
        for cpu in others:
            host.spend(cpu, host.USER, 400)
            host.spend(cpu, host.STEAL, 400)

    conditions = window(host, host.counters(*ours), work)
    assert (conditions.foreign_cores, conditions.stolen_share) == (0.0, 0.0)


def test_our_own_work_is_no_foreign_load_and_never_a_negative_one_and_its_switches_are_counted_by_second(host):
    def work():
        host.spend(0, host.USER, 390)
        host.own_s += 4.0  # getrusage is exact, the ticks are not
        host.switches += 480

    conditions = window(host, host.counters(0, 1), work)
    assert (conditions.foreign_cores, conditions.switches_per_s) == (0.0, 120.0)


V2, V1 = "cpu.stat", "cpu/cpu.stat"
SLOWED = {V1: "throttled_time 1000000000\n"}
THROTTLED = {  # files before and after, and the seconds between
    "version 2": ({V2: "nr_throttled 3\nthrottled_usec 1000000\n"}, {V2: "throttled_usec 1500000\n"}, 0.5),
    "version 1": ({V1: "nr_periods 9\nthrottled_time 2000000000\n"}, {V1: "throttled_time 2250000000\n"}, 0.25),
    "both": ({V2: "throttled_usec 1000000\n"} | SLOWED, {V2: "throttled_usec 3000000\n"} | SLOWED, 2.0),
    "version 1 beside a version 2 without a quota": (
        {V2: "usage_usec 9\n"} | SLOWED,
        {V2: "usage_usec 99\n", V1: "throttled_time 2000000000\n"},
        1.0,
    ),
    "never throttled": ({V2: "throttled_usec 0\n"}, {V2: "throttled_usec 0\n"}, 0.0),
    "no quota": ({V2: "usage_usec 9\n"}, {V2: "usage_usec 99\n"}, None),
    "no cgroup": ({}, {}, None),
    "not a list of pairs": ({V2: "throttled_usec\n"}, {V2: "throttled_usec\n"}, None),
    "unknown at the start": ({}, {V2: "throttled_usec 1500000\n"}, None),
}


@pytest.mark.parametrize("case", THROTTLED)
def test_throttled_seconds_come_from_either_version_of_cgroups(host, case):
    before, after, seconds = THROTTLED[case]

    def write(files):
        for name, text in files.items():
            (host.cgroup / name).write_text(text)

    write(before)
    throttled_s = window(host, host.counters(0, 1), lambda: write(after)).throttled_s
    assert throttled_s == (None if seconds is None else pytest.approx(seconds, abs=1e-9))


def stat_is_hidden(host: Host) -> None:
    (host.proc / "stat").unlink()


def kernel_knows_no_steal(host: Host) -> None:
    host.fields = 7
    host.spend(0, host.USER, 400)


@pytest.mark.parametrize("change", [stat_is_hidden, kernel_knows_no_steal])
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_stat_that_cannot_be_read_at_both_ends_disturbs_nothing(host, change, when):
    if when == "before":
        change(host)
    conditions = window(host, host.counters(0, 1), lambda: change(host) if when == "within" else None)
    assert (conditions.foreign_cores, conditions.stolen_share) == (None, None)
    assert conditions.disturbances(threads=2) == ()


def test_a_window_without_length_has_no_disturbance_and_cores_that_stat_does_not_list_are_unknown(host):
    counters = host.counters(0, 1)
    start = counters.read()
    host.spend(0, host.USER, 1)
    host.spend(1, host.STEAL, 1)
    assert counters.between(start, counters.read()).disturbances(threads=2) == ()
    conditions = window(host, host.counters(7), lambda: host.spend(0, host.USER, 400))
    assert (conditions.foreign_cores, conditions.stolen_share) == (None, None)


def test_the_kernel_of_this_machine_is_understood():
    stat = Path("/proc/stat")
    if not stat.exists() or f"cpu{min(usable_cpus())} " not in stat.read_text():
        pytest.skip("needs a kernel that lists our cores in /proc/stat")
    counters = HostCounters()
    conditions = counters.between(counters.read(), counters.read())
    assert conditions.cores == len(usable_cpus()) >= 1
    assert conditions.foreign_cores is not None and conditions.stolen_share is not None


def test_our_own_time_and_switches_are_those_of_all_threads_of_the_process(monkeypatch):
    usages = {
        resource.RUSAGE_SELF: SimpleNamespace(ru_utime=1.5, ru_stime=0.25, ru_nivcsw=7, ru_nvcsw=99),
        resource.RUSAGE_CHILDREN: SimpleNamespace(ru_utime=0.0, ru_stime=0.0, ru_nivcsw=3, ru_nvcsw=3),
    }
    monkeypatch.setattr(resource, "getrusage", usages.__getitem__)
    monkeypatch.setattr(Path, "glob", lambda *_: ())
    assert HostCounters().usage() == (1.75, 7)


def test_usable_cpus_are_those_of_the_affinity_or_else_all(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
    assert usable_cpus() == {1, 3}
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpus() == {0, 1, 2, 3}


def reference(clock: FakeClock, *times: float) -> Reference:
    """Return a reference whose work takes `times`, one after another."""
    left = iter(times)
    return Reference(lambda: clock.advance(next(left)), clock)


@pytest.mark.parametrize(
    ("times", "slowdowns"),
    [
        ((2.0, 1.0, 4.0, 3.0, 2.0, 5.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0), [1.0, 2.0, 1.0, 2.0]),
        ((1.0, 1.0, 1.0, 1.0, 64.0, 64.0), [1.0, 1.0]),
        ([0.0] * 6, [1.0, 1.0]),
    ],
    ids=["the best so far is the measure", "one slow repeat does not count", "too short for the clock"],
)
def test_the_reference_is_judged_by_the_best_so_far(host, times, slowdowns):
    work = reference(host.clock, *times)
    assert [work.slowdown(work.seconds()) for _ in slowdowns] == slowdowns


def test_a_window_is_as_slow_as_the_slower_of_its_ends(host):
    for start_s, stop_s in ((2.0, 1.0), (1.0, 2.0), (2.0, 2.0)):
        watch = Watch(host.counters(0, 1), reference(host.clock, *[1.0] * 6, *[start_s] * 3, *[stop_s] * 3))
        assert [watch.start().stop().slowdown for _ in range(2)] == [1.0, 2.0]


def test_a_window_holds_what_lies_between_its_own_start_and_stop_and_not_the_reference(host):
    watch = Watch(host.counters(0, 1), reference(host.clock, *[3.0] * 3, *[1.0] * 6))
    with pytest.raises(RuntimeError, match=r"not started; call start\(\) first"):
        watch.stop()
    watch.start()
    host.clock.advance(8.0)
    host.switches += 999
    watch.start()  # begins anew
    host.clock.advance(4.0)
    host.switches += 8
    conditions = watch.stop()
    assert (conditions.seconds, conditions.switches_per_s, conditions.slowdown) == (4.0, 2.0, 1.0)
    slow = Watch(host.counters(0, 1), reference(host.clock, *[3.0] * 3, *[1.0] * 3))
    assert slow.start().stop().slowdown == 3.0, "the first window is slow where its start was"
    assert Watch(host.counters(0, 1)).start().stop().slowdown is None


def test_the_time_of_a_child_is_no_time_of_others():
    def of_children() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return HostCounters().read().own_s - used.ru_utime - used.ru_stime

    before = of_children()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while (working := of_children() - before) < 0.1:
            time.sleep(0.01)
        child.kill()
    assert of_children() - before >= working, "what a child has used stays when it has ended"


class Gpu:
    """Gives a reading, or none."""

    reason: str | None = None
    reasons: dict[str, str] = {}

    def __init__(self, **reading: float) -> None:
        self.reading = reading

    def read(self) -> dict[str, float]:
        if not self.reading:
            raise OSError("Not Supported")
        return self.reading


def test_a_window_on_a_gpu_is_judged_by_what_the_driver_says_right_after_the_work(host):
    slowed = Gpu(gpu_clock_event_reasons=0x4 | 0x40, gpu_sm_clock_mhz=990.0, gpu_processes=2.0, gpu_temperature_c=88.0)
    conditions = Watch(host.counters(0, 1), source=slowed).start().stop()
    assert [disturbance.kind for disturbance in conditions.on_the_device()] == ["gpu_throttled", "gpu_shared"]
    assert (conditions.gpu_sm_clock_mhz, conditions.gpu_temperature_c) == ((990.0,), (88.0,))
    capped = Gpu(gpu_clock_event_reasons=0x4, gpu_processes=0.0)
    assert Watch(host.counters(0, 1), source=capped).start().stop().on_the_device() == []
    assert Watch(host.counters(0, 1), source=Gpu()).start().stop().gpu_clock_event_reasons is None


def test_readings_of_a_window_join_what_it_has():
    joined = QUIET.with_gpu(
        {"gpu_clock_event_reasons": [0x8, 0x20], "gpu_processes": [1.0, 3.0], "gpu_sm_clock_mhz": [990.0]}
    )
    assert (joined.gpu_clock_event_reasons, joined.gpu_processes) == (0x28, 3)
    assert joined.gpu_sm_clock_mhz == (1980.0, 990.0) and joined.gpu_temperature_c == (45.0,)
    assert QUIET.with_gpu({}) == QUIET


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        ([1980.0, 1900.0], [1410.0], "the GPU's clock was 1,940 MHz in one and 1,410 MHz in the other"),
        ([1000.0], [951.0], None), ([951.0], [1000.0], None), ([], [1000.0], None), ([1000.0], [], None),
    ],
)  # fmt: skip
def test_two_things_under_two_clocks_are_told_apart(one, other, changed):
    assert changed_clock(one, other) == changed
