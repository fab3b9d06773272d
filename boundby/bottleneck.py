"""What any callable is bound by: its times, its work and this machine's ceilings, brought together into a verdict."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from boundby.ceilings import Ceilings
from boundby.disturbance import HostCounters, Watch
from boundby.judgement import Times, judge
from boundby.roofline import Interval, OperatorLoad
from boundby.stats import Estimate, estimate
from boundby.timer import Clock, DeviceQueue, Timer, WarmUpRule, Work, warm_up
from boundby.trials import fewer_threads, graph_replay
from boundby.verdict import Doubt, Gain, Verdict
from boundby.work import Work as CountedWork
from boundby.work import count

ROUNDS = 7
ROUND_S = 0.05
LEAST_CALLS = 3
COUNTS = 3


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
    doubts = [Doubt("disturbed", "; ".join(each.text for each in disturbances))] if disturbances else []
    counted = counted_quietly(work, timer.clock if on_host else None)
    tried = fewer_threads(work, timer) if on_host else graph_replay(work, timer)
    return judge(
        times,
        loads([counted]),
        ceilings.limits(dtype),
        weights_bytes=counted.least_bytes,
        on_host=on_host,
        trials=[tried] if tried else [],
        gains=gains,
        doubts=[*doubts, *(Doubt("disturbed", text) for text in ceilings.doubts)],
        unknown=Doubt("ceilings", f"those of this machine in {dtype} were not measured"),
    )


def loads(counted: Sequence[CountedWork]) -> list[OperatorLoad]:
    """Return what each operator does in one forward, as the mean over forwards that were counted."""
    sums: dict[tuple[object, ...], list[float]] = {}
    is_timed = all(each.seconds is not None for work in counted for each in work.operators)
    for each in (operator for work in counted for operator in work.operators):
        other = each.bytes - each.given_bytes
        values = (each.calls, each.flops, each.given_bytes, other, each.new_bytes, each.seconds or 0.0)
        total = sums.setdefault((each.name, each.shapes), [0.0] * len(values))
        total[:] = [one + more for one, more in zip(total, values, strict=True)]
    n = len(counted)
    return [
        OperatorLoad(str(name), *(value / n for value in values[:5]), seconds=values[5] / n if is_timed else None)
        for (name, _), values in sums.items()
    ]


def counted_quietly(work: Work, clock: Clock | None) -> CountedWork:
    """Return the work of one call; with a clock the quickest of several counts, which was disturbed least."""
    if clock is None:
        return count(work)
    counts = [count(work, clock=clock) for _ in range(COUNTS)]
    return min(counts, key=lambda each: sum(operator.seconds or 0.0 for operator in each.operators))


def interval(found: Estimate) -> Interval:
    """Return the interval of an estimate; one round has none, and its ends are the value."""
    return Interval(found.value, found.low or found.value, found.high or found.value)


def _times(work: Work, timer: Timer, queue: DeviceQueue | None, make_input: Work | None) -> Times:
    isolated = _rounds(lambda: timer.isolated(work))
    inputs = _rounds(lambda: timer.isolated(make_input)) if make_input else None
    if queue is None:
        return Times(interval(estimate(isolated)), input_s=median(inputs) if inputs else None)
    enqueue = median(_rounds(lambda: timer.enqueue(work)))
    device = [each.seconds for each in (timer.on_device(work, queue, enqueue) for _ in range(ROUNDS)) if each.seconds]
    return Times(
        isolated_s=interval(estimate(isolated)),
        device_s=interval(estimate(device)) if device else None,
        enqueue_s=enqueue,
        input_s=median(inputs) if inputs else None,
    )


def _rounds(timed: Callable[[], float]) -> list[float]:
    """Return the median of each of `ROUNDS` rounds of calls."""
    found = []
    for _ in range(ROUNDS):
        seconds = [timed() for _ in range(LEAST_CALLS)]
        while sum(seconds) < ROUND_S:
            seconds.append(timed())
        found.append(median(seconds))
    return found
