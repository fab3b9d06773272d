"""In which order points are visited, and when they are known well enough."""

from collections.abc import Sequence

import pytest

from boundby.timing.rounds import Outcome, StopRule, sweep

STEADY = StopRule(half_width=0.01, max_seconds=1000.0)
NEVER_NARROW = StopRule(half_width=1e-12, max_seconds=1000.0, least_rounds=5, most_rounds=8)


class Machine:
    """Makes visits of one second; keeps which were made. `value` and `status` are functions of point and round."""

    def __init__(self, value=lambda point, number: 1.0, status=lambda point, number: "ok"):
        self.value, self.status = value, status
        self.made: list[tuple[int, int]] = []

    def __call__(self, point: int, number: int) -> Outcome:
        self.made.append((point, number))
        status = self.status(point, number)
        value = self.value(point, number) if status == "ok" else None
        return Outcome(point, number, status, seconds=1.0, value=value)

    def order(self, number: int) -> list[int]:
        return [point for point, of_round in self.made if of_round == number]

    def rounds(self, point: int) -> list[int]:
        return [number for visited, number in self.made if visited == point]


def noisy(point: int, number: int) -> float:
    return 1.0 + number % 2


def ok(values: Sequence[float], seconds: float = 1.0) -> list[Outcome]:
    return [Outcome(1, number, "ok", seconds, value) for number, value in enumerate(values)]


def test_round_0_goes_upwards_and_later_rounds_are_shuffled():
    machine = Machine(noisy)
    points = [64, 1, 16, 4, 32, 8]
    sweep(points, machine, NEVER_NARROW)
    assert machine.order(0) == [1, 4, 8, 16, 32, 64]
    later = [machine.order(number) for number in range(1, 8)]
    assert all(sorted(order) == sorted(points) for order in later)
    assert sum(order != sorted(points) for order in later) >= 6
    assert len({tuple(order) for order in later}) >= 6  # each round is shuffled anew


def test_the_order_is_a_function_of_the_seed():
    first, again, other = Machine(noisy), Machine(noisy), Machine(noisy)
    sweep([1, 2, 4, 8, 16], first, NEVER_NARROW, seed=7)
    sweep([1, 2, 4, 8, 16], again, NEVER_NARROW, seed=7)
    sweep([1, 2, 4, 8, 16], other, NEVER_NARROW, seed=8)
    assert first.made == again.made
    assert first.made != other.made


def test_steady_points_are_visited_once_per_round_even_when_given_twice_and_stop_after_the_least_rounds():
    machine = Machine()
    outcomes = sweep([2, 1, 2], machine, STEADY)
    assert sorted(machine.made) == [(point, number) for point in (1, 2) for number in range(5)]
    assert [(outcome.point, outcome.round) for outcome in outcomes] == [(p, n) for p in (1, 2) for n in range(5)]
    assert sweep([], Machine(), STEADY) == []


def test_all_points_go_on_until_the_last_interval_is_narrow():
    machine = Machine(lambda point, number: 1.0 if point == 1 or number not in (1, 3) else 1.1)
    rule = StopRule(half_width=0.03, max_seconds=1000.0)
    sweep([1, 2], machine, rule)
    # widened half-widths of 1, 1.1, 1, 1.1, 1, 1, ... from scipy.stats.t: 7.1 % at n = 5, 3.1 % at 10, 2.8 % at 11
    assert machine.rounds(2) == list(range(11))
    assert machine.rounds(1) == list(range(11))  # a point visited alone would meet one disturbance in several rounds


def test_a_point_that_has_used_its_seconds_is_left_out_of_the_rounds_of_others():
    machine = Machine(noisy)

    def visit(point, number):
        made = machine(point, number)
        return Outcome(point, number, "ok", seconds=5.0 if point == 8 else 1.0, value=made.value)

    sweep([1, 8], visit, StopRule(half_width=1e-12, max_seconds=30.0, most_rounds=8))
    assert machine.rounds(8) == list(range(6))
    assert machine.rounds(1) == list(range(8))


@pytest.mark.parametrize(("budget", "rounds"), [(0.5, 5), (5.0, 5), (5.5, 6), (6.0, 6), (100.0, 8)])
def test_the_least_rounds_come_before_the_budget_and_the_budget_before_the_width(budget, rounds):
    machine = Machine(noisy)
    sweep([1], machine, StopRule(half_width=1e-12, max_seconds=budget, most_rounds=8))
    assert len(machine.made) == rounds


