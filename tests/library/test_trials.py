"""What one change does to a workload that is known to follow it or not; every ratio is exact."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from boundby import trials
from boundby.judgement import confirm
from boundby.roofline import Interval
from boundby.timer import Timer
from boundby.trials import doubled_batch, fewer_threads, graph_replay, other_precision
from tests.fakes import FakeClock, FakeThreads

FORWARD_S = 2.0**-4
Work = Callable[[], None]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Four threads; fail the test that leaves other settings behind."""
    threads, precision = FakeThreads(monkeypatch, 4), torch.get_float32_matmul_precision()
    yield threads
    left = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    assert (threads.number, left) == (4, precision)


def takes(clock: FakeClock, seconds: float) -> Work:
    return lambda: clock.advance(seconds)


@pytest.mark.parametrize(
    ("fixed", "per_sample", "ratio"), [(0.0, FORWARD_S, 0.5), (FORWARD_S, 0.0, 1.0), (FORWARD_S, FORWARD_S, 2 / 3)]
)
def test_doubling_tells_a_fixed_cost_from_one_that_grows_with_the_samples(clock, fixed, per_sample, ratio):
    one, two = takes(clock, fixed + per_sample), takes(clock, fixed + 2 * per_sample)
    found = doubled_batch(one, two, Timer(clock))
    assert found.measured == Interval(*[pytest.approx(ratio, rel=1e-14)] * 3)


@pytest.mark.parametrize(
    ("growth", "confirms", "contradicts"),
    [(2.0, set(), {"launch", "under_utilised"}), (1.0, {"launch"}, {"compute", "memory", "mixed"})],
)
def test_doubling_bears_out_the_bounds_whose_time_follows(clock, growth, confirms, contradicts):
    found = doubled_batch(takes(clock, FORWARD_S), takes(clock, growth * FORWARD_S), Timer(clock))
    verdicts = {bound: confirm(bound, [found]) for bound in found.expected}
    assert {bound for bound, said in verdicts.items() if said == "confirmed"} == confirms
    assert {bound for bound, said in verdicts.items() if said == "contradicted"} == contradicts


def test_what_the_limits_predict_of_doubling_is_held_against_it(clock):
    # weights that are read once for either batch: the limits allow 0.8 of the time for half the samples
    one, two = takes(clock, 4 * FORWARD_S), takes(clock, 5 * FORWARD_S)
    assert confirm("memory", [doubled_batch(one, two, Timer(clock))]) == "contradicted"
    predicted = doubled_batch(one, two, Timer(clock), predicted_ratio=0.8)
    assert confirm("memory", [predicted]) == "untested"  # compute would too


