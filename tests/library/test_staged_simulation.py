"""Plans computed event by event against times worked out by hand, and predictions against what was run."""

import subprocess
import sys
from pathlib import Path

import pytest

from boundby.partition import Chain, ExecutionPlanner, Infeasible, Link, Unit, VirtualNode
from boundby.staged.comparison import compare, cut_times, regret_of
from boundby.staged.cuts import every_cut, plan_at
from boundby.staged.records import Measured, StageTimes, TransferTimes
from boundby.staged.simulation import simulate
from boundby.stats import summarize
from tests.partition_cases import random_case
from tests.staged_plans import plan_of

ROOT = Path(__file__).resolve().parents[2]
MS = 1e-3


def in_ms(*seconds):
    return [round(1e3 * each, 9) for each in seconds]


def test_one_stage_finishes_requests_one_after_the_other():
    found = simulate(plan_of(["a", "b"], seconds=[2 * MS, 1 * MS]), 3)
    assert in_ms(*found.finishes_s) == [3, 6, 9]
    assert in_ms(found.first_finish_s, found.period_s, found.last_finish_s) == [3, 3, 9]
    assert found.label == "simulated"


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
    for seed in range(50):
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


@pytest.mark.parametrize("module", ["simulation", "comparison", "records", "cuts", "settling"])
def test_arithmetic_of_stages_loads_no_torch(module):
    code = f"import sys, boundby.staged.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_given_cut_has_the_predictions_that_the_planner_makes_for_it():
    for seed in range(40):
        case = random_case(seed)
        if case.units < 2:
            continue
        nodes = [node for node in case.nodes if node.kind in case.chains][:2]
        if len(nodes) < 2:
            continue
        try:
            plan = ExecutionPlanner(case.chains).generate_plan(nodes, "throughput", case.links.default, in_order=True)
        except Infeasible:
            continue
        if len(plan.stages) == 2:
            given = plan_at([plan.stages[1].first_unit], plan, case.chains, nodes, case.links.default)
            assert given.stages == plan.stages and given.transfers == plan.transfers
            assert (given.latency_s, given.period_s, given.basis) == (plan.latency_s, plan.period_s, plan.basis)


@pytest.mark.parametrize("cuts", [[0], [2], [1, 1], []])
def test_cuts_that_do_not_split_the_units_are_refused(cuts):
    nodes = [VirtualNode(name, "cpu", ram_gb=1) for name in ("x", "y")]
    with pytest.raises(ValueError, match="do not split 2 units"):
        plan_at(cuts, plan_of("ab"), {"cpu": Chain((Unit("a", 1.0), Unit("b", 1.0)))}, nodes, Link(1.0))


def test_every_cut_in_two_is_named_by_the_unit_behind_it():
    chains = {"cpu": Chain(tuple(Unit(name, 1.0) for name in "abc"))}
    nodes = [VirtualNode(name, "cpu", ram_gb=1) for name in ("x", "y")]
    cuts = every_cut(plan_of("abc"), chains, nodes, Link(1.0))
    assert {name: [each.units for each in plan.stages] for name, plan in cuts.items()} == {
        "b": [("a",), ("b", "c")],
        "c": [("a", "b"), ("c",)],
    }


def measured(*seconds: float, transfer: float, period: float, finish: float, label: str = "measured") -> Measured:
    stages = tuple(
        StageTimes(f"node_{n}", "cpu", 1, (n,), (name,), 0, summarize([s]), summarize([2 * s]), "measured")
        for n, (name, s) in enumerate(zip("ab", seconds, strict=True))
    )
    carried = (TransferTimes("node_0", "node_1", 80, summarize([transfer]), label),)
    latency = summarize([sum(seconds) + transfer])
    return Measured(stages, carried, latency, 10, 0.0, finish, summarize([period]), label, ("noisy",))


def test_errors_are_signed_and_stand_beside_what_was_found():
    plan = plan_of(["a", "b"], 1, seconds=[2 * MS, 4 * MS], links=Link(float("inf"), 1 * MS))
    found = compare(plan, measured(4 * MS, 4 * MS, transfer=2 * MS, period=5 * MS, finish=43 * MS))
    assert [each.signed for each in found.stages] == [-0.5, 0.0]
    assert [each.signed for each in found.busy_stages] == [-0.75, -0.5]
    assert [each.signed for each in found.transfers] == [-0.5]
    assert found.transfer_sizes[0].signed == 0.25 and found.transfer_sizes[0].unit == "bytes"
    assert found.latency.signed == pytest.approx(-0.3)  # 7 ms of 10
    assert found.period.signed == pytest.approx(-0.2)
    assert found.last_finish.signed == pytest.approx(0.0)  # 7 + 9 * 4
    assert found.label == "measured" and found.doubts == ("noisy",)


def test_a_comparison_with_an_emulated_link_says_so():
    plan = plan_of(["a", "b"], 1, seconds=[2 * MS, 4 * MS])
    found = compare(plan, measured(2 * MS, 4 * MS, transfer=MS, period=MS, finish=MS, label="emulated"))
    assert found.label == "emulated"


def test_another_plan_than_was_run_is_not_compared():
    with pytest.raises(ValueError, match="not the plan that was run"):
        compare(plan_of(["a", "c"], 1), measured(MS, MS, transfer=MS, period=MS, finish=MS))


def test_regret_is_the_share_lost_against_the_best_cut():
    cuts = [cut_times(name, 1.0, rounds, []) for name, rounds in (("x", [11, 11]), ("y", [10, 10]))]
    found = regret_of(cuts[0], cuts)
    assert found.best.name == "y" and found.regret == pytest.approx(0.1)
    assert found.noise == 0.0 and not found.is_within_noise


def test_regret_within_the_spread_of_rounds_says_so():
    cuts = [cut_times(name, 1.0, rounds, []) for name, rounds in (("x", [10, 11, 12]), ("y", [8, 10, 13]))]
    found = regret_of(cuts[0], cuts)
    assert found.regret == pytest.approx(0.1)
    # 1.2533 * sqrt(1 / 3 + 19 / 3 / 3) / 10
    assert found.noise == pytest.approx(1.2533 * (1 / 3 + 19 / 9) ** 0.5 / 10, rel=1e-3)
    assert found.is_within_noise


def test_one_round_has_no_noise_to_hide_behind():
    cuts = [cut_times(name, 1.0, [value], []) for name, value in (("x", 11.0), ("y", 10.0))]
    found = regret_of(cuts[0], cuts)
    assert found.noise is None and not found.is_within_noise


def test_one_emulated_cut_makes_the_regret_emulated():
    runs = [measured(MS, MS, transfer=MS, period=MS, finish=MS, label=label) for label in ("measured", "emulated")]
    cuts = [cut_times(name, 1.0, [1.0], [run]) for name, run in zip("xy", runs, strict=True)]
    assert [each.label for each in cuts] == ["measured", "emulated"]
    assert [regret_of(each, cuts).label for each in cuts] == ["emulated"] * 2
    assert regret_of(cuts[0], cuts).doubts == ("noisy",)
