"""One training run from its settings to its report, with the framework that they name."""

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from boundby import files
from boundby.training import ManagerOptions, ProfilerManager, TimerOptions
from boundby.training.results import give_name
from boundby.training.store import file_name
from utils.errors import lacking
from utils.render import plain_text
from utils.render.blocks import Block
from utils.training import loop, run_folder, tasks
from utils.training.job import Job, Process, joined
from utils.training.progress import FILE, Progress
from utils.training.settings import TrainingSettings, plan_for

if TYPE_CHECKING:
    from boundby.capture import Cycle

Say = Callable[[str], object]

NEEDED = {"loop": (), "trainer": ("accelerate",), "lightning": ("lightning",)}
CHROME_TRACE = "chrome_trace.json"


def run(settings: TrainingSettings, run_id: str | None, output: Path | None, say: Say, note: Say) -> None:
    """Train, record if that is wanted, and say what was found; the first process of several speaks for all.

    Raises a PipelineError that names the way out, and whatever ended the training.
    """
    require(settings)
    with joined(settings.device) as process:
        folder = run_folder.claim(process, settings, run_id, output)
        job = _job(settings, process, folder, note)
        if process.is_first:
            run_folder.describe(folder, settings, job.plan)
            note(_opening(job))
        _train(job)
        process.wait_for_all()
        if process.is_first:
            say("\n".join(_closing(job)))


def _job(settings: TrainingSettings, process: Process, folder: Path, note: Say) -> Job:
    training = settings.training
    task = tasks.prepare(settings.model, settings.data.subsample_percentage, training.seed)
    plan = plan_for(training, len(task.split.training), process.world_size)
    progress = Progress(folder / FILE if process.is_first else None, plan, note)
    return Job(settings, task, plan, process, folder, progress, note)


def _train(job: Job) -> None:
    job.progress.begin()
    try:
        fit(job)
    except BaseException as error:
        job.progress.end(error)
        raise
    job.progress.end(None)


def _opening(job: Job) -> str:
    settings, plan = job.settings, job.plan
    recorded = "recorded" if settings.profiling.enabled else "not recorded (--profiler on)"
    return (
        f"{settings.framework}, {job.model_name} on {job.process.device}: {plan.steps} steps of "
        f"{plan.samples_per_step} samples in {plan.epochs} epoch(s), {recorded}; {job.folder}"
    )


def _closing(job: Job) -> Iterator[str]:
    """Yield the lines of the result: what was learnt, the stages, the verdict and where everything lies."""
    yield f"{job.folder}: {job.progress.said()}"
    if job.settings.profiling.enabled:
        yield from _recorded(job)
    yield ""
    names = sorted(each.name for each in job.folder.iterdir() if not each.name.startswith(files.TEMPORARY_PREFIX))
    yield f"in {job.folder}: {', '.join(names)}"


def _recorded(job: Job) -> Iterator[str]:
    ranks = run_folder.ranks_of(job.folder)
    if not ranks:
        yield "nothing was recorded; see the notes above"
        return
    blocks: list[Block] = run_folder.table(ranks[0])
    yield from ["", *plain_text.lines(blocks), "", *str(run_folder.judge(job.folder, ranks)).splitlines()]
    if job.settings.profiling.tensorboard:
        run_folder.write_scalars(ranks[0], job.folder / run_folder.SCALARS)
        yield f"scalars of the stages: tensorboard --logdir {job.folder / run_folder.SCALARS}"


def require(settings: TrainingSettings) -> None:
    """Raise EnvironmentLacksError where a package is missing that these settings need."""
    wanted = [*NEEDED[settings.framework], *(["tensorboard"] if settings.profiling.tensorboard else [])]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise lacking(*missing)


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
