"""What one change does to a workload that is known to follow it or not; every factor is exact."""

import math
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from boundby.bound import trials
from boundby.bound.bench import Bench
from boundby.bound.judgement import IDLE_DEVICE, confirm
from boundby.bound.trials import (
    Candidate,
    Made,
    doubled_batch,
    fewer_threads,
    graph_replay,
    reduced_precision_matmul,
    try_out,
)
from boundby.bound.verdict import Fix, Gain, SameLabels, Trial
from boundby.timing.timer import Timer
from boundby.work.roofline import Interval
from tests.fakes import FakeClock, FakeThreads, FakeWatch, QueuedDevice

FORWARD_S = 2.0**-4
Work = Callable[[], None]
OTHER = Fix("other", {"words": "something else"})


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


def changed_to(work: Callable[[], object], fix: Fix = OTHER, **options: object) -> Candidate:
    return Candidate(fix, lambda: Made(work), **options)


def tried(clock: FakeClock, work: Work, *candidates: Candidate | None, **options: object):
    """Return what came of the candidates, with seconds for all of them."""
    bench = Bench(Timer(clock), **{"watch": FakeWatch(), "trials_s": 100.0, **options})
    return try_out(work, [candidate for candidate in candidates if candidate], bench)


def the_trial(clock: FakeClock, work: Work, candidate: Candidate | None) -> Trial:
    [trial] = tried(clock, work, candidate).trials
    return trial


def signs(trial: Trial, *bounds: str) -> dict[str, str]:
    return {bound: confirm(bound, [trial]) for bound in bounds}


# How a trial is measured


@pytest.mark.parametrize(
    ("fixed", "per_sample", "gain"), [(0.0, FORWARD_S, 1.0), (FORWARD_S, 0.0, 2.0), (FORWARD_S, FORWARD_S, 4 / 3)]
)
def test_doubling_tells_a_fixed_cost_from_one_that_grows_with_the_samples(clock, fixed, per_sample, gain):
    trial = the_trial(clock, takes(clock, fixed + per_sample), doubled_batch(takes(clock, fixed + 2 * per_sample)))
    assert trial.measured == Interval(*[pytest.approx(gain, rel=1e-14)] * 3)
    assert not trial.is_fix


def test_neither_drift_nor_single_slow_calls_change_the_factor(clock):
    calls = 0

    def called(seconds, slower):
        def work():
            nonlocal calls
            clock.advance(seconds * slower(calls))
            calls += 1

        return work

    def disturbed(call):
        return 9 if call > 6 and call % 7 == 3 else 1

    trial = the_trial(clock, called(2.0**-9, disturbed), changed_to(called(2.0**-8, disturbed)))
    assert trial.measured == Interval.exact(0.5)
    calls = 0

    def drift(call):
        return 1.02**call

    trial = the_trial(clock, called(FORWARD_S, drift), changed_to(called(2 * FORWARD_S, drift)))
    assert trial.measured.low < 0.5 < trial.measured.high


def test_a_short_forward_is_called_until_a_block_is_long_enough_for_the_clock(clock):
    calls = 0

    def work():
        nonlocal calls
        calls += 1
        clock.advance(2.0**-10)

    the_trial(clock, work, changed_to(takes(clock, 2.0**-10)))
    blocks = math.ceil(trials.LEAST_BLOCK_S * 2**10)
    assert calls == 2 + trials.LEAST_PAIRS * (1 + blocks)  # two until it is warm


def test_of_a_long_forward_every_call_counts_and_fewer_pairs_will_do(clock):
    calls = []
    work = takes(clock, 2 * trials.LONG_S)
    trial = the_trial(clock, work, changed_to(lambda: calls.append(work())))
    assert (trial.pairs, len(calls)) == (trials.LEAST_LONG_PAIRS, 2 + trials.LEAST_LONG_PAIRS)


def test_a_change_is_warm_before_it_is_timed(clock):
    cold = iter([8.0, 4.0, 2.0])
    trial = the_trial(clock, takes(clock, FORWARD_S), changed_to(lambda: clock.advance(next(cold, FORWARD_S / 2))))
    assert trial.measured == Interval.exact(2.0)


def test_pairs_are_added_while_the_factor_is_uncertain_and_there_is_time(clock):
    calls = 0

    def restless():
        nonlocal calls
        calls += 1
        clock.advance(FORWARD_S * (2 if calls % 4 > 1 else 1))

    trial = the_trial(clock, restless, changed_to(takes(clock, FORWARD_S)))
    assert 1.0 < trial.measured.low < trial.measured.value < trial.measured.high < 2.0
    assert trial.pairs == trials.MOST_PAIRS
    [short] = tried(clock, restless, changed_to(takes(clock, FORWARD_S)), trials_s=3.0).trials
    assert trials.LEAST_PAIRS <= short.pairs < trials.MOST_PAIRS


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

    bench = Bench(Timer(clock, synchronize), watch=FakeWatch(), trials_s=100.0)
    outcome = try_out(launch(FORWARD_S), [changed_to(launch(2 * FORWARD_S))], bench)
    assert outcome.trials[0].measured == Interval.exact(0.5)


