"""Plans computed event by event against times worked out by hand, and predictions against what was run."""

from dataclasses import replace

import pytest

from boundby.partition import Chain, ExecutionPlanner, Infeasible, Link, Unit, VirtualNode
from boundby.partition.plan import Measured, StageTimes, TransferTimes, compare
from boundby.partition.simulation import simulate
from boundby.stats import summarize
from tests.partition_cases import plan_of, random_case, shared_case

MS = 1e-3


def in_ms(*seconds):
    return [round(1e3 * each, 9) for each in seconds]


FOUR_MS = Link(float("inf"), 4 * MS)


@pytest.mark.parametrize(
    ("seconds", "options", "finishes", "period"),
    [
        ([3], {}, [3, 6, 9], 3),
        ([2, 5, 1], {}, [8, 13, 18, 23], 5),
        ([2, 3], {"links": FOUR_MS}, [9, 13, 17], 4),  # 2 + 4 + 3; then the link is what is waited for
        # carries 2-6, 9-13, 16-20, 23-27: each begins when the second node has finished at 9, 16, 23
        ([2, 3], {"links": FOUR_MS, "overlap": False}, [9, 16, 23, 30], 7),
    ],
    ids=["one stage", "stages at the same time", "a link carries while nodes compute", "both ends are busy meanwhile"],
)
def test_requests_finish_when_worked_out_by_hand(seconds, options, finishes, period):
    plan = plan_of("abc"[: len(seconds)], *range(1, len(seconds)), seconds=[each * MS for each in seconds], **options)
    found = simulate(plan, len(finishes))
    assert in_ms(*found.finishes_s) == finishes
    assert in_ms(found.first_finish_s, found.period_s, plan.period_s) == [finishes[0], period, period]
    assert found.last_finish_s == found.finishes_s[-1]


def test_few_requests_have_no_steady_period_and_a_reason_and_none_are_refused():
    found = simulate(plan_of(["a", "b"], 1), 2)
    assert found.period_s is None and "simulate more" in found.reason
    with pytest.raises(ValueError, match="requests is 0"):
        simulate(plan_of(["a"]), 0)


def test_simulation_agrees_with_the_formulas_that_plans_are_chosen_by():
    seen = {True: 0, False: 0}
    for seed in range(30):
        case = random_case(seed)
        planner = ExecutionPlanner(case.chains, inputs_in_flight=case.inputs_in_flight)
        for objective in ("latency", "throughput", "requests"):
            options = {"overlap": case.overlap, "in_order": case.in_order, "requests": case.requests}
            try:
                plan = planner.generate_plan(case.nodes, objective, case.links, **options)
            except Infeasible:
                continue
            found = simulate(plan, max(2 * len(plan.stages) + 2, case.requests))
            assert found.first_finish_s == pytest.approx(plan.latency_s, abs=1e-11)
            assert found.period_s == pytest.approx(plan.period_s, abs=1e-11)
            assert found.finishes_s[case.requests - 1] <= plan.latency_s + (case.requests - 1) * plan.period_s + 1e-11
            if objective == "requests" and plan.overlap:
                assert found.finishes_s[case.requests - 1] == pytest.approx(plan.value_s, abs=1e-11)
            seen[plan.overlap] += len(plan.stages) > 1
    assert min(seen.values()) > 10


@pytest.mark.parametrize("make", [random_case, shared_case])
def test_a_given_cut_has_the_predictions_that_the_planner_makes_for_it(make):
    compared = 0
    for case in map(make, range(60)):
        planner = ExecutionPlanner(case.chains)
        try:
            plan = planner.generate_plan(case.nodes[:2], "throughput", case.links.default, in_order=True)
        except Infeasible:
            continue
        if len(plan.stages) == 2:
            compared += 1
            given = planner.plan_at([plan.stages[1].first_unit], case.nodes[:2], "throughput", case.links.default)
            assert given == replace(plan, gains=(), alternatives=())
    assert compared > 5


@pytest.mark.parametrize("cuts", [[0], [2], [1, 1], []])
def test_cuts_that_do_not_split_the_units_are_refused(cuts):
    nodes = [VirtualNode(name, "cpu", ram_gb=1) for name in ("x", "y")]
    with pytest.raises(ValueError, match="do not split 2 units"):
        ExecutionPlanner(Chain((Unit("a", 1.0), Unit("b", 1.0))), kind="cpu").plan_at(cuts, nodes)


def measured(*seconds: float, transfer: float, period: float, finish: float) -> Measured:
    stages = tuple(
        StageTimes(f"node_{n}", "cpu", "m", 1, (n,), (name,), 0, summarize([spent]), summarize([2 * spent]))
        for n, (name, spent) in enumerate(zip("ab", seconds, strict=True))
    )
    carried = (TransferTimes("node_0", "node_1", 80, summarize([transfer]), Link(1e9)),)
    latency = summarize([sum(seconds) + transfer])
    return Measured(stages, carried, latency, 10, finish, summarize([period]), 0.0, 1e-5, ())


def test_errors_are_signed_and_stand_beside_what_was_found():
    plan = plan_of(["a", "b"], 1, seconds=[2 * MS, 4 * MS], links=Link(float("inf"), 1 * MS))
    found = compare(plan, measured(4 * MS, 4 * MS, transfer=2 * MS, period=5 * MS, finish=43 * MS))
    assert [each.signed for each in found.stages] == [-0.5, 0.0]
    assert [each.signed for each in found.busy_stages] == [-0.75, -0.5]
    assert [each.signed for each in found.transfers] == [-0.5]
    assert found.transfer_sizes[0].signed == 0.25
    assert found.latency.signed == pytest.approx(-0.3)  # 7 ms of 10
    assert found.period.signed == pytest.approx(-0.2)
    assert found.last_finish.signed == pytest.approx(0.0)  # 7 + 9 * 4
    assert measured(4, 4, transfer=1, period=1, finish=1).stages[0].slowdown == 2


def test_another_plan_than_was_run_is_not_compared():
    with pytest.raises(ValueError, match="not the plan that was run"):
        compare(plan_of(["a", "c"], 1), measured(MS, MS, transfer=MS, period=MS, finish=MS))
