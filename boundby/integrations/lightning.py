"""Profile `trainer.fit` of Lightning: the times of its stages, and traces of a few of its steps.

    from boundby.integrations.lightning import ProfilerCallback
    trainer = Trainer(callbacks=[ProfilerCallback(enabled=True)])

Works with the packages `lightning` and `pytorch_lightning`, whose classes differ.
"""

import contextlib
import importlib
import importlib.util
import logging
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundby.capture import CaptureOptions, Schedule
from boundby.capture.manifest import MAX_TRACE_MB, trace_limit
from boundby.integrations.lightning_stages import FitStages
from boundby.remarks import Say, summary
from boundby.training import ManagerOptions, ProfilerManager, StageTimes, TimerOptions, read_stage_times
from boundby.training.judgement import judge_training
from boundby.training.reader import is_of_one_run
from boundby.training.records import Statistics
from boundby.training.results import RunFiles, give_name

if TYPE_CHECKING:
    from boundby.capture import Cycle

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
INSTALL = "neither lightning nor pytorch_lightning is installed: pip install 'lightning>=2.6.6'"
CHROME_TRACE = "chrome_trace.json"
_WITH_BASES: dict[tuple[type, tuple[str, ...]], type] = {}
LONGEST_NAME = 100  # characters of a folder
HEAD = f"{'stage':<16}{'share %':>9}{'median ms':>12}{'mean ms':>12}{'count':>8}"

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
                ranks = [times, *_others(manager.folder, times)]
                self._tell(str(judge_training(ranks, manager.trace_verdict)))
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


def table(times: StageTimes) -> str:
    """Return the stages as lines of text, by the clock of the host, in steps that no profiler disturbed."""
    step = times.step
    if step is None or not step.host_s.n:
        return "No step has ended that nothing disturbed; there is no table of stages."
    stages = [stage for stage in times.stages if stage.kind not in ("step", "span")]
    rows = [_row(stage.name, stage.share, stage.host_s) for stage in stages if stage.host_s.n]
    return "\n".join([HEAD, *rows, _row("(in no stage)", step.share, None), _row("whole step", None, step.host_s)])


def _row(name: str, share: float | None, spent: Statistics | None) -> str:
    median, mean = (spent.median, spent.mean) if spent else (None, None)
    cells = [_number(share, 100, 1), _number(median, 1e3, 3), _number(mean, 1e3, 3)]
    return f"{name:<16}{cells[0]:>9}{cells[1]:>12}{cells[2]:>12}{spent.n if spent else '':>8}"


def _number(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{scale * value:.{digits}f}"


def _others(folder: Path, times: StageTimes) -> Iterator[StageTimes]:
    """Yield the times of the other processes as far as they are written; those on other machines may not be here."""
    for rank in range(times.world_size):
        if rank == times.rank:
            continue
        try:
            other = read_stage_times(folder, rank)
        except (OSError, ValueError):
            continue
        if is_of_one_run(other, times):
            yield other
