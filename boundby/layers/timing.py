"""The time pass: runs with a probe on every forward, in turn with runs without, and what a probe costs.

Every run with probes has one without beside it. On a busy machine (two shared cores, 50 runs of a MiniLM classifier)
the median of the ratios within pairs varied by 0.4 %, the ratio of the two medians by 2.6 %.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import nn

from boundby.layers.attachment import Clock, Targets, attached, find_targets, timing_probe
from boundby.layers.calls import Call, CallLog, CallTree

Run = Callable[[], object]
CALIBRATION_RUNS = 50
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
    """Nanoseconds of every run: end to end without probes and, in the same place, with them and by call path."""

    reference_ns: list[int] = field(default_factory=list)
    instrumented_ns: list[int] = field(default_factory=list)
    runs: list[dict[Call, CallTimes]] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Time with probes over that without, minus one, as the median over neighbouring runs."""
        pairs = zip(self.instrumented_ns, self.reference_ns, strict=True)
        return median(probed / plain for probed, plain in pairs) - 1


@dataclass(frozen=True)
class HostPass:
    """Times runs on the host, where `synchronize` waits for the device."""

    run: Run
    tree: CallTree
    targets: Targets
    now: Clock
    synchronize: Callable[[], None]
    found: HostTimes = field(default_factory=HostTimes)

    def add_pair(self) -> None:
        """Time one run without and one with probes, in the other order every second time."""
        if len(self.found.runs) % 2:
            self._run_with_probes()
            self.found.reference_ns.append(self._elapsed_ns())
        else:
            self.found.reference_ns.append(self._elapsed_ns())
            self._run_with_probes()

    def _elapsed_ns(self) -> int:
        self.synchronize()
        start = self.now()
        self.run()
        self.synchronize()
        return self.now() - start

    def _run_with_probes(self) -> None:
        log: CallLog = {}
        with attached(self.targets, timing_probe(log, self.now)):
            self.found.instrumented_ns.append(self._elapsed_ns())
        self.tree.fill(log)
        self.found.runs.append(
            {each: CallTimes(each.ns, each.self_ns, each.calls, each.inner_calls) for each in self.tree.walk()}
        )


def time_runs(
    run: Run, tree: CallTree, targets: Targets, num_runs: int, now: Clock, synchronize: Callable[[], None]
) -> HostTimes:
    """Return the times of `num_runs` runs without and as many with probes."""
    host = HostPass(run, tree, targets, now, synchronize)
    for _ in range(num_runs):
        host.add_pair()
    return host.found


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
    """Return the nanoseconds that a probe adds to a call, measured on layers that do next to nothing."""
    fan = _Fan().eval()
    targets = find_targets(fan)
    with torch.no_grad():
        found = time_runs(fan, CallTree(targets.names), targets, CALIBRATION_RUNS, now, lambda: None)
    pairs = zip(found.instrumented_ns, found.reference_ns, strict=True)
    return max(0.0, median(probed - plain for probed, plain in pairs) / (CALIBRATION_CALLS + 1))


class _Fan(nn.Module):
    """Calls many small layers of several kinds: amid their operators a probe costs twice what it costs in a row."""

    def __init__(self) -> None:
        super().__init__()
        makers = (lambda: nn.Linear(4, 4), nn.ReLU, lambda: nn.LayerNorm(4))
        self.inner = nn.ModuleList(makers[number % len(makers)]() for number in range(CALIBRATION_CALLS))
        self.values = torch.ones(1, 4)

    def forward(self) -> None:
        for each in self.inner:
            each(self.values)
