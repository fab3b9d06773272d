"""The one engine of all recordings: a window of steps under torch's profiler and its neighbours, and what it gave.

`capture` drives it with a program that is called from here; a `Recorder` follows a loop that somebody else drives.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import torch.profiler

from boundby.capture.export import Exported, Naming, check_suffix, export, exported_bytes
from boundby.capture.instruments import (
    SNAPSHOT,
    Instrument,
    MemorySnapshot,
    NsightRange,
    StepRanges,
    memory_module,
    nsight_variable,
    reason_under_nsight,
)
from boundby.capture.manifest import CaptureManifest, CaptureOptions, Cycle, Record
from boundby.capture.schedule import Content, Span
from boundby.capture.session import Session, Use, activities_on
from boundby.machine import is_gpu, is_sticky, synchronizer
from boundby.trace import EXCLUDED

STACK_STEPS = 1
STAGE = "stage: "  # in front of the name of the range
NOTHING_SMALLER = "one step was asked for, and nothing is smaller"


class Engine:
    """Records one window of steps at a time: `open` before its first step, `step` after each one.

    `close` ends it early. What the last window gave is in `exported`; `book` keeps a record of it. The device has no
    queued work left when a window and its recording begin. Under Nsight a window is a range for it to collect.
    """

    def __init__(self, device: torch.device, options: CaptureOptions, log: Record, naming: Naming) -> None:
        self.log = log
        self.naming = naming
        variable = nsight_variable()
        self.reason_for_none = reason_under_nsight(variable) if variable else None  # why torch.profiler stays off
        self.activities = [] if variable else activities_on(device)
        self.ranges = StepRanges(log, options.nvtx or variable is not None)
        self.cycles: list[Cycle] = []
        self.stacks_path: Path | None = None
        self.snapshot_path: Path | None = None
        self.exported: Exported | None = None  # None where the profiler gave nothing
        self.content = Content(0, shapes=False, memory=False)  # of the window
        self.session: Session | None = None  # of the window
        self.is_open = False
        self._options = options
        self._synchronize = synchronizer(device)
        self._memory = memory_module(device) if options.snapshot_path and not variable else None
        self._span = Span(0, 0, 0)
        self._at = 0  # steps of the span that have ended
        self._instruments: list[Instrument] = []
        self._snapshot: MemorySnapshot | None = None
        self._mark: torch.profiler.record_function | None = None  # of what is part of no step
        self._stages: list[tuple[str, torch.profiler.record_function]] = []  # marked, the outermost first
        if self.reason_for_none:
            log.foresee("trace", f"not recorded: {self.reason_for_none}")
        else:
            self._note_unavailable(device)

    @property
    def takes_snapshots(self) -> bool:
        """Tell whether a snapshot of the allocator is wanted, can be had, and is not there yet."""
        return self._memory is not None and self.snapshot_path is None

    @property
    def is_at_work(self) -> bool:
        """Tell whether what is in the window slows the program; the window of a profiler that has failed holds none."""
        if not self.is_open:
            return False
        keeps_history = self._snapshot is not None and self._snapshot.is_open
        return self.session is None or self.session.is_at_work or keeps_history

    def open(
        self,
        first: int,
        warmup: int,
        content: Content,
        *,
        what: str = "trace",
        use: Use | None = None,
        with_snapshot: bool = False,
    ) -> None:
        """Open a window before step `first`; `use` receives the stopped profiler, and without one none is started."""
        self._span, self._at, self.content = Span(first, warmup, content.steps), 0, content
        self.exported = self.session = self._snapshot = None
        self._instruments = [NsightRange(self.log)] if self.reason_for_none else []
        if use and not self.reason_for_none:
            self.session = Session(what, self.log, self._span, use, content.settings(self.activities))
            self._instruments.append(self.session)
        if with_snapshot and self._memory and self._options.snapshot_path and self.takes_snapshots:
            path = self.naming.path(self._options.snapshot_path)
            self._snapshot = MemorySnapshot(self.log, self._memory, path)
            self._instruments.append(self._snapshot)
        self.is_open = True
        self._synchronize()
        for instrument in self._instruments:
            instrument.start()
        if warmup == 0:
            self._record()

    def step(self) -> bool:
        """Note that a step of the window has ended; return whether that closed the window."""
        self.include()
        self._at += 1
        if self._at == self._span.warmup:
            self._synchronize()
        for instrument in self._instruments:
            instrument.step()
        if self._at == self._span.warmup:
            self._record()
        if self._at >= self._span.length:
            self.close()
        return not self.is_open

    def close(self, *, export: bool = True) -> None:
        """Close the window; a recording without a whole step is thrown away, and without `export` any other too."""
        self.include()
        self.is_open = False
        for instrument in self._instruments:
            instrument.stop(export=export and self.whole_steps > 0)
        if self._snapshot:
            self.snapshot_path = self._snapshot.written

    @property
    def whole_steps(self) -> int:
        """Return how many whole steps of the recording have ended."""
        return max(0, self._at - self._span.warmup)

    def export(
        self, profile: torch.profiler.profile, path: Path, admits: Callable[[int], bool], *, keep: bool = True
    ) -> Exported:
        """Export what the profiler recorded; see `boundby.capture.export`."""
        self.exported = export(profile, path, admits, keep=keep)
        return self.exported

    def book(self, path: Path, steps_expected: int) -> Cycle:
        """Record what the window gave, with its trace at `path`, and note what is missing.

        Of a mark beyond the whole steps only a part is in the trace.
        """
        kept = self.exported if self.exported and self.exported.trace else None
        steps = min(kept.steps, self.whole_steps) if kept else 0
        if kept and steps < self.content.steps:
            note = self.log.downgrade if steps < self.whole_steps else self.log.foresee
            note("steps", f"{steps} of {self.content.steps} are in the trace")
        if kept and len(self.activities) > 1 and not kept.has_device_events:
            self.log.downgrade("device events", "the trace holds none; run with KINETO_LOG_LEVEL=0 to see why")
        cycle = Cycle(
            number=len(self.cycles) + 1,
            first_step=self._span.first + self._span.warmup,
            steps_expected=steps_expected,
            steps_recorded=steps,
            stacks=self.content.stacks,
            trace_path=path if kept else None,
            trace_bytes=path.stat().st_size if kept else None,
            json_bytes=self.exported.json_bytes if self.exported else None,
        )
        self.cycles.append(cycle)
        return cycle

    def exclude(self, name: str) -> None:
        """Mark in the trace, until `include`, that what follows is in no step; the device has finished the last one."""
        if not self.is_open or self._mark is not None:
            return
        self._synchronize()
        self._mark = torch.profiler.record_function(EXCLUDED + name)
        self._mark.__enter__()  # type: ignore[no-untyped-call]

    def include(self) -> None:
        """End the mark."""
        mark, self._mark = self._mark, None
        if mark is not None:
            self._synchronize()
            mark.__exit__(None, None, None)

    def begin_range(self, stage: str) -> None:
        """Mark in the trace, until `end_range`, that what follows is a stage of a step."""
        if self.is_open and self._mark is None:
            mark = torch.profiler.record_function(STAGE + stage)
            mark.__enter__()  # type: ignore[no-untyped-call]
            self._stages.append((stage, mark))

    def end_range(self, stage: str) -> None:
        """End the mark of a stage, and of those inside it whose end never came; one that never began is ignored."""
        names = [name for name, _ in self._stages]
        if stage in names:
            self.end_ranges(names.index(stage))

    def end_ranges(self, outermost: int = 0) -> None:
        """End the marks of stages from the `outermost` on; all of them at the end of their step."""
        while len(self._stages) > outermost:
            self._stages.pop()[1].__exit__(None, None, None)

    def note_warmup(self, warmup: int) -> None:
        """Note a recording without warm-up."""
        if warmup == 0:
            self.log.foresee(
                "warm-up", "none was asked for: the first recorded step also pays for starting the profiler"
            )

    def _record(self) -> None:
        for instrument in self._instruments:
            instrument.record()

    def _note_unavailable(self, device: torch.device) -> None:
        if len(self.activities) == 1:
            self.log.lacks("device events", f"the profiler of this torch records none for {device.type}")
        if memory_module(device) is None:
            lack = f"torch keeps the history of an allocator for CUDA and XPU only, not for {device.type}"
            self.log.lacks(SNAPSHOT, lack)


def completed(wanted: CaptureManifest, log: Record, engine: Engine | None, naming: Naming) -> CaptureManifest:
    """Return the manifest with what has been obtained up to now; without an engine nothing was recorded."""
    cycles = tuple(engine.cycles) if engine and not engine.reason_for_none else ()
    traces = sorted((cycle for cycle in cycles if cycle.trace_path), key=lambda cycle: cycle.stacks)
    return msgspec.structs.replace(
        wanted,
        activities=tuple(activity.name for activity in engine.activities) if engine else (),
        steps_recorded=sum(cycle.steps_recorded for cycle in cycles),
        trace_path=traces[0].trace_path if traces else None,
        trace_bytes=traces[0].trace_bytes if traces else None,
        stacks_path=engine.stacks_path if engine else None,
        downgrades=tuple(dict.fromkeys(log.downgrades)),
        unavailable=tuple(log.unavailable),
        warnings=tuple(dict.fromkeys(log.warnings)),
        snapshot_path=engine.snapshot_path if engine else None,
        rank=naming.rank,
        world_size=naming.world_size,
        cycles=cycles,
    )


def capture(
    step: Callable[[int], object],
    *,
    device: torch.device,
    steps: int,
    warmup: int,
    trace_path: Path,
    options: CaptureOptions | None = None,
) -> CaptureManifest:
    """Run `step(0)`, `step(1)`, … and record `steps` of them after `warmup`; return what was obtained.

    `trace_path` ends with `.json` or `.json.gz`. Of several steps one is recorded alone first: its size says whether
    all fit into `max_trace_bytes`. Stacks, a memory snapshot, and a second try after a trace above the limit run
    further steps. An exception of `step` passes through, with the profiler stopped and no file written.
    """
    check_suffix(trace_path)
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps is {steps} and warmup is {warmup}; at least 1 and 0 are needed")
    started = time.perf_counter()
    drive = _Drive(step, device, warmup, options or CaptureOptions())
    drive.record(steps, trace_path)
    engine = drive.engine
    wanted = CaptureManifest(
        steps_expected=steps,
        seconds=time.perf_counter() - started,
        estimated_bytes=drive.estimated_bytes,
        estimate_reason=drive.estimate_reason,
    )
    return completed(wanted, engine.log, engine, engine.naming)


class _Drive:
    """The windows of one capture, each in steps of its own: a size, the trace, stacks, and a memory snapshot."""

    def __init__(
        self, step: Callable[[int], object], device: torch.device, warmup: int, options: CaptureOptions
    ) -> None:
        self.engine = Engine(device, options, Record(), Naming())
        self.estimated_bytes: int | None = None
        self.estimate_reason: str | None = self.engine.reason_for_none or NOTHING_SMALLER
        self._step, self._device = step, device
        self._warmup = warmup
        self._options = options
        self._number = 0  # of the next step

    def record(self, steps: int, path: Path) -> None:
        """Run the steps that it takes."""
        engine, options = self.engine, self._options
        content = Content(steps, options.shapes, options.memory)
        if engine.reason_for_none:
            self._run(self._warmup, content)
            return
        engine.note_warmup(self._warmup)
        self._record_trace(path, self._affordable(content, path.parent) if steps > 1 else content)
        if options.stacks_path:
            self._record_stacks(options.stacks_path)
        if engine.takes_snapshots:
            self._run(0, Content(1, shapes=False, memory=False), with_snapshot=True)

    def _affordable(self, content: Content, folder: Path) -> Content:
        """Return the content with as many steps as fit, by the size of one that is recorded for this purpose alone."""
        sizes: list[int] = []
        # One warm-up step on a device: there the first kernels after a profiler's start may be lost.
        self._run(
            len(self.engine.activities) - 1,
            replace(content, steps=1),
            what="size estimate",
            use=lambda profile: sizes.append(exported_bytes(profile, folder)),
        )
        if not sizes:
            self.estimate_reason = "the profiler failed; see downgrades"
            return content
        self.estimated_bytes, self.estimate_reason = sizes[0] * content.steps, None
        fitting, remark = content.within(sizes[0], self._options.max_trace_bytes)
        if remark:
            self.engine.log.downgrades.append(remark)
        return fitting

    def _record_trace(self, path: Path, wanted: Content) -> None:
        """Record and save the trace, less and less of it until it fits."""
        content: Content | None = wanted
        while content:
            self._run(self._warmup, content, use=lambda profile: self.engine.export(profile, path, self._admits))
            exported = self.engine.exported
            if exported is None:
                return
            if exported.trace:
                self.engine.book(path, content.steps)
                return
            content, remark = content.less(exported.json_bytes, self._options.max_trace_bytes)
            self.engine.log.downgrades.append(remark)

    def _record_stacks(self, path: Path) -> None:
        """Record folded stacks from a trace of their own, as they swell a trace and its times."""

        def fold(profile: torch.profiler.profile) -> None:
            exported = self.engine.export(profile, path, self._admits, keep=False)
            if exported.trace is None:
                limit = self._options.max_trace_bytes
                raise ValueError(f"the trace with stacks is larger than {limit / 1e6:.1f} MB")
            exported.write_stacks(path)
            self.engine.stacks_path = path

        content = Content(STACK_STEPS, shapes=False, memory=False, stacks=True)
        self._run(self._warmup, content, what="stacks", use=fold)

    def _admits(self, json_bytes: int) -> bool:
        return json_bytes <= self._options.max_trace_bytes

    def _run(
        self,
        warmup: int,
        content: Content,
        *,
        what: str = "trace",
        use: Use | None = None,
        with_snapshot: bool = False,
    ) -> None:
        """Run the steps of one window."""
        engine = self.engine
        try:
            engine.open(self._number, warmup, content, what=what, use=use, with_snapshot=with_snapshot)
            while engine.is_open:
                engine.ranges.push(self._number)
                self._step(self._number)
                engine.ranges.pop()
                self._number += 1
                engine.step()
        except BaseException as error:
            if not (is_gpu(self._device) and is_sticky(error)):
                engine.ranges.pop()
                engine.close(export=False)
            elif engine.session:
                engine.session.leave()
            raise
