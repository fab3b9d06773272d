"""Profile `trainer.fit` of Lightning: the times of its stages, and traces of a few of its steps.

    from boundby.training.lightning import ProfilerCallback
    trainer = Trainer(callbacks=[ProfilerCallback(enabled=True)])

Works with the packages `lightning` and `pytorch_lightning`, whose classes differ.
"""

import contextlib
import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundby.capture import MAX_TRACE_MB, CaptureOptions, Guard, Say, Schedule, Wrapper, summary, trace_limit
from boundby.training import ManagerOptions, ProfilerManager, TimerOptions, stages
from boundby.training.results import CHROME_TRACE, RunFiles, publish_cycle
from boundby.training.timed_methods import TimedMethods

if TYPE_CHECKING:
    from boundby.capture import Cycle

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
INSTALL = "neither lightning nor pytorch_lightning is installed: pip install 'lightning>=2.6.6'"
_WITH_BASES: dict[tuple[type, tuple[str, ...]], type] = {}
LONGEST_NAME = 100  # characters of a folder

if not any(importlib.util.find_spec(package) for package in PACKAGES):
    raise ImportError(INSTALL)


class ProfilerCallback:
    """Times the stages of a fit and records `repeat_cycles` traces of it.

    Every `schedule_every_n_steps` steps a cycle begins: `wait_steps` at rest, `warmup_steps` thrown away,
    `active_steps` recorded. A step is one of the optimizer. `output_dir/<model>/`, named after the class of the module
    or its `model_name`, receives a `rank0.<time>.pt.trace.json` for TensorBoard per cycle, and the last one as
    `chrome_trace.json`. `run_folder`, by default the same folder, receives stage_times.json, profiler_summary.json,
    manifest.json, op_stats.csv and trace.json. A trace of more than `max_trace_mb` of JSON gives way to a cycle with
    less, where the fit has room for one. At the end the stages and the verdict go to `say`, by default Lightning's
    log, unless `reports` is False; so does what goes wrong, in any case. The fit is left as it is: what fails here is a
    remark, said once and kept in profiler_summary.json.

    Raises ValueError for a schedule or a limit that cannot be, and ImportError where neither package is installed.
    """

    _plain: type["ProfilerCallback"]  # the class without the bases of the packages

    def __new__(cls, *args: Any, **kwargs: Any) -> "ProfilerCallback":
        """Return a callback for the packages that the program has imported, one of which has its trainer."""
        made: ProfilerCallback = object.__new__(_with_bases(cls, packages_in_use()))
        return made

    def __init__(  # noqa: PLR0913  (the parameters of the specification)
        self,
        enabled: bool = False,
        output_dir: str | Path = "outputs/profiler_logs",
        schedule_every_n_steps: int = 50,
        wait_steps: int = 1,
        warmup_steps: int = 1,
        active_steps: int = 3,
        repeat_cycles: int = 2,
        *,
        run_folder: str | Path | None = None,
        max_trace_mb: float = MAX_TRACE_MB,
        say: Say | None = None,
        reports: bool = True,
    ) -> None:
        self.enabled = enabled
        self.output_dir = Path(output_dir)
        self.schedule = Schedule.of_parameters(
            wait_steps=wait_steps,
            warmup_steps=warmup_steps,
            active_steps=active_steps,
            repeat_cycles=repeat_cycles,
            schedule_every_n_steps=schedule_every_n_steps,
        )
        self.max_trace_bytes = trace_limit(max_trace_mb)
        self.run_folder = None if run_folder is None else Path(run_folder)
        self.manager: ProfilerManager | None = None  # of the fit that runs, or of the last one
        self.say = say
        self._reports = reports
        self._stages: FitStages | None = None  # of the fit that runs
        self._files = RunFiles(self.output_dir, 0, 1)  # for TensorBoard and people
        self._has_trace = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process rebuilds the callback, with its own bases."""
        return _remade, (type(self)._plain,), {**self.__dict__, "manager": None, "_stages": None}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, when a sanity check is over."""
        if self.enabled:
            with self._guard:
                self._start(trainer, pl_module)

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Mark the begin of clipping and the optimizer's step."""
        if self._stages:
            self._stages.begin_optimizer()

    def on_train_end(self, *_: Any) -> None:
        """End, write everything and say what was found."""
        self._finish(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End, and write what there is."""
        self._finish(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End a fit that was cut short, such as a tuner's trial."""
        self._finish(RuntimeError("the fit was given up"))

    def _start(self, trainer: Any, pl_module: Any) -> None:
        self.say = self.say or _log_of(trainer)
        rank, world_size = trainer.global_rank, trainer.world_size
        self._files = RunFiles((self.output_dir / folder_name(pl_module)).absolute(), rank, world_size)
        self._has_trace = False
        self.manager = ProfilerManager(
            (self.run_folder or self._files.folder).absolute(),
            device=trainer.strategy.root_device,
            schedule=self.schedule,
            options=ManagerOptions(
                TimerOptions(rank=rank, world_size=world_size),
                capture=CaptureOptions(max_trace_bytes=self.max_trace_bytes),
            ),
            say=self.say,
        )
        self.manager.register("trace_ready", self._publish)
        marks = FitStages(self.manager, trainer)
        self.manager.start(_steps_to_come(trainer, marks.steps_done), marks.steps_done)
        self._stages = marks
        marks.attach()

    def _finish(self, error: BaseException | None) -> None:
        marks, manager, self._stages = self._stages, self.manager, None
        if marks is None or manager is None:
            return
        marks.detach(error)
        manager.stop(error)
        with self._guard:
            if not self._has_trace:  # but an earlier fit may have had one
                self._files.path(CHROME_TRACE).unlink(missing_ok=True)
            if self._reports and self._files.rank == 0:
                self._tell(manager.told())

    def _publish(self, cycle: "Cycle") -> None:
        self._has_trace = publish_cycle(self._files, cycle) or self._has_trace

    @property
    def _guard(self) -> Guard:
        """A context whose errors are told and end nothing."""
        return Guard(lambda error: self._tell(f"profiler: {summary(error)}"))

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):
            (self.say or logging.getLogger(__name__).warning)(text)