def test_neither_drift_nor_single_slow_calls_change_the_ratio(clock):
    calls = 0

    def called(seconds, slower):
        def work():
            nonlocal calls
            clock.advance(seconds * slower(calls))
            calls += 1

        return work

    def drift(call):
        return 2.0 ** (max(0, call - 3) // 4)  # after three calls that warm up, each pair is two calls of either kind

    found = doubled_batch(called(FORWARD_S, drift), called(2 * FORWARD_S, drift), Timer(clock))
    assert (found.measured, calls) == (Interval.exact(0.5), 3 + 4 * trials.PAIRS)
    for slow in range(4):
        calls = 0

        def disturbed(call, slow=slow):
            return 9 if call > 2 and (call + 1) % 4 == slow else 1  # three set the size of a block

        found = doubled_batch(called(2.0**-9, disturbed), called(2.0**-8, disturbed), Timer(clock))
        assert found.measured == Interval.exact(0.5)


def test_a_short_forward_is_called_until_a_block_is_long_enough_for_the_clock(clock):
    calls = 0

    def work():
        nonlocal calls
        calls += 1
        clock.advance(2.0**-10)

    doubled_batch(work, takes(clock, 2.0**-10), Timer(clock))
    blocks = math.ceil(trials.LEAST_BLOCK_S * 2**10)
    assert calls == trials.PAIRS * (1 + blocks)


def test_a_ratio_that_differs_from_pair_to_pair_has_an_interval(clock):
    calls = 0

    def restless():
        nonlocal calls
        calls += 1
        clock.advance(FORWARD_S * (2 if calls % 4 > 1 else 1))

    ratio = doubled_batch(restless, takes(clock, FORWARD_S), Timer(clock)).measured
    assert ratio.low < 1.0 < ratio.value < 2.0 < ratio.high


def test_the_wait_for_the_device_is_part_of_every_time(clock):
    queued = 0.0

    def launch(seconds):
        def work():
            nonlocal queued
            queued += seconds

        return work

    def synchronize():
        nonlocal queued
        clock.advance(queued)
        queued = 0.0

    found = doubled_batch(launch(FORWARD_S), launch(2 * FORWARD_S), Timer(clock, synchronize))
    assert found.measured == Interval.exact(0.5)


def parallel(clock: FakeClock, serial: float = 0.0) -> Work:
    """Return work that its threads share, apart from a `serial` part; the first call after a change is slow."""
    used: list[int] = []

    def work() -> None:
        threads = torch.get_num_threads()
        if used[-1:] != [threads]:
            used.append(threads)
            clock.advance(1.0)
        clock.advance(FORWARD_S * (serial + 1 / threads))

    return work


@pytest.mark.parametrize(("number", "fewer", "ratio"), [(4, 2, 0.5), (2, 1, 0.5), (3, 1, 1 / 3)])
def test_work_that_threads_share_takes_as_much_longer_on_fewer(clock, threads, number, fewer, ratio):
    threads.number = number
    found = fewer_threads(parallel(clock), Timer(clock))
    left, threads.number = threads.number, 4
    assert left == number
    assert found.measured.value == pytest.approx(ratio, rel=1e-14)
    assert found.fix.settings == {"threads": fewer, "instead_of": number}
    assert [confirm(bound, [found]) for bound in ("compute", "launch")] == ["confirmed", "contradicted"]


def test_work_of_one_thread_does_not_mind_fewer(clock):
    found = fewer_threads(takes(clock, FORWARD_S), Timer(clock))
    assert found.measured == Interval.exact(1.0)
    assert [confirm(bound, [found]) for bound in ("compute", "launch")] == ["contradicted", "confirmed"]
    assert confirm("memory", [found]) == "untested"  # one thread may saturate the memory, or not


def test_one_thread_cannot_be_fewer(clock, threads):
    threads.number = 1
    found = fewer_threads(parallel(clock), Timer(clock))
    threads.number = 4
    assert found is None
    assert clock.now == 0.0  # nothing was run for it


@pytest.mark.parametrize("failing_call", [1, 2, 3, 5])
def test_the_threads_are_set_back_when_the_work_raises(clock, threads, failing_call):
    calls = 0

    def work():
        nonlocal calls
        calls += 1
        clock.advance(FORWARD_S)
        if calls == failing_call:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fewer_threads(work, Timer(clock))
    assert (calls, threads.number) == (failing_call, 4)


def rounding(clock: FakeClock, faster: float) -> Work:
    """Return work that is `faster` where float32 products may be rounded."""
    return lambda: clock.advance(FORWARD_S / (1 if torch.get_float32_matmul_precision() == "highest" else faster))


@pytest.fixture
def highest():
    with trials.matmul_precision("highest"):
        yield


@pytest.mark.usefixtures("highest")
@pytest.mark.parametrize(
    ("faster", "bound", "said", "other"),
    [(4.0, "compute", "confirmed", "memory"), (1.0, "memory", "untested", "compute")],  # or launch
)
def test_products_that_may_be_rounded_gain_where_compute_is_the_bound(clock, faster, bound, said, other):
    found = other_precision(rounding(clock, faster), Timer(clock), "medium", ceiling_ratio=4.0)
    assert found.measured == Interval.exact(faster)
    assert "'medium'" in found.name
    assert confirm(bound, [found]) == said
    assert confirm(other, [found]) == "contradicted"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("highest")
def test_precisions_whose_ceilings_are_close_tell_nothing(clock):
    close = trials.LEAST_CEILING_RATIO - 0.01
    assert other_precision(rounding(clock, close), Timer(clock), "medium", close) is None
    assert clock.now == 0.0  # nothing was run for it
    assert other_precision(rounding(clock, 1.0), Timer(clock), "medium", trials.LEAST_CEILING_RATIO) is not None


@pytest.mark.parametrize("ceiling_ratio", [1.3, 1.5, 2.0, 4.0, 8.0])
def test_no_ratio_speaks_for_compute_and_for_memory_alike(clock, highest, ceiling_ratio):
    found = other_precision(rounding(clock, 1.0), Timer(clock), "medium", ceiling_ratio)
    assert found.expected["compute"][0] <= ceiling_ratio <= found.expected["compute"][1]
    if ceiling_ratio >= 1.5:
        assert found.expected["memory"][1] < found.expected["compute"][0]


@pytest.mark.usefixtures("highest")
def test_the_precision_is_set_back_when_the_work_raises(clock):
    def work():
        clock.advance(FORWARD_S)
        assert torch.get_float32_matmul_precision() == "highest", "no kernel for this precision"

    with pytest.raises(AssertionError, match="no kernel"):
        other_precision(work, Timer(clock), "medium", ceiling_ratio=4.0)
    assert torch.get_float32_matmul_precision() == "highest"


class FakeCuda:
    """The parts of torch.cuda that capture a graph: the host issues for `host_s`, the device works for `device_s`.

    While it captures, the work `reads` from the device or not; a replay is issued in no time.
    """

    def __init__(self, clock: FakeClock, host_s: float, device_s: float, reads: bool = False) -> None:
        self.clock, self.host_s, self.device_s, self.reads = clock, host_s, device_s, reads
        self.is_capturing = False
        self.calls = self.waits = 0

    def work(self) -> None:
        self.calls += 1
        if self.is_capturing:
            if self.reads:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return
        self.clock.advance(max(self.host_s, self.device_s))

    def replay(self) -> None:
        self.clock.advance(self.device_s)

    def synchronize(self) -> None:
        self.waits += 1

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        assert graph is self
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def wait_stream(self, stream: object) -> None:
        assert stream is self

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)


