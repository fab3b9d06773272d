"""Plans computed event by event against times worked out by hand, and predictions against what was run."""

from typing import Any

import pytest
from msgspec.structs import replace

from boundby.partition import Chain, ExecutionPlanner, Infeasible, Link, PartitionPlan, Unit, VirtualNode
from boundby.partition.plan import ORDER_ONLY, TOGETHER_ASSUMED, Measured, StageTimes, TransferTimes, compare
from boundby.partition.simulation import simulate
from boundby.partition.solver import Objective
from boundby.timing.stats import summarize
from tests import partition_cases as cases
from tests.partition_cases import plan_of, random_case, shared_case

MS = 1e-3


def in_ms(*seconds):
    return [round(1e3 * spent_s, 9) for spent_s in seconds]


FOUR_MS = Link(float("inf"), 4 * MS)


@pytest.mark.parametrize(
    ("seconds", "options", "finishes", "period"),
    [
        ([3], {}, [3, 6, 9], 3),
        ([2, 5, 1], {}, [8, 13, 18, 23], 5),
        ([2, 3], {"links": FOUR_MS}, [9, 13, 17], 4),  # 2 + 4 + 3; then the link is what is waited for
    ],
    ids=["one stage", "stages at the same time", "a link carries while nodes compute"],
)
def test_requests_finish_when_worked_out_by_hand(seconds, options, finishes, period):
    plan = plan_of("abc"[: len(seconds)], *range(1, len(seconds)), seconds=[ms * MS for ms in seconds], **options)
    simulated = simulate(plan, len(finishes))
    assert in_ms(*simulated.finishes_s) == finishes
    assert in_ms(simulated.first_finish_s, simulated.period_s, plan.period_s) == [finishes[0], period, period]
    assert simulated.last_finish_s == simulated.finishes_s[-1]


def test_few_requests_have_no_steady_period_and_a_reason_and_none_are_refused():
    simulated = simulate(plan_of(["a", "b"], 1), 2)
    assert simulated.period_s is None and "simulate more" in simulated.reason
    with pytest.raises(ValueError, match="requests is 0"):
        simulate(plan_of(["a"]), 0)


def test_simulation_agrees_with_the_formulas_that_plans_are_chosen_by():
    several = 0
    for seed in range(30):
        case = random_case(seed)
        planner = ExecutionPlanner(case.chains, inputs_in_flight=case.inputs_in_flight)
        for objective in ("latency", "throughput", "requests"):
            options = {"in_order": case.in_order, "requests": case.requests}
            try:
                plan = planner.generate_plan(case.nodes, objective, case.links, **options)
            except Infeasible:
                continue
            simulated = simulate(plan, max(2 * len(plan.stages) + 2, case.requests))
            assert simulated.first_finish_s == pytest.approx(plan.latency_s, abs=1e-11)
            assert simulated.period_s == pytest.approx(plan.period_s, abs=1e-11)
            last_s = plan.latency_s + (case.requests - 1) * plan.period_s
            assert simulated.finishes_s[case.requests - 1] <= last_s + 1e-11
            if objective == "requests":
                assert simulated.finishes_s[case.requests - 1] == pytest.approx(plan.value_s, abs=1e-11)
            several += len(plan.stages) > 1
    assert several > 20


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
    errors = compare(plan, measured(4 * MS, 4 * MS, transfer=2 * MS, period=5 * MS, finish=43 * MS))
    assert [stage.signed for stage in errors.stages] == [-0.5, 0.0]
    assert [busy_stage.signed for busy_stage in errors.busy_stages] == [-0.75, -0.5]
    assert [transfer.signed for transfer in errors.transfers] == [-0.5]
    assert errors.transfer_sizes[0].signed == 0.25
    assert errors.latency.signed == pytest.approx(-0.3)  # 7 ms of 10
    assert errors.period.signed == pytest.approx(-0.2)
    assert errors.last_finish.signed == pytest.approx(0.0)  # 7 + 9 * 4
    assert measured(4, 4, transfer=1, period=1, finish=1).stages[0].slowdown == 2


def test_another_plan_than_was_run_is_not_compared():
    with pytest.raises(ValueError, match="not the plan that was run"):
        compare(plan_of(["a", "c"], 1), measured(MS, MS, transfer=MS, period=MS, finish=MS))


OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "requests")
LINK = Link(1e9, is_measured=True)


def chain(*milliseconds: float) -> Chain:
    return Chain(tuple(Unit(f"h.{n}", ms * MS, layers=(f"h.{n}",)) for n, ms in enumerate(milliseconds)))


def node(name: str, **fields: Any) -> VirtualNode:
    return VirtualNode(name, "cpu", **{"ram_gb": 1, "machine": "pod", **fields})


def planned(made, nodes, objective="throughput", **options):
    free = Link(float("inf"), is_measured=True)
    return ExecutionPlanner(made, kind="cpu").generate_plan(nodes, objective, free, **options)


def test_the_period_is_of_busy_nodes_and_the_latency_of_one_that_computes_alone():
    plan = planned(chain(10, 10, 10, 10), [node("a", contention=1.5), node("b", contention=1.25)], in_order=True)
    assert [stage.units for stage in plan.stages] == [("h.0", "h.1"), ("h.2", "h.3")]
    assert [(stage.compute_s, stage.busy_compute_s) for stage in plan.stages] == [(0.020, 0.030), (0.020, 0.025)]
    assert (plan.latency_s, plan.period_s, plan.value_s) == (0.040, 0.030, 0.030)
    assert plan.requests_per_s == pytest.approx(1 / 0.030) and plan.requests_per_s_reason is None
    assert plan.limits[0] == "computing on a, 100 % of the period" and "slow one another down" in " ".join(plan.notes)
    assert "20.000 ms (measured; 30.000 ms while others on pod compute)" in str(plan)


