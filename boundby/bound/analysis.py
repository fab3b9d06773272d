"""What any callable is bound by: it is timed, counted, replayed, split, its fixes are tried, and all of it is judged.

`bottleneck` takes these steps for every door: `boundby.explain`, step 02 and programs of one's own.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import torch
from msgspec import structs

from boundby.bound.bench import Bench
from boundby.bound.device_time import DeviceTimer
from boundby.bound.judgement import IDLE_DEVICE, NOTHING_ELSE, Evidence, Forward, Times, judge
from boundby.bound.prediction import Batches, predictions
from boundby.bound.replay import Lengths, Setting, replay
from boundby.bound.split import Replay, Split, split
from boundby.bound.trials import Candidate, fewer_threads, graph_replay, reduced_precision_matmul, try_out
from boundby.bound.verdict import Doubt, Fix, Gain, Reference, Verdict
from boundby.formatting import Missing, first_line
from boundby.machine import Ceilings, raise_if_lost
from boundby.timing import Clock, WarmUpRule, Work, estimate, warm_up
from boundby.work import Interval, Limits, OperatorLoad, count
from boundby.work import Work as CountedWork

ROUNDS = 7
ROUND_S = 0.05
LEAST_CALLS, MOST_CALLS = 3, 1000
COUNTS = 3


@dataclass(frozen=True)
class Machine:
    """The limits of this machine, and the dtype of what runs on it."""

    ceilings: Ceilings
    dtype: str

    @cached_property
    def limits(self) -> Limits | None:
        """The limits in this dtype; None where they were not measured."""
        return self.ceilings.limits(self.dtype)

    @property
    def doubts(self) -> list[Doubt]:
        """What disturbed the measurement of the limits."""
        return [Doubt("disturbed", text) for text in self.ceilings.doubts]

    @property
    def other_dtypes(self) -> tuple[str, ...]:
        """The other dtypes of weights and activations in which this machine was measured."""
        return tuple(dict.fromkeys(ceiling.dtype for ceiling in self.ceilings.compute if ceiling.dtype != self.dtype))

    @cached_property
    def faster_precision(self) -> tuple[str, float] | None:
        """Another setting of float32 products with the highest limit, and how many times that of the one in use."""
        configured = self.ceilings.configured("float32")
        if self.dtype != "float32" or configured is None:
            return None
        best = self.ceilings.best("float32")
        is_other = best.precision and best.precision != configured.precision
        return (best.precision, best.flops_per_s / configured.flops_per_s) if is_other and best.precision else None

    def forward(
        self, times: Times, work: Sequence[OperatorLoad] | Missing, weights_bytes: float, on_host: bool
    ) -> Forward | Doubt:
        """Return what was timed and counted beside the limits, or why it cannot be held against them."""
        if isinstance(work, Missing):
            return Doubt("work", work.reason)
        if self.limits is None or not work:
            return Doubt("ceilings", f"the limits of this machine in {self.dtype} were not measured")
        return Forward(times, tuple(work), self.limits, weights_bytes, on_host)

    def limits_under(self, fix: Fix) -> Limits | None:
        """Return the limits that hold under a fix: of its dtype, its precision of products, else those in use."""
        if fix.kind == "dtype":
            return self.ceilings.limits(str(fix.settings["dtype"]))
        if fix.kind != "matmul_precision" or self.limits is None:
            return self.limits
        named = [ceiling for ceiling in self.ceilings.compute if ceiling.precision == fix.settings["precision"]]
        rates = [Interval(ceiling.flops_per_s, ceiling.low, ceiling.flops_per_s) for ceiling in named]
        return structs.replace(self.limits, flops_per_s=rates[0]) if rates else None

    def other_precisions(self, forward: Forward) -> Iterator[Gain]:
        """Yield the most that other precisions of the same model could bring: no limit lets it be faster."""
        fixes = [Fix("dtype", {"dtype": name}) for name in self.other_dtypes]
        if self.faster_precision:
            fixes.append(Fix("matmul_precision", {"precision": self.faster_precision[0]}))
        seconds = forward.times.working_s.value
        for fix in fixes:
            limits, dtype = self.limits_under(fix), str(fix.settings.get("dtype", self.dtype))
            size = getattr(torch, dtype).itemsize / getattr(torch, self.dtype).itemsize
            smaller = [load.resized(size) for load in forward.operators]
            least_s = forward.attributed(smaller, limits, forward.weights_bytes * size).least_s if limits else None
            if least_s:
                yield Gain(fix, seconds / least_s, f"its limits need {100 * least_s / seconds:.0f} % of the time")


@dataclass(frozen=True)
class Call:
    """A callable, one forward that needs no gradients, and what its owner knows of it.

    `make_input` is what happens before each call (tokenizing); its time is held against that of `work`. `bring` copies
    the input to the device. `bare` is the callable without what makes the host wait for the device before it issues;
    the device's time is taken of it, and it is what is replayed. `shape`: the samples and the tokens of each.
    `lengths`: what is padding in it. `measured_s`: what the callable took in a sweep. `batch_sizes`: those to predict,
    with the tokens to which texts are padded there. `candidates`: fixes to try beside those of any callable. `known` is
    evidence from elsewhere: trials, gains, the share of padding, and doubts.
    """

    work: Work
    make_input: Work | None = None
    bring: Work | None = None
    bare: Work | None = None
    shape: tuple[int, int] | None = None
    lengths: Lengths | None = None
    measured_s: Interval | None = None
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    candidates: Sequence[Candidate] = ()
    known: Evidence = NOTHING_ELSE


def bottleneck(call: Call, machine: Machine, bench: Bench) -> Verdict:
    """Return the verdict on a call: what limits it, what was tried, and what else could help.

    It is timed, counted, replayed operator by operator, and run with what can be changed here. Raises ValueError where
    the FLOPs of an operator are not known.
    """
    work, bare = call.work, _runnable(call.bare) or call.work
    bench.watch.start()
    warm_up(work, bench.timer, WarmUpRule(least_s=ROUND_S, cap_s=20 * ROUND_S))
    device = DeviceTimer(bench.timer, bench.queue) if bench.queue else None
    times = _times(call, bare, bench, device)
    disturbances = bench.watch.stop().disturbances(bench.threads)
    doubts = [Doubt("disturbed", "; ".join(disturbance.text for disturbance in disturbances))] if disturbances else []
    doubts += [Doubt("disturbed", device.leftover)] if device and device.leftover else []
    counted = counted_quietly(work, bench.timer.clock if bench.on_host else None)
    forward = machine.forward(times, loads([counted]), counted.least_bytes, bench.on_host)
    own = [candidate.fix for candidate in call.candidates]
    candidates = [
        *call.candidates,
        *(candidate for candidate in of_any_callable(machine, bench, work, bare) if candidate.fix not in own),
    ]
    replayed = _replayed(call, bare, candidates, counted.least_bytes, bench)
    seconds = call.measured_s or times.isolated_s
    parts: Split | Missing | None = replayed if isinstance(replayed, Missing) else None
    gains = list(call.known.gains)
    if not isinstance(replayed, Missing):
        doubts += [Doubt("disturbed", text) for text in replayed.doubts]
        if machine.limits:
            parts = split(replayed, machine.limits, seconds.value)
            batches = Batches(call.lengths.real if call.lengths else None, call.batch_sizes, times.input_s)
            gains += predictions(replayed, parts, machine.limits_under, batches)
    gains += machine.other_precisions(forward) if isinstance(forward, Forward) else []
    gains = _without_doubles(gains)
    tried = try_out(work, candidates if machine.limits else (), bench)
    evidence = structs.replace(
        call.known,
        split=parts,
        reference=Reference(*call.shape, seconds) if call.shape else None,
        tried=call.known.tried.joined(tried).with_predictions(gains),
        gains=gains,
        doubts=[*call.known.doubts, *doubts, *machine.doubts],
    )
    return judge(forward, evidence)


def of_any_callable(machine: Machine, bench: Bench, work: Work, bare: Work) -> Iterator[Candidate]:
    """Yield the fixes that need nothing but the callable: threads and products on a CPU, a graph on a GPU.

    The graph is last: no trial comes after a capture that failed. It is of `bare`, as `Call` has it.
    """
    precision = machine.faster_precision
    fixes = [fewer_threads(work)] if bench.on_host else []
    fixes += [reduced_precision_matmul(work, *precision)] if precision else []
    fixes += [] if bench.on_host else [graph_replay(bare, IDLE_DEVICE)]
    yield from filter(None, fixes)


def _runnable(bare: Work | None) -> Work | None:
    """Return the call after a first one; None where there is none, or a model that does not take it."""
    if bare is None:
        return None
    try:
        bare()
    except Exception as error:  # of a model: it may raise anything, and can be timed with its own mask
        raise_if_lost(error)
        return None
    return bare


def _replayed(
    call: Call, bare: Work, candidates: Sequence[Candidate], weights_bytes: float, bench: Bench
) -> Replay | Missing:
    """Return the replay, or why the forward cannot be run as its operators, which loses nothing else."""
    if not bench.replay_s:
        return Missing("no seconds were given for replays")
    settings = [setting for candidate in candidates for setting in _settings(candidate)]
    try:
        return replay(bare, bench, weights_bytes=weights_bytes, lengths=call.lengths, settings=settings)
    except Exception as error:  # of a model, or of operators called out of their place: they may raise anything
        raise_if_lost(error)
        return Missing(f"its operators could not be run alone ({first_line(error)})")


def _settings(candidate: Candidate) -> Iterator[Setting]:
    """Yield the fix as one that operators can be replayed under, where it is one."""
    if candidate.fix.kind == "dtype":
        yield Setting(candidate.fix, dtype=getattr(torch, str(candidate.fix.settings["dtype"])))
    elif candidate.fix.kind in ("threads", "matmul_precision"):
        yield Setting(candidate.fix, entered=candidate.setting)


def _without_doubles(gains: Sequence[Gain]) -> list[Gain]:
    """Return one gain of each fix, the first."""
    first: dict[Fix, Gain] = {}
    for gain in gains:
        first.setdefault(gain.fix, gain)
    return list(first.values())


def loads(counted: Sequence[CountedWork]) -> list[OperatorLoad]:
    """Return what each operator does in one forward, as the mean over forwards that were counted."""
    total: dict[tuple[object, ...], OperatorLoad] = {}
    for load in itertools.chain.from_iterable(work.operators for work in counted):
        key = load.name, load.shapes
        total[key] = total[key] + load if key in total else load
    return [load.shared(len(counted)) for load in total.values()]


def counted_quietly(work: Work, clock: Clock | None) -> CountedWork:
    """Return the work of one call; with a clock the quickest of several counts, which was disturbed least."""
    if clock is None:
        return count(work)
    counts = [count(work, clock=clock) for _ in range(COUNTS)]
    return min(counts, key=lambda candidate: sum(operator.seconds or 0.0 for operator in candidate.operators))


def _times(call: Call, bare: Work, bench: Bench, device: DeviceTimer | None) -> Times:
    timer = bench.timer
    isolated_s = Interval.of(estimate(_rounds(timer.isolated, call.work)))
    input_s = median(_rounds(timer.isolated, call.make_input)) if call.make_input else None
    if device is None:
        return Times(isolated_s, input_s=input_s)
    enqueue_s = median(_rounds(timer.enqueue, call.work))
    seconds = [timing.seconds for timing in device.times(bare, enqueue_s, ROUNDS) if timing.seconds]
    return Times(
        isolated_s,
        device_s=Interval.of(estimate(seconds)) if seconds else None,
        enqueue_s=enqueue_s,
        input_s=input_s,
        transfer_s=median(_rounds(timer.isolated, call.bring)) if call.bring else None,
    )


def _rounds(timed: Callable[[Work], float], work: Work) -> list[float]:
    """Return the median of each of `ROUNDS` rounds of calls."""
    medians = []
    for _ in range(ROUNDS):
        seconds = [timed(work) for _ in range(LEAST_CALLS)]
        while sum(seconds) < ROUND_S and len(seconds) < MOST_CALLS:
            seconds.append(timed(work))
        medians.append(median(seconds))
    return medians
