"""Profile a training of the Hugging Face Trainer: the times of its stages all along, and a trace of a few of its steps.

`ProfCallback` wraps methods of the Trainer that calls it, or that it is attached to. Each cycle leaves a folder named
after its last step; Nsight Systems may take the place of torch.profiler.
"""

import functools
import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import accelerate.data_loader
import torch
from transformers import Trainer, TrainerCallback

from boundby import files
from boundby.capture import (
    MAX_TRACE_MB,
    CaptureManifest,
    CaptureOptions,
    Cycle,
    Guard,
    Patches,
    Remarks,
    Say,
    Schedule,
    Wrapper,
    nsight_variable,
    trace_limit,
)
from boundby.trace import (
    Structure,
    memory_page,
    memory_use,
    op_stats,
    read_trace,
    table_lines,
    table_rows,
    without_excluded,
)
from boundby.training import stages
from boundby.training.manager import ManagerOptions, ProfilerManager
from boundby.training.results import give_name
from boundby.training.store import file_name
from boundby.training.timed_methods import TimedMethods

TRACE, STACKS, SNAPSHOT = "trace.pt.trace.json", "stacks.txt", "memory_snapshot.pickle"
FOLDER = re.compile(r"iteration_\d+(?:_run(\d+))?")
MEMORY_TIMELINE, KEY_AVERAGES = "memory-timeline.html", "key_averages.txt"

ABSENT = "this program does not run under it; torch.profiler stays off, and the stages alone are timed. Start it with: "
NO_TRACE_WANTED = "enable_nsight_systems keeps torch.profiler off; without it a few steps are recorded"
TRACED = "cuda,nvtx,osrt"


def runs_in(output_dir: Path, rank: int) -> int:
    """Return the number of the last run of which this rank has left a trace in the folder; 0 where there is none."""
    folders = (path.parent.name for path in output_dir.glob(f"iteration_*/rank{rank}_{TRACE}"))
    return max((int(match[1] or 1) for match in map(FOLDER.fullmatch, folders) if match), default=0)


def folder_name(step: int, run: int) -> str:
    """Return the name of the folder of a cycle that ended at a step, in the first or a later run."""
    return f"iteration_{step}" if run == 1 else f"iteration_{step}_run{run}"


@dataclass(frozen=True)
class Exports:
    """What is written beside the trace."""

    memory_timeline: bool  # and the snapshot of the device's allocator
    stacks: bool
    key_averages: bool


def write_iteration(
    folder: Path, manifest: CaptureManifest, cycle: Cycle, trace_path: Path, exports: Exports, remarks: Remarks
) -> None:
    """Write the files of one cycle, made from its trace, which gets the name that TensorBoard looks for.

    A file that fails is a remark and stops no other.
    """
    own_trace = functools.cache(lambda: without_excluded(read_trace(trace_path)))
    snapshot, stacks = manifest.snapshot_path, manifest.stacks_path

    def path(name: str) -> Path:
        return folder / f"rank{manifest.rank}_{name}"

    def guard(what: str) -> Guard:
        return remarks.guard(f"{folder.name}: {what}")

    with guard("trace"):
        give_name(trace_path, path(TRACE))
    if exports.key_averages:
        with guard(KEY_AVERAGES):  # by shapes and stack; several processes write a table each
            lines = table_lines(table_rows(op_stats(own_trace(), ("shapes", "stack"))))
            name = file_name(KEY_AVERAGES, manifest.rank, manifest.world_size)
            files.write_text(folder / name, "\n".join([*lines, ""]))
    if exports.memory_timeline:
        with guard("memory timeline"):
            trace = own_trace()
            uses = memory_use(Structure(trace))
            files.write_text(path(MEMORY_TIMELINE), memory_page(uses, f"Memory of rank {manifest.rank}, {folder.name}"))
    if exports.memory_timeline and snapshot:
        with guard("memory snapshot"):
            give_name(snapshot, path(SNAPSHOT))
    if exports.stacks and cycle.stacks and stacks:  # of several cycles the last one alone records them
        with guard("stacks"):
            give_name(stacks, path(STACKS))


def nsight_command(report: str, cycles: int, program: Sequence[str]) -> str:
    """Return the command that runs the program under Nsight Systems and collects the recorded steps alone.

    With several cycles each one makes a report of its own. The number must be right: with a smaller one the rest is
    lost, with a larger one the session waits for ranges that never come.
    """
    end = "stop" if cycles == 1 else f"repeat:{cycles}"
    options = ["-t", TRACED, "-c", "cudaProfilerApi", f"--capture-range-end={end}", "--cuda-graph-trace=node"]
    return shlex.join(["nsys", "profile", *options, "-o", report, *program])


