"""One training run from its settings to its report."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from boundby.capture import Schedule
from boundby.machine import is_gpu, pick_device
from boundby.training import ManagerOptions, ProfilerManager, RunFiles, TimerOptions, publish_cycle
from utils.command import EnvironmentLacksError, InputError, PipelineError, lacking
from utils.training import loop, run_folder, tasks
from utils.training.progress import FILE, Progress
from utils.training.settings import Plan, TrainingSettings, plan_for


@dataclass(frozen=True)
class Process:
    """Rank and size of the job, and the device of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this one writes and says what all have in common."""
        return self.rank == 0


@contextlib.contextmanager
def joined(device_name: str) -> Iterator[Process]:
    """Join the job that the environment tells of.

    Raises EnvironmentLacksError where the device is not there, InputError where several processes are to share one.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Process(0, 1, _device(device_name))
        return
    if device_name.rpartition(":")[2].isdigit():
        raise InputError(f"device: {device_name!r} is one GPU for {world_size} processes; device=cuda is one for each")
    device = _device(device_name)
    if is_gpu(device):
        device = _device(f"{device.type}:{os.environ.get('LOCAL_RANK', '0')}")
    torch.distributed.init_process_group("nccl" if is_gpu(device) else "gloo")
    try:
        yield Process(torch.distributed.get_rank(), world_size, device)
    finally:
        torch.distributed.destroy_process_group()


def _device(name: str) -> torch.device:
    try:
        return pick_device(name)
    except (ValueError, RuntimeError) as error:
        raise EnvironmentLacksError(f"device: {error}; use device=cpu, or a machine with that GPU") from None


@dataclass(frozen=True)
class Job:
    """What is trained, how, where it is written, and who is told."""

    settings: TrainingSettings
    task: tasks.Task
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
    def pins_memory(self) -> bool:
        """Whether batches are made in memory that a GPU can fetch them from by itself."""
        return self.settings.data.pin_memory and is_gpu(self.process.device)

    @property
    def model_name(self) -> str:
        """The name of the folder of this model's traces: its class."""
        return type(self.task.model).__name__


Say = Callable[[str], object]
After = Callable[[Job], Iterator[str]]


def run(
    settings: TrainingSettings, run_id: str | None, output: Path | None, say: Say, note: Say, after: After | None = None
) -> Path:
    """Train, record if that is wanted, report, and return the folder; the first process of several speaks for all.

    What `after` does with the run is said last. Raises a PipelineError that names the way out, and whatever ended the
    training.
    """
    if settings.profiling.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise lacking("tensorboard")
    with joined(settings.device) as process:
        folder = claim(process, settings, run_id, output)
        task = tasks.prepare(settings.model, settings.data.subsample_percentage, settings.training.seed)
        plan = plan_for(settings.training, len(task.split.training), process.world_size)
        progress = Progress(folder / FILE if process.is_first else None, plan, note)
        job = Job(settings, task, plan, process, folder, progress, note)
        if process.is_first:
            run_folder.describe(folder, settings, plan)
            note(_opening(job))
        progress.begin()
        try:
            fit(job)
        except BaseException as error:
            progress.end(error)
            raise
        progress.end(None)
        if process.world_size > 1:
            torch.distributed.barrier()
        if process.is_first:
            say("\n".join(_closing(job)))
        if after:
            say("\n".join(after(job)))
    return folder


def claim(process: Process, settings: TrainingSettings, run_id: str | None, output: Path | None) -> Path:
    """Return the folder of this run, made and empty; the first process of a job makes it for all.

    Raises, in each process, InputError for a run id that is no plain name or a folder that holds something, and
    EnvironmentLacksError where it cannot be made.
    """
    answers: list[Path | PipelineError | None] = [None]
    if process.is_first:
        began = datetime.now(UTC)
        stamp = f"{began:%Y%m%dT%H%M%S}.{began.microsecond // 1000:03d}Z"
        try:
            answers[0] = run_folder.named(run_id, output, f"{stamp}-{settings.model}")
            run_folder.make(answers[0])
        except PipelineError as error:
            answers[0] = error
    if process.world_size > 1:
        torch.distributed.broadcast_object_list(answers, src=0, device=process.device)
    if isinstance(answers[0], Path):
        return answers[0]
    raise answers[0] or InputError("the first process named no folder")


def _opening(job: Job) -> str:
    settings, plan = job.settings, job.plan
    recorded = "recorded" if settings.profiling.enabled else "not recorded (--profiler on)"
    return (
        f"{job.model_name} on {job.process.device}: {plan.steps} steps of "
        f"{plan.samples_per_step} samples in {plan.epochs} epoch(s), {recorded}; {job.folder}"
    )


def _closing(job: Job) -> Iterator[str]:
    """Yield the lines of the result: what was learnt, the stages, the verdict and where everything lies."""
    yield f"{job.folder}: {job.progress.said()}"
    profiling, ranks = job.settings.profiling, run_folder.ranks_of(job.folder)
    if profiling.enabled and not ranks:
        yield "nothing was recorded; see the notes above"
    elif profiling.enabled:
        yield from ["", *run_folder.lines(job.folder, ranks)]
        if profiling.tensorboard:
            run_folder.write_scalars(ranks[0], job.folder / run_folder.SCALARS)
            yield f"scalars of the stages: tensorboard --logdir {job.folder / run_folder.SCALARS}"
    yield f"\nin {job.folder}: {', '.join(run_folder.files_in(job.folder))}"


def fit(job: Job) -> None:
    """Train, recorded if that is wanted."""
    process, training = job.process, job.settings.training
    model = job.task.model.to(process.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    if process.world_size > 1:
        model = DistributedDataParallel(model)
    workers = job.settings.data.num_workers
    batches, evaluation = loop.loaders(job.task.split, job.plan, training.seed, workers, job.pins_memory)
    work = loop.Work(model, optimizer, batches, evaluation if training.evaluate else None, process.device)
    profiler = ProfilerManager(
        job.folder,
        device=process.device,
        schedule=job.schedule,
        options=ManagerOptions(TimerOptions(rank=process.rank, world_size=process.world_size)),
        say=job.note,
        enabled=job.settings.profiling.enabled,
    )
    traces = RunFiles(Path(job.settings.profiling.output_dir) / job.model_name, process.rank, process.world_size)
    profiler.register("trace_ready", functools.partial(publish_cycle, traces))
    profiler.start(job.plan.steps)
    with profiler:
        loop.fit(work, job.plan, profiler, job.progress)