@pytest.mark.parametrize(
    ("host_s", "ratio", "said"),
    [
        (4 * FORWARD_S, 4.0, {"launch": "confirmed", "compute": "contradicted"}),
        (0.0, 1.0, {"memory": "untested", "launch": "contradicted"}),
    ],
)
def test_a_replayed_graph_takes_the_time_of_the_device_alone(clock, monkeypatch, host_s, ratio, said):
    cuda = FakeCuda(clock, host_s, FORWARD_S)
    cuda.install(monkeypatch)
    found = graph_replay(cuda.work, Timer(clock))
    assert found.measured == Interval.exact(ratio)
    assert {bound: confirm(bound, [found]) for bound in said} == said


def test_work_that_reads_from_the_device_cannot_be_captured(clock, monkeypatch):
    cuda = FakeCuda(clock, FORWARD_S, FORWARD_S, reads=True)
    cuda.install(monkeypatch)
    assert graph_replay(cuda.work, Timer(clock)) is None
    assert cuda.waits == 1  # a broken capture is over before anything else is timed
    assert cuda.calls == 4  # three times to warm up, once to capture, none to time


def test_a_mistake_in_the_work_is_not_taken_for_a_failed_capture(clock, monkeypatch):
    FakeCuda(clock, 0.0, 0.0).install(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        graph_replay(lambda: 1 / 0, Timer(clock))
