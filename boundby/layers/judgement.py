"""What limits each layer, and how far the whole profile can be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from boundby.bound import LATE_HOST, Bound, Forward, Times, judge
from boundby.layers.records import Coverage, CoverageStatus
from boundby.timing import Summary, least_samples, summarize
from boundby.work import Interval, Limits, OperatorLoad

PASS = (0.97, 1.03)  # of the un-instrumented time
WARN = (0.90, 1.10)
LEAST_FOR_P95 = 20  # with fewer the 95th percentile is beyond the largest sample
MOST_OVERHEAD = 0.03
LEAST_WAIT_S, LEAST_WAIT_SHARE = 100e-6, 0.1  # of a layer's own time; less is a clock read late, or a page fault
DISTURBED = 0.05  # of a run, or of a layer's mean


@dataclass(frozen=True)
class LayerVerdict:
    """What limits a layer's own work; `gain_at_limit_s` is of the end-to-end time, if that work ran at the limits."""

    bound: Bound | None = None
    share_of_limit: float | None = None
    gain_at_limit_s: float | None = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """The limits for layers. `weights_bytes` is the least a run must read, which tells how far away weights lie."""

    limits: Limits | None
    weights_bytes: float
    on_host: bool


def judge_layer(
    seconds: float, host_s: float | None, operators: Sequence[OperatorLoad] | None, machine: Machine
) -> LayerVerdict:
    """Return the verdict on a layer that spends `seconds` (of the device, if there is one) in its own work.

    `host_s` are the host's, None where they hold waiting for the device.
    """
    if machine.limits is None or operators is None:
        return LayerVerdict()
    if seconds <= 0:
        return LayerVerdict(gain_at_limit_s=0.0)
    if not operators:
        return LayerVerdict("launch", 0.0, seconds)  # all of it is the host's work between operators
    exact = Interval.exact(seconds)
    times = Times(exact) if machine.on_host else Times(exact, device_s=exact, enqueue_s=host_s)
    forward = Forward(times, tuple(operators), machine.limits, machine.weights_bytes, machine.on_host)
    verdict, left_s = judge(forward), max(0.0, seconds - forward.attribution.least_s)
    return LayerVerdict(verdict.bound, verdict.share_of_limit, left_s, tuple(map(str, verdict.doubts)))


def is_launch_bound(host_self_s: float, device_self_s: float) -> bool:
    """Tell whether the host takes longer to issue a layer's own work than the device to do it, or nearly so."""
    return host_self_s >= LATE_HOST * device_self_s


def summarize_runs(samples: Sequence[float]) -> Summary:
    """Return the summary of one value per run, with the 95th percentile from 20 runs on.

    `boundby.timing.stats` asks for 59; below that the profile as a whole says how far p95 can be trusted (`p95_doubt`).
    """
    summary = summarize(samples)
    if summary.p95 is not None or summary.n < LEAST_FOR_P95:
        return summary
    return replace(summary, p95=float(np.quantile(samples, 0.95)))


def p95_doubt(num_runs: int) -> str | None:
    """Return how far a 95th percentile of so many runs can be trusted; None where `boundby.timing` has no objection."""
    enough = least_samples(0.95)
    if num_runs >= enough:
        return None
    if num_runs < LEAST_FOR_P95:
        return (
            f"p95: too few runs ({num_runs}) for one; profile {LEAST_FOR_P95}, or {enough} for one that can be trusted"
        )
    return (
        f"p95: with {num_runs} runs, the chance that even the slowest one is quicker than the true 95th percentile is "
        f"{100 * 0.95**num_runs:.0f} %; profile {enough} runs or more"
    )


def clearly_less(wall_s: float, cpu_s: float) -> bool:
    """Tell whether the clock of the CPU counted so much less than the wall clock that something waited."""
    return wall_s - cpu_s > max(LEAST_WAIT_S, LEAST_WAIT_SHARE * wall_s)


def kept_waiting(run_s: Sequence[float], waited_s: Sequence[float]) -> frozenset[int]:
    """Return the runs that waited clearly longer than the median run: for the core, or for what a layer waits for."""
    if not waited_s:
        return frozenset()
    least_s = median(waited_s) + max(LEAST_WAIT_S, DISTURBED * median(run_s))
    return frozenset(run for run, seconds in enumerate(waited_s) if seconds > least_s)


def undisturbed_mean(seconds: Sequence[float], disturbed: frozenset[int]) -> float | None:
    """Return the mean without the disturbed runs where it is clearly less than with them, else None."""
    left = [value for run, value in enumerate(seconds) if run not in disturbed]
    if not left or not disturbed or fmean(seconds) <= (1 + DISTURBED) * fmean(left):
        return None
    return fmean(left)


def coverage(ratio: float, leaf_ratio: float, *, is_disturbed: bool = False) -> Coverage:
    """Return the coverage with what it says of the profile; one that was disturbed passes never."""
    status: CoverageStatus = "not representative"
    if PASS[0] <= ratio <= PASS[1] and not is_disturbed:
        status = "pass"
    elif WARN[0] <= ratio <= WARN[1]:
        status = "warn"
    return Coverage(ratio, status, leaf_ratio)


def trust_doubts(covered: Coverage, overhead: float, num_runs: int) -> list[str]:
    """Return what speaks against the profile as a whole."""
    doubts = []
    if not PASS[0] <= covered.ratio <= PASS[1]:
        doubts.append(
            f"coverage: the layers account for {100 * covered.ratio:.1f} % of the time without probes"
            + ("; this profile is not representative" if covered.status == "not representative" else "")
        )
    if overhead > MOST_OVERHEAD:
        doubts.append(f"overhead: runs with probes took {100 * overhead:.1f} % longer; the times are corrected for it")
    return [*doubts, *filter(None, [p95_doubt(num_runs)])]
