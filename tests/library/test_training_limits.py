"""What a timer does with long runs, odd names and failures, its own and those of its listeners."""

import gc
import sys
import types

import pytest

from boundby.training import StageTimer, TimerOptions
from boundby.training.aggregate import SAMPLE, RunningStatistics
from boundby.training.records import bytes_of, times_from
from tests.fakes import FakeNanoseconds
from tests.timed_loops import S, host_ns, reasons, run


def reachable_bytes(whole: object) -> int:
    """Return the bytes of everything that the object holds, without modules, types and code."""
    seen, queue, total = set(), [whole], 0
    while queue:
        each = queue.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | types.FunctionType | FakeNanoseconds):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        queue += gc.get_referents(each)
    return total


def test_memory_is_flat_over_a_long_run(clock):
    timer = StageTimer(clock=clock, options=TimerOptions(capacity=64))
    timer.start()
    sizes = []
    for step in range(10_000):
        run(timer, clock, data=1, forward=1)
        timer.metrics({"loss": step})
        timer.step()
        if step in (4_000, 9_999):
            timer.snapshot()  # understands what is noted, of which there may be more or less
            sizes.append(reachable_bytes(timer))
    assert sizes[1] < 1.01 * sizes[0]  # the numbers in it have grown by some digits
    times = timer.snapshot()
    assert (len(times.occurrences), len(times.metric_rows)) == (64, 64)
    assert (times.num_occurrences, times.stage("forward").host_s.n) == (30_000, 10_000)
    timer.stop()


def test_names_are_bounded_too(timer, clock):
    for number in range(1000):
        run(timer, clock, **{f"layer {number}": 1})
    timer.step()
    times = timer.snapshot()
    assert len(times.names) == 257
    assert times.stage("(others)").host_s.n == 745
    assert reasons(timer) == ["more than 256; the further ones are summed as (others)"]


def test_odd_names_and_numbers_stay_writable(timer, clock):
    for name in ("\udcff", "x" * 500):
        run(timer, clock, **{name: 1})
    timer.metrics({"\udcff": 1e300, "loss": 1.0})
    timer.step()
    times = times_from(bytes_of(timer.snapshot()))
    assert [each.name for each in times.names] == ["step", "?", "x" * 200]
    assert [(each.name, each.non_finite) for each in times.metrics] == [("?", 1), ("loss", 0)]


def test_a_tally_samples_a_long_stream_evenly():
    tally = RunningStatistics()
    for value in range(100_000):
        tally.add(value)
    found = tally.statistics()
    assert (found.n, found.total, found.minimum, found.maximum) == (100_000, sum(range(100_000)), 0, 99_999)
    assert found.sampled == SAMPLE
    assert abs(found.median - 50_000) < 4 * 50_000 / SAMPLE**0.5  # four standard errors
    assert abs(found.p90 - 90_000) < 4 * 30_000 / SAMPLE**0.5
    few = RunningStatistics()
    assert few.statistics().mean is None
    for value in range(28):
        few.add(value)
    assert few.statistics().p90 is None, "too few for a quantile"


@pytest.mark.parametrize("name", [None, [], {}])
def test_a_name_that_is_none_is_a_remark(timer, clock, name):
    with timer.stage(name):
        run(timer, clock, forward=1)
    timer.metrics(name)
    timer.metrics({"loss": "low"}, step="first")
    timer.step()
    assert host_ns(timer, "forward") == [S]
    assert "stage times" in [remark.what for remark in timer.remarks.all()]


@pytest.mark.parametrize("kind", ["step", "background", "x"])
def test_only_stages_spans_and_what_is_excluded_can_be_begun(timer, kind):
    timer.begin("forward", kind)
    timer.step()
    assert [each.name for each in timer.snapshot().names] == ["step"]
    assert "cannot be begun" in reasons(timer)[0]


@pytest.mark.parametrize("number", ["many", 2**70, 1.5])
def test_a_number_that_is_none_is_counted_on(timer, clock, number):
    timer.step(3)
    run(timer, clock, forward=1)
    timer.step(number)
    assert timer.snapshot().rows_of("forward")["step"].tolist() == [4]
    assert reasons(timer) == [f"{number!r} is none; counted on"]


def test_a_timer_that_is_disabled_or_fails_again_and_again_stays_off_whatever_its_listener_does(clock, tmp_path):
    said: list[str] = []
    timer = StageTimer(clock=clock, say=lambda text: said.append(text) or 1 / 0)
    with timer, StageTimer(tmp_path / "run", enabled=False, clock=clock) as off:
        for _ in range(150):
            timer.begin(None)
        timer.snapshot()
        timer.begin("forward")
        run(off, clock, forward=1)
        assert list(off.timed([1, 2])) == [1, 2]
        off.metrics({"loss": 1})
        off.step()
    assert reasons(timer)[-1] == "given up after 100 failures" and said
    assert timer.snapshot().status == "finished"
    assert off.snapshot().stages == () and not (tmp_path / "run").exists()


def test_hooks_are_told_in_order_and_dropped_when_they_raise(timer, clock):
    told: list[tuple] = []
    timer.hooks.register("stage_start", lambda name: told.append(("start", name)))
    timer.hooks.register("stage_end", lambda name, seconds: told.append(("end", name, seconds)))
    timer.hooks.register("step_end", lambda number, seconds: told.append(("step", number, seconds)))
    timer.hooks.register("step_end", lambda number, seconds: 1 / 0)
    for _ in range(2):
        run(timer, clock, forward=2)
        timer.step()
    assert told[:3] == [("start", "forward"), ("end", "forward", 2.0), ("step", 0, 2.0)]
    assert len(told) == 6
    assert reasons(timer) == ["ZeroDivisionError: division by zero"]
    with pytest.raises(ValueError, match="stage_begin"):
        timer.hooks.register("stage_begin", print)
