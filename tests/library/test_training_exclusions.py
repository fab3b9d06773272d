"""What is excluded ends where it says, whatever begins and ends inside it under the same name."""

import contextlib
from collections.abc import Iterator

import pytest

from boundby.training import StageTimer
from tests.fakes import FakeNanoseconds
from tests.timed_loops import S, host_ns, reasons, run


def batches(clock: FakeNanoseconds) -> Iterator[int]:
    for each in range(3):
        clock.advance(2)
        yield each
    clock.advance(2)


def inside_a(marker, times=1):
    def inside(timer, clock):
        with contextlib.ExitStack() as stack:
            for _ in range(times):
                stack.enter_context(getattr(timer, marker)("evaluation"))
            clock.advance(8)

    return inside


def a_loader_to_its_end(timer: StageTimer, clock: FakeNanoseconds) -> None:
    assert list(timer.timed(batches(clock), "evaluation")) == [0, 1, 2]  # the wait for its end is taken back


INSIDE = [*map(inside_a, ("excluded", "stage", "span")), inside_a("excluded", times=2), a_loader_to_its_end]


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("is_watched", [False, True])
def test_what_has_its_name_inside_does_not_end_it(timer, clock, inside, is_watched):
    if is_watched:  # then every mark is understood at once
        timer.hooks.register("stage_end", lambda name, seconds: None)
    for _ in range(2):
        run(timer, clock, forward=1)
        with timer.stage("callbacks"):
            with timer.excluded("evaluation"):
                clock.advance(1)
                inside(timer, clock)
                clock.advance(32)
                run(timer, clock, forward=64)
            clock.advance(1)
        timer.step()
    assert host_ns(timer, "step", "step") == [2 * S] * 2
    assert host_ns(timer, "callbacks") == host_ns(timer, "forward") == [S] * 2
    assert host_ns(timer, "evaluation", "excluded") == [(1 + 8 + 32 + 64) * S] * 2
    assert host_ns(timer, "evaluation") == host_ns(timer, "evaluation", "span") == []
    assert reasons(timer) == []


def test_an_exception_inside_ends_both(timer, clock):
    with pytest.raises(ValueError), timer.excluded(), timer.excluded():
        clock.advance(8)
        raise ValueError
    run(timer, clock, forward=1)
    timer.step()
    assert host_ns(timer, "forward") == host_ns(timer, "step", "step") == [S]


def test_ends_that_never_came_inside_it_are_forgotten_with_its_step(timer, clock):
    timer.begin("evaluation", "excluded")
    timer.begin("evaluation")
    timer.step()
    with timer.excluded("evaluation"):
        clock.advance(8)
    run(timer, clock, forward=1)
    timer.step()
    assert host_ns(timer, "evaluation", "excluded") == [8 * S]
    assert host_ns(timer, "forward") == [S]
    assert reasons(timer) == ["'evaluation', which is excluded, was open when its step ended"]


def test_whoever_asks_is_told_whether_something_excluded_is_open(timer):
    timer.hooks.register("stage_end", lambda name, seconds: told.append((name, timer.is_excluded)))
    told: list[tuple[str, bool]] = []
    with timer.excluded("evaluation"):
        with timer.stage("forward"):
            pass
        with timer.excluded("evaluation"):
            pass
    assert told == [("forward", True), ("evaluation", True), ("evaluation", False)]
