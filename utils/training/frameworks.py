"""The three ways to train the same model on the same data, each profiled in the way of its framework."""

import functools
import importlib
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from boundby.training import ManagerOptions, ProfilerManager, TimerOptions
from boundby.training.results import give_name
from boundby.training.store import file_name
from utils.errors import EnvironmentLacksError
from utils.training import loop
from utils.training.job import Job
from utils.training.settings import TrainingSettings

if TYPE_CHECKING:
    from boundby.capture import Cycle

NEEDED = {"loop": (), "trainer": ("accelerate",), "lightning": ("lightning",)}
CHROME_TRACE = "chrome_trace.json"


def require(settings: TrainingSettings) -> None:
    """Raise EnvironmentLacksError where a package is missing that these settings need."""
    wanted = [*NEEDED[settings.framework], *(["tensorboard"] if settings.profiling.tensorboard else [])]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentLacksError(f"{' and '.join(missing)}: not installed; bash setup_environment.sh --training")


def fit(job: Job) -> None:
    """Train with the framework that the settings name."""
    if job.settings.framework == "loop":
        _plain(job)
        return
    name = {"trainer": "transformers_trainer", "lightning": "lightning_trainer"}[job.settings.framework]
    importlib.import_module(f"utils.training.{name}").fit(job)


def _plain(job: Job) -> None:
    process, work = job.process, _work(job)
    profiler = ProfilerManager(
        job.folder,
        device=process.device,
        schedule=job.schedule,
        options=ManagerOptions(TimerOptions(rank=process.rank, world_size=process.world_size)),
        say=job.note,
        enabled=job.settings.profiling.enabled,
    )
    profiler.register("trace_ready", functools.partial(_publish, job))
    profiler.start(job.plan.steps)
    with profiler:
        loop.fit(work, job.plan, profiler, job.progress)


def _work(job: Job) -> loop.Work:
    training, process = job.settings.training, job.process
    model = job.task.model.to(process.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    workers = job.settings.data.num_workers
    batches, evaluation = loop.loaders(job.task.split, job.plan, training.seed, workers, process.device)
    if process.world_size > 1:
        model = DistributedDataParallel(model)
    return loop.Work(model, optimizer, batches, evaluation if training.evaluate else None, process.device)


def _publish(job: Job, cycle: "Cycle") -> None:
    """Give a trace the names under which TensorBoard and people look for it."""
    if cycle.trace_path is None:
        return
    folder = Path(job.settings.profiling.output_dir) / job.model_name
    give_name(cycle.trace_path, folder / f"rank{job.process.rank}.{time.time_ns()}.pt.trace.json")
    give_name(cycle.trace_path, folder / file_name(CHROME_TRACE, job.process.rank, job.process.world_size))
