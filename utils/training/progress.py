"""What a training has achieved, written to metrics.json while it runs: loss and speed of steps, and of epochs."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from boundby import files
from boundby.capture import summary
from boundby.training import ProfilerManager
from utils.command import Terminated
from utils.training.settings import Plan

if TYPE_CHECKING:
    import torch

FILE = "metrics.json"
INTERVAL_S = 1.0  # between two writings, at least
COST = 200  # the same, in times of what one takes: half a percent


class Epoch(msgspec.Struct, frozen=True):
    """One epoch; its speed is that of the steps that no profiler slowed down."""

    epoch: int
    steps: int
    loss_mean: float | None
    accuracy: float | None
    samples_per_s: float | None
    seconds: float


class Steps(msgspec.Struct):
    """What is known of each step, as columns; a loss that is no finite number is None."""

    step: list[int] = []
    loss: list[float | None] = []
    samples_per_s: list[float] = []


class Metrics(msgspec.Struct, kw_only=True):
    """What metrics.json holds."""

    schema_version: Literal[1] = 1
    status: Literal["running", "finished", "failed", "interrupted"] = "running"
    error: str | None = None
    steps_planned: int
    samples_per_step: int
    non_finite_losses: int = 0
    epochs: list[Epoch] = []
    steps: Steps = msgspec.field(default_factory=Steps)


class Progress:
    """Takes in steps and epochs. A file that cannot be written is reported once and stops nothing.

    Losses that lie on another device are fetched when the file is due, so that no step waits for the device. Without a
    `path` nothing is written. What the `profiler` does between two steps is in no time.
    """

    def __init__(
        self,
        path: Path | None,
        plan: Plan,
        note: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.metrics = Metrics(steps_planned=plan.steps, samples_per_step=plan.samples_per_step)
        self.steps = 0  # that have ended
        self.on_loss: Callable[[int, float], object] = lambda step, loss: None
        self.profiler: Callable[[], ProfilerManager | None] = lambda: None  # that runs beside the training
        self._path = path
        self._note = note
        self._clock = clock
        self._pending: list[tuple[torch.Tensor | float, float]] = []  # losses that are not fetched, with their speeds
        self._epoch_began = self._step_began = clock()
        self._usual_steps, self._usual_s = 0, 0.0  # of this epoch, those that no profiler slows down
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the file is to be written again."""
        return self._path is not None and self._clock() >= self._due

    def begin(self) -> None:
        """Begin before anything else."""
        self.begin_epoch()
        self.write()

    def begin_epoch(self) -> None:
        """Begin an epoch and its first step; what came before is no part of either."""
        self._epoch_began = self._step_began = self._training_s()
        self._usual_steps, self._usual_s = 0, 0.0

    def end_step(self, loss: "torch.Tensor | float") -> None:
        """Take in a step, whose loss is the mean over its batches, and write the file if that is due."""
        from boundby.machine import is_host  # which imports torch; a check of a run reads this module without it

        now = self._training_s()
        seconds = max(now - self._step_began, 1e-9)
        self._step_began = now
        self.steps += 1
        self._pending.append((loss, self.metrics.samples_per_step / seconds))
        profiler = self.profiler()
        if not (profiler and profiler.slows_step):
            self._usual_steps += 1
            self._usual_s += seconds
        if isinstance(loss, float) or is_host(loss.device):
            self._fetch()
        if self.is_due:
            self.write()

    def end_epoch(self, accuracy: float | None) -> None:
        """Take in an epoch; what came after its last step, such as an evaluation, is no part of its time."""
        self._fetch()
        metrics = self.metrics
        first = sum(epoch.steps for epoch in metrics.epochs)
        losses = [loss for loss in metrics.steps.loss[first:] if loss is not None]
        samples = self._usual_steps * metrics.samples_per_step
        metrics.epochs.append(
            Epoch(
                epoch=len(metrics.epochs) + 1,
                steps=self.steps - first,
                loss_mean=math.fsum(losses) / len(losses) if losses else None,
                accuracy=accuracy,
                samples_per_s=samples / self._usual_s if self._usual_steps else None,
                seconds=self._step_began - self._epoch_began,
            )
        )
        self.write()
        self.begin_epoch()

    def end(self, error: BaseException | None) -> None:
        """End; `error` is what ended the training, None where it ended well."""
        if error is None:
            self.metrics.status = "finished"
        else:
            is_interrupt = isinstance(error, KeyboardInterrupt | Terminated)
            self.metrics.status = "interrupted" if is_interrupt else "failed"
            self.metrics.error = summary(error)
        self.write()

    def write(self) -> None:
        """Write the file."""
        self._fetch()
        if self._path is None:
            return
        began = self._clock()
        try:
            files.write_bytes(self._path, msgspec.json.encode(self.metrics) + b"\n")
        except OSError as error:
            self._path = None
            self._note(f"{FILE} is not written any more: {error}; the training goes on")
        now = self._clock()
        self._due = now + max(INTERVAL_S, COST * (now - began))

    def said(self) -> str:
        """Return the achievements in one line."""
        losses = [loss for loss in self.metrics.steps.loss if loss is not None]
        parts = [f"{self.steps} steps, {f'last loss {losses[-1]:.4f}' if losses else 'no loss is known'}"]
        epoch = self.metrics.epochs[-1] if self.metrics.epochs else None
        if epoch and epoch.accuracy is not None:
            parts.append(f"accuracy {epoch.accuracy:.3f}")
        if epoch and epoch.samples_per_s is not None:
            parts.append(f"{epoch.samples_per_s:,.0f} samples/s in the last epoch")
        return ", ".join(parts)

    def _training_s(self) -> float:
        """Return the seconds of a clock that stands still while the profiler is at work between two steps."""
        profiler = self.profiler()
        return self._clock() - (profiler.between_steps_s if profiler else 0.0)

    def _fetch(self) -> None:
        """Take in the losses that are not known yet."""
        pending, self._pending = self._pending, []
        steps = self.metrics.steps
        for loss, speed in pending:
            value = float(loss)  # waits for the device
            is_finite = math.isfinite(value)
            steps.step.append(len(steps.step))
            steps.loss.append(value if is_finite else None)
            steps.samples_per_s.append(speed)
            self.metrics.non_finite_losses += not is_finite
            self.on_loss(steps.step[-1], value)
