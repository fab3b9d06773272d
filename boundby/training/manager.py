"""Profile a training loop: the times of its stages all along, and a trace of a few of its steps."""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from boundby import files
from boundby.bound import Verdict, judge_trace
from boundby.capture import Guard, Say
from boundby.machine import PsutilSource, Source, Sources
from boundby.trace import OPERATOR_COLUMNS, operator_rows
from boundby.training import results, stages, summary
from boundby.training.reader import others_of
from boundby.training.recorder import CudaMarks, HookEvent
from boundby.training.records import StageTimes
from boundby.training.results import RunFiles, remove_earlier
from boundby.training.timer import ENDED, UNSTOPPED, Block, Item, StageTimer, TimerOptions

if TYPE_CHECKING:
    import torch

    from boundby.capture import CaptureManifest, CaptureOptions, Cycle, Recorder, Schedule
    from boundby.machine import Allocator

NO_TRACE_WANTED = "ManagerOptions.trace is False; with True a few steps are recorded"
WAIT, WARMUP, ACTIVE = 10, 2, 3  # steps of the schedule, where none is given: past what happens once


COMPILER = "torch._dynamo.callback"
SHORT_COLLECTION_NS = 200_000
INTERVAL_S = 1.0  # psutil answers in 0.1 ms, NVML in up to 1 ms


@dataclass(frozen=True)
class ManagerOptions:
    """What is recorded beside the stages, and which process of the job this is."""

    timer: TimerOptions | None = None  # None: rank and size are those of torch.distributed or the environment
    trace: bool = True
    no_trace_reason: str = NO_TRACE_WANTED  # for the manifest, where `trace` is False
    readings: bool = True  # metrics of memory, load and clock events, once a second
    capture: "CaptureOptions | None" = None


