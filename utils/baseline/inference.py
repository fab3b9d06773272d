"""Measure classifiers over batch sizes: what is measured, on which texts, how often. The instruments are boundby's."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec
import torch

from boundby.bound import DeviceTimer
from boundby.inference import Batch, forward
from boundby.machine import (
    Conditions,
    DeviceLostError,
    Disturbance,
    MemoryUse,
    NoSource,
    Sampler,
    Watch,
    busy_threads,
    device_queue,
    is_host,
    is_out_of_memory,
    made_current,
    naming_loss,
    raise_if_lost,
    release_memory,
    synchronizer,
)
from boundby.timing import (
    MINIMUM_EFFECT,
    Outcome,
    StopRule,
    Timer,
    WarmUp,
    WarmUpRule,
    half_width_for_same,
    sweep,
    warm_up,
)
from boundby.work import unread
from utils.baseline import columns
from utils.baseline.document import Row
from utils.baseline.metrics import MetricsCollector
from utils.baseline.rounds import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    ROUNDS_PER_S,
    Quantity,
    Timing,
    Visit,
    named,
    outcomes,
)
from utils.baseline.selection import Selection
from utils.command import started_at

# Ten runs fill 0.4 s. On two shared cores rounds of 1.6 s varied as much as those of 0.3 s, by 1.4 to 3 %: the mood of
# a machine lasts longer than either, so that many short rounds tell more than a few long ones in the same time.
VISIT_S_PER_RUN = 0.04
MOST_BATCHES = 256  # of a visit, so that a fast GPU does not spend its time on making them
REFERENCE_CALLS = 3  # of a visit at most: their median is one value for the interval
ENOUGH_S = 0.1  # of reference calls, and of calls to keep warm: the first call after 50 ms of others takes 2 % longer
PIPELINED_BLOCK_S = 0.25  # long beside the one wait for the device at its end
RESOLUTION, RESOLUTION_ON_HOST = 0.01, 0.03  # of a time, as a share: when windows of the warm-up agree
NOISY, NOISY_ON_HOST = 0.02, 0.05  # half of an interval, as a share; a wider one cannot tell the optimum
MOST_REPEATS = 3  # of disturbed visits, by batch size: a machine that stays busy must not double the sweep
FIRST_PAUSE_S, PAUSE_GROWTH = 0.05, 1.5


@dataclass(frozen=True)
class Guard:
    """Who watches the machine during a visit, and how to wait before a disturbed one is repeated."""

    watch: Watch
    pause: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class SweepSettings:
    """What is measured and how exactly.

    `num_runs` timed and `num_warmup_runs` untimed forwards are the least work per batch size; more rounds follow until
    half of the throughput's 95 % interval is `ci_half_width` of it, or `max_seconds` are spent; None aims at what two
    runs need to be found the same.
    """

    batch_sizes: Sequence[int] = ()
    num_runs: int = 10
    num_warmup_runs: int = 3
    ci_half_width: float | None = None
    max_seconds: float = 15.0

    def rule(self, device: torch.device) -> StopRule:
        """Return when a batch size needs no further visit on this device."""
        return StopRule(
            half_width=self.ci_half_width or half_width_for_same(MINIMUM_EFFECT["cpu" if is_host(device) else "cuda"]),
            max_seconds=self.max_seconds,
            least_rounds=min(LEAST_ROUNDS, self.num_runs),
            most_rounds=max(MOST_ROUNDS, int(ROUNDS_PER_S * self.max_seconds)),
        )

    def widest(self, device: torch.device) -> float:
        """Return half the widest interval of a throughput that is not noisy, as a share: what was asked for, if that.

        By itself a sweep aims at less than it needs, and a machine on which the budget does not suffice for that is no
        noisy one. A row that cannot be told to be within 5 % of the fastest is.
        """
        return self.ci_half_width or (NOISY_ON_HOST if is_host(device) else NOISY)


DEFAULTS = SweepSettings()


class InferenceProfiler:
    """Profiles one model: real texts, cold call apart, warm-up to convergence, rounds until the interval is narrow."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        *,
        timer: Timer | None = None,
        sampler: Sampler | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.timer = timer or Timer(synchronize=synchronizer(self.device))
        self.sampler = sampler or Sampler(NoSource("no sampler was given"))
        self.guard = guard
        self.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.session = f"{started_at()}-{os.getpid()}"

    def profile_multiple_batch_sizes(
        self,
        texts: Sequence[str],
        batch_sizes: Sequence[int],
        num_runs: int = 10,
        max_length: int = 512,
        *,
        settings: SweepSettings = DEFAULTS,
        finished: Sequence[Visit] = (),
        on_visit: Callable[[Visit], None] | None = None,
    ) -> list[Row]:
        """Return one row of metrics per batch size, smallest first; the columns are those of `utils.baseline.columns`.

        `settings` say how exactly. `finished` rounds are not made again; `on_visit` gets each new one. Running out of
        memory is a row, not an error. Raises DeviceLostError where the GPU does nothing more for this process, after
        `on_visit` has the round that failed.
        """
        settings = replace(settings, batch_sizes=batch_sizes, num_runs=num_runs)
        selection = Selection.of(texts, self.tokenizer, max_length, self.device)
        visits = take_turns([self], selection, settings, finished, on_visit)
        return columns.rows(visits, sorted(batch_sizes), settings.widest(self.device))


