"""The callback for the Hugging Face Trainer: the times of its stages all along, and a trace of a few of its steps."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import TrainerCallback

from boundby.capture import CaptureOptions, Cycle, Schedule
from boundby.capture.manifest import MAX_TRACE_MB, trace_limit
from boundby.integrations.transformers.exports import (
    NO_TRACE_WANTED,
    SNAPSHOT,
    STACKS,
    Exports,
    Iteration,
    NsightMode,
    folder_name,
    runs_in,
)
from boundby.integrations.transformers.stages import Attachment, HookMarks
from boundby.training.manager import ManagerOptions, ProfilerManager

logger = logging.getLogger(__name__)

OUTPUT_DIR = "./profiler_output"
WAIT, WARMUP, ACTIVE, CYCLES = 4, 4, 1, 1


class ProfCallback(TrainerCallback):
    """Profiles a training of the Hugging Face Trainer: pass it in its `callbacks`.

    All along, the stages of every step are timed; `attach` times them exactly. After `wait_steps` and `warmup_steps`
    each of the `num_cycles` cycles records `active_steps` steps with torch.profiler, and `output_dir/iteration_X/`
    gets its files, where X is the Trainer's `global_step` after the last of them; a second training with this
    `output_dir` leaves them alone and writes `iteration_X_run2`. `profile_memory` needs shapes and stacks and switches
    them on. Stage times, summary, manifest, table of operators and the first trace go to
    `run_folder`, which is `output_dir` if not given. A cycle's steps are optimizer steps; with `schedule_every_n_steps`
    cycles begin that many steps apart, otherwise the next one follows at once. A schedule longer than the training is
    shortened to it. In place of a trace of more than `max_trace_mb` of JSON another cycle records less; the trace is
    kept all the same where the training has no room for one.

    Nothing here changes the training or ends it: what fails is logged once and stands in `manifest.json`. Of several
    cycles, only the last records stacks and the snapshot of memory, since stacks slow a step down.

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
    ) -> None:
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
        self.manager: ProfilerManager | None = None  # of the training that runs, or of the last one
        self._marks: HookMarks | None = None
        self._attachment: Attachment | None = None
        self._global_step = 0
        self._run: int | None = None  # its number among those in `output_dir`, known from the first cycle on

    def __enter__(self) -> "ProfCallback":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(error)

    def attach(self, trainer: Any) -> Attachment:
        """Time the stages of this Trainer's next training exactly, by wrapping its methods; exceptions are noticed too.

        What it returns lets go of the Trainer at the end of that training by itself, or when asked, or as a context
        manager. The callback need not be among the Trainer's.
        """
        if self._attachment:
            self._attachment.detach()
        self._attachment = Attachment(self, trainer)
        return self._attachment

    def let_go(self, attachment: Attachment) -> None:
        """Go on as a plain callback: the attachment to a Trainer has ended."""
        if self._attachment is attachment:
            self._attachment = None

    def start(self, args: Any, state: Any) -> ProfilerManager:
        """Begin to profile a training; return what times it."""
        self.stop(RuntimeError("another training began before this one ended"))
        self.manager = self._run = None
        self._global_step = state.global_step
        total_steps = max(0, state.max_steps - state.global_step) if state.max_steps > 0 else None
        self.manager = manager = ProfilerManager(
            self.run_folder, device=args.device, schedule=self.schedule, options=self._options(), say=logger.warning
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
        if self._marks:
            self.guarded(self._marks.train_end)
            self._marks = None
        if self.manager:
            self.manager.stop(error)

    def guarded(self, action: Callable[[], object]) -> None:
        """Do it; a failure becomes a remark."""
        try:
            action()
        except Exception as error:
            if self.manager:
                self.manager.timer.remarks.add("callback", error)
            else:
                logger.warning("the profiler of the training stays off: %s", error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to profile."""
        if not self._attachment:
            self.guarded(lambda: self._begin(args, state, kwargs.get("model")))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the profile."""
        if not self._attachment:
            self.stop()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the epoch."""
        self._mark(lambda marks: marks.epoch_begin())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of the epoch."""
        self._mark(lambda marks: marks.epoch_end(control))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that the data is there."""
        self._mark(lambda marks: marks.step_begin())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of a micro-batch."""
        self._mark(lambda marks: marks.substep_end())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that the gradients are there."""
        self._mark(lambda marks: marks.pre_optimizer_step())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the update."""
        self._mark(lambda marks: marks.optimizer_step())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of the step, and what follows it."""

        def end(marks: HookMarks) -> None:
            marks.step_end()
            self.step(state)
            marks.between_steps(control)

        self._mark(end)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep what was logged."""

        def keep(marks: HookMarks) -> None:
            self.log(state, logs)
            marks.logged(control)

        self._mark(keep)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of an evaluation."""
        self._mark(lambda marks: marks.evaluated(control))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Mark the end of a prediction."""
        self._mark(lambda marks: marks.evaluated(control))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that an evaluation is under way."""
        self._mark(lambda marks: marks.prediction_step())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of a checkpoint."""
        self._mark(lambda marks: marks.saved(control))

    def _mark(self, action: Callable[[HookMarks], object]) -> None:
        marks = self._marks
        if marks:
            self.guarded(lambda: action(marks))

    def _begin(self, args: Any, state: Any, model: Any) -> None:
        self._marks = HookMarks(self.start(args, state).timer)
        self._marks.train_begin(args, model)

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
            Iteration(folder, manifest, cycle.trace_path, manager.timer.remarks).write(self.exports, cycle)