def folder_name(module: Any) -> str:
    """Return the name of a model as one folder: its `model_name`, or its class; what no file system minds is kept."""
    given = getattr(module, "model_name", None)
    name = given if isinstance(given, str) and given.strip(". ") else type(module).__name__
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).strip(".")[:LONGEST_NAME] or "model"


def _steps_to_come(trainer: Any, done: int) -> int | None:
    """Return how many steps the fit has left, None where that is not known."""
    if not trainer.lightning_module.automatic_optimization and trainer.max_steps != -1:
        return None  # it counts the optimizers' steps, of which a batch may have any number
    total = trainer.estimated_stepping_batches
    return int(total) - done if done < total < float("inf") else None


def _log_of(trainer: Any) -> Say:
    """Return the log of the package that has the trainer, on rank 0."""
    roots = [base.__module__.split(".")[0] for base in type(trainer).__mro__]
    package = next(PACKAGES[root] for root in roots if root in PACKAGES)
    log: Say = importlib.import_module(f"{package}.utilities.rank_zero").rank_zero_info
    return log


def packages_in_use() -> tuple[str, ...]:
    """Return the packages that the program has imported, else the first one installed."""
    imported = tuple(module for module in PACKAGES.values() if module in sys.modules)
    return imported or next((PACKAGES[package],) for package in PACKAGES if importlib.util.find_spec(package))


def _with_bases(plain: type, packages: tuple[str, ...]) -> type:
    """Return the class with the callbacks of these packages as further bases, the same one each time."""
    if (plain, packages) not in _WITH_BASES:
        callbacks: list[type] = [importlib.import_module(package).Callback for package in packages]
        missing = [callback for callback in callbacks if not issubclass(plain, callback)]
        namespace = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_plain": plain}
        _WITH_BASES[plain, packages] = type(plain.__name__, (plain, *missing), namespace) if missing else plain
    return _WITH_BASES[plain, packages]


def _remade(plain: type["ProfilerCallback"]) -> "ProfilerCallback":
    return plain.__new__(plain)


COMMUNICATION = "communication"  # of the processes before each batch: has one of them been told to end?
Method = Callable[..., Any]


