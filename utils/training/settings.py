"""The settings of `profile_training.py`: the schema of configs/training.yaml, and the plan they give."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from utils.settings import Device, Name, Section

ModelName = Literal["baseline_cnn", "resnet", "efficientnet"]


class Data(Section):
    """How much of the data is used, and how it is loaded."""

    subsample_percentage: Annotated[float, Field(gt=0, le=1)] = 1.0  # a share of 1, under the name it is known by
    num_workers: NonNegativeInt = 0
    pin_memory: bool = True  # on a GPU; elsewhere there is nothing to pin it for


class Training(Section):
    """How long and how the model is trained."""

    max_epochs: PositiveInt = 2
    steps_per_epoch: PositiveInt | None = None  # optimizer steps; None: all data once
    max_steps: PositiveInt | None = None  # as many steps in all, in as many epochs as that takes
    batch_size: Annotated[int, Field(ge=2)] = 32  # batch normalisation needs two samples
    accumulate_grad_batches: PositiveInt = 1
    learning_rate: PositiveFloat = 3e-3
    evaluate: bool = True  # after each epoch
    seed: NonNegativeInt = 0


class Profiling(Section):
    """What is recorded: stage times of every step, and a trace of a few."""

    enabled: bool = False
    output_dir: Name = "outputs/profiler_logs"
    schedule_every_n_steps: NonNegativeInt = 50
    wait_steps: NonNegativeInt = 1
    warmup_steps: NonNegativeInt = 1
    active_steps: PositiveInt = 3
    repeat_cycles: PositiveInt = 2
    tensorboard: bool = False


class TrainingSettings(Section):
    """Everything that configs/training.yaml may hold."""

    model: ModelName = "baseline_cnn"
    device: Device = "auto"
    data: Data = Data()
    training: Training = Training()
    profiling: Profiling = Profiling()


@dataclass(frozen=True)
class Plan:
    """The length of a training; a step is one of the optimizer, and takes `accumulate` batches in each process."""

    steps: int
    steps_per_epoch: int
    batch_size: int  # of one process
    accumulate: int
    world_size: int

    @property
    def epochs(self) -> int:
        """The epochs begun; the last one may be short."""
        return math.ceil(self.steps / self.steps_per_epoch)

    @property
    def samples_per_step(self) -> int:
        """Of all processes."""
        return self.batch_size * self.accumulate * self.world_size

    @property
    def rows_per_epoch(self) -> int:
        """What a training set must hold for whole steps alone."""
        return self.steps_per_epoch * self.samples_per_step


def plan_for(training: Training, num_rows: int, world_size: int = 1) -> Plan:
    """Return the plan; an epoch that takes all data leaves out, or repeats, what would make no whole step."""
    rows_per_step = training.batch_size * training.accumulate_grad_batches * world_size
    per_epoch = training.steps_per_epoch or max(1, num_rows // rows_per_step)
    steps = training.max_steps or training.max_epochs * per_epoch
    return Plan(steps, per_epoch, training.batch_size, training.accumulate_grad_batches, world_size)
