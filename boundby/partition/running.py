"""Run a plan: a process for every stage, on `torch.distributed.pipelining`, and what stages and transfers took.

`torchrun` starts as many processes as the plan has stages; process n computes stage n. They talk over Gloo between CPUs
and NCCL between GPUs, through the hosts where a plan has both. A process alone runs a plan of one stage.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils._pytree import tree_map_only

from boundby.machine import HostCounters, Watch, host_id, is_host, pick_device, synchronizer, usable_cpus
from boundby.partition.nodes import Link
from boundby.partition.plan import Measured, PartitionPlan, StageTimes, TransferTimes
from boundby.partition.stages import CutError, cut_stage, first_tensor, named
from boundby.timing import Summary, summarize

Span = tuple[int, int]  # nanoseconds: begin and end
Message = TypeVar("Message")

NS = 1e-9
REQUESTS, SINGLES, WARMUP = 40, 20, 5
SMALL, LARGE = 4 * 1024, 4 * 1024 * 1024  # bytes: what a link's latency is read from, and what its rate is
TOLERANCE = 1e-5  # of the largest number of an output, or of 1 where that is less
PINGS = 20
ONE_MACHINE = (
    "the stages are processes of one machine: they share its memory, and whatever else runs there disturbs them all"
)
SHARED_CORES = "there are more threads than cores: stages wait for one another, so no time is that of a node alone"
CLOCKS = "clocks of the machines are synchronized to {:.0f} us: transfers and latency are no more precise"
LEAKED = (
    "the stages and the whole model give different outputs: more than the hidden state crosses a cut. Cut between "
    "blocks of the model, or plan for fewer nodes"
)
RECEIVES = "a stage receives between two computations: the period includes transfers that the plan takes for hidden"


@dataclass(frozen=True)
class StagedRun:
    """What a plan took, the same in every process, and the outputs of one request, which the last stage alone has."""

    measured: Measured
    outputs: Tensor | None


def run(
    model: nn.Module,
    plan: PartitionPlan,
    inputs: Any,
    *,
    requests: int = REQUESTS,
    singles: int = SINGLES,
    warmup: int = WARMUP,
    now: Callable[[], int] = time.perf_counter_ns,
) -> StagedRun:
    """Compute the stage of this process; return the times of all, of `singles` requests one by one, then many at once.

    `inputs` are of one request, as in `cut_stage`, whose CutError passes through; every process needs the same model
    and inputs. Raises ValueError for another number of processes than stages, and for a device that is not here.
    """
    if min(requests, singles, warmup) < 1:
        raise ValueError(f"{requests} requests, {singles} one by one, {warmup} to warm up: there must be 1 of each")
    with _world(len(plan.stages)) as rank, _cores_of_its_own() as (cores, own_cores):
        device = _device(plan, rank)
        wire = pick_device("cpu") if any(_shared(is_host(device))) else device  # hosts hand on what some GPU cannot
        stage = cut_stage(model, plan, rank, inputs, device)
        timed = _Timed(stage.module, device, wire, now)
        line = _Line(timed, len(plan.stages), stage.entering, stage.leaving, wire)
        given = tree_map_only(Tensor, lambda value: value.to(device), named(inputs))
        difference, tolerance = _checked(line.at_once(given, warmup), stage.whole)
        watch = Watch(HostCounters(cpus=cores, usage=_usage_of_all)).start()
        timed.take()
        line.one_at_a_time(given, singles)
        alone = timed.take()
        outputs = line.at_once(given, requests)
        busy = timed.take()
        threads = torch.get_num_threads()
        disturbances = watch.stop().disturbances(threads * _on_this_host())
        own = _Process(
            device=str(device),
            host=host_id(),
            threads=threads,
            cores=tuple(own_cores),
            is_crowded=threads * _on_this_host() > len(cores),
            disturbances=tuple(disturbance.text for disturbance in disturbances),
            weight_bytes=stage.weight_bytes,
            sent_bytes=stage.leaving.nbytes,
            clock=_clock(now),
            alone=alone,
            busy=busy,
            small=_handed_on(SMALL, singles, wire, now),
            large=_handed_on(LARGE, singles, wire, now),
        )
        measured = _measured(plan, _shared(own), requests, difference, tolerance)
        return StagedRun(measured, None if outputs is None else outputs[-len(stage.whole) :])


class _Process(msgspec.Struct, frozen=True):
    """What one process says of its stage to the others; spans are in nanoseconds of its clock."""

    device: str
    host: str
    threads: int
    cores: tuple[int, ...]  # that it was bound to; empty where it was not
    is_crowded: bool
    disturbances: tuple[str, ...]
    weight_bytes: int
    sent_bytes: int
    clock: tuple[float, float]  # how far it is ahead of the first one's, and how well that is known
    alone: list[Span]  # computations with one request in the pipeline
    busy: list[Span]  # with many
    small: list[Span]  # handing on a small message, and a large one
    large: list[Span]


class _Timed(nn.Module):
    """A stage between the wire and its device, with begin and end of each computation."""

    def __init__(self, stage: nn.Module, device: torch.device, wire: torch.device, now: Callable[[], int]) -> None:
        super().__init__()
        self._stage, self._device, self._wire, self._now = stage, device, wire, now
        self._synchronize = synchronizer(device)
        self._spans: list[Span] = []

    def forward(self, *received: Tensor, **inputs: Any) -> Tensor:
        received = tuple(tensor.to(self._device) for tensor in received)
        self._synchronize()
        begin = self._now()
        output = self._stage(*received, **inputs)
        self._synchronize()
        self._spans.append((begin, self._now()))
        return first_tensor(output).to(self._wire)

    def take(self) -> list[Span]:
        """Return the computations since the last time."""
        spans, self._spans = self._spans, []
        return spans


class _Copy(nn.Module):
    """Gives a tensor of its own, as a layer does."""

    def forward(self, *received: Tensor, **inputs: Tensor) -> Tensor:
        return first_tensor((received, inputs)).clone()


class _Line:
    """All stages in a row, seen from this process."""

    def __init__(
        self, stage: nn.Module, stages: int, entering: Tensor | None, leaving: Tensor, wire: torch.device
    ) -> None:
        self._stage = PipelineStage(
            stage,
            distributed.get_rank(),
            stages,
            wire,
            input_args=() if entering is None else (entering,),
            output_args=(leaving,),
        )
        self._schedules: dict[int, ScheduleGPipe] = {}

    def at_once(self, inputs: dict[str, Any], requests: int) -> Tensor | None:
        """Run requests that are all there at the beginning; return the outputs where this is the last stage."""
        if requests not in self._schedules:
            self._schedules[requests] = ScheduleGPipe(self._stage, requests)
        all_inputs = tree_map_only(Tensor, lambda tensor: torch.cat([tensor] * requests), inputs)
        distributed.barrier()
        outputs: Tensor | None = self._schedules[requests].step(**all_inputs)  # without a loss: forward alone
        return outputs

    def one_at_a_time(self, inputs: dict[str, Any], requests: int) -> None:
        """Run requests, each when the one before is finished."""
        for _ in range(requests):
            self.at_once(inputs, 1)


@contextlib.contextmanager
def _world(stages: int) -> Iterator[int]:
    """Join the processes of the run; yield the number of this one."""
    is_mine = not distributed.is_initialized()
    if is_mine and "RANK" in os.environ:
        distributed.init_process_group()
    elif is_mine:
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        if distributed.get_world_size() != stages:
            raise ValueError(
                f"the plan has {stages} stages, and {distributed.get_world_size()} processes were started; start one "
                f"for each: torchrun --nproc-per-node {stages}"
            )
        yield distributed.get_rank()
    finally:
        if is_mine:
            distributed.destroy_process_group()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def _on_this_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@contextlib.contextmanager
def _cores_of_its_own() -> Iterator[tuple[list[int], list[int]]]:
    """Bind this process to as many cores as it has threads, where all of the host have room; yield all and its own."""
    cores, threads, first = sorted(usable_cpus()), torch.get_num_threads(), torch.get_num_threads() * _local_rank()
    if _on_this_host() == 1 or _on_this_host() * threads > len(cores) or not hasattr(os, "sched_setaffinity"):
        yield cores, []
        return
    os.sched_setaffinity(0, cores[first : first + threads])
    try:
        yield cores, cores[first : first + threads]
    finally:
        os.sched_setaffinity(0, cores)


def _device(plan: PartitionPlan, rank: int) -> torch.device:
    """Return where this stage computes: the GPUs of a host are given out in the order of the stages."""
    stage, first = plan.stages[rank], rank - _local_rank()
    if not stage.on_gpu:
        return pick_device("cpu")
    try:
        return pick_device(f"cuda:{sum(stage.on_gpu for stage in plan.stages[first:rank])}")
    except ValueError as error:
        raise ValueError(f"{stage.node} cannot be run here: {error}. Compute the plan without it (simulate)") from error


def _shared(value: Message) -> list[Message]:
    """Return the value of every process. They are sent as JSON: nothing that is received can run code."""
    text = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size())]
    distributed.all_gather(sizes, torch.tensor([len(text)]))
    longest = int(max(sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    distributed.all_gather(texts, nn.functional.pad(text, (0, longest - len(text))))
    contents = [bytes(text[: int(size)].tolist()) for text, size in zip(texts, sizes, strict=True)]
    return [msgspec.json.decode(content, type=type(value)) for content in contents]


def _usage_of_all() -> tuple[float, int]:
    """Return the CPU seconds of all processes of the run on this host, and how often they were switched out."""
    usages = [usage for host, usage in _shared((host_id(), HostCounters().usage())) if host == host_id()]
    return sum(seconds for seconds, _ in usages), sum(switches for _, switches in usages)


def _clock(now: Callable[[], int]) -> tuple[float, float]:
    """Return how far this process's clock is ahead of the first one's, and how well that is known, in ns.

    The quickest of several round trips says it.
    """
    clock = 0.0, 0.0  # all processes of a host have one
    if len(set(_shared(host_id()))) == 1:
        return clock
    rank, theirs = distributed.get_rank(), torch.zeros(1, dtype=torch.int64)
    for other in range(1, distributed.get_world_size()):
        for turn in range(PINGS if rank in (0, other) else 0):
            begin = now()
            if rank == 0:
                distributed.recv(theirs, other)
                distributed.send(torch.tensor([now()]), other)
                continue
            distributed.send(theirs, 0)
            distributed.recv(theirs, 0)
            end = now()
            if turn == 0 or end - begin < 2 * clock[1]:
                clock = (begin + end) / 2 - int(theirs), (end - begin) / 2
    return clock


def _handed_on(size_bytes: int, runs: int, wire: torch.device, now: Callable[[], int]) -> list[Span]:
    """Return the spans of this stage when all stages only pass on a message of this size."""
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=wire)
    timed = _Timed(_Copy(), wire, wire, now)
    entering = message.to("meta") if distributed.get_rank() else None
    line = _Line(timed, distributed.get_world_size(), entering, message.to("meta"), wire)
    line.one_at_a_time({"0": message}, 1)
    timed.take()
    line.one_at_a_time({"0": message}, runs)
    return timed.take()


def _checked(outputs: Tensor | None, whole: Tensor) -> tuple[float, float]:
    """Return the largest difference to what the whole model gave, and the largest one that rounding explains.

    Raises CutError in every process where it is larger.
    """
    difference, tolerance = 0.0, 0.0
    if outputs is not None:
        wanted = whole.cpu().double()
        relative = max(TOLERANCE, 4 * torch.finfo(whole.dtype).eps if whole.dtype.is_floating_point else 0.0)
        tolerance = relative * max(1.0, float(wanted.abs().max()))
        difference = float((outputs.cpu().double().reshape(-1, *whole.shape) - wanted).abs().max())
    text, tolerance = _shared((str(difference), tolerance))[-1]  # NaN is no JSON
    if not float(text) <= tolerance:
        raise CutError(f"{LEAKED} (the difference is {text}, {tolerance:.1e} is allowed)")
    return float(text), tolerance


def _measured(
    plan: PartitionPlan, processes: Sequence[_Process], requests: int, difference: float, tolerance: float
) -> Measured:
    first, last = processes[0], processes[-1]
    finishes = [(end - first.busy[0][0] - last.clock[0]) * NS for _, end in last.busy]
    steady = finishes[len(processes) - 1 :]  # before, not every stage is at work
    gaps = [after - before for before, after in itertools.pairwise(steady)]
    stages = tuple(
        StageTimes(
            node=stage.node,
            device=own.device,
            machine=own.host,
            threads=own.threads,
            cores=own.cores,
            units=stage.units,
            weight_bytes=own.weight_bytes,
            compute=_lengths(own.alone),
            busy_compute=_lengths(own.busy),
        )
        for stage, own in zip(plan.stages, processes, strict=True)
    )
    apart = last.clock[0] - first.clock[0]
    return Measured(
        stages=stages,
        transfers=tuple(_transfers(plan, processes)),
        latency=summarize(
            [(end - begin - apart) * NS for (begin, _), (_, end) in zip(first.alone, last.alone, strict=True)]
        ),
        requests=requests,
        last_finish_s=finishes[-1],
        period=summarize(gaps) if gaps else None,
        difference=difference,
        tolerance=tolerance,
        doubts=tuple(dict.fromkeys(_run_doubts(plan, processes))),
    )


def _transfers(plan: PartitionPlan, processes: Sequence[_Process]) -> Iterator[TransferTimes]:
    for transfer, (before, after) in zip(plan.transfers, itertools.pairwise(processes), strict=True):
        apart = after.clock[0] - before.clock[0]
        small, large = (
            median(_between(*spans, apart)) for spans in ((before.small, after.small), (before.large, after.large))
        )
        rate = (LARGE - SMALL) / max(large - small, 1e-9)
        yield TransferTimes(
            source=transfer.source,
            target=transfer.target,
            size_bytes=before.sent_bytes,
            seconds=summarize(_between(before.alone, after.alone, apart)),
            link=Link(rate, max(0.0, small - SMALL / rate), is_measured=True),
        )


def _lengths(spans: Sequence[Span]) -> Summary:
    return summarize([(end - begin) * NS for begin, end in spans])


def _between(before: Sequence[Span], after: Sequence[Span], apart: float) -> list[float]:
    """Return the seconds from the end of each computation to the beginning of the next stage's, by one clock."""
    return [(begin - end - apart) * NS for (_, end), (begin, _) in zip(before, after, strict=True)]


def _run_doubts(plan: PartitionPlan, processes: Sequence[_Process]) -> Iterator[str]:
    hosts = {process.host for process in processes}
    if len(processes) > len(hosts):
        yield ONE_MACHINE
    if any(process.is_crowded for process in processes):
        yield SHARED_CORES
    if len(hosts) > 1:
        yield CLOCKS.format(max(process.clock[1] for process in processes) / 1e3)
    if len(processes) > 1:
        yield RECEIVES
    for process in processes:
        yield from (f"disturbed: {text}" for text in process.disturbances)