class ProfilerManager:
    """Times the stages of a loop and records a few of its steps; everything goes to a run folder.

    `start`, `step` after each step, `stop`; also a context manager. Stages are marked as on a `StageTimer`. Nothing
    here raises but for arguments that cannot be: what fails is a remark, said once to `say` and kept in
    `profiler_summary.json` and `manifest.json`; what only follows from the settings, the length of the loop or the
    device stands there alone. A profiler is for one loop: started again, it stays off and says so. What an earlier run
    recorded in the folder is removed at the start, unless that run goes on. Steps that torch's profiler slows down stay
    out of the summaries, with the spans that hold one, and the time that profiling takes between two steps is in no
    step and no span. With `enabled=False` nothing happens, and torch is not loaded.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: "torch.device | None" = None,
        schedule: "Schedule | None" = None,
        options: ManagerOptions | None = None,
        say: Say | None = None,
        enabled: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self._device = device
        self._schedule = schedule
        self._options = options or ManagerOptions()
        self._is_enabled = enabled
        self._is_on = False
        self._has_ended = False
        self._pid = os.getpid()
        self._recorder: Recorder | None = None
        self._readings: Readings | None = None
        self._derived: Path | None = None  # the trace from which the tables are
        self.trace_verdict: Verdict | None = None  # what the trace says, None where there is none yet
        self._files = RunFiles(self.folder, 0, 1)
        self._is_excluding = False  # what runs is marked in the trace as part of no step
        self._marks_trace = False
        self._interruptions: Interruptions | None = None
        self.between_steps_s = 0.0  # that profiling has taken up to now: they are in no step and no span
        self._thread = 0  # of the loop, while exclusions are marked
        self.timer = StageTimer(self.folder, options=self._options.timer, say=say, enabled=enabled)

    def __enter__(self) -> "ProfilerManager":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(error)

    def register(self, event: HookEvent, hook: Callable[..., object]) -> None:
        """Call `hook` at each event from now on, in the thread in which it happens.

        `stage_start(name)`, then `part_start(name)`, or `excluded_start(name)` where it is part of no step; spans have
        neither. `stage_end(name, seconds)`, `step_end(number, seconds)`, `trace_ready(cycle)`. A hook that raises is
        not called again. Raises ValueError for another event.
        """
        self.timer.hooks.register(event, hook)

    def start(self, total_steps: int | None = None, first_step: int = 0) -> None:
        """Begin before the first step. `total_steps`, where known, shortens the schedule of the trace to the loop.

        `first_step` is the number of the first step, where a run is resumed; `total_steps` are then those left.
        """
        if self._is_on or not self._is_enabled:
            return
        if self._has_ended:
            self.timer.remarks.add("profiler", ENDED)
            return
        self._is_on = True
        self._pid = os.getpid()
        atexit.register(self._stop_at_exit)
        with self._guard("profiler"):
            self._prepare()
        self.timer.start(first_step)
        if self._recorder:
            self._recorder.start(total_steps, first_step)
        self._begin_step()
        self._interruptions = Interruptions(self.timer)

    def step(self, number: int | None = None) -> None:
        """Take note that a step has ended, which had this number; one more than the last, if None."""
        if not self._is_on:
            return
        if self._interruptions:
            self._interruptions.is_paused = True  # what the profiler does between steps is no part of the loop
            self._interruptions.watch_compiler()
        self.timer.step(number)
        began = perf_counter()
        if self._recorder:
            self._recorder.step()
        values: dict[str, float] = {}
        if self._readings:
            with self._guard("readings"):
                values = self._readings.due()
        if values:
            self.timer.metrics(values)
        if self._recorder or values:
            self._begin_step()
            self.between_steps_s += perf_counter() - began
        if self._interruptions:
            self._interruptions.is_paused = False

    def stop(self, error: BaseException | None = None) -> None:
        """End, and write everything; `error` is what ended the loop, None where it ended well."""
        if not self._is_on or os.getpid() != self._pid:
            return
        self._is_on, self._has_ended = False, True
        atexit.unregister(self._stop_at_exit)
        if self._interruptions:
            self._interruptions.stop()
        manifest = self._recorder.stop() if self._recorder else None
        self.timer.stop(error)
        reason = None if self._options.trace else self._options.no_trace_reason
        with self._guard(results.MANIFEST):
            self._write_manifest(manifest or results.manifest_of_nothing(self._files, reason))
        with self._guard(results.SUMMARY):
            document = summary.run_summary(self.timer.snapshot(), manifest, self.trace_verdict)
            files.write_json(self._files.path(results.SUMMARY), document)
        with self._guard(f"{results.SUMMARY} of all ranks"):
            summary.merge_at_stop(self._files)

    def stage(self, name: str) -> Block:
        """Return a context that times its block as a stage."""
        return self.timer.stage(name)

    def span(self, name: str) -> Block:
        """Return a context that times its block, which holds steps, such as an epoch."""
        return self.timer.span(name)

    def excluded(self, name: str = "evaluation") -> Block:
        """Return a context whose block is no part of a step, and of no recorded one."""
        return self.timer.excluded(name)

    def timed(self, items: Iterable[Item], name: str = "data") -> Iterator[Item]:
        """Yield the items; the wait for each of them is a stage."""
        return self.timer.timed(items, name)

    def metrics(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add numbers of a step, of the one that runs if `step` is None."""
        self.timer.metrics(values, step)

    def snapshot(self) -> StageTimes:
        """Return the stage times known up to now."""
        return self.timer.snapshot()

    @property
    def slows_step(self) -> bool:
        """Tell whether torch's profiler is at work in the step that runs, be it in warm-up."""
        return self._recorder is not None and self._recorder.is_at_work

    @property
    def manifest(self) -> "CaptureManifest | None":
        """Return what has been recorded up to now; None where no trace is asked for."""
        return self._recorder.manifest if self._recorder else None

    def told(self) -> str:
        """Return what a person reads at the end: the stages, and the verdict on this process and those known here."""
        times = self.snapshot()
        return results.told([times, *others_of(self.folder, times)], self.trace_verdict)

    def _begin_step(self) -> None:
        """Let the current step begin only now, as the profiler slows its warm-up too."""
        self.timer.restart_step()
        self._is_excluding = False  # the recorder ends one with its step
        is_at_work = self.slows_step
        if is_at_work:
            self.timer.disturb()
        if is_at_work is not self._marks_trace:
            self._mark_trace(is_at_work)

    def _mark_trace(self, wanted: bool) -> None:
        """Mark in the trace the stages, and what is part of no step, while there is one: no other step pays for it."""
        self._marks_trace = wanted
        self._thread = threading.get_ident()
        change = self.timer.hooks.register if wanted else self.timer.hooks.unregister
        change("part_start", self._begin_range)
        change("excluded_start", self._exclude)
        change("stage_end", self._end_mark)

    def _begin_range(self, name: str) -> None:
        if self._recorder and not self._is_excluding and threading.get_ident() == self._thread:
            self._recorder.begin_range(name)

    def _exclude(self, name: str) -> None:
        if self._recorder and not self._is_excluding and threading.get_ident() == self._thread:
            self._is_excluding = True
            self._recorder.exclude(name)

    def _end_mark(self, name: str, *_: object) -> None:
        """End the mark of a stage; that of what is excluded stays, where what has ended lay inside it."""
        if self._recorder and threading.get_ident() == self._thread:
            if not self._is_excluding:
                self._recorder.end_range(name)
            elif not self.timer.is_excluded:
                self._is_excluding = False
                self._recorder.include()

    def _prepare(self) -> None:
        """Find out about process and device, and make what records the trace."""
        from boundby.capture import CaptureOptions, Naming, Recorder, Schedule, naming_of_process
        from boundby.machine import allocator, gpu_source, is_gpu, pick_device

        timer, given = self.timer, self._options.timer
        device = self._device or pick_device()
        naming = Naming(given.rank, given.world_size) if given else naming_of_process()
        self._files = RunFiles(self.folder, naming.rank, naming.world_size)
        with self._guard("earlier run"):
            if reason := remove_earlier(self._files):
                timer.remarks.add("earlier run", reason)
        timer.options = replace(timer.options, rank=naming.rank, world_size=naming.world_size, device=str(device))
        if is_gpu(device):
            timer.marks = CudaMarks(device)
        if self._options.readings:
            counters = allocator(device)
            sources = (PsutilSource(), gpu_source(device))
            self._readings = Readings(Sources(*sources, AllocatorSource(counters)) if counters else Sources(*sources))
        if self._options.trace:
            self._recorder = Recorder(
                self._schedule or Schedule(WAIT, WARMUP, ACTIVE),
                self.folder / results.TRACE,
                device=device,
                options=self._options.capture or CaptureOptions(),
                naming=naming,
                on_cycle=self._take_cycle,
            )

    def _stop_at_exit(self) -> None:
        self.stop(RuntimeError(UNSTOPPED))

    def _take_cycle(self, cycle: "Cycle") -> None:
        """Write the results so far, in case the run is killed later, and call the hooks."""
        if self._recorder:
            manifest = self._recorder.manifest
            if manifest.trace_path not in (None, self._derived):
                with self._guard(results.OP_STATS):
                    self._derive(manifest)
            with self._guard(results.MANIFEST):
                self._write_manifest(manifest)
        self.timer.hooks.tell("trace_ready", cycle)

    def _derive(self, manifest: "CaptureManifest") -> None:
        """Write the results derived from the trace, and keep its verdict."""
        self._derived, path = manifest.trace_path, self._files.path(results.TRACE)
        if manifest.trace_path not in (None, path):  # it is one of several, and gets the usual name too
            results.give_name(manifest.trace_path, path)
        analysis = results.analysis_of(manifest)
        self.trace_verdict = judge_trace(analysis)
        rows = operator_rows(analysis.operators)
        files.write_csv(self._files.path(results.OP_STATS), rows, OPERATOR_COLUMNS)

    def _write_manifest(self, manifest: "CaptureManifest") -> None:
        """Write it, and report what has failed; foreseen limits only stand in the file."""
        for downgrade in manifest.downgrades:
            if not downgrade.is_foreseen:
                self.timer.remarks.tell(downgrade.what, downgrade.reason)
        whole = msgspec.structs.replace(manifest, downgrades=(*manifest.downgrades, *self.timer.remarks.all()))
        files.write_json(self._files.path(results.MANIFEST), whole)

    def _guard(self, what: str) -> Guard:
        return self.timer.remarks.guard(what)


