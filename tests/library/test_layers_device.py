"""Device time and memory by layer, on a device that keeps books."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from boundby.layers.engine import ObservabilityEngine
from boundby.layers.probes import CallTree, find_targets
from boundby.layers.records import ModelProfile
from boundby.layers.timing import spanning
from boundby.machine.memory import CPU_REASON
from boundby.timing.timer import BACKLOG_SHARE, QUEUE_DEPTH
from tests.fakes import FakeClock, QueuedDevice
from tests.layer_models import Calls, FakeAllocator, FakeDevice, Takes, instruments, layer

ONE = torch.ones(1)
MS = 1_000_000  # nanoseconds


class Issues(Takes):
    """Takes `ns` of the host to issue `device_s` of work."""

    def __init__(self, clock: FakeClock, ns: int, device: FakeDevice, device_s: float) -> None:
        super().__init__(clock, ns)
        self.device, self.device_s = device, device_s

    def forward(self, x: Any) -> Any:
        self.device.work(self.device_s)
        return super().forward(x)


@pytest.fixture
def clock():
    return FakeClock(0)


@pytest.fixture
def device():
    return FakeDevice()


def profile_of(model: nn.Module, folder: Any, clock: FakeClock, num_runs: int = 3, **given: Any) -> ModelProfile:
    if "marks" in given:
        given["synchronize"] = given["marks"].synchronize
    engine = ObservabilityEngine(model, folder, instruments=instruments(clock, **given))
    engine.warmup(ONE, 0)
    return engine.profile(ONE, num_runs).profile


def test_device_time_is_split_like_host_time_and_the_slower_of_both_is_named(clock, device, tmp_path):
    model = Calls(clock, 1 * MS, a=Issues(clock, 2 * MS, device, 0.008), b=Issues(clock, 4 * MS, device, 0.001))
    profile = profile_of(model, tmp_path, clock, marks=device)
    a, b, root = layer(profile, "a"), layer(profile, "b"), layer(profile, "")
    assert (a.device_self_s.median, a.host_self_s.median) == pytest.approx((0.008, 0.002))
    assert (a.is_launch_bound, b.is_launch_bound) == (False, True)
    assert (root.device_self_s.median, root.device_inclusive_s.median) == pytest.approx((0, 0.009))
    timed = [layer for layer in profile.layers if layer.calls]
    assert sum(row.device_self_s.median for row in timed) == pytest.approx(root.device_inclusive_s.median)
    assert a.self_s is a.device_self_s and root.inclusive_s is root.device_inclusive_s
    assert "device_self_s" not in profile.reasons


def test_coverage_is_that_of_the_slower_of_host_and_device(clock, tmp_path):
    class Running(FakeDevice):
        """A device that begins work when it is issued, or when it is done with what it has."""

        def work(self, seconds):
            self.seconds = max(self.seconds, clock.now / 1e9) + seconds

        def mark(self):
            self.work(0.0)
            return super().mark()

        def synchronize(self):
            clock.now = max(clock.now, round(self.seconds * 1e9))

    for device_s, ratio in ((0.001, 1.0), (0.02, 20 / 21)):  # the device begins a millisecond after the host
        clock.now, running = 0, Running()
        model = Calls(clock, 1 * MS, a=Issues(clock, 4 * MS, running, device_s))
        assert profile_of(model, tmp_path, clock, marks=running).coverage.ratio == pytest.approx(ratio)


def test_the_device_is_held_back_while_the_host_issues_and_waited_for_once_a_run_or_a_doubt(clock, device, tmp_path):
    model = Calls(clock, 0, a=Issues(clock, 10 * MS, device, 0.001))
    profile_of(model, tmp_path, clock, num_runs=3, marks=device)
    assert device.held == pytest.approx(3 * [BACKLOG_SHARE * 0.010])
    waits_for_host_times = 2 * 2 * 3  # before and after each run with probes and without
    assert device.waits == waits_for_host_times + 2 * 4
    assert device.open_marks == 0  # every mark went back
    device.is_late = True
    doubts = profile_of(Issues(clock, 1, device, 0.001), tmp_path, clock, num_runs=3, marks=device).doubts
    assert any("device: in 3 of 3 runs it waited for the host" in doubt for doubt in doubts)


@pytest.mark.parametrize(("operators", "is_known"), [(10, True), (2000, False)])
def test_beyond_the_depth_of_the_queue_no_layer_is_called_bound_by_launch_for_waiting(
    clock, device, tmp_path, operators, is_known
):
    class Many(Issues):
        def forward(self, x):
            for _ in range(operators):
                x = x + 1
            return super().forward(x)

    profile = profile_of(Calls(clock, 0, a=Many(clock, 4 * MS, device, 0.001)), tmp_path, clock, marks=device)
    assert layer(profile, "a").is_launch_bound is (True if is_known else None)
    assert ("is_launch_bound" in profile.reasons) is not is_known
    assert any(doubt.startswith("host:") for doubt in profile.doubts) is not is_known


class Bounded(QueuedDevice):
    """A queue of which a mark can be used again."""

    def stream(self) -> str:
        return "main"

    def reuse(self, mark: float) -> None:
        pass


class Block(nn.Module):
    """Ten operators of its own before those of a layer inside, each a launch."""

    def __init__(self, launch: Callable[[], None], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.launch, self.inner = launch, inner

    def forward(self, x: Any) -> Any:
        for _ in range(10):
            x = x + 1
            self.launch()
        return self.inner(x) if self.inner else x


@pytest.mark.parametrize("blocks", [20, 60, 120])
def test_layers_have_device_times_however_many_launches_the_queue_holds(tmp_path, blocks):
    host_s, kernel_s = 2.0**-15, 2.0**-16
    clock = FakeClock()
    device = Bounded(clock, depth=QUEUE_DEPTH)
    launch = partial(device.issue, host_s, kernel_s)
    model = nn.Sequential(*(Block(launch, Block(launch)) for _ in range(blocks))).eval()
    engine = ObservabilityEngine(
        model,
        tmp_path,
        instruments=instruments(
            lambda: round(clock.now * 1e9),
            marks=device,
            synchronize=device.synchronize,
        ),
    )
    engine.warmup(ONE, 0)
    profile = engine.profile(ONE, 3).profile
    assert layer(profile, "").device_inclusive_s.median == pytest.approx(20 * blocks * kernel_s, rel=1e-12)
    for path in ("0", f"{blocks // 2}", f"{blocks - 1}"):
        outer, inner = layer(profile, path), layer(profile, f"{path}.inner")
        assert outer.device_inclusive_s.median == pytest.approx(20 * kernel_s, rel=1e-12)
        assert (outer.device_self_s.median, inner.device_self_s.median) == pytest.approx(
            2 * (10 * kernel_s,), rel=1e-12
        )
    assert not any(doubt.startswith("device:") for doubt in profile.doubts)


def test_runs_of_the_device_are_as_many_as_those_of_the_host_and_count_against_the_time(clock, device, tmp_path):
    model = Issues(clock, 1000 * MS, device, 0.001)
    engine = ObservabilityEngine(model, tmp_path, instruments=instruments(clock, marks=device))
    engine.warmup(ONE, 0)
    report = engine.profile(ONE, 50, max_seconds=25.0)  # 4 s of other passes, 1 s to issue ahead, 3 s for each run
    assert report.profile.num_runs == len(report.samples[""].device_self_s) == 6


def test_work_on_a_side_stream_has_no_device_time_but_a_reason(clock, device, tmp_path):
    class OnTheSide(Calls):
        def forward(self, x):
            x = self.b(x)
            device.in_use = "side"
            x = self.a(x)
            device.in_use = "main"
            return x

    model = OnTheSide(clock, 0, a=Issues(clock, 5, device, 0.001), b=Issues(clock, 5, device, 0.002))
    profile = profile_of(model, tmp_path, clock, marks=device)
    a, root = layer(profile, "a"), layer(profile, "")
    assert a.device_self_s is None and a.device_inclusive_s is None and a.is_launch_bound is None
    assert "another stream" in a.doubts[0] and a.self_s is a.host_self_s
    assert root.device_self_s is None  # what is left of it without `a` cannot be known
    assert layer(profile, "b").device_self_s.median == pytest.approx(0.002)


def test_layers_on_several_devices_are_told_from_those_at_home():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    tree = CallTree(find_targets(model).names)
    root = tree.top.calling(0)
    first, second = root.calling(1), root.calling(2)
    home, other = torch.device("cuda", 0), torch.device("cuda", 1)
    reasons = spanning(tree, {0: {home, other}, 1: {home, torch.device("cpu")}, 2: {other}}, home)
    assert set(reasons) == {root, second} and first not in reasons
    assert "cuda:1" in reasons[second]


def test_memory_is_what_was_there_before_the_peak_inside_and_what_is_left(clock, tmp_path):
    allocator = FakeAllocator()

    class Uses(Calls):
        def __init__(self, kept, passing, **inner):
            super().__init__(clock, 1, **inner)
            self.kept, self.passing = kept, passing

        def forward(self, x):
            allocator.take(self.passing)
            allocator.take(-self.passing)
            x = super().forward(x)
            allocator.take(self.kept)
            return x

    class Root(Uses):
        def forward(self, x):
            x = super().forward(x)
            allocator.take(-self.kept - 400)
            return x

    model = Root(100, 50, a=Uses(300, 20, inner=Uses(0, 900)), b=Uses(100, 0))
    allocator.take(1000)
    profile = profile_of(model, tmp_path, clock, allocator=allocator)
    sizes = ("memory_before_bytes", "activation_peak_bytes", "memory_after_bytes")
    seen = {layer.path: tuple(getattr(layer, size) for size in sizes) for layer in profile.layers}
    assert seen == {"": (1000, 900, 1000), "a": (1000, 900, 1300), "a.inner": (1000, 900, 1000), "b": (1300, 100, 1400)}
    assert "activation_peak_bytes" not in profile.reasons


def test_a_cpu_has_no_memory_by_layer_and_another_kind_of_device_is_refused(clock, tmp_path):
    profile = profile_of(Takes(clock, 5), tmp_path, clock)
    assert layer(profile, "").activation_peak_bytes is None
    assert profile.reasons["activation_peak_bytes"] == profile.reasons["memory_before_bytes"] == CPU_REASON
    engine = ObservabilityEngine(nn.Linear(1, 1, device="meta"), tmp_path)
    with pytest.raises(ValueError, match="'meta' cannot be timed"):
        engine.profile(torch.ones(1, 1, device="meta"))
