"""Wall-clock truth: workloads whose answer is known, measured for real; `make truth` prints every attempt."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from boundby.bound.analysis import Call, Machine, bottleneck
from boundby.bound.bench import Bench
from boundby.bound.verdict import Verdict
from boundby.machine.ceilings import Ceilings, measure
from boundby.machine.disturbance import HostCounters, Watch
from boundby.timing.stats import summarize
from boundby.timing.timer import Timer

pytestmark = [pytest.mark.truth, pytest.mark.timeout(1800)]

CPU = torch.device("cpu")
REPEATS = 20
SPUN_S = (20e-6, 200e-6, 2e-3, 20e-3)
Work = Callable[[], object]


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def one_core_loaded() -> Iterator[None]:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("seconds", SPUN_S)
def test_a_callable_that_spins_a_known_time_is_measured_exactly_while_another_core_is_loaded(seconds: float) -> None:
    timer = Timer()
    with one_core_loaded():
        for attempt in range(5):
            median = summarize(
                [timer.isolated(lambda: spin(seconds)) for _ in range(max(50, int(0.5 / seconds)))]
            ).median
            error = median - seconds
            shown = f"median {median * 1e6:.2f} us ({error * 1e6:+.2f} us)"
            print(f"spin {seconds * 1e6:.0f} us, attempt {attempt + 1}: {shown}")
            assert abs(error) <= 0.01 * seconds + 2e-6


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    """Return the limits of this machine; one that was disturbed is measured again."""
    measured = measure(CPU, dtypes=("float32",))
    for _ in range(3):
        if not measured.doubts:
            break
        measured = measured.joined(measure(CPU, dtypes=("float32",)))
    print(f"\nceilings: {measured.configured('float32')}\n{measured.memory}")
    print(f"dispatch {measured.dispatch_s * 1e6:.2f} us {measured.doubts}")
    return measured


def a_large_product() -> tuple[Work, Work | None]:
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return lambda: left @ right, None


def a_large_addition() -> tuple[Work, Work | None]:
    left, right = torch.randn(2**24), torch.randn(2**24)
    return lambda: left + right, None


def a_large_addition_in_place() -> tuple[Work, Work | None]:
    left, right = torch.randn(2**25), torch.randn(2**25)
    return lambda: left.add_(right), None


def a_thousand_tiny_operators() -> tuple[Work, Work | None]:
    tiny = torch.randn(4)

    def work() -> torch.Tensor:
        value = tiny
        for _ in range(1000):
            value = value + tiny
        return value

    return work, None


def a_slow_tokenizer() -> tuple[Work, Work | None]:
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    return lambda: left @ right, lambda: spin(0.05)


BENCH = Bench(replay_s=2.0, trials_s=3.0)
WORKLOADS = {
    "compute": a_large_product,
    "memory": a_large_addition,
    "memory, in place": a_large_addition_in_place,
    "launch": a_thousand_tiny_operators,
    "input": a_slow_tokenizer,
}


def names(verdict: Verdict, bound: str) -> bool:
    """Tell whether the verdict is `bound`, or mixed with it among what it may be."""
    return verdict.bound == bound or (verdict.bound == "mixed" and bound in verdict.alternatives)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_whose_limit_is_known_gets_the_right_verdict_every_time(name: str, ceilings: Ceilings) -> None:
    expected = name.partition(",")[0]
    work, make_input = WORKLOADS[name]()
    right = 0
    for attempt in range(REPEATS):
        verdict = bottleneck(Call(work, make_input), Machine(ceilings, "float32"), BENCH)
        right += names(verdict, expected)
        against = [trial.name for trial in verdict.trials if trial.says_of(verdict.bound) == "refutes"]
        assert not against or not verdict.settled, against
        share = f"{100 * (verdict.share_of_limit or 0):.0f} %"
        seen = f"{verdict.bound} {verdict.alternatives} {share}, {verdict.confidence}, {verdict.confirmation}"
        seen += f", {verdict.unsettled.text}" if verdict.unsettled else ""
        print(f"{name} {attempt + 1}/{REPEATS}: {seen} {[doubt.kind for doubt in verdict.doubts]}")
    print(f"{name}: {right} of {REPEATS} right")
    assert right == REPEATS


def test_a_loaded_core_is_noticed_every_time_and_a_free_one_is_not_blamed() -> None:
    product = torch.randn(512, 512)

    def window() -> list[str]:
        watch = Watch(HostCounters()).start()
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            product @ product
        return [disturbance.kind for disturbance in watch.stop().disturbances(torch.get_num_threads())]

    quiet = [window() for _ in range(REPEATS)]
    with one_core_loaded():
        loaded = [window() for _ in range(REPEATS)]
    print(f"quiet: {quiet}\nloaded: {loaded}")
    assert all("foreign_load" in kinds for kinds in loaded)


def test_measuring_changes_what_is_measured_by_less_than_the_half_width_it_reports() -> None:
    """Time forwards bare, and with sampler and watch around them, in turns."""
    from boundby.machine.sampler import PsutilSource, Sampler
    from boundby.timing.stats import estimate

    left, right = torch.randn(256, 256), torch.randn(256, 256)
    timer, ratios = Timer(), []

    def block() -> float:
        return summarize([timer.isolated(lambda: left @ right) for _ in range(300)]).median

    block()
    for pair in range(30):
        bare = block()
        watch = Watch(HostCounters()).start()
        with Sampler(PsutilSource()):
            watched = block()
        watch.stop()
        ratios.append(watched / bare)
        print(f"pair {pair + 1}: watched / bare {ratios[-1]:.4f}")
    ratio = estimate(ratios)
    print(f"watched / bare: {ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]")
    assert ratio.low is not None and ratio.low < 1.01
