"""What a training has achieved, written to metrics.json while it runs: loss and speed of steps, epochs in sum."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from boundby import files
from boundby.remarks import summary
from boundby.training import ProfilerManager
from utils.cli import Terminated
from utils.training.settings import Plan

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
FILE = "metrics.json"
INTERVAL_S = 1.0  # between two writings, at least
COST = 200  # the same, in times of what one takes: half a percent


class Epoch(msgspec.Struct, frozen=True):
    """One epoch in sum."""

    epoch: int
    steps: int
    loss_mean: float | None
    accuracy: float | None
    samples_per_s: float | None
    seconds: float


class Steps(msgspec.Struct, frozen=True):
    """What is known of each step, as columns; a loss that is no finite number is None."""

    step: list[int]
    loss: list[float | None]
    samples_per_s: list[float]


class Metrics(msgspec.Struct, frozen=True):
    """What metrics.json holds."""

    schema_version: Literal[1]
    status: Literal["running", "finished", "failed", "interrupted"]
    error: str | None
    steps_planned: int
    samples_per_step: int
    non_finite_losses: int
    epochs: list[Epoch]
    steps: Steps


class Progress:
    """Takes in steps and epochs. A file that cannot be written is said once and stops nothing.

    Losses that lie on another device are fetched when the file is due, so that no step waits for the device. Without a
    `path` nothing is written. What the `profiler` does between two steps is in no time, and the steps that it slows
    down are not in the speed of their epoch.
    """

    def __init__(
        self,
        path: Path | None,
        plan: Plan,
        note: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._path = path
        self._plan = plan
        self._note = note
        self._clock = clock
        self._losses: list[float | None] = []
        self._pending: list[Any] = []
        self._speeds: list[float] = []
        self._epochs: list[Epoch] = []
        self._epoch_began = self._step_began = clock()
        self._usual_steps, self._usual_s = 0, 0.0  # of this epoch, those that no profiler slows down
        self._due = 0.0
        self._status = "running"
        self._error: str | None = None
        self.on_loss: Callable[[int, float], object] = lambda step, loss: None
        self.profiler: Callable[[], ProfilerManager | None] = lambda: None  # that runs beside the training

    @property
    def steps(self) -> int:
        """The steps that have ended."""
        return len(self._speeds)

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
        now = self._training_s()
        seconds = max(now - self._step_began, 1e-9)
        self._speeds.append(self._plan.samples_per_step / seconds)
        self._step_began = now
        profiler = self.profiler()
        if not (profiler and profiler.slows_step):
            self._usual_steps += 1
            self._usual_s += seconds
        self._pending.append(loss)
        device = getattr(loss, "device", None)
        from boundby.device import is_host  # which imports torch; a check of a run reads this module without it

        if device is None or is_host(device):
            self._resolve()
        if self.is_due:
            self.write()

    def end_epoch(self, accuracy: float | None) -> None:
        """Take in an epoch; what came after its last step, such as an evaluation, is no part of its time."""
        self._resolve()
        steps = self.steps - sum(epoch.steps for epoch in self._epochs)
        samples = self._plan.samples_per_step
        losses = [each for each in self._losses[self.steps - steps :] if each is not None]
        self._epochs.append(
            Epoch(
                epoch=len(self._epochs) + 1,
                steps=steps,
                loss_mean=math.fsum(losses) / len(losses) if losses else None,
                accuracy=accuracy,
                samples_per_s=self._usual_steps * samples / self._usual_s if self._usual_steps else None,
                seconds=self._step_began - self._epoch_began,
            )
        )
        self.write()
        self.begin_epoch()

    def end(self, error: BaseException | None) -> None:
        """End; `error` is what ended the training, None where it ended well."""
        interrupted = isinstance(error, KeyboardInterrupt | Terminated)
        self._status = "interrupted" if interrupted else "finished" if error is None else "failed"
        self._error = None if error is None else summary(error)
        self.write()

    def write(self) -> None:
        """Write the file."""
        self._resolve()
        if self._path is None:
            return
        began = self._clock()
        try:
            files.write_text(self._path, files.encode_json(msgspec.to_builtins(self._metrics())) + "\n")
        except OSError as error:
            self._path = None
            self._note(f"{FILE} is not written any more: {error}; the training goes on")
        now = self._clock()
        self._due = now + max(INTERVAL_S, COST * (now - began))

    def said(self) -> str:
        """Return the achievements in one line."""
        last = next((each for each in reversed(self._losses) if each is not None), None)
        loss = "no loss is known" if last is None else f"last loss {last:.4f}"
        parts = [f"{self.steps} steps, {loss}"]
        epoch = self._epochs[-1] if self._epochs else None
        if epoch and epoch.accuracy is not None:
            parts.append(f"accuracy {epoch.accuracy:.3f}")
        if epoch and epoch.samples_per_s is not None:
            parts.append(f"{epoch.samples_per_s:,.0f} samples/s in the last epoch")
        return ", ".join(parts)

    def _metrics(self) -> Metrics:
        known = len(self._losses)
        return Metrics(
            schema_version=SCHEMA_VERSION,
            status=self._status,
            error=self._error,
            steps_planned=self._plan.steps,
            samples_per_step=self._plan.samples_per_step,
            non_finite_losses=self._losses.count(None),
            epochs=self._epochs,
            steps=Steps(list(range(known)), self._losses, self._speeds[:known]),
        )

    def _training_s(self) -> float:
        """Return the seconds of a clock that stands still while the profiler is at work between two steps."""
        profiler = self.profiler()
        return self._clock() - (profiler.between_steps_s if profiler else 0.0)

    def _resolve(self) -> None:
        """Fetch the losses that are not known yet."""
        pending, self._pending = self._pending, []
        for each in pending:
            value = float(each)
            self._losses.append(value if math.isfinite(value) else None)
            self.on_loss(len(self._losses) - 1, value)
