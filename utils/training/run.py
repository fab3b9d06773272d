"""One training run from its settings to its report."""

from collections.abc import Callable, Iterator
from pathlib import Path

from boundby import files
from utils.render import plain_text
from utils.render.blocks import Block
from utils.training import frameworks, models, report, run_folder, scalars
from utils.training.job import Job
from utils.training.plan import plan_for
from utils.training.process import Process, joined
from utils.training.progress import FILE, Progress
from utils.training.settings import TrainingSettings

Say = Callable[[str], object]


def run(settings: TrainingSettings, run_id: str | None, output: Path | None, say: Say, note: Say) -> None:
    """Train, record if that is wanted, and say what was found; the first process of several speaks for all.

    Raises a PipelineError that names the way out, and whatever ended the training.
    """
    frameworks.require(settings)
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
    task = models.prepare(settings.model, settings.data.subsample_percentage, training.seed)
    plan = plan_for(training, len(task.split.training), process.world_size)
    progress = Progress(folder / FILE if process.is_first else None, plan, note)
    return Job(settings, task, plan, process, folder, progress, note)


def _train(job: Job) -> None:
    job.progress.begin()
    try:
        frameworks.fit(job)
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
    ranks = report.ranks_of(job.folder)
    if not ranks:
        yield "nothing was recorded; see the notes above"
        return
    blocks: list[Block] = report.table(ranks[0])
    yield from ["", *plain_text.lines(blocks), "", *str(report.judge(job.folder, ranks)).splitlines()]
    if job.settings.profiling.tensorboard:
        scalars.write(ranks[0], job.folder / scalars.FOLDER)
        yield f"scalars of the stages: tensorboard --logdir {job.folder / scalars.FOLDER}"
