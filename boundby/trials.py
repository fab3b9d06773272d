"""Change one thing on purpose and see whether the time follows, as the suspected bound predicts.

Each function returns a `Trial`: time before over time after, with its interval from pairs that are timed one
right after the other (so that a drift of the machine hits both), and the range that each bound predicts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from boundby.ceilings import matmul_precision
from boundby.judgement import IDLE_DEVICE
from boundby.roofline import Interval
from boundby.stats import estimate
from boundby.timer import Timer, Work
from boundby.verdict import Bound, Fix, Trial

PAIRS = 5
LEAST_BLOCK_S = 0.02
UNCHANGED = (0.87, 1.15)
LEAST_CEILING_RATIO = 1.3  # between two settings, to tell them apart by their times


def doubled_batch(work: Work, doubled: Work, timer: Timer, predicted_ratio: float | None = None) -> Trial:
    """Time `doubled`, the same forward on twice the samples; the factor is that of the throughput.

    A fixed cost doubles it, work that grows with the samples leaves it near 1. `predicted_ratio` is what the
    limits say for this model, whose weights are read once in both: it is the prediction for memory and compute.
    """
    expected = predicted_ratio or 0.5
    around = (2 * expected * 0.8, 2 * expected * 1.25)
    ranges: dict[Bound, tuple[float, float]] = {
        "compute": around,
        "memory": around,
        "mixed": around,
        "launch": (1.4, 2.3),
        "under_utilised": (1.1, 2.3),
    }
    return Trial(Fix("double_batch"), _ratio(work, doubled, timer).times(2), expected=ranges)


def fewer_threads(work: Work, timer: Timer) -> Trial | None:
    """Run on half the CPU threads; None where there is only one."""
    threads = torch.get_num_threads()
    if threads < 2:
        return None
    fewer = threads // 2
    full = threads / fewer
    ranges: dict[Bound, tuple[float, float]] = {
        "compute": (0.8 / full, 1.5 / full),  # threads that wait for one another leave less to lose
        "launch": (0.8, 1.6),
    }
    fix = Fix("threads", {"threads": fewer, "instead_of": threads})
    return Trial(fix, _ratio(work, work, timer, lambda: _threads(fewer)), expected=ranges)


def other_precision(work: Work, timer: Timer, precision: str, ceiling_ratio: float) -> Trial | None:
    """Run with another precision of float32 products, whose measured ceiling is `ceiling_ratio` times as high.

    None where the two ceilings are too close to tell anything.
    """
    if ceiling_ratio < LEAST_CEILING_RATIO:
        return None
    ranges: dict[Bound, tuple[float, float]] = {
        "compute": (1 + 0.4 * (ceiling_ratio - 1), 1.2 * ceiling_ratio),
        "memory": UNCHANGED,
        "launch": UNCHANGED,
    }
    fix = Fix("matmul_precision", {"precision": precision})
    return Trial(fix, _ratio(work, work, timer, lambda: matmul_precision(precision)), expected=ranges)


def graph_replay(work: Work, timer: Timer) -> Trial | None:
    """Replay the work, on the current GPU, as a graph that the host issues in one go; None if it cannot be captured."""
    graph = _captured(work)
    if graph is None:
        return None
    not_idle = (UNCHANGED[0], 1 / (1 - IDLE_DEVICE))  # one that idles for less is not called launch-bound
    ranges: dict[Bound, tuple[float, float]] = {
        "launch": (1.15, math.inf),
        "compute": not_idle,
        "memory": not_idle,
    }
    return Trial(Fix("issue_at_once"), _ratio(work, graph.replay, timer), expected=ranges)


def _captured(work: Work) -> torch.cuda.CUDAGraph | None:
    """Return the graph of one call with static inputs, or None where the call reads from the device on its way."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):  # workspaces are allocated before the capture
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _ratio(
    base: Work,
    changed: Work,
    timer: Timer,
    setting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Interval:
    """Return the time of `base` over that of `changed` under `setting`, with the 95 % interval of `PAIRS` pairs."""
    with setting():
        timer.isolated(changed)
        once = min(timer.isolated(changed) for _ in range(2))
    calls = max(1, math.ceil(LEAST_BLOCK_S / max(once, 1e-9)))
    ratios = []
    for _ in range(PAIRS):
        timer.isolated(base)  # warm: the setting before was the other one
        before = min(timer.isolated(base) for _ in range(calls))
        with setting():
            timer.isolated(changed)
            after = min(timer.isolated(changed) for _ in range(calls))
        ratios.append(before / after)
    return Interval.of(estimate(ratios))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