class FitStages:
    """Marks the stages of one `trainer.fit` on a manager, from `attach` until `detach`.

    A step lasts from the fetch of its first batch to the next fetch, so that what callbacks do after a batch belongs to
    the step of that batch. It ends where the trainer has stepped its optimizer, with manual optimization after every
    batch. The marks are attributes of the objects of this trainer; nothing of a class is touched.
    """

    def __init__(self, manager: ProfilerManager, trainer: Any) -> None:
        self._manager = manager
        self._begin, self._end = manager.timer.begin, manager.timer.end
        self._trainer = trainer
        self._counts_steps = bool(trainer.lightning_module.automatic_optimization)
        self._methods = TimedMethods(manager.timer)
        self._hooks: list[Any] = []  # of the optimizers
        self._steps = self.steps_done
        self._is_due = False  # the step has ended but for its callbacks
        self._in_batch = self._in_callbacks = self._in_optimizer = False
        self._fetches = 0  # that are under way: an iterable is fetched from inside the start of an epoch

    @property
    def steps_done(self) -> int:
        """Return the steps that have ended since the training began, in this run or those that it resumes."""
        if self._counts_steps:
            return int(self._trainer.global_step)
        return int(self._trainer.fit_loop.total_batch_idx) + 1

    def attach(self) -> None:
        """Begin to mark; what this version of Lightning lacks becomes a remark and goes unmarked."""
        trainer, methods, timed = self._trainer, self._methods, self._methods.timed
        epochs, precision = "fit_loop.epoch_loop", "strategy.precision_plugin"
        before, after = self._begin_fetch, self._end_fetch
        methods.time(trainer, f"{epochs}.run", stages.EPOCH, timed(stages.EPOCH, "span"))
        methods.time(trainer, f"{epochs}.on_run_start", stages.DATA, self._around(before, after))  # starts the workers
        methods.time(trainer, f"{epochs}._on_before_fetch", stages.DATA, self._around(before))
        methods.time(trainer, f"{epochs}._on_after_fetch", stages.DATA, self._around(after=after))
        methods.time(trainer, "strategy.batch_to_device", stages.H2D, self._transfer)
        methods.time(trainer, f"{epochs}.automatic_optimization.run", stages.CALLBACKS, self._batch)
        methods.time(trainer, f"{epochs}.manual_optimization.run", stages.CALLBACKS, self._batch)
        methods.time(trainer, "strategy.training_step", stages.FORWARD)
        methods.time(trainer, f"{precision}.backward", stages.BACKWARD)
        methods.time(trainer, f"{epochs}.val_loop.run", stages.EVALUATION, timed(stages.EVALUATION, "excluded"))
        methods.time(trainer, "save_checkpoint", stages.CHECKPOINT)
        if trainer.gradient_clip_val:
            methods.time(trainer, f"{precision}.clip_gradients", stages.CLIP)
        if trainer.lr_scheduler_configs:
            methods.time(trainer, f"{epochs}.update_lr_schedulers", stages.SCHEDULER)
        if trainer.world_size > 1:
            methods.time(trainer, f"{epochs}._broadcast_sigterm_tensor", COMMUNICATION, self._between_batches)
        for optimizer in trainer.optimizers:
            methods.time(optimizer, "zero_grad", stages.ZERO_GRAD)
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.end_optimizer()))
        self._begin_callbacks()

    def detach(self, error: BaseException | None = None) -> None:
        """Take every mark away; `error` is what ended the fit. A step that lacks its callbacks alone has ended."""
        self._methods.undo()
        while self._hooks:
            self._hooks.pop().remove()
        self._end_step(raised=error is not None)

    def begin_optimizer(self) -> None:
        """Note that the gradients are ready, and that clipping and the optimizer's step follow."""
        if not self._in_optimizer:  # an optimizer such as L-BFGS computes them several times in one step
            self._in_optimizer = True
            self._begin(stages.OPTIMIZER)

    def end_optimizer(self, *, raised: bool = False) -> None:
        """Take note that the optimizer has stepped."""
        if self._in_optimizer:
            self._in_optimizer = False
            self._end(stages.OPTIMIZER, raised=raised)

    @staticmethod
    def _around(before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None) -> Wrapper:
        def around(method: Method, *args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return method(*args, **kwargs)
            finally:
                after()

        return around

    def _transfer(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        batch = self._methods.timed(stages.H2D)(method, *args, **kwargs)
        self._begin_callbacks()
        return batch

    def _between_batches(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        return self._methods.timed(COMMUNICATION)(method, *args, **kwargs)

    def _batch(self, run: Method, *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        self._in_batch = True
        try:
            result = run(*args, **kwargs)
        except BaseException:
            self.end_optimizer(raised=True)
            self._in_batch = False
            raise
        self.end_optimizer()  # which did not step, as when a gradient of half precision is not finite
        self._in_batch = False
        self._begin_callbacks()
        done = self.steps_done
        self._is_due = not self._counts_steps or done > self._steps
        self._steps = done
        return result

    def _begin_fetch(self) -> None:
        self._fetches += 1
        if self._fetches == 1:
            self._end_step()
            self._begin(stages.DATA)

    def _end_fetch(self) -> None:
        self._fetches -= 1
        if not self._fetches:
            self._end(stages.DATA)

    def _begin_callbacks(self) -> None:
        if not self._in_callbacks and not self._in_batch:
            self._in_callbacks = True
            self._begin(stages.CALLBACKS)

    def _end_step(self, *, raised: bool = False) -> None:
        """End the callbacks, and the step if it is due; inside a batch there is neither."""
        if self._in_callbacks:
            self._in_callbacks = False
            self._end(stages.CALLBACKS, raised=raised)
        if self._is_due:
            self._is_due = False
            self._manager.step(self._steps - 1)