@pytest.mark.parametrize(("busy", "windows", "doubts"), [(0, 1, 0), (1, 2, 0), (2, 2, 1)])
def test_a_disturbed_trial_is_made_once_more(clock, busy, windows, doubts):
    watch = FakeWatch(lambda window: 2.0 * (window < busy))
    outcome = tried(clock, takes(clock, FORWARD_S), changed_to(takes(clock, FORWARD_S)), watch=watch)
    assert (watch.windows, [doubt.kind for doubt in outcome.doubts]) == (windows, ["disturbed"] * doubts)
    assert len(outcome.trials) == 1


@pytest.mark.parametrize(("on_device", "windows"), [(False, 2), (True, 1)])
def test_cores_that_a_gpu_leaves_free_may_be_used_by_others(clock, on_device, windows):
    watch = FakeWatch(lambda window: 2.0)  # of four
    work = takes(clock, FORWARD_S)
    outcome = tried(clock, work, changed_to(work), watch=watch, queue=QueuedDevice(clock) if on_device else None)
    assert (watch.windows, bool(outcome.doubts)) == (windows, windows == 2)


# What comes of trials that cannot be made


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "out_of_memory", "not enough memory"),
        (ValueError("no kernel\nand more"), "failed", "ValueError: no kernel"),
    ],
)
@pytest.mark.parametrize("where", ["make", "work", "labels"])
def test_a_trial_that_raises_is_a_remark_and_the_others_are_made(clock, error, kind, reason, where):
    released = []

    def raising():
        raise error

    made = {
        "make": raising,
        "work": lambda: Made(raising),
        "labels": lambda: Made(takes(clock, FORWARD_S), raising),
    }[where]
    candidates = [Candidate(OTHER, made), changed_to(takes(clock, FORWARD_S), Fix("fuse_operators"))]
    outcome = tried(clock, takes(clock, FORWARD_S), *candidates, release=lambda: released.append(1))
    assert [(untried.fix, untried.kind) for untried in outcome.untried] == [(OTHER, kind)]
    assert reason in outcome.untried[0].reason and "\n" not in outcome.untried[0].reason
    assert [trial.fix.kind for trial in outcome.trials] == ["fuse_operators"]
    assert len(released) == 2


def test_what_does_not_fit_into_the_seconds_is_not_begun(clock):
    def made():
        raise AssertionError

    dear = Candidate(Fix("fuse_operators"), made, setup_s=30.0)
    said: list[str] = []
    options = {"trials_s": 10.0, "tell": lambda text, left_s: said.append(text)}
    outcome = tried(clock, takes(clock, FORWARD_S), dear, changed_to(takes(clock, FORWARD_S)), **options)
    assert len(said) == 2 and said[0].startswith("trial: ")
    [untried] = outcome.untried
    assert (untried.kind, untried.reason[:30]) == ("over_budget", "it would take about 31 s, more")
    assert len(outcome.trials) == 1
    assert clock.now < 10.0


def test_a_trial_stands_beside_what_was_predicted_and_the_labels_it_keeps(clock):
    kept = SameLabels(9, 10, Interval(0.9, 0.6, 0.98))
    fix = Fix("dtype", {"dtype": "bfloat16"})
    gain = Gain(fix, 3.0, "a limit", predicted=Interval(1.9, 1.7, 2.1))
    candidate = Candidate(fix, lambda: Made(takes(clock, FORWARD_S / 2), lambda: kept))
    [trials] = tried(clock, takes(clock, FORWARD_S), candidate).with_predictions([gain]).trials
    assert (trials.predicted, trials.at_most, trials.same_labels) == (gain.predicted, 3.0, kept)
    assert (trials.measured, trials.outcome, trials.is_within_bound) == (Interval.exact(2.0), "gains", True)


# What each says of the bounds


@pytest.mark.parametrize(
    ("growth", "compute", "memory", "launch"),
    [
        (2.0, "ambiguous", "ambiguous", "refutes"),
        (1.0, "refutes", "ambiguous", "ambiguous"),  # weights that are read once may be what is fixed
        (1.5, "ambiguous", "ambiguous", "ambiguous"),
    ],
)
def test_doubling_refutes_the_bounds_whose_time_does_not_follow(clock, growth, compute, memory, launch):
    trial = the_trial(clock, takes(clock, FORWARD_S), doubled_batch(takes(clock, growth * FORWARD_S)))
    assert signs(trial, "compute", "memory", "launch", "under_utilised") == {
        "compute": compute,
        "memory": memory,
        "launch": launch,
        "under_utilised": "silent",
    }


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
    work = parallel(clock)
    trial = the_trial(clock, work, fewer_threads(work))
    left, threads.number = threads.number, 4
    assert left == number
    assert trial.measured.value == pytest.approx(ratio, rel=1e-14)
    assert trial.fix.settings == {"threads": fewer, "instead_of": number}
    assert signs(trial, "compute", "launch") == {"compute": "confirms", "launch": "refutes"}


