"""A training that is about to begin: what a framework needs to know, and this process among those of its job."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from boundby.capture import Schedule
from boundby.device import is_gpu, pick_device
from utils.errors import EnvironmentLacksError, InputError
from utils.training.progress import Progress
from utils.training.settings import Plan, TrainingSettings
from utils.training.tasks import Task


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

    def agreed(self, number: int) -> int:
        """Return the number that the first process gives."""
        if self.world_size == 1:
            return number
        given = torch.tensor([number], dtype=torch.long, device=self.device)
        torch.distributed.broadcast(given, src=0)
        return int(given.item())

    def wait_for_all(self) -> None:
        """Wait until every process is here."""
        if self.world_size > 1:
            torch.distributed.barrier()


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
    task: Task
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
    def model_name(self) -> str:
        """The name of the folder of this model's traces: its class."""
        return type(self.task.model).__name__