def take_turns(
    profilers: Sequence[InferenceProfiler],
    selection: Selection,
    settings: SweepSettings,
    finished: Sequence[Visit] = (),
    on_visit: Callable[[Visit], None] | None = None,
) -> list[Visit]:
    """Return the visits of one model in several dtypes, `finished` ones first: each round visits all that are open.

    A change of the machine's load then hits all dtypes alike. On a GPU all models stay in its memory until that runs
    out, and then only the one that is visited. Raises DeviceLostError as `profile_multiple_batch_sizes` does.
    """
    memory = _SharedMemory([owner.model for owner in profilers], selection.device)
    plans = {owner.dtype: _Plan(owner, selection, settings, memory) for owner in profilers}
    visits = list(finished)

    def at(point: int | tuple[int, str]) -> list[Visit]:
        return [visit for visit in visits if (visit.batch_size, visit.dtype) == point]

    def visit_once(point: tuple[int, str], number: int) -> Outcome:
        earlier = next(iter(at(point)), None)
        plan = plans[point[1]]
        made = plan.visit(point[0], number, earlier.batches if earlier else None)
        visits.append(made)
        if on_visit:
            on_visit(made)
        if plan.lost:
            raise plan.lost
        return outcomes([made])[0]

    points = [(batch_size, dtype) for batch_size in settings.batch_sizes for dtype in plans]
    done = [outcome for point in points for outcome in outcomes(at(point))]
    rule = settings.rule(selection.device)
    # What a round is worth changes with all that is known of the lengths, so that it is worked out again every time.
    sweep(points, visit_once, rule, finished=done, revised=lambda known: outcomes(at(known[0].point)))
    return visits


@dataclass(frozen=True)
class OnDevice:
    """Times of batches on a device, in which way its own were taken, and why there are none of these."""

    timings: list[Timing]
    by: str | None = None
    reason: str | None = None


