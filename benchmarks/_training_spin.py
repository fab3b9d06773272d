"""A training step of exactly known length: it spins, in five stages, so that all beyond it is the cost of timing it.

What a spin lasts longer than it should is not counted: another process has interrupted it. Neither is a step that lasts
two milliseconds more between its spins; the timer itself takes one at times. The processor time of other threads, which
write, is counted in full.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

STAGES = ("data", "h2d", "forward", "backward", "optimizer")
STEP_S = 0.005
INTERRUPTED_S = 0.002
PART_NS = round(STEP_S * 1e9 / len(STAGES))
NOTHING = nullcontext()


def bare(count: int) -> float:
    """Return the seconds of a step with nothing around its parts."""
    return _timed(count, lambda _: NOTHING, lambda: None)


def off(count: int) -> float:
    """Return the seconds of a step under a manager that is not enabled."""
    from boundby.training import ProfilerManager

    with ProfilerManager("never", enabled=False) as manager:
        return _timed(count, manager.stage, manager.step)


def timed(count: int) -> float:
    """Return the seconds of a step under a stage timer that writes to a folder from its own thread."""
    from boundby.training import StageTimer

    with tempfile.TemporaryDirectory() as folder, StageTimer(Path(folder)) as timer:
        return _timed(count, timer.stage, timer.step)


METHODS = {"off": off, "stage timer": timed}


def abba(method: Callable[[int], float], count: int) -> tuple[float, float]:
    """Return the seconds of a bare step and of one with the method, from blocks bare, method, method, bare."""
    first = bare(count)
    watched = method(count) + method(count)
    return (first + bare(count)) / 2, watched / 2


def _timed(count: int, stage: Callable[[str], Any], step: Callable[[], object]) -> float:
    """Return the mean seconds of a step. Raises ValueError where every one was interrupted."""
    beyond = []
    others = time.process_time() - time.thread_time()
    for _ in range(count):
        spun = 0
        begin = time.perf_counter_ns()
        for name in STAGES:
            with stage(name):
                spun += _spin()
        step()
        beyond.append((time.perf_counter_ns() - begin - spun) / 1e9)
    others = time.process_time() - time.thread_time() - others
    kept = [each for each in beyond if each < INTERRUPTED_S]
    if not kept:
        raise ValueError(f"each of {count} steps was interrupted; quiet the machine")
    return STEP_S + statistics.fmean(kept) + others / count


def _spin() -> int:
    """Return the nanoseconds that it took."""
    clock = time.perf_counter_ns
    begin = clock()
    end = begin + PART_NS
    while (now := clock()) < end:
        pass
    return now - begin
