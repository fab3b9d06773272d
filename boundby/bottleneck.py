"""What any callable is bound by: its times, its work and this machine's ceilings, brought together into a verdict."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import torch

from boundby.ceilings import Ceilings
from boundby.disturbance import HostCounters, Watch
from boundby.judgement import Times, judge, precision_gain
from boundby.known import Missing, known
from boundby.roofline import Attribution, Interval, Limits, OperatorLoad, attribute
from boundby.stats import estimate
from boundby.timer import Clock, DeviceQueue, Timer, WarmUpRule, Work, warm_up
from boundby.trials import fewer_threads, graph_replay
from boundby.verdict import Doubt, Fix, Gain, Trial, Verdict
from boundby.work import Work as CountedWork
from boundby.work import count

ROUNDS = 7
ROUND_S = 0.05
LEAST_CALLS = 3
COUNTS = 3


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
        """The setting of float32 products with the highest limit, and how many times that of the one in use."""
        configured = self.ceilings.configured("float32")
        if self.dtype != "float32" or configured is None:
            return None
        best = self.ceilings.best("float32")
        return (best.precision, best.flops_per_s / configured.flops_per_s) if best.precision else None


def verdict_on(
    forward: Forward, *, trials: Sequence[Trial] = (), gains: Sequence[Gain] = (), doubts: Sequence[Doubt] = ()
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
        trials=trials,
        gains=gains,
        doubts=[*doubts, *(Doubt("disturbed", text) for text in forward.ceilings.doubts)],
        unknown=unknown,
    )


def other_precisions(forward: Forward) -> Iterator[Gain]:
    """Yield the most that other precisions of the same model could bring, by their measured limits."""
    attribution, configured = forward.attribution, forward.ceilings.configured(forward.dtype)
    if attribution is None or configured is None or forward.dtype != "float32":
        return
    if forward.faster_precision:
        precision, ratio = forward.faster_precision
        yield precision_gain(Fix("matmul_precision", {"precision": precision}), attribution, ratio, bytes_factor=1.0)
    for ceiling in forward.ceilings.compute:
        if ceiling.dtype != "float32":
            ratio = ceiling.flops_per_s / configured.flops_per_s
            smaller = torch.float32.itemsize / getattr(torch, ceiling.dtype).itemsize
            yield precision_gain(Fix("dtype", {"dtype": ceiling.dtype}), attribution, ratio, bytes_factor=smaller)


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
) -> Verdict:
    """Return the verdict on `work`, one forward in `dtype` that needs no gradients.

    `queue` is that of the GPU it runs on, None on a CPU. `make_input` is what happens before each call (tokenizing);
    its time is held against that of `work`. `watch` notices what else uses the machine, by default on the host.
    Raises ValueError where the FLOPs of an operator are not known.
    """
    on_host = queue is None
    watch = (watch or Watch(HostCounters())).start()
    warm_up(work, timer, WarmUpRule(least_s=ROUND_S, cap_s=20 * ROUND_S))
    times = _times(work, timer, queue, make_input)
    threads = torch.get_num_threads() if on_host else 1
    disturbances = watch.stop().disturbances(threads)
    doubts = [Doubt("disturbed", "; ".join(disturbance.text for disturbance in disturbances))] if disturbances else []
    counted = counted_quietly(work, timer.clock if on_host else None)
    tried = fewer_threads(work, timer) if on_host else graph_replay(work, timer)
    forward = Forward(times, loads([counted]), ceilings, dtype, counted.least_bytes, on_host)
    return verdict_on(forward, trials=[tried] if tried else [], gains=gains, doubts=doubts)


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


def _times(work: Work, timer: Timer, queue: DeviceQueue | None, make_input: Work | None) -> Times:
    isolated = _rounds(lambda: timer.isolated(work))
    inputs = _rounds(lambda: timer.isolated(make_input)) if make_input else None
    if queue is None:
        return Times(Interval.of(estimate(isolated)), input_s=median(inputs) if inputs else None)
    enqueue = median(_rounds(lambda: timer.enqueue(work)))
    device = [
        timing.seconds for timing in (timer.on_device(work, queue, enqueue) for _ in range(ROUNDS)) if timing.seconds
    ]
    return Times(
        isolated_s=Interval.of(estimate(isolated)),
        device_s=Interval.of(estimate(device)) if device else None,
        enqueue_s=enqueue,
        input_s=median(inputs) if inputs else None,
    )


def _rounds(timed: Callable[[], float]) -> list[float]:
    """Return the median of each of `ROUNDS` rounds of calls."""
    medians = []
    for _ in range(ROUNDS):
        seconds = [timed() for _ in range(LEAST_CALLS)]
        while sum(seconds) < ROUND_S:
            seconds.append(timed())
        medians.append(median(seconds))
    return medians
