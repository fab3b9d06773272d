"""The plain training loop, with its stages marked: what one would write in a project of one's own."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from boundby.training import ProfilerManager, stages
from utils.training.progress import Progress
from utils.training.settings import Plan
from utils.training.tasks import Repeated, Row, Split

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """What is trained on what."""

    model: torch.nn.Module  # on its device
    optimizer: torch.optim.Optimizer
    batches: DataLoader[Row]  # of one epoch
    evaluation: DataLoader[Row] | None
    device: torch.device


def loaders(
    split: Split, plan: Plan, seed: int, num_workers: int, pin_memory: bool
) -> tuple[DataLoader[Row], DataLoader[Row]]:
    """Return the batches to learn from, shuffled anew each epoch in an order that the seed decides, and the others."""
    rows = Repeated(split.training, plan.rows_per_epoch)
    order = DistributedSampler[Row](rows, seed=seed) if plan.world_size > 1 else None
    common: dict[str, Any] = {"batch_size": plan.batch_size, "pin_memory": pin_memory}
    training: DataLoader[Row] = DataLoader(
        rows,
        sampler=order,
        shuffle=order is None,
        generator=torch.Generator().manual_seed(seed),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        **common,
    )
    return training, DataLoader(Repeated(split.evaluation, len(split.evaluation)), **common)


def fit(work: Work, plan: Plan, profiler: ProfilerManager, progress: Progress) -> None:
    """Train; `profiler` and `progress` have begun and are ended by the caller."""
    progress.on_loss = lambda step, loss: profiler.metrics({"loss": loss}, step)
    progress.profiler = lambda: profiler
    for epoch in range(plan.epochs):
        steps = min(plan.steps_per_epoch, plan.steps - progress.steps)
        if isinstance(work.batches.sampler, DistributedSampler):
            work.batches.sampler.set_epoch(epoch)
        work.model.train()
        progress.begin_epoch()
        with profiler.span(stages.EPOCH):
            _run_epoch(work, steps, plan, profiler, progress)
        accuracy = None
        if work.evaluation is not None:
            with profiler.excluded(stages.EVALUATION):
                accuracy = accuracy_of(work.model, work.evaluation, work.device)
        with profiler.excluded(stages.LOGGING):
            progress.end_epoch(accuracy)


def accuracy_of(model: torch.nn.Module, batches: DataLoader[Row], device: torch.device) -> float:
    """Return the share of rows that the model labels as they are labelled."""
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=device)
    rows = 0
    with torch.no_grad():
        for batch in batches:
            here = to_device(batch, device)
            right += (model(**here)["logits"].argmax(dim=-1) == here["labels"]).sum()
            rows += len(here["labels"])
    return right.item() / rows


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device."""
    return {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def _run_epoch(work: Work, steps: int, plan: Plan, profiler: ProfilerManager, progress: Progress) -> None:
    with profiler.stage(stages.DATA):
        iterator = iter(work.batches)  # starts the workers
    batches = profiler.timed(iterator, stages.DATA)
    for _ in range(steps):
        loss = _step(work, batches, plan.accumulate, profiler)
        with profiler.stage(stages.LOGGING):
            progress.end_step(loss)
            profiler.metrics({"samples": plan.samples_per_step})
        profiler.step()


def _step(work: Work, batches: Iterator[Batch], accumulate: int, profiler: ProfilerManager) -> torch.Tensor:
    """Run one step of the optimizer; return the mean loss of its batches, on the device."""
    total = torch.zeros((), device=work.device)
    for number in range(1, accumulate + 1):
        batch = next(batches)
        with profiler.stage(stages.H2D):
            batch = to_device(batch, work.device)
        with _gradients_kept(work.model, number < accumulate):
            with profiler.stage(stages.FORWARD):
                loss = work.model(**batch)["loss"] / accumulate
                total += loss.detach()
            with profiler.stage(stages.BACKWARD):
                loss.backward()
    with profiler.stage(stages.OPTIMIZER):
        work.optimizer.step()
    with profiler.stage(stages.ZERO_GRAD):
        work.optimizer.zero_grad()
    return total


def _gradients_kept(model: torch.nn.Module, is_kept: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the processes do not exchange gradients, where more batches of the step follow."""
    if is_kept and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return contextlib.nullcontext()