@dataclass
class BatchTimer:
    """Times batches on one model: alone, queued one after another, and what host and device need for each."""

    model: Any
    device: torch.device
    timer: Timer
    on_gpu: DeviceTimer | None = None  # calibrated once, when it is first asked for

    def isolated(self, batches: Mapping[int, Batch], least_s: float = 0.0, least: int = 1) -> list[Timing]:
        """Return the time of each batch alone, in as many passes as come nearest to `least_s` and make `least` calls.

        Nothing is run to warm up a batch: in a loop over a dataset each comes after another, and once.
        """
        timings: list[Timing] = []
        passes = 1
        while len(timings) < passes * len(batches):
            for index, batch in batches.items():
                seconds = self.timer.isolated(_caller(self.model, batch))
                timings.append(_timing("isolated", index, seconds, [batch]))
            if len(timings) == len(batches):
                one_pass = sum(timing.seconds for timing in timings)
                passes = max(round(least_s / max(one_pass, 1e-9)), math.ceil(least / len(batches)))
        return timings

    def pipelined(self, batches: Sequence[Batch], isolated: Sequence[Timing]) -> list[Timing]:
        """Return one block of queued calls; nothing on a CPU, where a call that returns has finished."""
        if is_host(self.device):
            return []
        one_pass = len(batches) * sum(timing.seconds for timing in isolated) / len(isolated)
        queue = list(batches) * max(1, math.ceil(PIPELINED_BLOCK_S / one_pass))
        seconds = self.timer.pipelined(_caller(self.model, batch) for batch in queue)
        return [_timing("pipelined", 0, seconds, queue)]

    def on_device(self, batches: Mapping[int, Batch], most_s: float = math.inf) -> OnDevice:
        """Return the times to bring each batch to the device, to issue it and to compute it.

        The time to compute is that of a forward whose mask is ready: the model's own waits for the device to read it.
        After the first batch none is begun once `most_s` are over.
        """
        if is_host(self.device):
            return OnDevice(
                [], reason="a call on the CPU has computed when it returns: its time is the isolated latency"
            )
        if self.on_gpu is None:
            queue = device_queue(self.device)
            assert queue is not None  # every device but the host has one
            self.on_gpu = DeviceTimer(self.timer, queue)
        timings: list[Timing] = []
        ways: list[str] = []
        reason = None
        start = self.timer.clock()
        for index, batch in batches.items():
            if timings and self.timer.clock() - start >= most_s:
                break
            call, host = _caller(self.model, batch), batch.to(torch.device("cpu"))
            transfer_s = self.timer.isolated(partial(host.to, self.device))
            enqueue_s = self.timer.enqueue(call)
            timings += [_timing("transfer", index, transfer_s, [batch]), _timing("enqueue", index, enqueue_s, [batch])]
            [measured] = self.on_gpu.times(self._unread(batch) or call, enqueue_s, like=batch.is_padded)
            if measured.seconds is None or measured.by is None:
                reason = measured.reason
            else:
                timings.append(_timing("device", index, measured.seconds, [batch]))
                ways.append(measured.by)
        if reason:  # the mean over some of the batches would be compared with that over all
            return OnDevice([timing for timing in timings if timing.quantity != "device"], reason=reason)
        return OnDevice(timings, by=", ".join(dict.fromkeys(ways)))

    @property
    def disturbances(self) -> tuple[Disturbance, ...]:
        """What a capture of a graph left in the process."""
        leftover = self.on_gpu.leftover if self.on_gpu else None
        return (Disturbance("capture", leftover, is_passing=False),) if leftover else ()

    def _unread(self, batch: Batch) -> Callable[[], object] | None:
        """Return the forward with a ready mask, run once; None where none is needed or the model takes none."""
        if not batch.is_padded:
            return None
        ready = unread(self.model, {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask})
        if ready is None:
            return None
        try:
            self.model(**ready)
        except Exception as error:  # a model may raise anything, and is then timed with its own mask
            raise_if_lost(error)
            if is_out_of_memory(error):
                raise
            return None
        return lambda: self.model(**ready)


