"""Profile `trainer.fit` of Lightning: the times of its stages, and traces of a few of its steps.

    from boundby.integrations.lightning import ProfilerCallback
    trainer = Trainer(callbacks=[ProfilerCallback(enabled=True)])

Works with the packages `lightning` and `pytorch_lightning`, whose classes differ.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundby.capture import CaptureOptions, Schedule
from boundby.capture.manifest import MAX_TRACE_MB, trace_limit
from boundby.integrations.lightning_report import table, verdict
from boundby.integrations.lightning_stages import FitStages
from boundby.training import ManagerOptions, ProfilerManager, TimerOptions
from boundby.training.records import Say, summary
from boundby.training.results import RunFiles, give_name

if TYPE_CHECKING:
    from boundby.capture import Cycle

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
INSTALL = "neither lightning nor pytorch_lightning is installed: pip install 'lightning>=2.6.6'"
CHROME_TRACE = "chrome_trace.json"
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

    def __new__(cls, *args: Any, **kwargs: Any) -> "ProfilerCallback":
        """Return a callback of the packages that the program has imported, since one of them has its trainer."""
        return object.__new__(_with_bases(cls, _packages_in_use()))

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
        self._say = say
        self._reports = reports
        self._stages: FitStages | None = None  # of the fit that runs
        self._files = RunFiles(self.output_dir, 0, 1)  # for TensorBoard and people
        self._run_folder = self.output_dir
        self._has_trace = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes an equal one, with bases of its own."""
        return _remade, (type(self)._plain,), {**self.__dict__, "manager": None, "_stages": None}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, when a sanity check is over."""
        if self.enabled:
            try:
                self._start(trainer, pl_module)
            except Exception as error:
                self._tell(f"profiler: {summary(error)}")

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
        """End a fit that has come to no end of its own, such as a trial of a tuner."""
        self._finish(RuntimeError("the fit was given up"))

    def _start(self, trainer: Any, pl_module: Any) -> None:
        self._say = self._say or _log_of(trainer)
        rank, world_size = trainer.global_rank, trainer.world_size
        self._files = RunFiles((self.output_dir / folder_name(pl_module)).absolute(), rank, world_size)
        self._has_trace = False
        self._run_folder = (self.run_folder or self._files.folder).absolute()
        self.manager = ProfilerManager(
            self._run_folder,
            device=trainer.strategy.root_device,
            schedule=self.schedule,
            options=ManagerOptions(
                TimerOptions(rank=rank, world_size=world_size),
                capture=CaptureOptions(max_trace_bytes=self.max_trace_bytes),
            ),
            say=self._say,
        )
        self.manager.register("trace_ready", self._publish)
        stages = FitStages(self.manager, trainer)
        self.manager.start(_steps_to_come(trainer, stages.steps_done), stages.steps_done)
        self._stages = stages
        stages.attach()

    def _finish(self, error: BaseException | None) -> None:
        stages, manager, self._stages = self._stages, self.manager, None
        if stages is None or manager is None:
            return
        stages.detach(error)
        manager.stop(error)
        try:
            if not self._has_trace:  # but an earlier fit may have had one
                self._files.path(CHROME_TRACE).unlink(missing_ok=True)
            if self._reports and self._files.rank == 0:
                times = manager.snapshot()
                self._tell(table(times))
                self._tell(verdict(self._run_folder, times, manager.trace_verdict))
        except Exception as failure:
            self._tell(f"profiler: {summary(failure)}")

    def _publish(self, cycle: "Cycle") -> None:
        """Give a trace the names under which TensorBoard and people look for it."""
        if cycle.trace_path is None:
            return
        name = f"rank{self._files.rank}.{time.time_ns()}.pt.trace.json"
        give_name(cycle.trace_path, self._files.folder / name)
        give_name(cycle.trace_path, self._files.path(CHROME_TRACE))
        self._has_trace = True

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):
            (self._say or logging.getLogger(__name__).warning)(text)


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
    roots = [each.__module__.split(".")[0] for each in type(trainer).__mro__]
    package = next(PACKAGES[root] for root in roots if root in PACKAGES)
    return importlib.import_module(f"{package}.utilities.rank_zero").rank_zero_info


def _packages_in_use() -> tuple[str, ...]:
    """Return those that the program has imported, or else the first that is installed."""
    found = tuple(module for module in PACKAGES.values() if module in sys.modules)
    return found or next((PACKAGES[each],) for each in PACKAGES if importlib.util.find_spec(each))


@functools.cache
def _with_bases(plain: type, packages: tuple[str, ...]) -> type:
    """Return the class with the callbacks of these packages as further bases."""
    callbacks = [importlib.import_module(package).Callback for package in packages]
    missing = [each for each in callbacks if not issubclass(plain, each)]
    if not missing:
        return plain
    namespace = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_plain": plain}
    return type(plain.__name__, (plain, *missing), namespace)


def _remade(plain: type) -> Any:
    return plain.__new__(plain)
