"""Record cycles of a loop that somebody else drives, such as a training framework with callbacks."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from boundby.capture.cycles import Cycles, Target
from boundby.capture.export import check_suffix
from boundby.capture.manifest import CaptureManifest, CaptureOptions, Cycle, Record, summary
from boundby.capture.naming import Naming, naming_of_process
from boundby.capture.nsight import StepRanges, nsight_variable, reason_under_nsight
from boundby.capture.schedule import NEVER, Schedule
from boundby.capture.session import activities_on
from boundby.capture.shortfalls import note_unavailable, note_warmup

NO_ESTIMATE = "a size is known from the second cycle without stacks on"


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
        self._schedule = schedule
        self._trace_path = trace_path
        self._device = device
        self._options = options or CaptureOptions()
        self._naming = naming
        self._on_cycle = on_cycle
        self._log = Record()
        self._cycles: Cycles | None = None  # None before the start, and for a loop without a step to record
        self._ranges = StepRanges(self._log, self._options.nvtx)
        self._number = 0  # of the step that runs
        self._wake_at = NEVER  # the first step number at which there is something to do
        self._reason_for_none: str | None = None  # why torch.profiler stays off; then all is for Nsight
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
        if self._cycles is None and not self._is_stopped:
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
        cycles = self._cycles
        if cycles:
            self._guarded(lambda: cycles.exclude(name))

    def include(self) -> None:
        """End it."""
        if self._cycles:
            self._guarded(self._cycles.include)

    def stop(self) -> CaptureManifest:
        """End; a recording that is under way is kept as far as it got. Return what was obtained."""
        if not self._is_stopped:
            self._is_stopped = True
            self._wake_at = NEVER
            self._guarded(self._end)
        return self.manifest

    @property
    def is_at_work(self) -> bool:
        """Tell whether a profiler slows the step that runs, be it in warm-up; one that has failed slows none."""
        return self._cycles is not None and self._cycles.is_at_work

    @property
    def manifest(self) -> CaptureManifest:
        """Return what has been obtained up to now."""
        cycles = self._cycles
        done = tuple(cycles.done) if cycles and not self._reason_for_none else ()
        traces = sorted((cycle for cycle in done if cycle.trace_path), key=lambda cycle: cycle.stacks)
        naming = self._naming or Naming()
        return CaptureManifest(
            torch_version=str(torch.__version__),
            activities=tuple(activity.name for activity in cycles.activities) if cycles else (),
            steps_expected=self._schedule.active * self._schedule.repeat,
            steps_recorded=sum(cycle.steps_recorded for cycle in done),
            trace_path=traces[0].trace_path if traces else None,
            trace_bytes=traces[0].trace_bytes if traces else None,
            stacks_path=cycles.stacks_path if cycles else None,
            seconds=cycles.seconds if cycles else 0.0,
            downgrades=tuple(dict.fromkeys(self._log.downgrades)),
            unavailable=tuple(self._log.unavailable),
            warnings=tuple(dict.fromkeys(self._log.warnings)),
            snapshot_path=cycles.snapshot_path if cycles else None,
            estimated_bytes=cycles.estimated_bytes if cycles else None,
            estimate_reason=None if cycles and cycles.estimated_bytes else NO_ESTIMATE,
            rank=naming.rank,
            world_size=naming.world_size,
            cycles=done,
            trace_wanted=self._reason_for_none is None,
            trace_reason=self._reason_for_none,
        )

    def _begin(self, total_steps: int | None, first: int) -> None:
        self._naming = self._naming or naming_of_process()
        variable = nsight_variable()
        if variable:
            self._reason_for_none = f"{reason_under_nsight(variable)}; run without Nsight for a trace"
            self._log.foresee("trace", f"not recorded: {reason_under_nsight(variable)}")
            self._ranges.is_on = True
        else:
            note_unavailable(self._log, self._device, activities_on(self._device))
        schedule = self._schedule if total_steps is None else self._shortened(total_steps)
        if schedule is None:
            return
        note_warmup(self._log, schedule.warmup)
        if schedule.repeat == 1 and self._options.records_stacks and not variable:
            self._log.foresee("trace", "the schedule has one cycle: its times hold the cost of recording stacks")
        target = Target(self._device, self._trace_path, self._options, self._naming, self._on_cycle)
        self._cycles = Cycles(
            schedule, target, self._log, first=first, total_steps=total_steps, for_nsight=variable is not None
        )
        self._number = first
        self._enter_step(self._cycles)

    def _shortened(self, total_steps: int) -> Schedule | None:
        fitted = self._schedule.fitted(total_steps)
        if fitted != self._schedule:
            longer = f"{self._schedule} takes {self._schedule.steps} steps and the loop has {total_steps}"
            self._log.foresee("schedule", f"{longer}; {fitted or 'nothing'} instead")
        return fitted

    def _advance(self) -> None:
        if self._cycles:
            self._ranges.pop()
            self._cycles.step()
            self._enter_step(self._cycles)

    def _enter_step(self, cycles: Cycles) -> None:
        cycles.open_if_due(self._number)
        self._ranges.push(self._number)
        self._wake_at = 0 if cycles.is_open or self._ranges.is_on else cycles.opens_at

    def _end(self) -> None:
        self._ranges.pop()
        if self._cycles:
            self._cycles.cut_short(self._number)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Do it; after a failure of this module's own, nothing more is recorded."""
        try:
            action()
        except Exception as error:
            self._log.downgrade("recorder", summary(error))
            self._wake_at = NEVER
            if self._cycles:
                self._cycles.abandon()