class _SharedMemory:
    """The memory of a device, and the models in it that take turns."""

    def __init__(self, models: Sequence[Any], device: torch.device) -> None:
        self._models, self._device = models, device
        self._is_scarce = False

    def admit(self, model: Any) -> None:
        """See to it that this model is on the device, and where memory is scarce no other."""
        if self._is_scarce:
            for other in self._models:
                if other is not model:
                    other.to("cpu")
            release_memory(self._device)
            model.to(self._device)

    def make_room(self, model: Any) -> bool:
        """Leave the device to this model alone; False where no other was there."""
        if self._is_scarce or len(self._models) == 1 or is_host(self._device):
            return False
        self._is_scarce = True
        self.admit(model)
        return True

    def without_others(self, use: MemoryUse, model: Any) -> MemoryUse:
        """Return what was used without the weights of the models that wait for their turn."""
        others = [other for other in self._models if other is not model and not self._is_scarce]
        waiting = sum(parameter.nbytes for other in others for parameter in other.parameters())
        where = "process_" if is_host(self._device) else "device_"
        held = {name: getattr(use, name) for name in MemoryUse.__struct_fields__ if name.startswith(where)}
        held.pop("device_total_bytes", None)
        return msgspec.structs.replace(
            use, **{name: value - waiting for name, value in held.items() if value is not None}
        )


