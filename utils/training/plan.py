"""How many steps and epochs a training takes: one answer for every framework."""

import math
from dataclasses import dataclass

from utils.training.settings import Training


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