class StageRanges:
    """A range of NVTX for every stage, from when it begins to when it ends; ranges may overlap."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._open: dict[str, int] = {}
        self._is_on = True
        self._guard = Guard(self._failed)

    def begin(self, name: str) -> None:
        """Begin the range of a stage; one of this name that never ended ends first."""
        self.end(name)
        if self._is_on:
            with self._guard:
                self._open[name] = torch.cuda.nvtx.range_start(name)

    def end(self, name: str, seconds: float = 0.0) -> None:
        """End the range of a stage."""
        opened = self._open.pop(name, None)
        if self._is_on and opened is not None:
            with self._guard:
                torch.cuda.nvtx.range_end(opened)

    def _failed(self, error: Exception) -> None:
        self._is_on = False
        self._remarks.add("NVTX ranges", error)


class NsightMode:
    """A run that Nsight Systems profiles, into `report`."""

    def __init__(self, report: str, environment: Mapping[str, str] = os.environ) -> None:
        self.report = report
        self.is_active = nsight_variable(environment) is not None

    def prepare(self, manager: ProfilerManager, schedule: Schedule, total_steps: int | None) -> None:
        """Mark the stages for Nsight; where it is not there, tell how to start it."""
        if self.is_active:
            ranges = StageRanges(manager.timer.remarks)
            manager.register("stage_start", ranges.begin)
            manager.register("stage_end", ranges.end)
            return
        fitted = schedule if total_steps is None else schedule.fitted(total_steps)
        command = nsight_command(self.report, fitted.repeat if fitted else 1, sys.orig_argv)
        manager.timer.remarks.add("Nsight Systems", ABSENT + command)


logger = logging.getLogger(__name__)

OUTPUT_DIR = "./profiler_output"
WAIT, WARMUP, ACTIVE, CYCLES = 4, 4, 1, 1


def calling_trainer() -> Trainer:
    """Return the Trainer that calls a callback, which is not told who it is. Raises LookupError where none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), Trainer):
            return owner
        frame = frame.f_back
    raise LookupError("no Trainer of transformers calls this callback; name it: callback.attach(trainer)")


