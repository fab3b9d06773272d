"""How much nodes of one machine slow one another down: their stages computed alone, and all at the same time.

What they share (memory bandwidth, caches, clock, the other thread of a core) depends on the work, so every node
computes its own stage of a plan. It does so again and again and waits for no other, alone and beside the others,
forwards and backwards in every round, so that a change of the machine meets both alike. In a pipeline the stages that
wait slow nobody down: what this measures is the most that each is slowed.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from torch import nn

from boundby.partition.plan import PartitionPlan
from boundby.staged.pipeline import Pipeline, Spans
from boundby.staged.places import Workers, share_cores
from boundby.staged.records import Contention
from boundby.staged.running import NS, SHARED_CORES, watch
from boundby.stats import median_estimate, summarize

ROUNDS = 9  # the interval is then from the second to the eighth, and one bad round moves nothing
COMPUTATIONS = 5  # of the longest stage in each part of a round, twice


def contention_of(
    model: nn.Module, plan: PartitionPlan, inputs: Any, *, rounds: int = ROUNDS, workers: Workers | None = None
) -> tuple[Contention, ...]:
    """Return the contention of every node of a plan that shares its machine. The arguments are those of `Pipeline`."""
    with Pipeline(model, plan, inputs, workers) as pipeline:
        return measured_contention(pipeline, rounds)


def measured_contention(pipeline: Pipeline, rounds: int = ROUNDS) -> tuple[Contention, ...]:
    """Return the contention of a pipeline at work. Raises ValueError where no two stages are on one machine."""
    groups = list(_groups(pipeline.plan))
    if not groups:
        raise ValueError("no two stages of this plan are on the same machine: give their nodes the same `machine`")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; measure 1 or more")
    spent = [_durations(each, 0, each.end[-1]) for each in pipeline.one_at_a_time(COMPUTATIONS)]
    seconds = COMPUTATIONS * max(map(median, spent))
    watching = watch(pipeline)
    found = [_Rounds(pipeline, group, rounds, seconds) for group in groups]
    disturbances = watching.stop().disturbances(sum(each.threads for each in pipeline.places))
    doubts = [f"disturbed: {each.text}" for each in disturbances]
    if share_cores(pipeline.places):
        doubts.append(SHARED_CORES)
    return tuple(each for group in found for each in group.contention(doubts))


class _Rounds:
    """The stages of one machine, run in rounds: seconds by stage and round, alone and together."""

    def __init__(self, pipeline: Pipeline, group: Sequence[int], rounds: int, seconds: float) -> None:
        self._pipeline, self._group = pipeline, group
        self._alone: dict[int, list[list[float]]] = {stage: [[] for _ in range(rounds)] for stage in group}
        self._together: dict[int, list[list[float]]] = {stage: [[] for _ in range(rounds)] for stage in group}
        parts = [*((stage,) for stage in group), tuple(group)]
        for turn in range(rounds):
            for part in (*parts, *parts[::-1]):
                self._run(part, seconds, turn)

    def contention(self, doubts: Sequence[str]) -> Iterator[Contention]:
        """Yield the contention of each stage."""
        for stage in self._group:
            yield self._contention(stage, doubts)

    def _run(self, part: Sequence[int], seconds: float, turn: int) -> None:
        spans = self._pipeline.occupy(part, seconds)
        begin = max(spans[stage].begin[0] for stage in part)  # from then on, and until the first one ends, all compute
        end = min(spans[stage].end[-1] for stage in part)
        into = self._together if len(part) > 1 else self._alone
        for stage in part:
            durations = _durations(spans[stage], begin, end)
            if not durations:
                node = self._pipeline.plan.stages[stage].node
                raise ValueError(f"{node} has finished no computation while all others of its machine computed too")
            into[stage][turn].extend(durations)

    def _contention(self, stage: int, doubts: Sequence[str]) -> Contention:
        plan, place = self._pipeline.plan, self._pipeline.places[stage]
        alone, together = self._alone[stage], self._together[stage]
        rounds = tuple(median(busy) / median(free) for free, busy in zip(alone, together, strict=True))
        return Contention(
            node=plan.stages[stage].node,
            machine=plan.stages[stage].machine or "",
            beside=tuple(plan.stages[other].node for other in self._group if other != stage),
            units=plan.stages[stage].units,
            device=place.device,
            threads=place.threads,
            cores=place.cores,
            alone=summarize([each for some in alone for each in some]),
            together=summarize([each for some in together for each in some]),
            rounds=rounds,
            slowdown=median_estimate(rounds),
            label="emulated" if share_cores(self._pipeline.places) else "measured",
            doubts=tuple(doubts),
        )


def _groups(plan: PartitionPlan) -> Iterator[tuple[int, ...]]:
    """Yield the places of the stages on every machine that has several."""
    for machine in dict.fromkeys(each.machine for each in plan.stages if each.machine is not None):
        group = tuple(place for place, each in enumerate(plan.stages) if each.machine == machine)
        if len(group) > 1:
            yield group


def _durations(spans: Spans, begin: int, end: int) -> list[float]:
    """Return the seconds of the computations within a window."""
    return [(b - a) * NS for a, b in zip(spans.begin, spans.end, strict=True) if a >= begin and b <= end]
