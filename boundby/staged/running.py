"""Run a plan on this machine: its outputs, and what its stages, transfers and requests took."""

from collections.abc import Sequence
from typing import Any

import psutil
from torch import nn

from boundby.disturbance import HostCounters, Watch
from boundby.partition.plan import PartitionPlan
from boundby.staged.pipeline import Pipeline, Spans
from boundby.staged.places import Workers, share_cores
from boundby.staged.records import Label, Measured, StagedRun, StageTimes, TransferTimes
from boundby.stats import Summary, summarize

NS = 1e-9
REQUESTS, SINGLES, WARMUP = 40, 20, 5
ONE_MACHINE = "the nodes are processes of one machine: they share its memory, and what else runs on it disturbs all"
SHARED_CORES = "there are more threads than cores: stages wait for one another, and no time of them is a node's own"
BESIDE = "the plan has no overlap, but a worker receives while it computes"
MADE_UP_LINKS = "links were emulated by sleep"


def run(
    model: nn.Module,
    plan: PartitionPlan,
    inputs: Any,
    *,
    requests: int = REQUESTS,
    singles: int = SINGLES,
    workers: Workers | None = None,
) -> StagedRun:
    """Return the outputs of a plan for `inputs`, and its times: `singles` requests one by one, then many at once.

    The other arguments are those of `Pipeline`, whose errors pass through. Make no profile meanwhile: each would
    disturb the other.
    """
    with Pipeline(model, plan, inputs, workers) as pipeline:
        return StagedRun(pipeline.infer(inputs), measured(pipeline, requests, singles))


def measured(pipeline: Pipeline, requests: int = REQUESTS, singles: int = SINGLES, warmup: int = WARMUP) -> Measured:
    """Return the times of a pipeline at work. Raises ValueError for less than one request."""
    if min(requests, singles) < 1:
        raise ValueError(f"{requests} requests at once and {singles} one by one: there must be 1 or more of both")
    pipeline.at_once(max(1, warmup))
    watching = watch(pipeline)
    alone, busy = pipeline.one_at_a_time(singles), pipeline.at_once(requests)
    disturbances = watching.stop().disturbances(sum(each.threads for each in pipeline.places))
    finishes = [(end - busy[0].begin[0]) * NS for end in busy[-1].end]
    steady = finishes[len(busy) - 1 :]  # before, not every stage is at work
    gaps = [after - before for before, after in zip(steady, steady[1:], strict=False)]
    stages = tuple(_stages(pipeline, alone, busy))
    transfers = tuple(_transfers(pipeline, alone))
    labels = {each.label for each in (*stages, *transfers)}
    return Measured(
        stages=stages,
        transfers=transfers,
        latency=_summary(alone[0].begin, alone[-1].end),
        requests=requests,
        first_finish_s=finishes[0],
        last_finish_s=finishes[-1],
        period=summarize(gaps) if gaps else None,
        label="emulated" if "emulated" in labels else "measured",
        doubts=(*_doubts(pipeline), *(f"disturbed: {each.text}" for each in disturbances)),
    )


def watch(pipeline: Pipeline) -> Watch:
    """Return a watch, started, for what but this process and its workers uses the machine."""
    return Watch(HostCounters(usage=lambda: _usage(pipeline.pids))).start()


def _stages(pipeline: Pipeline, alone: Sequence[Spans], busy: Sequence[Spans]) -> list[StageTimes]:
    label: Label = "emulated" if share_cores(pipeline.places) else "measured"
    return [
        StageTimes(
            node=stage.node,
            device=pipeline.places[index].device,
            threads=pipeline.places[index].threads,
            cores=pipeline.places[index].cores,
            units=stage.units,
            weight_bytes=pipeline.weight_bytes[index],
            compute=_summary(alone[index].begin, alone[index].end),
            busy_compute=_summary(busy[index].begin, busy[index].end),
            label=label,
        )
        for index, stage in enumerate(pipeline.plan.stages)
    ]


def _transfers(pipeline: Pipeline, alone: Sequence[Spans]) -> list[TransferTimes]:
    return [
        TransferTimes(
            source=pipeline.plan.stages[index].node,
            target=pipeline.plan.stages[index + 1].node,
            size_bytes=before.sent_bytes,
            seconds=_summary(before.end, after.begin),
            label="measured" if pipeline.places[index + 1].link is None else "emulated",
        )
        for index, (before, after) in enumerate(zip(alone, alone[1:], strict=False))
    ]


def _doubts(pipeline: Pipeline) -> list[str]:
    doubts = [ONE_MACHINE] if len(pipeline.places) > 1 else []
    if share_cores(pipeline.places):
        doubts.append(SHARED_CORES)
    if len(pipeline.places) > 1 and not pipeline.plan.overlap:
        doubts.append(BESIDE)
    if any(each.link for each in pipeline.places):
        doubts.append(MADE_UP_LINKS)
    return doubts


def _usage(workers: Sequence[int]) -> tuple[float, int]:
    """Return the CPU seconds of this process and its workers, and how often they were switched out unwillingly."""
    processes = [psutil.Process(), *map(psutil.Process, workers)]
    times = [each.cpu_times() for each in processes]
    switches = sum(each.num_ctx_switches().involuntary for each in processes)
    return sum(each.user + each.system for each in times), switches


def _summary(begin: Sequence[int], end: Sequence[int]) -> Summary:
    return summarize([(b - a) * NS for a, b in zip(begin, end, strict=True)])