class _Plan:
    """How one visit is made: which texts, how many batches, in which order."""

    def __init__(
        self, owner: InferenceProfiler, selection: Selection, settings: SweepSettings, memory: _SharedMemory
    ) -> None:
        self.owner, self.selection, self.settings, self.memory = owner, selection, settings, memory
        self._warmed: set[int] = set()
        self._visited: set[int] = set()
        self._shapes: set[object] = set()  # of batches that ran on a GPU
        self._repeats: dict[int, int] = {}
        self.lost: DeviceLostError | None = None  # in the last visit: none may follow
        self._timer = BatchTimer(owner.model, owner.device, owner.timer)

    def visit(self, batch_size: int, number: int, batches: int | None) -> Visit:
        """Return one visit. `batches` is how many earlier visits of this batch size timed; None in the first."""
        owner = self.owner
        try:
            with naming_loss(named(batch_size, owner.dtype)):
                return self._attempt(batch_size, number, batches)
        except DeviceLostError as lost:
            self.lost = lost
        return Visit(owner.dtype, batch_size, number, "failed", owner.session, message=self.lost.reason)

    def _attempt(self, batch_size: int, number: int, batches: int | None) -> Visit:
        """Return the visit, or one that failed. Raises DeviceLostError where no other could follow."""
        owner, start = self.owner, self.owner.timer.clock()
        self.memory.admit(owner.model)
        collector = MetricsCollector(owner.device, sampler=owner.sampler)
        try:
            with torch.inference_mode(), made_current(owner.device):
                made = self._undisturbed(batch_size, number, batches, collector)
            self._visited.add(batch_size)
            return replace(made, spent_s=owner.timer.clock() - start)
        except Exception as error:  # a model may raise anything; the other batch sizes are still worth measuring
            raise_if_lost(error)
            status: Literal["oom", "failed"] = "oom" if is_out_of_memory(error) else "failed"
            message = f"{type(error).__name__}: {error}".split("\n")[0]
        release_memory(owner.device)  # outside the except block: its traceback holds the tensors
        if status == "oom" and self.memory.make_room(owner.model):
            return self._attempt(batch_size, number, batches)
        return Visit(owner.dtype, batch_size, number, status, owner.session, message=message)

    def _undisturbed(self, batch_size: int, number: int, batches: int | None, collector: MetricsCollector) -> Visit:
        """Return a visit that nothing disturbed, or the last one where the repeats of this batch size are used up."""
        pause_s, repeats, first = FIRST_PAUSE_S, 0, None
        while True:
            made, disturbances = self._measure(batch_size, number, batches, collector)
            if first is None:
                first = made
            else:  # the cold call and the warm-up happened once, in the first attempt
                timings = (*first.of("cold"), *made.timings)
                made = replace(made, repeats=repeats, timings=timings, warm_up=first.warm_up)
            is_passing = any(disturbance.is_passing for disturbance in disturbances)
            if not is_passing or self._repeats.get(batch_size, 0) >= MOST_REPEATS:
                return made
            self._repeats[batch_size] = self._repeats.get(batch_size, 0) + 1
            repeats += 1
            assert self.owner.guard is not None  # without one nothing is found to be disturbed
            self.owner.guard.pause(pause_s)
            pause_s *= PAUSE_GROWTH

    def _measure(
        self, batch_size: int, number: int, batches: int | None, collector: MetricsCollector
    ) -> tuple[Visit, tuple[Disturbance, ...]]:
        owner, timer = self.owner, self.owner.timer
        release_memory(owner.device)  # else the allocator still holds what a larger batch size left, and counts it here
        arrivals = self.selection.arrivals(batch_size)
        reference = {arrivals.reference: self.selection.reference(batch_size)}
        [(typical_index, typical)] = reference.items()
        call = _caller(owner.model, typical)
        largest = self._batch(batch_size, arrivals.largest)
        timings: list[Timing] = []
        if batch_size not in self._warmed:
            timings.append(_timing("cold", typical_index, timer.isolated(call), [typical]))
        if not is_host(owner.device):
            self._run(largest)  # the allocator has nothing left: what it asks the GPU for from here on is in no time
        if batch_size in self._warmed:
            warm = self._keep_warm(call)
        else:  # in a resumed sweep too, lest the first call of the new process spend the time of the warm-up
            warm = self._warm_up(call)
            self._warmed.add(batch_size)
        count = batches or self._affordable(warm.seconds / warm.runs)
        chosen = {index: self._batch(batch_size, index) for index in arrivals.sample(count, number)}
        if not is_host(owner.device):
            self._run_new_shapes(list(chosen.values()))
        timings.append(self._tokenize_timing(list(chosen.values())))
        if owner.guard:
            owner.guard.watch.start()
        measurement = collector.start_measurement()
        if batch_size not in self._visited:  # once: the most memory, and the cost of the longest texts
            seconds = timer.isolated(_caller(owner.model, largest))
            timings.append(_timing("largest", arrivals.largest, seconds, [largest]))
        timings += [
            _timing("reference", typical_index, seconds, [typical]) for seconds in self._few(call, REFERENCE_CALLS)
        ]
        isolated = self._timer.isolated(chosen, self._visit_s, self._least_batches)
        timings += [*isolated, *self._timer.pipelined(list(chosen.values()), isolated)]
        some = list(chosen)[:: math.ceil(len(chosen) / self.settings.num_runs)]
        samples = sum(len(batch.rows) for batch in chosen.values())
        seen = collector.end_measurement(measurement, batch_size, samples)
        # After it: backlogs are no load of the model's, and a graph has memory of its own.
        on_device = self._timer.on_device({index: chosen[index] for index in some}, self._visit_s / 2)
        conditions = self._conditions(seen["readings"])
        disturbances = conditions.disturbances(busy_threads(self.owner.device)) if conditions else ()
        disturbances += self._timer.disturbances
        visit = Visit(
            dtype=owner.dtype,
            batch_size=batch_size,
            round=number,
            status="ok",
            session=owner.session,
            timings=(*timings, *on_device.timings),
            batches=len(chosen),
            warm_up=warm,
            memory=self.memory.without_others(seen["memory"], owner.model),
            readings=seen["readings"],
            reading_reasons=seen["reading_reasons"],
            window_s=seen["window_s"],
            conditions=conditions,
            disturbances=disturbances,
            device_by=on_device.by,
            device_reason=on_device.reason,
            truncated=self.selection.tokens.truncated,
            whole=arrivals.totals,
        )
        return visit, disturbances

    def _run_new_shapes(self, batches: Sequence[Batch]) -> None:
        """Run every batch once whose shape is new to this GPU, before anything is timed.

        It loads kernels, and cuDNN plans its attention, when a shape first asks for them, which takes up to 40 ms:
        once in a dataset, but often in a few batches.
        """
        for batch in batches:
            if (batch.shape, batch.is_padded) not in self._shapes:
                self._run(batch)

    def _run(self, batch: Batch) -> None:
        self.owner.timer.isolated(_caller(self.owner.model, batch))
        self._shapes.add((batch.shape, batch.is_padded))

    def _conditions(self, readings: dict[str, list[float]]) -> Conditions | None:
        """Return what the host's counters and the readings of the GPU say of the window, or None without a guard."""
        if self.owner.guard is None:
            return None
        now = self.owner.sampler.now()  # a window may be shorter than the sampler's interval
        seen = self.owner.guard.watch.stop().with_gpu(readings)
        return seen.with_gpu({name: [value] for name, value in now.items()})

    def _warm_up(self, call: Callable[[], object]) -> WarmUp:
        rule = WarmUpRule(
            least_runs=self.settings.num_warmup_runs,
            least_s=self._visit_s,
            tolerance=resolution(self.owner.device),
            cap_s=max(self.settings.max_seconds / 2, VISIT_S_PER_RUN),
        )
        return warm_up(call, self.owner.timer, rule)

    def _keep_warm(self, call: Callable[[], object]) -> WarmUp:
        """Call a few times, where another batch size had the caches since this one was warm."""
        seconds = self._few(call, self.settings.num_warmup_runs)
        return WarmUp(len(seconds), sum(seconds), converged=True)

    def _few(self, call: Callable[[], object], most: int) -> list[float]:
        """Return the seconds of so many calls, fewer where they take long."""
        seconds: list[float] = []
        while len(seconds) < most and sum(seconds) < ENOUGH_S:
            seconds.append(self.owner.timer.isolated(call))
        return seconds

    @property
    def _visit_s(self) -> float:
        """How long the timed batches of a visit should take together."""
        return VISIT_S_PER_RUN * self.settings.num_runs

    @property
    def _least_batches(self) -> int:
        """How many batches a visit times whatever they take."""
        runs = self.settings.num_runs
        return math.ceil(runs / min(LEAST_ROUNDS, runs))

    def _affordable(self, seconds_per_batch: float) -> int:
        """Return how many batches a visit times: what fills its time, or what five visits can pay.

        It is `num_runs` times or by a power of two, so that two sweeps of the same work, which never find quite the
        same speed, mostly time the same batches.
        """
        seconds, runs = max(seconds_per_batch, 1e-9), self.settings.num_runs
        wanted = min(MOST_BATCHES, self._visit_s / seconds, self.settings.max_seconds / LEAST_ROUNDS / seconds)
        return max(self._least_batches, math.ceil(runs * 2.0 ** round(math.log2(max(wanted, 1) / runs))))

    def _batch(self, batch_size: int, index: int) -> Batch:
        return self.selection.batch(self.selection.arrivals(batch_size).rows(index))

    def _tokenize_timing(self, batches: list[Batch]) -> Timing:
        """Time the tokenizer on the same texts, batch by batch, as a server would call it."""
        owner = self.owner
        start = owner.timer.clock()
        for batch in batches:
            self.selection.tokenize(batch)
        return _timing("tokenize", 0, owner.timer.clock() - start, batches)


def resolution(device: torch.device) -> float:
    """Return how exactly times can be known on a device, as a share of them: a host is shared with everything else."""
    return RESOLUTION_ON_HOST if is_host(device) else RESOLUTION


def _caller(model: Any, batch: Batch) -> Callable[[], object]:
    return lambda: forward(model, batch)


def _timing(quantity: Quantity, index: int, seconds: float, batches: Sequence[Batch]) -> Timing:
    return Timing(
        quantity=quantity,
        index=index,
        seconds=seconds,
        samples=sum(len(batch.rows) for batch in batches),
        tokens_real=sum(batch.tokens_real for batch in batches),
        tokens_padded=sum(batch.tokens_padded for batch in batches),
    )