def test_work_of_one_thread_does_not_mind_fewer(clock):
    work = takes(clock, FORWARD_S)
    trial = the_trial(clock, work, fewer_threads(work))
    assert trial.measured == Interval.exact(1.0)
    assert signs(trial, "compute", "launch", "memory") == {
        "compute": "refutes",
        "launch": "confirms",
        "memory": "silent",  # one thread may saturate the memory, or not
    }


@pytest.mark.parametrize(("number", "asked"), [(1, None), (4, 4), (4, 8)])
def test_no_fewer_threads_are_no_trial(clock, threads, number, asked):
    threads.number = number
    candidate = fewer_threads(takes(clock, FORWARD_S), asked)
    threads.number = 4
    assert candidate is None


@pytest.mark.parametrize("failing_call", [3, 4, 6])
def test_the_threads_are_set_back_when_the_work_raises(clock, threads, failing_call):
    calls = 0

    def work():
        nonlocal calls
        calls += 1
        clock.advance(FORWARD_S)
        if calls == failing_call:
            raise ZeroDivisionError

    outcome = tried(clock, work, fewer_threads(work))
    assert (calls, threads.number) == (failing_call, 4)
    assert [untried.kind for untried in outcome.untried] == ["failed"]


def rounding(clock: FakeClock, faster: float) -> Work:
    """Return work that is `faster` where float32 products may be rounded."""
    return lambda: clock.advance(FORWARD_S / (1 if torch.get_float32_matmul_precision() == "highest" else faster))


@pytest.fixture
def highest():
    with trials.matmul_precision("highest"):
        yield


@pytest.mark.usefixtures("highest")
@pytest.mark.parametrize(("faster", "launch"), [(4.0, "refutes"), (1.0, "ambiguous"), (0.5, "ambiguous")])
def test_coarser_products_speak_against_a_slow_host_alone_and_a_loss_against_nothing(clock, faster, launch):
    work = rounding(clock, faster)
    trial = the_trial(clock, work, reduced_precision_matmul(work, "medium", ceiling_ratio=4.0))
    assert trial.measured == Interval.exact(faster)
    assert signs(trial, "compute", "memory", "launch") == {
        "compute": "ambiguous",
        "memory": "ambiguous",
        "launch": launch,
    }
    assert torch.get_float32_matmul_precision() == "highest"


def test_precisions_whose_ceilings_are_close_are_no_other_products(clock):
    work = takes(clock, FORWARD_S)
    assert reduced_precision_matmul(work, "medium", trials.LEAST_CEILING_RATIO - 0.01) is None
    assert reduced_precision_matmul(work, "medium", trials.LEAST_CEILING_RATIO) is not None


@pytest.mark.parametrize(
    ("gain", "signs_of"),
    [(4.0, {"launch": "confirms", "compute": "refutes"}), (1.0, {"memory": "ambiguous", "launch": "refutes"})],
)
def test_a_graph_gains_where_the_host_is_the_limit_and_nothing_elsewhere(clock, gain, signs_of):
    replayed = replace(graph_replay(takes(clock, 0.0), IDLE_DEVICE), make=lambda: Made(takes(clock, FORWARD_S / gain)))
    trial = the_trial(clock, takes(clock, FORWARD_S), replayed)
    assert trial.measured == Interval.exact(gain)
    assert signs(trial, *signs_of) == signs_of


class Clocks:
    """A GPU whose clock follows what ran last."""

    reason: str | None = None
    reasons: dict[str, str] = {}

    def __init__(self) -> None:
        self.mhz = 1980.0

    def read(self) -> dict[str, float]:
        return {"gpu_sm_clock_mhz": self.mhz}

    def running(self, clock: FakeClock, mhz: float) -> Work:
        def work() -> None:
            self.mhz = mhz
            clock.advance(FORWARD_S)

        return work


@pytest.mark.parametrize(("mhz", "doubts"), [(1980.0, []), (1900.0, []), (1410.0, ["throttled"])])
def test_a_gain_under_another_clock_than_without_the_fix_is_doubted(clock, mhz, doubts):
    gpu = Clocks()
    outcome = tried(clock, gpu.running(clock, 1980.0), changed_to(gpu.running(clock, mhz)), source=gpu)
    assert [doubt.kind for doubt in outcome.doubts] == doubts and len(outcome.trials) == 1
    assert all("1,980 MHz in one and 1,410 MHz in the other" in doubt.text for doubt in outcome.doubts)
