"""Record cycles of a loop that somebody else drives, such as a training framework with callbacks."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
import torch.profiler

from boundby.capture.engine import Engine, completed
from boundby.capture.export import Naming, check_suffix, naming_of_process
from boundby.capture.manifest import CaptureManifest, CaptureOptions, Cycle, Record
from boundby.capture.remarks import summary
from boundby.capture.schedule import NEVER, Content, Schedule
from boundby.trace import MAX_JSON_BYTES

NO_ESTIMATE = "a size is known from the second cycle without stacks on"
MOST_RETRIES = 2  # further cycles in place of those that gave no trace
KEPT = "kept all the same, since no smaller one can follow"


class Recorder:
    """Records the cycles of a schedule: `start`, `step` after each step of the loop, `stop`; also a context manager.

    The three raise nothing: what fails is a downgrade in the manifest, and the loop runs on. Files go to `trace_path`
    and the paths of the options, with the rank in front where there are several and the cycle behind where there are
    several; `naming` replaces the rank that is found. Stacks and the memory snapshot belong to the last cycle.
    `on_cycle` is told of each cycle as it ends. Call `step` from one thread and one depth of calls.
    """

    def __init__(
        self,
        schedule: Schedule,
        trace_path: Path,
        *,
        device: torch.device,
        options: CaptureOptions | None = None,
        naming: Naming | None = None,
        on_cycle: Callable[[Cycle], object] | None = None,
    ) -> None:
        check_suffix(trace_path)
        self._trace_path = trace_path
        self._device = device
        self._options = options or CaptureOptions()
        self._naming = naming
        self._on_cycle = on_cycle
        self._log = Record()
        self._engine: Engine | None = None  # None before the start, and for a loop without a step to record
        self._wanted = self._schedule = schedule  # as it was given, and as it fits into the loop
        self._planned = schedule.repeat  # cycles
        self._retries = MOST_RETRIES
        self._content = Content(schedule.active, self._options.shapes, self._options.memory)  # of the next cycle
        self._wants_stacks = self._options.records_stacks
        self._step_bytes: float | None = None  # of JSON, in the last cycle without stacks
        self._estimated_bytes: int | None = None
        self._seconds = 0.0  # inside the cycles, with export
        self._opened_s = 0.0
        self._first = self._number = 0  # of the loop, and of the step that runs
        self._end = NEVER  # the number of the first step behind the loop
        self._opened_at = 0
        self._opens_at = NEVER  # the number of the step before which the next cycle opens
        self._wake_at = NEVER  # the first step number at which there is something to do
        self._is_stopped = False

    def __enter__(self) -> "Recorder":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, total_steps: int | None = None, first_step: int = 0) -> None:
        """Begin, before the first step, which has this number: that of the checkpoint, where a run is resumed.

        A schedule longer than `total_steps`, the steps that are left, where known, is shortened.
        """
        if self._engine is None and not self._is_stopped:
            self._guarded(lambda: self._begin(total_steps, first_step))

    def step(self) -> None:
        """Take note that a step of the loop has ended."""
        self._number += 1
        if self._number >= self._wake_at:  # at rest, this line is all that the loop pays
            self._guarded(self._advance)

    def exclude(self, name: str) -> None:
        """Begin, in the thread of the loop, something that is part of no step, such as an evaluation.

        It stands in the trace as a range, and the analysis cuts it out. The step that ends next ends it too.
        """
        engine = self._engine
        if engine:
            self._guarded(lambda: engine.exclude(name))

    def begin_range(self, stage: str) -> None:
        """Begin, in the thread of the loop, a stage of a step: it stands in the trace as a range of this name."""
        if self._engine:
            self._guarded(functools.partial(self._engine.begin_range, stage))

    def end_range(self, stage: str) -> None:
        """End it, with those that began inside and have not ended."""
        if self._engine:
            self._guarded(functools.partial(self._engine.end_range, stage))

    def include(self) -> None:
        """End it."""
        if self._engine:
            self._guarded(self._engine.include)

    def stop(self) -> CaptureManifest:
        """End; a recording that is under way is kept as far as it got. Return what was obtained."""
        if not self._is_stopped:
            self._is_stopped = True
            self._wake_at = NEVER
            self._guarded(self._finish)
        return self.manifest

    @property
    def is_at_work(self) -> bool:
        """Tell whether a profiler slows the step that runs, be it in warm-up; one that has failed slows none."""
        return self._engine is not None and self._engine.is_at_work

    @property
    def manifest(self) -> CaptureManifest:
        """Return what has been obtained up to now."""
        reason = self._engine.reason_for_none if self._engine else None
        wanted = CaptureManifest(
            steps_expected=self._wanted.active * self._wanted.repeat,
            seconds=self._seconds,
            estimated_bytes=self._estimated_bytes,
            estimate_reason=None if self._estimated_bytes else NO_ESTIMATE,
            trace_wanted=reason is None,
            trace_reason=f"{reason}; run without Nsight for a trace" if reason else None,
        )
        return completed(wanted, self._log, self._engine, self._naming or Naming())

    def _begin(self, total_steps: int | None, first: int) -> None:
        self._naming = self._naming or naming_of_process()
        engine = Engine(self._device, self._options, self._log, self._naming)
        if total_steps is not None:
            fitted = self._wanted.fitted(total_steps)
            if fitted != self._wanted:
                longer = f"{self._wanted} takes {self._wanted.steps} steps and the loop has {total_steps}"
                self._log.foresee("schedule", f"{longer}; {fitted or 'nothing'} instead")
            if fitted is None:
                return
            self._schedule, self._end = fitted, first + total_steps
        engine.note_warmup(self._schedule.warmup)
        if self._schedule.repeat == 1 and self._wants_stacks and not engine.reason_for_none:
            self._log.foresee("trace", "the schedule has one cycle: its times hold the cost of recording stacks")
        self._planned = self._schedule.repeat
        self._content = replace(self._content, steps=self._schedule.active)
        self._first = self._number = first
        self._opens_at = first + self._schedule.wait
        self._engine = engine
        self._enter_step(engine)

    def _advance(self) -> None:
        if self._engine:
            self._engine.end_ranges()
            self._engine.ranges.pop()
            if self._engine.is_open and self._engine.step():
                self._settle(self._engine)
            self._enter_step(self._engine)

    def _enter_step(self, engine: Engine) -> None:
        if not engine.is_open and self._number >= self._opens_at:
            self._open(engine)
        engine.ranges.push(self._number)
        self._wake_at = 0 if engine.is_open or engine.ranges.is_on else self._opens_at

    def _open(self, engine: Engine) -> None:
        """Open the next cycle before the step that comes."""
        self._opened_s, self._opened_at = time.perf_counter(), self._number
        is_last = len(engine.cycles) + 1 >= self._planned
        content = replace(self._content, stacks=self._wants_stacks and is_last)
        if self._step_bytes is not None:
            if not content.stacks:  # they swell a step by an unknown factor: the estimate is then a lower bound
                self._estimated_bytes = round(self._step_bytes * content.steps)
            content, remark = content.within(self._step_bytes, self._options.max_trace_bytes)
            if remark:
                self._log.downgrades.append(remark)
        engine.open(
            self._number,
            self._schedule.warmup,
            content,
            use=lambda profile: self._keep(engine, profile),
            with_snapshot=is_last,
        )

    def _keep(self, engine: Engine, profile: torch.profiler.profile) -> None:
        """Export what a cycle recorded."""
        options = self._options
        exported = engine.export(profile, self._cycle_path(engine), lambda size: self._admits(engine, size))
        if not exported.trace or not engine.content.stacks:
            return
        self._wants_stacks = False
        if options.stacks_path:
            path = engine.naming.path(options.stacks_path)
            with self._log.guard("stacks"):
                exported.write_stacks(path)
                engine.stacks_path = path

    def _cycle_path(self, engine: Engine) -> Path:
        number = len(engine.cycles) + 1
        return engine.naming.path(self._trace_path, number if self._schedule.repeat > 1 else None)

    def _admits(self, engine: Engine, json_bytes: int) -> bool:
        """Tell whether to keep a trace of this size: one above the limit only if no smaller one can follow."""
        limit = self._options.max_trace_bytes
        if json_bytes <= limit:
            return True
        if json_bytes > MAX_JSON_BYTES:
            return False
        upcoming, _ = engine.content.less(json_bytes, limit)
        number = len(engine.cycles) + 1
        return number >= self._planned and not self._can_follow(number, upcoming)

    def _can_follow(self, number: int, upcoming: Content | None) -> bool:
        """Tell whether the loop has room for one more cycle than planned, to replace cycle `number`."""
        if upcoming is None or self._retries == 0:
            return False
        ends_at = self._opened_at + (self._planned + 1 - number) * self._schedule.period + self._schedule.warmup
        return ends_at + upcoming.steps <= self._end

    def _settle(self, engine: Engine) -> None:
        """Book what the cycle that has closed gave, tell the owner, and plan the next one."""
        cycle = engine.book(self._cycle_path(engine), self._schedule.active)
        self._seconds += time.perf_counter() - self._opened_s
        if not engine.reason_for_none:
            self._adapt(engine, cycle)
            self._tell(cycle)
        is_due = len(engine.cycles) < self._planned
        self._opens_at = self._opened_at + self._schedule.period if is_due else NEVER

    def _adapt(self, engine: Engine, cycle: Cycle) -> None:
        """Learn the size of a step from a cycle; plan another one in place of one that gave nothing."""
        content, limit = engine.content, self._options.max_trace_bytes
        if cycle.json_bytes is not None and not cycle.stacks:
            self._step_bytes = cycle.json_bytes / content.steps
        if cycle.trace_path:
            if cycle.json_bytes is not None and cycle.json_bytes > limit:
                self._log.downgrade("trace", f"{content.excess(cycle.json_bytes, limit)}; {KEPT}")
            return
        upcoming: Content | None = None
        if cycle.json_bytes is not None:
            upcoming, remark = content.less(cycle.json_bytes, limit)
            self._log.downgrades.append(remark)
        elif engine.session and engine.session.has_given_way:
            upcoming = content
        elif engine.session and engine.session.has_failed and cycle.stacks:
            upcoming = replace(content, stacks=False)
            self._log.downgrade("stacks", "left out from then on: the profiler failed with them")
        if upcoming is None:
            return
        if cycle.stacks:
            self._wants_stacks = upcoming.stacks
        self._content = replace(upcoming, stacks=False)
        if self._can_follow(cycle.number, upcoming):
            self._retries -= 1
            self._planned += 1

    def _tell(self, cycle: Cycle) -> None:
        if self._on_cycle:
            with self._log.guard("on_cycle"):
                self._on_cycle(cycle)

    def _finish(self) -> None:
        """Close the cycle that is open, and note what is missing: the loop has ended."""
        engine = self._engine
        if engine is None:
            return
        engine.end_ranges()
        engine.ranges.pop()
        if engine.is_open:
            self._planned, self._end = len(engine.cycles) + 1, self._number  # nothing can follow
            engine.close()
            self._settle(engine)
            if engine.cycles[-1].trace_path:
                self._log.foresee("trace", "the loop ended inside it: its last ProfilerStep mark is no whole step")
        if engine.reason_for_none:
            return
        whole, ran = sum(cycle.trace_path is not None for cycle in engine.cycles), self._number - self._first
        if whole < self._schedule.repeat:
            self._log.foresee("cycles", f"{whole} of {self._schedule.repeat}; the loop ended after {ran} steps")
        if self._wants_stacks:
            self._log.foresee("stacks", "the loop ended before the cycle that records them")

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run the action; after a failure of this module, nothing more is recorded."""
        try:
            action()
        except Exception as error:
            self._log.downgrade("recorder", summary(error))
            self._wake_at = NEVER
            if self._engine and self._engine.is_open:
                self._engine.close(export=False)
