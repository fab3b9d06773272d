"""The cycles of a recorder: when each one opens, what it holds, what it gave, and what is tried in its place."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.profiler

from boundby.capture.booking import booked
from boundby.capture.content import Content
from boundby.capture.export import Exported, export
from boundby.capture.manifest import CaptureOptions, Cycle, Record, summary
from boundby.capture.naming import Naming
from boundby.capture.nsight import NsightRange
from boundby.capture.schedule import NEVER, Schedule, Span
from boundby.capture.session import Session, activities_on
from boundby.capture.snapshot import MemorySnapshot, memory_module
from boundby.capture.window import Instrument, Window
from boundby.device import synchronizer
from boundby.trace.decoding import MAX_JSON_BYTES
from boundby.trace.window import EXCLUDED

MOST_RETRIES = 2  # further cycles in place of those that gave no trace
KEPT = "kept all the same, since no smaller one can follow"


@dataclass(frozen=True)
class Target:
    """What is recorded, and where it goes."""

    device: torch.device
    trace_path: Path
    options: CaptureOptions
    naming: Naming
    on_cycle: Callable[[Cycle], object] | None


class Cycles:
    """The cycles of one loop. `open_if_due` before each step, `step` after it, `cut_short` where the loop ends."""

    def __init__(
        self, schedule: Schedule, target: Target, log: Record, *, first: int, total_steps: int | None, for_nsight: bool
    ) -> None:
        self.done: list[Cycle] = []
        self.opens_at = first + schedule.wait  # the number of the step before which the next window opens
        self.stacks_path: Path | None = None
        self.snapshot_path: Path | None = None
        self.estimated_bytes: int | None = None
        self.seconds = 0.0  # inside the windows, with export
        self.activities = [] if for_nsight else activities_on(target.device)
        self._schedule = schedule
        self._target = target
        self._log = log
        self._first = first
        self._last_step = NEVER if total_steps is None else first + total_steps
        self._for_nsight = for_nsight
        self._planned = schedule.repeat
        self._retries = MOST_RETRIES
        self._content = Content(schedule.active, target.options.shapes, target.options.memory)
        self._wants_stacks = target.options.records_stacks
        self._step_bytes: float | None = None  # of JSON, in the last cycle without stacks
        self._window: Window | None = None
        self._running = self._content  # in the window
        self._opened_s = 0.0
        self._exclusion: torch.profiler.record_function | None = None  # the mark of what is part of no step
        self._session: Session | None = None
        self._snapshot: MemorySnapshot | None = None
        self._exported: Exported | None = None

    @property
    def is_open(self) -> bool:
        """Tell whether a window is open."""
        return self._window is not None

    @property
    def is_at_work(self) -> bool:
        """Tell whether what is in the window slows the program; the window of a profiler that has failed holds none."""
        if self._window is None:
            return False
        keeps_history = self._snapshot is not None and self._snapshot.is_open
        return self._session is None or self._session.is_at_work or keeps_history

    def open_if_due(self, number: int) -> None:
        """Open the next window if step `number` is its first."""
        if self._window is not None or number < self.opens_at:
            return
        self._opened_s = time.perf_counter()
        is_last = len(self.done) + 1 >= self._planned
        self._running = replace(self._content, stacks=self._wants_stacks and is_last)
        if self._step_bytes is not None:
            if not self._running.stacks:  # they swell a step by an unknown factor: the estimate is then a lower bound
                self.estimated_bytes = round(self._step_bytes * self._running.steps)
            self._running, remark = self._running.within(self._step_bytes, self._target.options.max_trace_bytes)
            if remark:
                self._log.downgrades.append(remark)
        self._exported = None
        span = Span(number, self._schedule.warmup, self._running.steps)
        self._window = Window(span, self._instruments(span, is_last), synchronizer(self._target.device))
        self._window.start()

    def exclude(self, name: str) -> None:
        """Mark in the trace, until `include`, that what comes is part of no step; the device has none of one left."""
        if self._window is None or self._exclusion is not None:
            return
        synchronizer(self._target.device)()
        self._exclusion = torch.profiler.record_function(EXCLUDED + name)
        self._exclusion.__enter__()

    def include(self) -> None:
        """End the mark."""
        mark, self._exclusion = self._exclusion, None
        if mark is not None:
            synchronizer(self._target.device)()
            mark.__exit__(None, None, None)

    def step(self) -> None:
        """Take note that a step has ended."""
        if self._window is None:
            return
        self.include()
        self._window.step()
        if self._window.is_over:
            self._close(self._window)

    def cut_short(self, number: int) -> None:
        """Close the window that is open, and note what is missing: the loop has ended before step `number`."""
        if self._window is not None:
            self._planned, self._last_step = len(self.done) + 1, number  # nothing can follow
            self.include()
            self._window.stop()
            self._close(self._window)
            if self.done[-1].trace_path:
                self._log.foresee("trace", "the loop ended inside it: its last ProfilerStep mark is no whole step")
        if self._for_nsight:
            return
        whole, ran = sum(cycle.trace_path is not None for cycle in self.done), number - self._first
        if whole < self._schedule.repeat:
            self._log.foresee("cycles", f"{whole} of {self._schedule.repeat}; the loop ended after {ran} steps")
        if self._wants_stacks:
            self._log.foresee("stacks", "the loop ended before the cycle that records them")

    def abandon(self) -> None:
        """Close the window that is open and keep nothing of it."""
        window, self._window = self._window, None
        if window:
            self.include()
            window.stop(export=False)

    def _instruments(self, span: Span, is_last: bool) -> list[Instrument]:
        if self._for_nsight:
            return [NsightRange(self._log, span)]
        settings = self._running.settings(self.activities)
        self._session = Session("trace", self._log, span, self._keep, settings)
        instruments: list[Instrument] = [self._session]
        memory, path = memory_module(self._target.device), self._target.options.snapshot_path
        if is_last and memory and path and self.snapshot_path is None:
            self._snapshot = MemorySnapshot(self._log, span, memory, self._target.naming.path(path))
            instruments.append(self._snapshot)
        return instruments

    def _trace_path(self) -> Path:
        number = len(self.done) + 1
        return self._target.naming.path(self._target.trace_path, number if self._schedule.repeat > 1 else None)

    def _keep(self, profile: torch.profiler.profile) -> None:
        options = self._target.options
        self._exported = export(profile, self._trace_path(), self._admits)
        if not self._exported.trace or not self._running.stacks:
            return
        self._wants_stacks = False
        if options.stacks_path:
            path = self._target.naming.path(options.stacks_path)
            try:
                self._exported.write_stacks(path)
                self.stacks_path = path
            except (OSError, ValueError) as error:
                self._log.downgrade("stacks", summary(error))

    def _admits(self, json_bytes: int) -> bool:
        """Tell whether a trace of this size is kept: one above the limit too, where no smaller one can follow it."""
        limit = self._target.options.max_trace_bytes
        if json_bytes <= limit:
            return True
        if self._window is None or json_bytes > MAX_JSON_BYTES:
            return False
        upcoming, _ = self._running.less(json_bytes, limit)
        number = len(self.done) + 1
        return number >= self._planned and not self._can_follow(number, self._window.span.first, upcoming)

    def _can_follow(self, number: int, first: int, upcoming: Content | None) -> bool:
        """Tell whether the loop has room for a cycle more than planned, in place of this one."""
        if upcoming is None or self._retries == 0:
            return False
        ends_at = first + (self._planned + 1 - number) * self._schedule.period + self._schedule.warmup
        return ends_at + upcoming.steps <= self._last_step

    def _close(self, window: Window) -> None:
        """Book what the window gave, tell the owner, and plan the next one."""
        self._window = None
        cycle = self._booked(window)
        self.done.append(cycle)
        self.seconds += time.perf_counter() - self._opened_s
        if self._snapshot:
            self.snapshot_path, self._snapshot = self._snapshot.written, None
        if not self._for_nsight:
            self._adapt(cycle, window.span.first)
            self._tell(cycle)
        self._exported = self._session = None
        is_due = len(self.done) < self._planned
        self.opens_at = window.span.first + self._schedule.period if is_due else NEVER

    def _booked(self, window: Window) -> Cycle:
        """Return what the window gave; steps that the loop did not end are not counted."""
        return booked(
            self._log,
            self._exported,
            self._running,
            self.activities,
            self._trace_path(),
            number=len(self.done) + 1,
            first_step=window.span.first + window.span.warmup,
            steps_expected=self._schedule.active,
            whole_steps=window.recorded,
        )

    def _adapt(self, cycle: Cycle, first: int) -> None:
        """Learn the size of a step from a cycle; plan another one in place of one that gave nothing."""
        if cycle.json_bytes is not None and not cycle.stacks:
            self._step_bytes = cycle.json_bytes / self._running.steps
        limit = self._target.options.max_trace_bytes
        if cycle.trace_path:
            if cycle.json_bytes is not None and cycle.json_bytes > limit:
                self._log.downgrade("trace", f"{self._running.excess(cycle.json_bytes, limit)}; {KEPT}")
            return
        upcoming: Content | None = None
        if cycle.json_bytes is not None:
            upcoming, remark = self._running.less(cycle.json_bytes, limit)
            self._log.downgrades.append(remark)
        elif self._session and self._session.has_given_way:
            upcoming = self._running
        elif self._session and self._session.has_failed and cycle.stacks:
            upcoming = replace(self._running, stacks=False)
            self._log.downgrade("stacks", "left out from then on: the profiler failed with them")
        if upcoming is None:
            return
        if cycle.stacks:
            self._wants_stacks = upcoming.stacks
        self._content = replace(upcoming, stacks=False)
        if self._can_follow(cycle.number, first, upcoming):
            self._retries -= 1
            self._planned += 1

    def _tell(self, cycle: Cycle) -> None:
        if self._target.on_cycle:
            try:
                self._target.on_cycle(cycle)
            except Exception as error:
                self._log.downgrade("on_cycle", summary(error))
