"""Record steps of a program that is driven here: a callable, called as often as the recording needs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.profiler

from boundby.capture.booking import booked
from boundby.capture.content import Content
from boundby.capture.export import Exported, check_suffix, export, exported_bytes
from boundby.capture.manifest import CaptureManifest, CaptureOptions, Cycle, Record
from boundby.capture.nsight import NsightRange, StepRanges, nsight_variable, reason_under_nsight
from boundby.capture.schedule import Span
from boundby.capture.session import Session, activities_on
from boundby.capture.shortfalls import note_unavailable, note_warmup
from boundby.capture.snapshot import MemorySnapshot, memory_module
from boundby.capture.window import Instrument, Window
from boundby.device import synchronizer

STACK_STEPS = 1


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
    job = _Job(step, device, warmup, options or CaptureOptions())
    variable = nsight_variable()
    if variable:
        job.run_for_nsight(steps, reason_under_nsight(variable))
    else:
        job.record(trace_path, steps)
    trace = job.cycle
    return CaptureManifest(
        torch_version=str(torch.__version__),
        activities=() if variable else tuple(activity.name for activity in job.activities),
        steps_expected=steps,
        steps_recorded=trace.steps_recorded if trace else 0,
        trace_path=trace.trace_path if trace else None,
        trace_bytes=trace.trace_bytes if trace else None,
        stacks_path=job.stacks_path,
        seconds=time.perf_counter() - started,
        downgrades=tuple(job.log.downgrades),
        unavailable=tuple(job.log.unavailable),
        warnings=tuple(dict.fromkeys(job.log.warnings)),
        snapshot_path=job.snapshot_path,
        estimated_bytes=job.estimated_bytes,
        estimate_reason=job.estimate_reason,
        cycles=(trace,) if trace else (),
    )


class _Job:
    """The recordings of one capture, which share the program, its step numbers, the device and the log."""

    def __init__(
        self, step: Callable[[int], object], device: torch.device, warmup: int, options: CaptureOptions
    ) -> None:
        self.log = Record()
        self.activities = activities_on(device)
        self.cycle: Cycle | None = None
        self.stacks_path: Path | None = None
        self.snapshot_path: Path | None = None
        self.estimated_bytes: int | None = None
        self.estimate_reason: str | None = "one step was asked for, and nothing is smaller"
        self._step = step
        self._number = 0
        self._device = device
        self._synchronize = synchronizer(device)
        self._warmup = warmup
        self._options = options
        self._ranges = StepRanges(self.log, options.nvtx)

    def record(self, path: Path, steps: int) -> None:
        """Record trace, stacks and memory snapshot, each in steps of its own."""
        note_unavailable(self.log, self._device, self.activities)
        note_warmup(self.log, self._warmup)
        content = Content(steps, self._options.shapes, self._options.memory)
        self._record_trace(path, self._affordable(content, path.parent) if steps > 1 else content)
        if self._options.stacks_path:
            self._record_stacks(self._options.stacks_path)
        memory = memory_module(self._device)
        if self._options.snapshot_path and memory:
            span = Span(self._number, 0, 1)
            snapshot = MemorySnapshot(self.log, span, memory, self._options.snapshot_path)
            self._run(span, [snapshot])
            self.snapshot_path = snapshot.written

    def run_for_nsight(self, steps: int, reason: str) -> None:
        """Run the steps with named ranges, the recorded ones marked for Nsight to collect."""
        self.log.downgrade("trace", f"not recorded: {reason}")
        self.estimate_reason = reason
        self._ranges = StepRanges(self.log, True)
        span = Span(self._number, self._warmup, steps)
        self._run(span, [NsightRange(self.log, span)])

    def _affordable(self, content: Content, folder: Path) -> Content:
        """Return the content with as many steps as fit, by the size of one that is recorded for this purpose alone."""
        json_bytes = 0

        def measure(profile: torch.profiler.profile) -> None:
            nonlocal json_bytes
            json_bytes = exported_bytes(profile, folder)

        # One warm-up step on a device: there the first kernels after a profiler's start may be lost.
        self._profile("size estimate", len(self.activities) - 1, replace(content, steps=1), measure)
        if json_bytes == 0:
            self.estimate_reason = "the profiler failed; see downgrades"
            return content
        self.estimated_bytes, self.estimate_reason = json_bytes * content.steps, None
        fitting, remark = content.within(json_bytes, self._options.max_trace_bytes)
        if remark:
            self.log.downgrades.append(remark)
        return fitting

    def _record_trace(self, path: Path, content: Content) -> None:
        """Record and save the trace, less and less of it until it fits."""
        limit = self._options.max_trace_bytes
        upcoming: Content | None = content
        while upcoming:
            content = upcoming
            first = self._number + self._warmup
            exported = self._try_trace(path, content)
            if exported is None:
                return
            if exported.trace:
                self.cycle = booked(
                    self.log,
                    exported,
                    content,
                    self.activities,
                    path,
                    number=1,
                    first_step=first,
                    steps_expected=content.steps,
                    whole_steps=content.steps,
                )
                return
            upcoming, remark = content.less(exported.json_bytes, limit)
            self.log.downgrades.append(remark)

    def _try_trace(self, path: Path, content: Content) -> Exported | None:
        """Return what the recording gave, None where the profiler failed; keep it if it fits."""
        exported = None

        def keep(profile: torch.profiler.profile) -> None:
            nonlocal exported
            exported = export(profile, path, self._admits)

        self._profile("trace", self._warmup, content, keep)
        return exported

    def _record_stacks(self, path: Path) -> None:
        """Record folded stacks from a trace of their own, as they swell a trace and its times."""
        limit = self._options.max_trace_bytes

        def fold(profile: torch.profiler.profile) -> None:
            exported = export(profile, path, self._admits, keep=False)
            if exported.trace is None:
                raise ValueError(f"the trace with stacks is larger than {limit / 1e6:.1f} MB")
            exported.write_stacks(path)
            self.stacks_path = path

        self._profile("stacks", self._warmup, Content(STACK_STEPS, shapes=False, memory=False, stacks=True), fold)

    def _admits(self, json_bytes: int) -> bool:
        return json_bytes <= self._options.max_trace_bytes

    def _profile(self, what: str, warmup: int, content: Content, use: Callable[[torch.profiler.profile], None]) -> None:
        span = Span(self._number, warmup, content.steps)
        self._run(span, [Session(what, self.log, span, use, content.settings(self.activities))])

    def _run(self, span: Span, instruments: Sequence[Instrument]) -> None:
        window = Window(span, instruments, self._synchronize)
        try:
            window.start()
            for _ in range(span.length):
                self._ranges.push(self._number)
                self._step(self._number)
                self._ranges.pop()
                self._number += 1
                window.step()
        except BaseException:
            self._ranges.pop()
            window.stop(export=False)
            raise
        window.stop()
