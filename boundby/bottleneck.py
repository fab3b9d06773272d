"""What any callable is bound by: its times, its work and this machine's ceilings, brought together into a verdict."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import torch
from msgspec import structs

from boundby.ceilings import Ceilings
from boundby.device import raise_if_lost
from boundby.device_time import DeviceTimer
from boundby.disturbance import HostCounters, Watch
from boundby.formatting import first_line
from boundby.judgement import IDLE_DEVICE, Times, judge
from boundby.known import Missing, known
from boundby.prediction import predictions
from boundby.replay import BUDGET_S, Lengths, Setting, replay
from boundby.roofline import Attribution, Interval, Limits, OperatorLoad, attribute
from boundby.sampler import Source
from boundby.split import Replay, Split, split
from boundby.stats import estimate
from boundby.timer import Clock, DeviceQueue, Timer, WarmUpRule, Work, warm_up
from boundby.trials import Candidate, Tried, coarser_products, fewer_threads, graph_replay, try_out
from boundby.verdict import Doubt, Fix, Gain, Reference, Verdict
from boundby.work import Work as CountedWork
from boundby.work import count

ROUNDS = 7
ROUND_S = 0.05
LEAST_CALLS, MOST_CALLS = 3, 1000
COUNTS = 3
TRIALS_S = 10.0
NOTHING_TRIED = Tried()


@dataclass(frozen=True)
class Forward:
    """One forward as it was measured and counted, and the machine it ran on.

    `weights_bytes` is what a forward cannot help reading; `on_host`: to issue an operator takes time from computing.
    """

    times: Times
    work: Sequence[OperatorLoad] | Missing
    ceilings: Ceilings
    dtype: str
    weights_bytes: float
    on_host: bool

    @cached_property
    def limits(self) -> Limits | None:
        """The limits in the dtype of the forward; None where they were not measured."""
        return self.ceilings.limits(self.dtype)

    @cached_property
    def attribution(self) -> Attribution | None:
        """The least time by kind of limit; None where work or limits are not known."""
        if self.limits is None or isinstance(self.work, Missing) or not self.work:
            return None
        seconds = self.times.working_s.value
        return attribute(self.work, self.limits, self.weights_bytes, seconds, self.on_host)

    @cached_property
    def faster_precision(self) -> tuple[str, float] | None:
        """Another setting of float32 products with the highest limit, and how many times that of the one in use."""
        configured = self.ceilings.configured("float32")
        if self.dtype != "float32" or configured is None:
            return None
        best = self.ceilings.best("float32")
        is_other = best.precision and best.precision != configured.precision
        return (best.precision, best.flops_per_s / configured.flops_per_s) if is_other and best.precision else None

    @property
    def other_dtypes(self) -> tuple[str, ...]:
        """The other dtypes of weights and activations in which this machine was measured."""
        return tuple(dict.fromkeys(each.dtype for each in self.ceilings.compute if each.dtype != self.dtype))

    def least_under(self, fix: Fix) -> float | None:
        """Return the least seconds by the limits under a fix of dtype or precision; None where they are not known."""
        limits = self.limits_under(fix)
        if limits is None or self.limits is None or isinstance(self.work, Missing) or not self.work:
            return None
        other = str(fix.settings["dtype"]) if fix.kind == "dtype" else self.dtype
        size = getattr(torch, other).itemsize / getattr(torch, self.dtype).itemsize
        smaller = [
            structs.replace(
                load,
                weight_bytes=load.weight_bytes * size,
                other_bytes=load.other_bytes * size,
                new_bytes=load.new_bytes * size,
                seconds=None,
            )
            for load in self.work
        ]
        seconds = self.times.working_s.value
        return attribute(smaller, limits, self.weights_bytes * size, seconds, self.on_host).least_s

    def limits_under(self, fix: Fix) -> Limits | None:
        """Return the limits that hold under a fix: of its dtype, its precision of products, else those in use."""
        if fix.kind == "dtype":
            return self.ceilings.limits(str(fix.settings["dtype"]))
        if fix.kind != "matmul_precision" or self.limits is None:
            return self.limits
        named = [each for each in self.ceilings.compute if each.precision == fix.settings["precision"]]
        rates = [Interval(each.flops_per_s, each.low, each.flops_per_s) for each in named]
        return structs.replace(self.limits, flops_per_s=rates[0]) if rates else None


def verdict_on(  # noqa: PLR0913  (each is one kind of evidence)
    forward: Forward,
    *,
    split: Split | None = None,
    unreplayed: Missing | None = None,
    reference: Reference | None = None,
    padding: float | None = None,
    tried: Tried = NOTHING_TRIED,
    gains: Sequence[Gain] = (),
    doubts: Sequence[Doubt] = (),
) -> Verdict:
    """Return the verdict on a forward; inconclusive, with the reason, where work or limits are not known."""
    if isinstance(forward.work, Missing):
        unknown = Doubt("work", forward.work.reason)
    else:
        unknown = Doubt("ceilings", f"the limits of this machine in {forward.dtype} were not measured")
    return judge(
        forward.times,
        known(forward.work) or (),
        forward.limits,
        weights_bytes=forward.weights_bytes,
        on_host=forward.on_host,
        split=split,
        unreplayed=unreplayed,
        reference=reference,
        padding=padding,
        trials=tried.trials,
        untried=tried.untried,
        gains=gains,
        doubts=[*doubts, *tried.doubts, *(Doubt("disturbed", text) for text in forward.ceilings.doubts)],
        unknown=unknown,
    )


def other_precisions(forward: Forward) -> Iterator[Gain]:
    """Yield the most that other precisions of the same model could bring: no limit lets it be faster."""
    fixes = [Fix("dtype", {"dtype": name}) for name in forward.other_dtypes]
    if forward.faster_precision:
        fixes.append(Fix("matmul_precision", {"precision": forward.faster_precision[0]}))
    seconds = forward.times.working_s.value
    for fix in fixes:
        least_s = forward.least_under(fix)
        if least_s:
            yield Gain(fix, seconds / least_s, f"its limits need {100 * least_s / seconds:.0f} % of the time")


@dataclass(frozen=True)
class Extras:
    """What the caller of `bottleneck` knows beyond the callable.

    `shape`: the samples and the tokens of each. `measured_s`: what the callable took in a sweep. `lengths`: what is
    padding in it; `padding`: the share of the FLOPs that is. `batch_sizes`: those to predict, with the tokens to which
    texts are padded there. `candidates`: fixes to try beside those of any callable; `tried`: what is known of others
    already. `bring`: what copies the input to the device. `bare`: the callable without what makes the host wait for
    the device before it issues; the device's time is taken of it, and it is what is replayed. `release` gives the
    memory of a trial back. `replay_s`, `trials_s`: seconds for replays and trials; `told` hears what goes on and how
    many of these seconds are left. `source` reads the clock of the GPU under each trial.
    """

    shape: tuple[int, int] | None = None
    measured_s: Interval | None = None
    lengths: Lengths | None = None
    padding: float | None = None
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    candidates: Sequence[Candidate] = ()
    tried: Tried = NOTHING_TRIED
    bring: Work | None = None
    bare: Work | None = None
    release: Callable[[], object] = lambda: None
    replay_s: float = BUDGET_S
    trials_s: float = TRIALS_S
    told: Callable[[str, float], object] = lambda text, left_s: None
    source: Source | None = None


NO_EXTRAS = Extras()


def bottleneck(  # noqa: PLR0913  (the callable, the machine and the dtype; instruments and extras by keyword alone)
    work: Work,
    ceilings: Ceilings,
    dtype: str,
    *,
    timer: Timer,
    queue: DeviceQueue | None = None,
    make_input: Work | None = None,
    watch: Watch | None = None,
    gains: Sequence[Gain] = (),
    doubts: Sequence[Doubt] = (),
    extras: Extras = NO_EXTRAS,
) -> Verdict:
    """Return the verdict on `work`, one forward in `dtype` that needs no gradients.

    It is timed, counted, replayed operator by operator, and run with what can be changed here. `queue` is that of the
    GPU it runs on, None on a CPU. `make_input` is what happens before each call (tokenizing); its time is held against
    that of `work`. `watch` notices what else uses the machine, by default on the host. Raises ValueError where the
    FLOPs of an operator are not known.
    """
    on_host = queue is None
    watch = watch or Watch(HostCounters())
    watch.start()
    warm_up(work, timer, WarmUpRule(least_s=ROUND_S, cap_s=20 * ROUND_S))
    bare = _runnable(extras.bare) or work
    device = DeviceTimer(timer, queue) if queue else None
    times = _times(work, bare, timer, device, make_input, extras.bring)
    threads = torch.get_num_threads() if on_host else 1
    disturbances = watch.stop().disturbances(threads)
    disturbed = [Doubt("disturbed", "; ".join(each.text for each in disturbances))] if disturbances else []
    disturbed += [Doubt("disturbed", device.leftover)] if device and device.leftover else []
    counted = counted_quietly(work, timer.clock if on_host else None)
    forward = Forward(times, loads([counted]), ceilings, dtype, counted.least_bytes, on_host)
    own = [candidate.fix for candidate in extras.candidates]
    candidates = [*extras.candidates, *(each for each in of_any_callable(forward, work, bare) if each.fix not in own)]
    replayed = _replayed(forward, bare, timer, queue, candidates, watch, extras)
    disturbed += [Doubt("disturbed", text) for text in replayed.doubts] if replayed else []
    seconds = extras.measured_s or times.isolated_s
    found = split(replayed, forward.limits, seconds.value) if replayed and forward.limits else None
    predicted: Sequence[Gain] = ()
    if replayed and found:
        predicted = predictions(
            replayed,
            found,
            forward.limits_under,
            lengths=extras.lengths.real if extras.lengths else None,
            input_s=times.input_s,
            batch_sizes=list(extras.batch_sizes),
            tokens_at=extras.batch_sizes,
        )
    known_gains = _without_doubles([*gains, *predicted, *other_precisions(forward)])
    tried = try_out(
        work,
        candidates if forward.limits else (),
        timer,
        budget_s=extras.trials_s,
        gains=known_gains,
        watch=watch,
        release=extras.release,
        told=extras.told,
        threads=threads,
        source=extras.source,
    )
    return verdict_on(
        forward,
        split=found,
        unreplayed=replayed if isinstance(replayed, Missing) else None,
        reference=Reference(*extras.shape, seconds) if extras.shape else None,
        padding=extras.padding,
        tried=extras.tried.with_predictions(known_gains).joined(tried),
        gains=known_gains,
        doubts=[*doubts, *disturbed],
    )


def of_any_callable(forward: Forward, work: Work, bare: Work) -> Iterator[Candidate]:
    """Yield the fixes that need nothing but the callable: threads and products on a CPU, a graph on a GPU.

    The graph is last: no trial comes after a capture that failed. It is of `bare`, as `Extras` has it.
    """
    precision = forward.faster_precision
    fixes = [fewer_threads(work)] if forward.on_host else []
    fixes += [coarser_products(work, *precision)] if precision else []
    fixes += [] if forward.on_host else [graph_replay(bare, IDLE_DEVICE)]
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


def _replayed(  # noqa: PLR0913, PLR0917  (of one caller, above)
    forward: Forward,
    work: Work,
    timer: Timer,
    queue: DeviceQueue | None,
    candidates: Sequence[Candidate],
    watch: Watch,
    extras: Extras,
) -> Replay | Missing:
    """Return the replay, or why the forward cannot be run as its operators, which loses nothing else."""
    if not extras.replay_s:
        return Missing("no seconds were given for replays")
    try:
        return replay(
            work,
            timer=timer,
            queue=queue,
            weights_bytes=forward.weights_bytes,
            lengths=extras.lengths,
            settings=[setting for candidate in candidates for setting in _settings(candidate)],
            budget_s=extras.replay_s,
            watch=watch,
            told=lambda left_s: extras.told("replays", left_s + extras.trials_s),
        )
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
    return [gain for place, gain in enumerate(gains) if gain.fix not in [each.fix for each in gains[:place]]]


def loads(counted: Sequence[CountedWork]) -> list[OperatorLoad]:
    """Return what each operator does in one forward, as the mean over forwards that were counted."""
    sums: dict[tuple[object, ...], list[float]] = {}
    is_timed = all(operator.seconds is not None for work in counted for operator in work.operators)
    for operator in itertools.chain.from_iterable(work.operators for work in counted):
        other = operator.bytes - operator.given_bytes
        values = (
            operator.calls,
            operator.flops,
            operator.given_bytes,
            other,
            operator.new_bytes,
            operator.seconds or 0.0,
        )
        total = sums.setdefault((operator.name, operator.shapes), [0.0] * len(values))
        total[:] = [one + more for one, more in zip(total, values, strict=True)]
    n = len(counted)
    return [
        OperatorLoad(
            name=str(name),
            calls=calls / n,
            flops=flops / n,
            weight_bytes=weight_bytes / n,
            other_bytes=other_bytes / n,
            new_bytes=new_bytes / n,
            seconds=seconds / n if is_timed else None,
        )
        for (name, _), (calls, flops, weight_bytes, other_bytes, new_bytes, seconds) in sums.items()
    ]


def counted_quietly(work: Work, clock: Clock | None) -> CountedWork:
    """Return the work of one call; with a clock the quickest of several counts, which was disturbed least."""
    if clock is None:
        return count(work)
    counts = [count(work, clock=clock) for _ in range(COUNTS)]
    return min(counts, key=lambda candidate: sum(operator.seconds or 0.0 for operator in candidate.operators))


def _times(  # noqa: PLR0913, PLR0917  (of one caller, above)
    work: Work, bare: Work, timer: Timer, device: DeviceTimer | None, make_input: Work | None, bring: Work | None
) -> Times:
    isolated = _rounds(lambda: timer.isolated(work))
    inputs = _rounds(lambda: timer.isolated(make_input)) if make_input else None
    if device is None:
        return Times(Interval.of(estimate(isolated)), input_s=median(inputs) if inputs else None)
    enqueue = median(_rounds(lambda: timer.enqueue(work)))
    seconds = [timing.seconds for timing in device.times(bare, enqueue, ROUNDS) if timing.seconds]
    return Times(
        isolated_s=Interval.of(estimate(isolated)),
        device_s=Interval.of(estimate(seconds)) if seconds else None,
        enqueue_s=enqueue,
        input_s=median(inputs) if inputs else None,
        transfer_s=median(_rounds(lambda: timer.isolated(bring))) if bring else None,
    )


def _rounds(timed: Callable[[], float]) -> list[float]:
    """Return the median of each of `ROUNDS` rounds of calls."""
    medians = []
    for _ in range(ROUNDS):
        seconds = [timed() for _ in range(LEAST_CALLS)]
        while sum(seconds) < ROUND_S and len(seconds) < MOST_CALLS:
            seconds.append(timed())
        medians.append(median(seconds))
    return medians