class ProfCallback(TrainerCallback):
    """Profiles a training of the Hugging Face Trainer: pass it in its `callbacks`.

    All along, the stages of every step are timed, by wrapping methods of the Trainer while it trains. After
    `wait_steps` and `warmup_steps` each of the `num_cycles` cycles records `active_steps` steps with torch.profiler,
    and `output_dir/iteration_X/` gets its files, where X is the Trainer's `global_step` after the last of them; a
    second training with this `output_dir` leaves them alone and writes `iteration_X_run2`. `profile_memory` needs
    shapes and stacks and switches them on. Stage times, summary, manifest, table of operators and the first trace go
    to `run_folder`, by default `output_dir`. A cycle's steps are optimizer steps; with `schedule_every_n_steps` cycles
    begin that many steps apart, otherwise the next one follows at once. A schedule longer than the training is
    shortened to it. In place of a trace of more than `max_trace_mb` of JSON another cycle records less; the trace is
    kept all the same where the training has no room for one.

    At the end the stages and the verdict go to `say`, by default a logger's warning, unless `reports` is False; so does
    what goes wrong, in any case. Nothing here changes the training or ends it: what fails is said once and stands in
    `manifest.json`. Of several cycles, only the last records stacks and the snapshot of memory, since stacks slow a
    step down.

    The Trainer tells callbacks nothing of an exception: use `attach`, or the callback as a context manager around
    `train()`, to have everything written then and not at the end of the process.
    """

    def __init__(  # noqa: PLR0913  (the parameters that the specification names)
        self,
        output_dir: str | None = OUTPUT_DIR,
        wait_steps: int | None = WAIT,
        warmup_steps: int | None = WARMUP,
        active_steps: int | None = ACTIVE,
        num_cycles: int | None = CYCLES,
        profile_memory: bool = True,
        with_stack: bool = True,
        record_shapes: bool = True,
        export_memory_timeline: bool = True,
        export_stacks: bool = True,
        export_key_averages: bool = True,
        enable_nsight_systems: bool = False,
        nsight_systems_output_file: str | None = None,
        *,
        run_folder: str | Path | None = None,
        schedule_every_n_steps: int = 0,
        max_trace_mb: float = MAX_TRACE_MB,
        say: Say | None = None,
        reports: bool = True,
    ) -> None:
        self.say: Say = say or logger.warning
        self._reports = reports
        self.output_dir = Path(OUTPUT_DIR if output_dir is None else output_dir)
        self.run_folder = self.output_dir if run_folder is None else Path(run_folder)
        self.schedule = Schedule.of_parameters(
            wait_steps=WAIT if wait_steps is None else wait_steps,
            warmup_steps=WARMUP if warmup_steps is None else warmup_steps,
            active_steps=ACTIVE if active_steps is None else active_steps,
            num_cycles=CYCLES if num_cycles is None else num_cycles,
            schedule_every_n_steps=schedule_every_n_steps,
        )
        self.max_trace_bytes = trace_limit(max_trace_mb)
        self.profile_memory = profile_memory
        self.with_stack = with_stack or profile_memory
        self.record_shapes = record_shapes or profile_memory
        self.exports = Exports(
            memory_timeline=export_memory_timeline and profile_memory,
            stacks=export_stacks and self.with_stack,
            key_averages=export_key_averages,
        )
        report = nsight_systems_output_file or str(self.output_dir / "nsys_profile.nsys-rep")
        self.nsight = NsightMode(report) if enable_nsight_systems else None
        self.guard = Guard(self._failed)
        self.manager: ProfilerManager | None = None  # of the training that runs, or of the last one
        self._attachment: Attachment | None = None
        self._global_step = 0
        self._has_ended = False  # the training that `manager` is of
        self._run: int | None = None  # its number among those in `output_dir`, known from the first cycle on

    def __enter__(self) -> "ProfCallback":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(error)
        if self._attachment:
            self._attachment.detach()

    def attach(self, trainer: Any) -> "Attachment":
        """Profile this Trainer's next training; then exceptions that end it are noticed too.

        What it returns lets go of the Trainer at the end of that training by itself, or when asked, or as a context
        manager. The callback need not be among the Trainer's.
        """
        if self._attachment:
            self._attachment.detach()
        self._attachment = Attachment(self, trainer)
        return self._attachment

    def let_go(self, attachment: "Attachment") -> None:
        """Forget the attachment to a Trainer, which has ended."""
        if self._attachment is attachment:
            self._attachment = None

    def start(self, args: Any, state: Any) -> ProfilerManager:
        """Begin to profile a training; return what times it."""
        self.stop(RuntimeError("another training began before this one ended"))
        self.manager = self._run = None
        self._has_ended = False
        self._global_step = state.global_step
        total_steps = max(0, state.max_steps - state.global_step) if state.max_steps > 0 else None
        self.manager = manager = ProfilerManager(
            self.run_folder, device=args.device, schedule=self.schedule, options=self._options(), say=self.say
        )
        manager.register("trace_ready", self._write_iteration)
        if self.nsight:
            self.nsight.prepare(manager, self.schedule, total_steps)
        manager.start(total_steps, first_step=state.global_step)
        return manager

    def step(self, state: Any) -> None:
        """Take note that an optimizer step has ended."""
        self._global_step = state.global_step
        if self.manager:
            self.manager.step(state.global_step - 1)

    def log(self, state: Any, logs: dict[str, Any] | None) -> None:
        """Keep the numbers that the Trainer logs."""
        if self.manager:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            self.manager.metrics(numbers, step=max(0, state.global_step - 1))

    def stop(self, error: BaseException | None = None) -> None:
        """End the profile and write it; `error` is what ended the training, None where it ended well."""
        if self._attachment:
            self._attachment.end(error)
        if self.manager and not self._has_ended:
            self._has_ended = True
            self.manager.stop(error)
            if self._reports and self.manager.timer.options.rank == 0:
                with self.guard:
                    self.say(self.manager.told())

    def _failed(self, error: Exception) -> None:
        if self.manager:
            self.manager.timer.remarks.add("callback", error)
        else:
            logger.warning("the profiler of the training stays off: %s", error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to profile the Trainer that calls, unless one is attached, which is told by itself."""
        if not self._attachment:
            with self.guard:
                self._attachment = Attachment(self, calling_trainer())
                self._attachment.begin(args, state)

    def _options(self) -> ManagerOptions:
        capture = CaptureOptions(
            stacks_path=self.run_folder / STACKS if self.exports.stacks else None,
            snapshot_path=self.run_folder / SNAPSHOT if self.exports.memory_timeline else None,
            shapes=self.record_shapes,
            memory=self.profile_memory,
            max_trace_bytes=self.max_trace_bytes,
            nvtx=self.nsight is not None,
            stacks=self.with_stack,
        )
        is_recorded = self.nsight is None or self.nsight.is_active
        return ManagerOptions(trace=is_recorded, no_trace_reason=NO_TRACE_WANTED, capture=capture)

    def _write_iteration(self, cycle: Cycle) -> None:
        manager = self.manager
        manifest = manager.manifest if manager else None
        if manager and manifest and cycle.trace_path:
            self._run = self._run or runs_in(self.output_dir, manifest.rank) + 1
            folder = self.output_dir / folder_name(self._global_step, self._run)
            write_iteration(folder, manifest, cycle, cycle.trace_path, self.exports, manager.timer.remarks)


class Attachment:
    """The callback's hold on one Trainer, for one training; also a context manager that lets go at its end.

    Its stand-ins pass on arguments, results and exceptions as they are. When the training ends, or an exception ends
    it, the profile is written and every method of the Trainer is what it was.
    """

    def __init__(self, callback: ProfCallback, trainer: Any) -> None:
        self._callback = callback
        self._trainer = trainer
        self._is_in_step = False
        self._hold = Patches()  # from now on
        self._methods: TimedMethods | None = None  # while it trains
        self._hold.put(trainer, "train", self._train)
        self._hold.put(trainer.callback_handler, "call_event", self._event)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._callback.stop(error)
        self.detach()

    def detach(self) -> None:
        """Let go of the Trainer."""
        self._let_methods_be()
        self._hold.undo()
        self._callback.let_go(self)

    def end(self, error: BaseException | None) -> None:
        """End what is timed; an `error` has left what is open."""
        if self._methods and error is not None:
            self._methods.cut()
        self._let_methods_be()

    def _let_methods_be(self) -> None:
        if self._methods:
            self._methods.undo()
        self._methods = None

    def _train(self, original: Wrapper, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            self._callback.stop(error)
            raise
        else:
            self._callback.stop()
            return result
        finally:
            self.detach()

    def _event(self, original: Wrapper, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Time the callbacks of an event, and take note of it before and after them."""
        if self._methods and event == "on_step_end":
            self._methods.end(stages.SCHEDULER)
        call = functools.partial(self._methods.timed(stages.CALLBACKS), original) if self._methods else original
        result = call(event, args, state, control, **kwargs)
        with self._callback.guard:
            self._after(event, args, state, kwargs)
        return result

    def _after(self, event: str, args: Any, state: Any, kwargs: dict[str, Any]) -> None:
        if event == "on_train_begin":
            self.begin(args, state)
        elif self._methods is None:
            return
        elif event == "on_epoch_begin":
            self._methods.begin(stages.EPOCH, "span")
        elif event == "on_epoch_end":
            self._methods.end(stages.EPOCH)
        elif event == "on_step_begin":
            self._is_in_step = True
        elif event == "on_optimizer_step":
            self._methods.begin(stages.SCHEDULER)
        elif event == "on_step_end":
            self._is_in_step = False
            self._callback.step(state)
        elif event == "on_log":
            self._callback.log(state, kwargs.get("logs"))
        elif event == "on_train_end":
            self._callback.stop()
            self.detach()

    def begin(self, args: Any, state: Any) -> None:
        """Begin to time a training."""
        self._let_methods_be()
        self._is_in_step = False
        self._methods = methods = TimedMethods(self._callback.start(args, state).timer)
        trainer = self._trainer

        def during(stage: str) -> Wrapper:
            return methods.timed(stage, when=lambda: self._is_in_step)

        logging_now = methods.timed(stages.LOGGING, when=lambda: bool(trainer.control.should_log))
        evaluating = methods.timed(stages.EVALUATION, "excluded")
        methods.time(trainer, "get_batch_samples", stages.DATA, functools.partial(self._load, methods))
        methods.time(trainer, "_prepare_inputs", stages.H2D, during(stages.H2D))
        methods.time(trainer, "compute_loss", stages.FORWARD, during(stages.FORWARD))
        methods.time(trainer, "accelerator.backward", stages.BACKWARD, during(stages.BACKWARD))
        methods.time(trainer, "_clip_grad_norm", stages.CLIP, during(stages.CLIP))
        methods.time(trainer, "_get_grad_norm", stages.CLIP, during(stages.CLIP))
        methods.time(trainer, "optimizer.step", stages.OPTIMIZER, during(stages.OPTIMIZER))
        methods.time(trainer, "_maybe_log_save_evaluate", stages.LOGGING, logging_now)
        methods.time(trainer, "_save_checkpoint", stages.CHECKPOINT)
        methods.time(trainer, "evaluate", stages.EVALUATION, evaluating)
        methods.time(trainer, "predict", stages.EVALUATION, evaluating)

    @staticmethod
    def _load(methods: TimedMethods, original: Wrapper, *args: Any, **kwargs: Any) -> Any:
        """Time the wait for data, and in it the copies to the device, which the loader itself asks for."""
        copies = Patches()
        copies.put(accelerate.data_loader, "send_to_device", methods.timed(stages.H2D))
        try:
            return methods.timed(stages.DATA)(original, *args, **kwargs)
        finally:
            copies.undo()
