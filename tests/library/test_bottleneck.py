"""Callables whose operators take a known time on a machine of known limits: the bound follows by construction."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from boundby.bound import analysis as module
from boundby.bound.analysis import Call, Machine, bottleneck, counted_quietly, loads
from boundby.bound.bench import Bench
from boundby.bound.judgement import Evidence
from boundby.bound.trials import Candidate, Made
from boundby.bound.verdict import Doubt, Fix, Gain, Verdict
from boundby.machine.ceilings import Ceilings, ComputeCeiling, MemoryCeiling
from boundby.timing.stats import estimate
from boundby.timing.timer import Timer
from boundby.work import count
from boundby.work.roofline import Interval
from tests.fakes import FakeClock, FakeThreads, FakeWatch, QueuedDevice

FORWARD_S = 2.0**-4
LEFT, RIGHT = torch.ones(16, 16), torch.ones(16, 16)
PRODUCT_FLOPS = 2 * 16**3
ADDITION_BYTES = 3 * 4 * 16**2
FLOAT32 = "float32"


class OperatorsTake(TorchDispatchMode):
    """Lets each operator take a time by its name, which the threads share or not."""

    def __init__(self, clock: FakeClock, seconds: Mapping[str, float], shared: bool = True) -> None:
        super().__init__()
        self._clock, self._seconds, self._shared = clock, seconds, shared

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._clock.advance(
            self._seconds.get(func._schema.name, 0.0) / (torch.get_num_threads() if self._shared else 1)
        )
        return func(*args, **(kwargs or {}))


def machine(flops_per_s: float = 1e15, bytes_per_s: float = 1e15, dispatch_s: float = 1e-9) -> Ceilings:
    return Ceilings(
        device={"type": "cpu"},
        compute=(ComputeCeiling(FLOAT32, "highest", True, flops_per_s, flops_per_s, 1024, 0.0),),
        memory=(MemoryCeiling("memory", 2**28, bytes_per_s, bytes_per_s, "copy"),),
        dispatch_s=dispatch_s,
        dispatch_high_s=dispatch_s,
        seconds=1.0,
    )


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    return FakeThreads(monkeypatch)  # one: fewer are not possible, and nothing is tried unless a test sets more


def product() -> None:
    torch.mm(LEFT, RIGHT)


def addition() -> None:
    torch.add(LEFT, RIGHT)


def judged(clock, seconds, work, ceilings, shared=True, **options):
    """Return the verdict on `work` whose operators take `seconds`."""
    watch: Any = options.pop("watch", FakeWatch())
    with OperatorsTake(clock, seconds, shared):
        return bottleneck(
            Call(work, **options), Machine(ceilings, FLOAT32), Bench(Timer(clock), watch=watch, replay_s=0.0)
        )


@pytest.mark.parametrize(("share", "bound"), [(0.75, "compute"), (0.25, "under_utilised")])
def test_a_product_near_the_peak_is_bound_by_compute_and_one_far_from_it_under_utilises(clock, share, bound):
    ceilings = machine(flops_per_s=PRODUCT_FLOPS / (share * FORWARD_S))
    verdict = judged(clock, {"aten::mm": FORWARD_S}, product, ceilings)
    assert verdict.bound == bound
    assert verdict.share_of_limit == pytest.approx(share, rel=1e-12)
    assert (verdict.confidence, verdict.confirmation, verdict.doubts) == ("medium", "untested", ())


def test_an_addition_at_the_rate_of_memory_is_bound_by_it(clock):
    ceilings = machine(bytes_per_s=ADDITION_BYTES / (0.875 * FORWARD_S))
    verdict = judged(clock, {"aten::add": FORWARD_S}, addition, ceilings)
    assert (verdict.bound, verdict.share_of_limit) == ("memory", pytest.approx(0.875, rel=1e-12))


def test_operators_that_take_no_longer_than_to_issue_them_are_bound_by_launch(clock):
    def many():
        for _ in range(64):
            torch.add(LEFT, RIGHT)

    verdict = judged(clock, {"aten::add": 2.0**-10}, many, machine(dispatch_s=2.0**-11))
    assert (verdict.bound, verdict.share_of_limit) == ("launch", 1.0)
    fused = next(gain for gain in verdict.gains if gain.fix == Fix("fuse_operators"))
    assert fused.at_most == pytest.approx(128)  # from 64 slow operators to the least time of one


def compute_bound(clock, share=0.8, **options):
    return judged(clock, {"aten::mm": FORWARD_S}, product, machine(PRODUCT_FLOPS / (share * FORWARD_S)), **options)


@pytest.mark.parametrize(("input_s", "bound"), [(FORWARD_S, "input"), (0.99 * FORWARD_S, "compute")])
def test_an_input_as_slow_as_the_forward_is_the_bound(clock, input_s, bound):
    verdict = compute_bound(clock, 1.0, make_input=lambda: clock.advance(input_s))
    assert verdict.bound == bound
    ahead = next(gain for gain in verdict.gains if gain.fix == Fix("overlap_input"))
    assert ahead.at_most == pytest.approx((FORWARD_S + input_s) / FORWARD_S)


@pytest.mark.parametrize(
    ("shared", "bound", "confirmation", "confidence", "settled"),
    [(True, "compute", "confirmed", "high", True), (False, "mixed", "untested", "low", False)],
)
def test_half_the_threads_confirm_compute_or_leave_it_open(
    clock, threads, shared, bound, confirmation, confidence, settled
):
    threads.number = 2
    ceilings = machine(flops_per_s=PRODUCT_FLOPS / (0.85 * FORWARD_S))
    verdict = judged(clock, {"aten::mm": (1 + shared) * FORWARD_S}, product, ceilings, shared=shared)
    assert (verdict.bound, verdict.confirmation, verdict.confidence) == (bound, confirmation, confidence)
    assert (verdict.settled, threads.number) == (settled, 2)


def test_a_slow_host_does_not_mind_fewer_threads(clock, threads):
    def slow_host():
        product()
        clock.advance(FORWARD_S)

    threads.number = 4
    verdict = judged(clock, {}, slow_host, machine())
    assert (verdict.bound, verdict.confirmation, verdict.confidence) == ("launch", "confirmed", "high")


@pytest.mark.parametrize(("others", "confidence"), [(0.0, "high"), (1.0, "medium")])
def test_what_else_used_the_machine_is_a_doubt_and_lowers_the_confidence(clock, threads, others, confidence):
    threads.number = 2
    ceilings = machine(flops_per_s=PRODUCT_FLOPS / (0.8 * FORWARD_S))
    verdict = judged(clock, {"aten::mm": 2 * FORWARD_S}, product, ceilings, watch=FakeWatch(lambda window: others))
    assert verdict.confidence == confidence
    assert verdict.doubts == ((Doubt("disturbed", "other processes used 1.0 of 2 cores"),) if others else ())


def test_a_dtype_without_ceilings_is_inconclusive_and_work_that_cannot_be_counted_refused(clock):
    with OperatorsTake(clock, {"aten::mm": FORWARD_S}):
        watch: Any = FakeWatch()
        verdict = bottleneck(
            Call(product), Machine(machine(), "float16"), Bench(Timer(clock), watch=watch, replay_s=0.0)
        )
    assert (verdict.bound, verdict.share_of_limit) == ("inconclusive", None)
    assert [doubt.kind for doubt in verdict.doubts] == ["ceilings"]
    with pytest.raises(ValueError, match=r"FLOPs of aten::_fft_\w+ are not known"):
        judged(clock, {"aten::_fft_r2c": FORWARD_S}, lambda: torch.fft.rfft(LEFT), machine())


def test_fixes_of_the_caller_stand_among_the_gains(clock):
    own = Fix("other", {"words": "use half the layers"})
    verdict = compute_bound(clock, known=Evidence(gains=[Gain(own, 2.0, "arithmetic")]))
    assert [gain.fix for gain in verdict.gains] == [own, Fix("better_kernels")]


@pytest.fixture
def device(clock):
    return QueuedDevice(clock)


def judged_on(device: QueuedDevice, work: Callable[[], object], flops_per_s: float, **known: Any) -> Verdict:
    watch: Any = FakeWatch()
    bench = Bench(Timer(device.clock, device.synchronize), device, watch, replay_s=0.0)
    return bottleneck(Call(work, **known), Machine(machine(flops_per_s), FLOAT32), bench)


@pytest.mark.parametrize(
    ("times_s", "ratio", "bound", "confirmation"),
    [
        ((2.0**-7, 2.0**-8), 2.0, "launch", "confirmed"),
        ((2.0**-7, 2.0**-8), 1.0, "compute", "confirmed"),
        ((2.0**-7, 2.0**-8), None, "launch", "untested"),
        ((2.0**-12, 2.0**-5), 1.0, "compute", "confirmed"),
    ],
)
def test_a_device_is_held_against_its_own_time_and_a_graph(device, monkeypatch, times_s, ratio, bound, confirmation):
    def replayed(work, idle_share):
        expected: Any = {"launch": (1.15, 100.0), "compute": (0.87, 1.15)}
        seconds = (host_s + device_s) / ratio if ratio else math.nan
        made = Made(lambda: device.clock.advance(seconds)) if ratio else None
        return Candidate(Fix("issue_at_once"), lambda: made, expected=expected)

    def work():
        product()
        device.issue(host_s, device_s)

    monkeypatch.setattr(module, "graph_replay", replayed)
    host_s, device_s = times_s
    verdict = judged_on(device, work, PRODUCT_FLOPS / (0.8 * device_s))
    assert (verdict.bound, verdict.confirmation) == (bound, confirmation)
    isolated_ms, device_ms, host_ms = (1e3 * seconds for seconds in (host_s + device_s, device_s, host_s))
    expected = f"the device computes for {device_ms:.2f} of {isolated_ms:.2f} ms; the host issues for {host_ms:.2f} ms"
    assert expected in verdict.evidence
    if bound == "compute":
        assert verdict.share_of_limit == pytest.approx(0.8)


def test_without_a_time_of_the_device_the_isolated_time_is_held_against_the_limits(device, monkeypatch):
    def work():
        product()
        device.issue(2.0**-12, 2.0**-5)

    monkeypatch.setattr(module, "graph_replay", lambda *_: Candidate(Fix("issue_at_once"), lambda: None))
    monkeypatch.setattr(device, "hold", lambda seconds: None)  # so that the device reaches the call too early
    verdict = judged_on(device, work, PRODUCT_FLOPS / 0.8 / (2.0**-12 + 2.0**-5))
    assert (verdict.bound, verdict.share_of_limit) == ("compute", pytest.approx(0.8))
    assert not any("the device computes" in line for line in verdict.evidence)


@pytest.mark.parametrize("is_taken", [True, False])
def test_the_device_s_time_is_that_of_the_call_that_does_not_wait_for_it(device, monkeypatch, is_taken):
    def bare():
        if not is_taken:
            raise TypeError("no such argument")
        product()
        device.issue(2.0**-12, 2.0**-5)

    def work():
        device.synchronize()
        product()
        device.issue(2.0**-12, 2.0**-5)

    monkeypatch.setattr(module, "graph_replay", lambda *_: Candidate(Fix("issue_at_once"), lambda: None))
    verdict = judged_on(device, work, PRODUCT_FLOPS / 2.0**-5, bare=bare)
    assert any("the device computes for 31.25" in line for line in verdict.evidence) == is_taken


def test_what_a_capture_left_in_the_process_is_a_doubt(device, monkeypatch):
    def work():
        product()
        device.issue(2.0**-12, 2.0**-5)

    monkeypatch.setattr(module, "graph_replay", lambda *_: Candidate(Fix("issue_at_once"), lambda: None))
    monkeypatch.setattr(module, "DeviceTimer", partial(module.DeviceTimer, leftover="the stream still captures"))
    verdict = judged_on(device, work, PRODUCT_FLOPS / 2.0**-5)
    assert Doubt("disturbed", "the stream still captures") in verdict.doubts


def test_loads_are_the_mean_over_forwards():
    short, long = count(lambda: (product(), product())), count(lambda: (product(), addition()))
    by_name = {load.name: load for load in loads([short, long])}
    mm = by_name["aten::mm"]
    assert (mm.calls, mm.flops, mm.weight_bytes, mm.new_bytes) == (1.5, 1.5 * PRODUCT_FLOPS, 1.5 * 2048, 1.5 * 1024)
    assert (by_name["aten::add"].calls, by_name["aten::add"].flops) == (0.5, 0.0)
    add = by_name["aten::add"]
    assert (add.weight_bytes, add.other_bytes, add.new_bytes) == (1024.0, 512.0, 512.0)  # half of both operands
    assert {load.seconds for load in by_name.values()} == {None}


def test_operators_of_other_shapes_are_loads_of_their_own():
    narrow = torch.ones(2, 16)
    operators = loads([count(lambda: (product(), torch.mm(narrow, RIGHT)))])
    assert [(load.name, load.flops) for load in operators] == [("aten::mm", 2.0 * 16**3), ("aten::mm", 2.0 * 2 * 256)]


def test_on_the_host_the_quickest_of_several_counts_stands(clock):
    seconds, times = {}, iter([8.0, 1.0, 2.0])

    def work():
        seconds["aten::mm"] = next(times)
        product()

    with OperatorsTake(clock, seconds):
        [operator] = counted_quietly(work, clock).operators
    assert operator.seconds == 1.0
    assert list(times) == []


def test_behind_the_host_operators_are_counted_once_and_not_timed(clock):
    runs = 0

    def work():
        nonlocal runs
        runs += 1
        product()

    [operator] = counted_quietly(work, None).operators
    assert (runs, operator.seconds) == (1, None)


def test_one_round_has_an_interval_of_no_width():
    assert Interval.of(estimate([2.0])) == Interval(pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))
    several = estimate([1.0, 2.0, 4.0])
    assert Interval.of(several) == Interval(several.value, several.low, several.high)
