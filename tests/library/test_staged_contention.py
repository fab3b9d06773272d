"""Contention measured on a machine made up here, and plans that are made with it until they stay the same."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from boundby.partition import Chain, ExecutionPlanner, Link, PartitionPlan, Unit, VirtualNode
from boundby.staged import contention
from boundby.staged.contention import COMPUTATIONS, measured_contention
from boundby.staged.cuts import plan_at
from boundby.staged.pipeline import Spans
from boundby.staged.places import Place
from boundby.staged.records import Contention
from boundby.staged.settling import NOT_SETTLED, settle, with_contention
from boundby.stats import median_estimate, summarize

MS, NS_OF_MS = 1e-3, 10**6
FREE = Link(float("inf"), is_measured=True)
CHAIN = Chain(tuple(Unit(f"h.{n}", 10 * MS, layers=(f"h.{n}",)) for n in range(6)))


def nodes_on(*machines: str | None) -> list[VirtualNode]:
    return [
        VirtualNode(name, "cpu", ram_gb=1, machine=machine) for name, machine in zip("abcd", machines, strict=False)
    ]


def cut_for(nodes: Sequence[VirtualNode]) -> PartitionPlan:
    like = ExecutionPlanner(CHAIN, kind="cpu").generate_plan(nodes[:1], "throughput", FREE)
    return plan_at(range(1, len(nodes)), like, {"cpu": CHAIN}, nodes, FREE)


class Machine:
    """Stands for a pipeline: stages that take `alone` ms, and `slowed` times as long while others compute too."""

    pids = ()

    def __init__(self, plan: PartitionPlan, alone: Sequence[float], slowed: Sequence[float]) -> None:
        self.plan, self.alone, self.slowed = plan, alone, slowed
        self.places = [Place("cpu", 1, (n,)) for n in range(len(alone))]
        self.pace: Callable[[int], float] = lambda part: 1.0  # of the whole machine, by number of the part that is run
        self.late_ms = 0  # by which every stage begins after the one before
        self.parts: list[tuple[int, ...]] = []

    def one_at_a_time(self, requests: int) -> tuple[Spans, ...]:
        return tuple(self._spans(0, each, requests * each) for each in self.alone)

    def occupy(self, stages: Sequence[int], seconds: float) -> tuple[Spans, ...]:
        pace = self.pace(len(self.parts))
        self.parts.append(tuple(stages))
        found = []
        for stage, alone in enumerate(self.alone):
            each = pace * alone * (self.slowed[stage] if len(stages) > 1 else 1.0)
            is_at_work = stage in stages
            found.append(self._spans(stage * self.late_ms, each, 1e3 * seconds if is_at_work else 0))
        return tuple(found)

    def _spans(self, begin_ms: float, each_ms: float, whole_ms: float) -> Spans:
        """Return computations one after the other, the last of which is over after so long."""
        count = int(-(-whole_ms // each_ms))
        edges = [round((begin_ms + n * each_ms) * NS_OF_MS) for n in range(count + 1)]
        return Spans(tuple(edges[:-1]), tuple(edges[1:]), 0)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the watch of the machine, which sees nothing but what a test tells it."""
    seen = SimpleNamespace(disturbances=lambda threads: [], usable=range(4))
    monkeypatch.setattr(contention, "watch", lambda pipeline: SimpleNamespace(stop=lambda: seen))
    monkeypatch.setattr("boundby.staged.places.usable_cpus", lambda: set(seen.usable))
    return seen


def test_each_node_has_the_slow_down_that_its_neighbours_are_to_it() -> None:
    machine = Machine(cut_for(nodes_on("pod", "pod")), [20, 30], [1.25, 1.75])
    first, second = measured_contention(machine, rounds=9)
    assert (first.node, first.machine, first.beside, first.units) == ("a", "pod", ("b",), ("h.0",))
    assert (second.beside, second.units, second.label) == (("a",), tuple(f"h.{n}" for n in range(1, 6)), "measured")
    assert [each.factor for each in (first, second)] == [pytest.approx(1.25), pytest.approx(1.75)]
    assert (first.alone.median, first.together.median) == (pytest.approx(0.020), pytest.approx(0.025))
    assert len(first.rounds) == first.slowdown.rounds == 9 and first.slowdown.low == pytest.approx(1.25)
    assert second.doubts == ()


def test_alone_and_together_take_turns_forwards_and_backwards() -> None:
    machine = Machine(cut_for(nodes_on("pod", "pod")), [10, 10], [1.5, 1.5])
    measured_contention(machine, rounds=2)
    assert machine.parts == [(0,), (1,), (0, 1), (0, 1), (1,), (0,)] * 2


