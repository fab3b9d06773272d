"""The demo training with the Trainer of Lightning, profiled by `ProfilerCallback`."""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from boundby.device import is_gpu
from boundby.integrations.lightning import ProfilerCallback
from utils.training import loop
from utils.training.run import Job

QUIET = ("lightning.pytorch", "lightning.fabric", "lightning")
REMARKS = (  # of Lightning, about what is meant here
    ".*does not have many workers.*",
    ".*Trainer already configured with model summary.*",
    ".*LeafSpec.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
)


def fit(job: Job) -> None:
    """Train. Raises KeyboardInterrupt where Lightning has turned one into an exit."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    settings = job.settings
    training, evaluation = loop.loaders(
        job.task.split, job.plan, settings.training.seed, settings.data.num_workers, job.pins_memory
    )
    with warnings.catch_warnings():
        for text in REMARKS:
            warnings.filterwarnings("ignore", text)
        try:
            _trainer(job).fit(_Module(job), training, evaluation if settings.training.evaluate else None)
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


def _trainer(job: Job) -> pl.Trainer:
    process, profiling = job.process, job.settings.profiling
    callback = ProfilerCallback(
        enabled=profiling.enabled,
        output_dir=profiling.output_dir,
        schedule_every_n_steps=profiling.schedule_every_n_steps,
        wait_steps=profiling.wait_steps,
        warmup_steps=profiling.warmup_steps,
        active_steps=profiling.active_steps,
        repeat_cycles=profiling.repeat_cycles,
        run_folder=job.folder,
        say=job.note,
        reports=False,  # the end of the run does
    )
    job.progress.profiler = lambda: callback.manager
    on_gpu = is_gpu(process.device)
    alone: Any = [process.device.index] if on_gpu else 1
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=alone if process.world_size == 1 else process.world_size,
        strategy="auto" if process.world_size == 1 else "ddp",
        max_steps=job.plan.steps,
        max_epochs=-1,
        accumulate_grad_batches=job.plan.accumulate,
        callbacks=[callback, _Report(job)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the loader has one
        default_root_dir=str(job.folder),
    )


class _Module(pl.LightningModule):
    """The model of the job as Lightning wants it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.task.model
        self.model_name = job.model_name  # of the folder of its traces
        self.losses: list[torch.Tensor] = []  # of the batches of this step
        self.right: list[torch.Tensor] = []  # of the rows of this evaluation
        self._learning_rate = job.settings.training.learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.model(**batch)["loss"]
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Compare labels with those of the rows."""
        self.right.append(self.model(**batch)["logits"].argmax(dim=-1) == batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self._learning_rate)


class _Report(pl.Callback):
    """Tells the progress of steps and epochs."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_epoch_start(self, *args: Any) -> None:
        """Begin an epoch."""
        self._job.progress.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Take in a step, when its last batch has ended."""
        progress = self._job.progress
        if len(pl_module.losses) == self._job.plan.accumulate:
            progress.end_step(torch.stack(pl_module.losses).mean())
            pl_module.losses.clear()
            if progress.steps == self._job.plan.steps:
                trainer.should_stop = True  # evaluates after an epoch that is short too, as max_steps alone does not

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Take in an epoch; its evaluation came before."""
        accuracy = torch.cat(pl_module.right).float().mean().item() if pl_module.right else None
        pl_module.right.clear()
        self._job.progress.end_epoch(accuracy)
