"""The time pass: runs with a probe on every forward, in turn with runs without, and what a probe costs.

Runs with and without probes alternate in short blocks, so that a machine that becomes slower meets both alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from torch import nn

from boundby.layers.attachment import Clock, Targets, attached, find_targets, timing_probe
from boundby.layers.calls import Call, CallTree

Run = Callable[[], object]
BLOCK_RUNS = 5
CALIBRATION_RUNS = 30
CALIBRATION_CALLS = 200


@dataclass(frozen=True)
class CallTimes:
    """What one run spent in one call path, as the clock saw it."""

    ns: int  # calls inside included
    self_ns: int
    calls: int
    inner_calls: int


@dataclass
class HostTimes:
    """Nanoseconds of every run: end to end without probes and with them, and by call path."""

    reference_ns: list[int] = field(default_factory=list)
    instrumented_ns: list[int] = field(default_factory=list)
    runs: list[dict[Call, CallTimes]] = field(default_factory=list)


def time_runs(
    run: Run, tree: CallTree, targets: Targets, num_runs: int, now: Clock, synchronize: Callable[[], None]
) -> HostTimes:
    """Return the times of `num_runs` runs without and as many with probes."""
    found = HostTimes()

    def elapsed_ns() -> int:
        synchronize()
        start = now()
        run()
        synchronize()
        return now() - start

    def with_probes(count: int) -> None:
        with attached(targets, timing_probe(tree, now)):
            for _ in range(count):
                tree.clear()
                tree.enter_root()
                found.instrumented_ns.append(elapsed_ns())
                found.runs.append(_harvest(tree))

    for first, count in _blocks(num_runs):
        if first:
            with_probes(count)
        found.reference_ns.extend(elapsed_ns() for _ in range(count))
        if not first:
            with_probes(count)
    return found


def corrected(times: dict[Call, CallTimes], cost_ns: float) -> tuple[dict[Call, float], dict[Call, float]]:
    """Return self and inclusive nanoseconds of each call path of a run, less what the probes inside cost.

    A probe works outside of the window that it times, so its cost is in the self time of the caller.
    """
    selves = {call: max(0.0, each.self_ns - each.inner_calls * cost_ns) for call, each in times.items()}
    return selves, inclusive(selves)


def inclusive(selves: dict[Call, float]) -> dict[Call, float]:
    """Return for each call path the sum of its own value and of all below; callers come before callees."""
    sums = dict(selves)
    for call in reversed(selves):
        if call.caller in sums:
            sums[call.caller] += sums[call]
    return sums


def probe_cost_ns(now: Clock) -> float:
    """Return the nanoseconds that a probe adds to a call, measured on modules that do nothing."""
    fan = _Fan()
    targets = find_targets(fan)
    found = time_runs(lambda: fan(0), CallTree(targets.names), targets, CALIBRATION_RUNS, now, synchronize=lambda: None)
    return max(0.0, (median(found.instrumented_ns) - median(found.reference_ns)) / (CALIBRATION_CALLS + 1))


class _Fan(nn.Module):
    """Calls many modules that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Identity() for _ in range(CALIBRATION_CALLS))

    def forward(self, value: int) -> int:
        for each in self.inner:
            value = each(value)
        return value


def _harvest(tree: CallTree) -> dict[Call, CallTimes]:
    return {each: CallTimes(each.ns, each.self_ns, each.calls, each.inner_calls) for each in tree.walk()}


def _blocks(num_runs: int) -> Iterator[tuple[bool, int]]:
    """Yield whether the runs with probes come first, and how many there are: A B, B A, A B, ..."""
    for number, start in enumerate(range(0, num_runs, BLOCK_RUNS)):
        yield number % 2 == 1, min(BLOCK_RUNS, num_runs - start)