def test_one_node_alone_is_not_slowed_and_is_best_where_two_slow_one_another_down_too_much():
    plan = planned(chain(10, 10, 10, 10), [node(name, contention=2.5) for name in "ab"])
    assert [stage.busy_compute_s for stage in plan.stages] == [0.040] and plan.period_basis == "measured"
    assert {split.name: split.period_s for split in plan.alternatives}["equal split"] == pytest.approx(0.050)
    assert [gain.change for gain in plan.gains if "machine of its own" in gain.change]


def test_no_throughput_is_claimed_where_contention_was_not_measured():
    for nodes in ([node("a"), node("b")], [node("a", contention=1.5), node("b")]):
        plan = planned(chain(10, 10), nodes)
        assert (plan.basis, plan.period_basis, plan.value_basis) == ("measured", "assumed", "assumed")
        assert plan.requests_per_s is None and plan.requests_per_s_reason == TOGETHER_ASSUMED in plan.notes
        assert "a and b share a machine (pod), and their contention was not measured" in plan.doubts[0]
    one = ExecutionPlanner(chain(10, 10), kind="cpu").generate_plan(nodes, links=Link(1e9, 1e-3))
    assert one.value_basis == one.period_basis == "measured"  # one node has nobody beside it


def test_contention_or_times_that_are_assumed_stay_the_reason_for_no_throughput():
    plan = planned(chain(10, 10), [node(name, contention=1.1) for name in "abc"])
    assert len(plan.stages) == 2 and plan.period_basis == "assumed" and plan.requests_per_s is None
    assert "was measured with all 3 nodes of pod busy, and this plan uses 2" in plan.doubts[0]
    plan = planned(chain(10, 10), [node("a", contention=1.1, speed=1.0), node("b", contention=1.1)])
    assert plan.period_basis == "assumed" and plan.requests_per_s_reason == ORDER_ONLY


def two_stages(first: float, second: float, *contention: float) -> PartitionPlan:
    made = chain(first, second)
    nodes = [node(name, contention=factor) for name, factor in zip("ab", contention, strict=True)]
    return ExecutionPlanner(made, kind="cpu").plan_at([1], nodes, "throughput", Link(float("inf")))


def test_equally_long_stages_take_the_latency_once_and_the_busy_period_for_each_other_request():
    simulated = simulate(two_stages(10, 10, 1.5, 1.5), 6)
    assert [round(1e3 * finish_s, 6) for finish_s in simulated.finishes_s] == [25, 40, 55, 70, 85, 95]
    assert simulated.period_s == pytest.approx(0.015)  # 10 alone, 5 times 15 together, 10 alone: 20 + 5 * 15
    assert simulate(two_stages(10, 10, 1.5, 1.5), 1).finishes_s == (pytest.approx(0.020),), "they take turns"


def test_a_stage_is_slowed_only_while_the_other_one_computes():
    # The second computes 6 ms of every period; in these the first one does 4 ms of its own work, the rest alone.
    assert simulate(two_stages(10, 4, 1.5, 1.5), 20).period_s == pytest.approx(0.012)
    assert two_stages(10, 4, 1.5, 1.5).period_s == pytest.approx(0.015)  # the planner's, which is the most it can be
    simulated = simulate(two_stages(8, 10, 1.5, 1.5), 40)
    assert simulated.period_s == pytest.approx(0.015)
    assert simulated.finishes_s[-1] - simulated.finishes_s[-2] == pytest.approx(0.010)  # alone at the end


def test_the_simulation_of_shared_machines_lies_between_all_alone_and_all_busy():
    checked = equal = 0
    for seed in range(50):
        case, objective = cases.shared_case(seed), OBJECTIVES[seed % len(OBJECTIVES)]
        planner = ExecutionPlanner(case.chains, inputs_in_flight=case.inputs_in_flight)
        options = {"in_order": case.in_order, "requests": case.requests}
        try:
            plan = planner.generate_plan(case.nodes, objective, case.links, **options)
        except Infeasible:
            continue
        if all(stage.busy_compute_s == stage.compute_s for stage in plan.stages):
            continue
        alone = [replace(stage, busy_compute_s=stage.compute_s) for stage in plan.stages]
        crowded = [replace(stage, compute_s=stage.busy_compute_s) for stage in plan.stages]
        free, busy = (replace(plan, stages=tuple(stages)) for stages in (alone, crowded))
        low, simulated, high = (simulate(variant, 12) for variant in (free, plan, busy))
        checked += 1
        assert simulate(plan, 1).first_finish_s == pytest.approx(plan.latency_s, abs=1e-10)
        for a, b, c in zip(low.finishes_s, simulated.finishes_s, high.finishes_s, strict=True):
            assert a - 1e-10 <= b <= c + 1e-10
        if simulated.period_s is not None:
            assert simulated.period_s <= plan.period_s + 1e-10
            equal += simulated.period_s == pytest.approx(plan.period_s, abs=1e-10)
    assert checked > 5 and equal > 1
