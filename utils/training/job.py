"""A training that is about to begin: everything that a framework needs to know."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from boundby.capture import Schedule
from utils.training.models import Task
from utils.training.plan import Plan
from utils.training.process import Process
from utils.training.progress import Progress
from utils.training.settings import TrainingSettings


@dataclass(frozen=True)
class Job:
    """What is trained, how, where it is written, and who is told."""

    settings: TrainingSettings
    task: Task
    plan: Plan
    process: Process
    folder: Path
    progress: Progress
    note: Callable[[str], object]

    @property
    def schedule(self) -> Schedule:
        """Which steps are recorded."""
        given = self.settings.profiling
        return Schedule(
            given.wait_steps, given.warmup_steps, given.active_steps, given.repeat_cycles, given.schedule_every_n_steps
        )

    @property
    def model_name(self) -> str:
        """The name of the folder of this model's traces: its class."""
        return type(self.task.model).__name__
