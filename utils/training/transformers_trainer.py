"""The demo training with the Trainer of transformers, profiled by `ProfCallback`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from boundby.device import is_host
from boundby.integrations.transformers import ProfCallback
from utils.training.run import Job
from utils.training.tasks import Repeated


@contextlib.contextmanager
def losses_of(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield the losses of the batches that a model is trained on, while the context lasts; fetch nothing."""
    losses: list[torch.Tensor] = []

    def keep(model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if model.training:
            losses.append(output["loss"].detach())

    hook = model.register_forward_hook(keep)
    try:
        yield losses
    finally:
        hook.remove()


def fit(job: Job) -> None:
    """Train; the callback holds on to the Trainer, so that it times the stages exactly and hears of exceptions."""
    split = job.task.split
    model = job.task.model
    with losses_of(model) as losses:
        trainer = Trainer(
            model=model,
            args=arguments_of(job),
            data_collator=split.collate,
            train_dataset=Repeated(split.training, job.plan.rows_per_epoch),
            eval_dataset=Repeated(split.evaluation, len(split.evaluation)),
            compute_metrics=_accuracy,
            callbacks=[_Report(job, losses)],
        )
        trainer.remove_callback(PrinterCallback)  # the end of the run says it
        with _profiled(job, trainer):
            trainer.train()


def _profiled(job: Job, trainer: Trainer) -> contextlib.AbstractContextManager[Any]:
    profiling = job.settings.profiling
    if not profiling.enabled:
        return contextlib.nullcontext()
    callback = ProfCallback(
        output_dir=str(Path(profiling.output_dir) / job.model_name),
        wait_steps=profiling.wait_steps,
        warmup_steps=profiling.warmup_steps,
        active_steps=profiling.active_steps,
        num_cycles=profiling.repeat_cycles,
        run_folder=job.folder,
        reports=False,  # the end of the run says it
        schedule_every_n_steps=profiling.schedule_every_n_steps,
    )
    job.progress.profiler = lambda: callback.manager
    return callback.attach(trainer)


def arguments_of(job: Job) -> TrainingArguments:
    """Return the settings of the Trainer for a job."""
    training, plan = job.settings.training, job.plan
    arguments = TrainingArguments(
        output_dir=str(job.folder),  # must be given; nothing is saved
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch_size,
        per_device_eval_batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.accumulate,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # as in the other loops: gradients are not clipped
        seed=training.seed,
        dataloader_num_workers=job.settings.data.num_workers,
        dataloader_pin_memory=job.pins_memory,
        eval_strategy="epoch" if training.evaluate else "no",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        use_cpu=is_host(job.process.device),
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # or one process takes all, by DataParallel, with a batch for each
    return arguments


class _Report(TrainerCallback):
    """Tells the progress of steps and epochs."""

    def __init__(self, job: Job, losses: list[torch.Tensor]) -> None:
        self._job = job
        self._losses = losses

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin an epoch."""
        self._job.progress.begin_epoch()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Take in a step."""
        loss = torch.stack(self._losses).mean() if self._losses else torch.tensor(float("nan"))
        self._job.progress.end_step(loss)
        self._losses.clear()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Take in an epoch that no evaluation follows."""
        if not self._job.settings.training.evaluate:
            self._job.progress.end_epoch(None)

    def on_evaluate(self, *args: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        """Take in an epoch."""
        self._job.progress.end_epoch(metrics.get("eval_accuracy"))


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits = prediction.predictions
    return {"accuracy": float((np.asarray(logits).argmax(axis=-1) == prediction.label_ids).mean())}