def test_larger_points_than_one_that_ran_out_of_memory_are_not_tried():
    machine = Machine(status=lambda point, number: "oom" if point == 4 else "ok")
    outcomes = sweep([1, 2, 4, 8, 16], machine, STEADY)
    assert machine.rounds(4) == [0]
    assert machine.rounds(8) == machine.rounds(16) == []
    assert machine.rounds(1) == machine.rounds(2) == [0, 1, 2, 3, 4]
    ends = {outcome.point: outcome.status for outcome in outcomes}
    assert ends == {1: "ok", 2: "ok", 4: "oom", 8: "skipped_oom", 16: "skipped_oom"}


def test_running_out_of_memory_in_a_later_round_ends_that_point_and_larger_ones():
    machine = Machine(status=lambda point, number: "oom" if (point, number) == (4, 2) else "ok")
    sweep([2, 4, 8], machine, STEADY)
    assert machine.rounds(2) == [0, 1, 2, 3, 4]
    assert machine.rounds(4) == [0, 1, 2]
    assert max(machine.rounds(8)) <= 2


def test_a_point_that_failed_is_not_tried_again_and_larger_ones_are():
    machine = Machine(status=lambda point, number: "failed" if point == 2 else "ok")
    sweep([1, 2, 4], machine, STEADY)
    assert machine.rounds(2) == [0]
    assert machine.rounds(4) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("interrupted_after", range(26))
def test_a_sweep_goes_on_where_finished_visits_end(interrupted_after):
    points = [1, 2, 4, 8]
    whole = Machine(
        value=lambda point, number: 1.03 if (point, number) == (4, 3) else 1.0,  # keeps all going for eight rounds
        status=lambda point, number: "oom" if point == 8 else "ok",
    )
    expected = sweep(points, whole, STEADY)
    assert len(whole.made) == 25
    finished = [outcome for made in whole.made[:interrupted_after] for outcome in expected if same(outcome, made)]
    machine = Machine(whole.value, whole.status)
    outcomes = sweep(points, machine, STEADY, finished=finished)
    assert machine.made == whole.made[interrupted_after:]
    assert outcomes == expected


def same(outcome: Outcome, visit: tuple[int, int]) -> bool:
    return (outcome.point, outcome.round) == visit


def test_finished_visits_of_other_points_do_not_count():
    machine = Machine()
    outcomes = sweep([2], machine, STEADY, finished=[Outcome(1, 0, "oom")])
    assert machine.rounds(2) == [0, 1, 2, 3, 4]
    assert {outcome.point for outcome in outcomes} == {2}


def test_an_interrupted_visit_ends_the_sweep():
    def interrupted(point, number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([1], interrupted, STEADY)


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ([1.0] * 4, False),  # fewer than the least rounds
        ([1.0] * 5, True),
        ([1.0, 1.0, 1.0, 1.0, 1.01], True),  # 0.61 %
        ([1.0, 1.0, 1.0, 1.0, 1.02], False),  # 1.2 %
    ],
)
def test_the_rule_is_met_by_a_narrow_interval(values, met):
    assert STEADY.is_met(ok(values)) is met
    assert STEADY.is_done(ok(values)) is met


def test_the_most_rounds_end_a_point_and_one_round_never_meets_the_rule():
    assert not NEVER_NARROW.is_done(ok([1.0, 2.0] * 3))
    assert NEVER_NARROW.is_done(ok([1.0, 2.0] * 4))
    rule = StopRule(half_width=0.5, max_seconds=10.0, least_rounds=1)
    assert not rule.is_met(ok([1.0]))
    assert not rule.is_done(ok([1.0]))
    assert rule.is_done(ok([1.0], seconds=10.0))


@pytest.mark.parametrize("status", ["oom", "failed", "skipped_oom"])
def test_a_visit_that_is_not_ok_ends_its_point_at_once(status):
    assert STEADY.is_done([Outcome(1, 0, status)])
    assert not STEADY.is_met([Outcome(1, 0, status)])


@pytest.mark.parametrize(
    ("outcomes", "left"),
    [
        ([], 5),
        (ok([1.0, 2.0], seconds=1.0), 8),
        (ok([1.0, 2.0], seconds=100.0), 3),
        (ok([1.0, 2.0, 1.0, 2.0, 1.0], seconds=15.0), 2),
        (ok([1.0] * 5), 0),
        ([Outcome(1, 0, "oom")], 0),
    ],
)
def test_how_many_visits_may_follow_is_bounded_by_rounds_and_seconds(outcomes, left):
    assert StopRule(0.01, max_seconds=100.0, most_rounds=10).most_left(outcomes) == left