def test_only_what_was_computed_while_all_computed_counts_as_together() -> None:
    machine = Machine(cut_for(nodes_on("pod", "pod")), [10, 10], [2.0, 2.0])
    machine.late_ms = 15  # of the first stage 0 to 20 is before the second one is at work all the time
    first, _ = measured_contention(machine, rounds=1)
    whole = -(-COMPUTATIONS * 10 // 20)
    assert first.together.n == 2 * (whole - 1) and first.alone.n == 2 * COMPUTATIONS


def test_a_machine_that_becomes_slower_and_one_bad_round_move_no_slow_down() -> None:
    machine = Machine(cut_for(nodes_on("pod", "pod")), [10, 10], [1.5, 1.5])
    machine.pace = lambda part: 1.01**part * (4.0 if part in (8, 9) else 1.0)  # together in the second of nine rounds
    found = measured_contention(machine, rounds=9)
    assert [each.factor for each in found] == [pytest.approx(1.5, rel=1e-3)] * 2
    assert max(found[0].rounds) > 3 and found[0].slowdown.high < 1.6


def test_a_slow_down_below_1_is_noise() -> None:
    first, _ = measured_contention(Machine(cut_for(nodes_on("pod", "pod")), [10, 10], [0.9, 1.0]), rounds=1)
    assert first.slowdown.value == pytest.approx(0.9) and first.factor == 1.0


def test_nodes_are_measured_with_those_of_their_own_machine_alone() -> None:
    machine = Machine(cut_for(nodes_on("x", "y", "x", None)), [10, 10, 10, 10], [1.5] * 4)
    found = measured_contention(machine, rounds=1)
    assert [(each.node, each.beside) for each in found] == [("a", ("c",)), ("c", ("a",))]
    assert set(machine.parts) == {(0,), (2,), (0, 2)}


def test_a_plan_of_which_no_two_stages_share_a_machine_has_nothing_to_measure() -> None:
    for machines in ((None, None), ("x", "y")):
        with pytest.raises(ValueError, match="no two stages of this plan are on the same machine"):
            measured_contention(Machine(cut_for(nodes_on(*machines)), [10, 10], [1.5, 1.5]))
    with pytest.raises(ValueError, match="rounds is 0"):
        measured_contention(Machine(cut_for(nodes_on("x", "x")), [10, 10], [1.5, 1.5]), rounds=0)


def test_a_stage_that_finishes_nothing_beside_the_others_is_an_error() -> None:
    machine = Machine(cut_for(nodes_on("pod", "pod")), [10, 10], [1.0, 20.0])
    machine.late_ms = 1
    with pytest.raises(ValueError, match="b has finished no computation"):
        measured_contention(machine, rounds=1)


def test_shared_cores_and_disturbances_are_told(quiet: SimpleNamespace) -> None:
    quiet.usable = range(1)
    quiet.disturbances = lambda threads: [SimpleNamespace(text=f"{threads} threads were pushed aside")]
    first, _ = measured_contention(Machine(cut_for(nodes_on("pod", "pod")), [10, 10], [1.5, 1.5]), rounds=1)
    assert first.label == "emulated" and first.doubts[0] == "disturbed: 2 threads were pushed aside"
    assert "more threads than cores" in first.doubts[1]


# Planning with it.


def slowed(node: str, factor: float, label: str = "measured") -> Contention:
    times = summarize([1.0])
    return Contention(
        node, "pod", ("?",), (), "cpu", 1, (), times, times, (factor,), median_estimate([factor]), label, ()
    )


def plan_for(nodes: Sequence[VirtualNode]) -> PartitionPlan:
    return ExecutionPlanner(CHAIN, kind="cpu").generate_plan(nodes, "throughput", FREE, in_order=True)


def test_the_plan_is_made_again_until_the_contention_of_its_own_stages_changes_nothing() -> None:
    found = settle(plan_for, lambda plan: [slowed("a", 2.0), slowed("b", 1.0)], nodes_on("pod", "pod"))
    assert [len(turn.plan.stages[0].units) for turn in found.turns] == [3, 2]  # 3 + 3 units, then 2 that are slowed
    assert found.is_settled and [len(each.units) for each in found.plan.stages] == [2, 4]
    assert (found.plan.period_s, found.plan.period_basis) == (pytest.approx(0.040), "measured")
    assert [node.contention for node in found.nodes] == [2.0, 1.0] and found.plan.doubts == ()


def test_a_plan_that_goes_on_changing_says_so() -> None:
    def measure(plan: PartitionPlan) -> list[Contention]:
        is_even = len(plan.stages[0].units) == 3
        return [slowed("a", 2.0 if is_even else 1.0), slowed("b", 1.0)]

    found = settle(plan_for, measure, nodes_on("pod", "pod"), most_turns=3)
    assert not found.is_settled and len(found.turns) == 3 and NOT_SETTLED.format(3) in found.plan.doubts


def test_what_disturbed_the_contention_is_a_doubt_of_the_plan() -> None:
    noisy = replace(slowed("a", 1.5), doubts=("disturbed: by others",)), replace(slowed("b", 1.5), doubts=("noisy",))
    found = settle(plan_for, lambda plan: noisy, nodes_on("pod", "pod"))
    assert found.plan.doubts == ("disturbed: by others", "noisy")


def test_a_plan_on_one_node_or_on_machines_of_their_own_needs_no_contention() -> None:
    def measure(plan: PartitionPlan) -> list[Contention]:
        raise AssertionError("there is nothing to measure")

    for nodes in (nodes_on("pod"), nodes_on("x", "y"), nodes_on(None, None)):
        assert settle(plan_for, measure, nodes).turns == ()


def test_nodes_that_slow_one_another_down_too_much_end_in_a_plan_on_one() -> None:
    found = settle(plan_for, lambda plan: [slowed(each.node, 2.5) for each in plan.stages], nodes_on("pod", "pod"))
    assert found.is_settled and len(found.turns) == 1 and len(found.plan.stages) == 1


def test_emulated_contention_is_not_taken_for_measured() -> None:
    found = settle(
        plan_for, lambda plan: [slowed(each.node, 2.0, "emulated") for each in plan.stages], nodes_on("p", "p")
    )
    assert [node.contention for node in found.nodes] == [None, None] and found.plan.requests_per_s is None
    known = with_contention(nodes_on("pod", "pod"), [slowed("b", 1.5)])
    assert [node.contention for node in known] == [None, 1.5]