class Interruptions:
    """Times the collections of garbage and the compilations that fall into the stages of a loop, as stages inside.

    Both are told by their own callbacks, in the thread in which they happen, from the first step on until `stop`.
    """

    def __init__(self, timer: StageTimer) -> None:
        self._timer = timer
        self._began_ns = 0  # of the collection that runs; there is one at a time in a process
        self._compiler: Any = None
        self.is_paused = False
        gc.callbacks.append(self._collected)
        self.watch_compiler()

    def watch_compiler(self) -> None:
        """Be told of compilations from now on, once the program has loaded the compiler."""
        module = sys.modules.get(COMPILER) if self._compiler is None else None
        handler = getattr(module, "callback_handler", None)
        if handler is not None:
            handler.register_start_callback(self._compile_began)
            handler.register_end_callback(self._compile_ended)
            self._compiler = handler

    def stop(self) -> None:
        """Be told of nothing more."""
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        if self._compiler is not None:
            self._compiler.remove_start_callback(self._compile_began)
            self._compiler.remove_end_callback(self._compile_ended)

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        """Note a collection that has ended.

        Short ones, which every loop has hundreds of, are left in the stage in which they fall.
        """
        recorder = self._timer.recorder
        if recorder is None or self.is_paused:
            self._began_ns = 0
            return
        now = recorder.clock()
        if phase == "start":
            self._began_ns = now
        elif self._began_ns and now - self._began_ns >= SHORT_COLLECTION_NS:
            recorder.collected(self._began_ns, now)

    def _compile_began(self, *_: object) -> None:
        self._timer.begin(stages.COMPILE)

    def _compile_ended(self, *_: object) -> None:
        self._timer.end(stages.COMPILE)


class AllocatorSource:
    """What the device's allocator has handed out, what it keeps, and the most it has handed out; no wait for it."""

    reason: str | None = None
    reasons: Mapping[str, str] = {}

    def __init__(self, counters: "Allocator") -> None:
        self._counters = counters

    def read(self) -> dict[str, float]:
        """Return the bytes by metric."""
        counters = self._counters
        return {
            "gpu_memory_allocated_bytes": float(counters.allocated),
            "gpu_memory_reserved_bytes": float(counters.reserved),
            "gpu_memory_peak_allocated_bytes": float(counters.peak_allocated),
        }


class Readings:
    """Reads a source at intervals, in the thread of the loop and between two steps, so that no stage is delayed."""

    def __init__(self, source: Source | Sources, clock: Callable[[], float] = monotonic) -> None:
        self._source, self._clock = source, clock
        self._next = clock()

    def due(self) -> dict[str, float]:
        """Return the values of now, {} where the last ones are younger. Raises what the source does."""
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + INTERVAL_S
        return self._source.read()
