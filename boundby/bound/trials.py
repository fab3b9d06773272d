"""Make a fix here and measure what it does: runs with and without it, one right after the other.

A trial serves twice. It replaces what was predicted of its fix, and where bounds expect different things of it, it
speaks for some of them and against others. Nothing is lost with one that fails: it is named, with the reason.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import msgspec
import torch

from boundby.bound.bench import Bench
from boundby.bound.device_time import LEFTOVER, CaptureLeftoverError, captured
from boundby.bound.verdict import Bound, Doubt, Fix, SameLabels, Trial, Tried, Untried
from boundby.formatting import first_line
from boundby.machine import Source, changed_clock, host_threads, is_out_of_memory, matmul_precision, raise_if_lost
from boundby.timing import Timer, Work, estimate
from boundby.work import Interval

LEAST_PAIRS, MOST_PAIRS = 5, 15
LONG_S = 0.1  # of a forward, which needs no call to come back to its setting, and of which fewer pairs will do
LEAST_LONG_PAIRS = 3
NARROW = 0.015  # half of the interval as a share of the factor, with which no more pairs are run
LEAST_BLOCK_S = 0.02
WARM_CALLS = 5  # at most, of the fix, until two calls in a row take as long
WARM_TOLERANCE = 0.05
LEAST_CEILING_RATIO = 1.3  # between two settings of products, for the coarser one to be worth a trial
LARGEST = 0.35  # the share of the time that what limits has at least: nothing else has more
INFINITE = math.inf


class Made(msgspec.Struct, frozen=True):
    """The forward with a fix, how many texts keep their labels where it may change them, and what ends it."""

    work: Work
    same_labels: Callable[[], SameLabels | None] | None = None
    close: Callable[[], object] = lambda: None


class Candidate(msgspec.Struct, frozen=True):
    """A fix that can be tried: how to make it, how to set it, and the factor that each bound expects of it.

    `make` is called when its turn comes, which takes about `setup_s`; what it raises is a remark. `setting` is entered
    for every run with the fix. `base` is what it is compared with, the forward itself if None. The forward with the fix
    is on `samples` times as many texts. `is_fix` False: it is made to tell bounds apart, and nobody would keep it.
    """

    fix: Fix
    make: Callable[[], Made]
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    base: Work | None = None
    samples: float = 1.0
    expected: Mapping[Bound, tuple[float, float]] = msgspec.field(default_factory=dict)
    setup_s: float = 0.0
    is_fix: bool = True


def try_out(work: Work, candidates: Sequence[Candidate], bench: Bench) -> Tried:
    """Return the trials of what fits into the seconds for them, in the order of the candidates.

    The seconds that are left are shared by the candidates that are left. A trial that something disturbed is made once
    more where there is time. A gain under another clock of the GPU than without the fix is doubted.
    """
    clock = bench.timer.clock
    deadline = clock() + bench.trials_s
    once = _warm(work, bench.timer)
    trials: list[Trial] = []
    untried: list[Untried] = []
    disturbed: list[str] = []
    doubts: list[Doubt] = []
    for number, candidate in enumerate(candidates):
        left = deadline - clock()
        bench.tell(f"trial: {candidate.fix}", left)
        runs = 4 * LEAST_PAIRS if once < LONG_S else 2 * LEAST_LONG_PAIRS + 2
        needed = candidate.setup_s + runs * max(once, LEAST_BLOCK_S)
        if needed > left:
            reason = f"it would take about {max(1.0, needed):.0f} s, more than was left for trials"
            untried.append(Untried(candidate.fix, "over_budget", reason))
            continue
        try:
            clocks = _Clocks(bench.source)
            trial, seen = _trial(work, candidate, bench, left / (len(candidates) - number), clocks)
        except Exception as error:  # a forward, and torch in another setting, may raise anything
            raise_if_lost(error)
            untried.append(remark(candidate.fix, error))
            if isinstance(error, CaptureLeftoverError):
                disturbed.append(LEFTOVER)
        else:
            trials.append(trial)
            disturbed += [seen] if seen else []
            changed = changed_clock(clocks.without, clocks.under)
            doubts += [Doubt("throttled", f"{candidate.fix}, off and on: {changed}")] if changed else []
        bench.release()
    doubts += [Doubt("disturbed", text) for text in dict.fromkeys(disturbed)]
    return Tried(tuple(trials), tuple(untried), tuple(doubts))


def remark(fix: Fix, error: BaseException) -> Untried:
    """Return why a fix could not be tried, from what it raised."""
    if is_out_of_memory(error):
        return Untried(fix, "out_of_memory", "there is not enough memory for it")
    return Untried(fix, "failed", f"{type(error).__name__}: {first_line(error)}")


@dataclass
class _Clocks:
    """The clock of a GPU, in MHz, after each block without a fix and under it; none where nothing reads it."""

    source: Source | None
    without: list[float] = field(default_factory=list)
    under: list[float] = field(default_factory=list)

    def note(self, seen: list[float]) -> None:
        if self.source is not None and self.source.reason is None:
            with suppress(OSError, KeyError):
                seen.append(self.source.read()["gpu_sm_clock_mhz"])


def _trial(work: Work, candidate: Candidate, bench: Bench, slot_s: float, clocks: _Clocks) -> tuple[Trial, str | None]:
    """Return the trial, and what disturbed it; a disturbed one is made again where there is time."""
    timer = bench.timer
    start = timer.clock()
    made = candidate.make()
    try:
        with candidate.setting():
            once = _warm(made.work, timer)
        calls = max(1, math.ceil(LEAST_BLOCK_S / max(once, 1e-9))) if once < LONG_S else 0
        for _ in range(2):
            left = slot_s - (timer.clock() - start)
            bench.watch.start()
            pairs = _pairs(_Pair(candidate.base or work, made.work, candidate.setting, timer, clocks), calls, left)
            seen = bench.watch.stop().disturbances(bench.threads)
            disturbed = "; ".join(disturbance.text for disturbance in seen if disturbance.is_passing) or None
            if not disturbed or timer.clock() - start >= slot_s:
                break
        labels = made.same_labels() if made.same_labels else None
    finally:
        made.close()
    trial = Trial(
        candidate.fix,
        Interval.of(estimate(pairs)).times(candidate.samples),
        expected=candidate.expected,
        same_labels=labels,
        pairs=len(pairs),
        is_fix=candidate.is_fix,
    )
    return trial, disturbed


@dataclass(frozen=True)
class _Pair:
    """The forward without a fix and with it, and how either is timed."""

    base: Work
    changed: Work
    setting: Callable[[], AbstractContextManager[None]]
    timer: Timer
    clocks: _Clocks

    def without_fix(self, calls: int) -> float:
        return self._block(self.base, calls, self.clocks.without)

    def with_fix(self, calls: int) -> float:
        with self.setting():
            return self._block(self.changed, calls, self.clocks.under)

    def _block(self, work: Work, calls: int, mhz: list[float]) -> float:
        first = self.timer.isolated(work)
        best = min((self.timer.isolated(work) for _ in range(calls)), default=first)
        self.clocks.note(mhz)
        return best


def _pairs(pair: _Pair, calls: int, seconds: float) -> list[float]:
    """Return the time without the fix over that with it, pair by pair; which of them is first takes turns.

    Each is the best of `calls` in a row, after one that is not counted: the setting before was the other one. With 0
    calls it is that first one, of a forward that is long enough.
    """
    least = LEAST_PAIRS if calls else LEAST_LONG_PAIRS
    clock = pair.timer.clock
    start = clock()
    ratios: list[float] = []
    while len(ratios) < MOST_PAIRS:
        if len(ratios) >= least:
            half_width = estimate(ratios).half_width
            if clock() - start >= seconds or (half_width is not None and half_width <= NARROW):
                break
        if len(ratios) % 2:
            after = pair.with_fix(calls)
            before = pair.without_fix(calls)
        else:
            before = pair.without_fix(calls)
            after = pair.with_fix(calls)
        ratios.append(before / after)
    return ratios


def _warm(work: Work, timer: Timer) -> float:
    """Call `work` until it is warm for its shapes and settings, and return its seconds."""
    seconds = timer.isolated(work)
    for _ in range(WARM_CALLS - 1):
        before, seconds = seconds, timer.isolated(work)
        if abs(seconds - before) <= WARM_TOLERANCE * before:
            break
    return seconds


def doubled_batch(doubled: Work) -> Candidate:
    """Return the trial of the same forward on each text twice, which tells a fixed cost from one that grows with them.

    Of a fixed share `s` it gains 2 / (2 - s). Weights that are read once for both batches are fixed too, so that a
    forward that memory limits may gain as much as one that the host limits.
    """
    ranges: dict[Bound, tuple[float, float]] = {
        "compute": (0.8, 1.05 * 2 / (1 + LARGEST)),
        "memory": (0.8, 2.3),
        "launch": (0.95 * 2 / (2 - LARGEST), 2.3),
    }
    return Candidate(Fix("double_batch"), lambda: Made(doubled), samples=2.0, expected=ranges, is_fix=False)


def fewer_threads(work: Work, number: int | None = None) -> Candidate | None:
    """Return the trial of half the CPU threads, or of `number` of them; None where those would be no fewer.

    What the threads share takes `full` times as long, what one does alone as long as before. Threads that get into each
    other's way leave less to lose.
    """
    threads = torch.get_num_threads()
    fewer = threads // 2 if number is None else number
    if not 1 <= fewer < threads:
        return None
    full = threads / fewer
    ranges: dict[Bound, tuple[float, float]] = {
        "compute": (0.8 / full, 1.05 / (1 - LARGEST + LARGEST * full)),
        "launch": (0.95 / (LARGEST + (1 - LARGEST) * full), 1.6),
    }
    fix = Fix("threads", {"threads": fewer, "instead_of": threads})
    return Candidate(fix, lambda: Made(work), setting=lambda: host_threads(fewer), expected=ranges)


# A faster kind of product can help neither what the host limits nor, by itself, tell compute from memory.
FASTER_MATMUL: Mapping[Bound, tuple[float, float]] = {
    "compute": (0.0, INFINITE),
    "memory": (0.0, INFINITE),
    "launch": (0.0, 1.05 / LARGEST),
}


def reduced_precision_matmul(
    work: Work, precision: str, ceiling_ratio: float, same_labels: Callable[[], SameLabels | None] | None = None
) -> Candidate | None:
    """Return the trial of another precision of float32 products, whose limit is `ceiling_ratio` times as high.

    None where the limits are too close for it to be another kind of product.
    """
    if ceiling_ratio < LEAST_CEILING_RATIO:
        return None
    fix = Fix("matmul_precision", {"precision": precision})
    return Candidate(
        fix, lambda: Made(work, same_labels), setting=lambda: matmul_precision(precision), expected=FASTER_MATMUL
    )


def graph_replay(work: Work, idle_share: float) -> Candidate:
    """Return the trial of the work, on the current GPU, as a graph that the host issues in one go.

    A device that waits for the host for `idle_share` of the time is called launch-bound.
    """
    not_idle = (0.87, 1 / (1 - idle_share))
    ranges: dict[Bound, tuple[float, float]] = {"launch": (1.15, INFINITE), "compute": not_idle, "memory": not_idle}
    return Candidate(Fix("issue_at_once"), lambda: Made(captured(work).replay), expected=ranges)
