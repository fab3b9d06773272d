"""Plans computed event by event against times worked out by hand, and predictions against what was run."""

from dataclasses import replace

import pytest

from boundby.partition import Chain, ExecutionPlanner, Infeasible, Link, Unit, VirtualNode
from boundby.partition.comparison import Measured, StageTimes, TransferTimes, compare
from boundby.partition.simulation import simulate
from boundby.stats import summarize
from tests.partition_cases import plan_of, random_case

MS = 1e-3


def in_ms(*seconds):
    return [round(1e3 * each, 9) for each in seconds]


def test_one_stage_finishes_requests_one_after_the_other():
    found = simulate(plan_of(["a", "b"], seconds=[2 * MS, 1 * MS]), 3)
    assert in_ms(*found.finishes_s) == [3, 6, 9]
    assert in_ms(found.first_finish_s, found.period_s, found.last_finish_s) == [3, 3, 9]


def test_stages_work_on_different_requests_at_the_same_time():
    found = simulate(plan_of(["a", "b", "c"], 1, 2, seconds=[2 * MS, 5 * MS, 1 * MS]), 4)
    assert in_ms(*found.finishes_s) == [8, 13, 18, 23]
    assert in_ms(found.period_s) == [5]


def test_a_link_carries_while_nodes_compute_when_there_is_overlap():
    plan = plan_of(["a", "b"], 1, seconds=[2 * MS, 3 * MS], links=Link(float("inf"), 4 * MS))
    found = simulate(plan, 3)
    assert in_ms(*found.finishes_s) == [9, 13, 17]  # 2 + 4 + 3; then the link is what is waited for
    assert in_ms(found.period_s) == [4]


def test_both_ends_are_busy_while_a_link_carries_when_there_is_no_overlap():
    plan = plan_of(["a", "b"], 1, seconds=[2 * MS, 3 * MS], links=Link(float("inf"), 4 * MS), overlap=False)
    found = simulate(plan, 4)
    # carries 2-6, 9-13, 16-20, 23-27: each begins when the second node has finished at 9, 16, 23
    assert in_ms(*found.finishes_s) == [9, 16, 23, 30]
    assert in_ms(found.period_s, plan.period_s) == [7, 7]


def test_few_requests_have_no_steady_period_and_a_reason():
    found = simulate(plan_of(["a", "b"], 1), 2)
    assert found.period_s is None and "simulate more" in found.reason


def test_no_requests_are_refused():
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


def test_a_given_cut_has_the_predictions_that_the_planner_makes_for_it():
    compared = 0
    for seed in range(60):
        case = random_case(seed)
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
