"""Names of files that neither the ranks of one job nor the cycles of one run overwrite for each other."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Naming:
    """This process among those of its job, and what that does to the names of its files."""

    rank: int = 0
    world_size: int = 1

    def path(self, path: Path, cycle: int | None = None) -> Path:
        """Return `trace.json.gz` as `rank3_trace_cycle2.json.gz`: the rank if there are several, the cycle if given."""
        stem, dot, suffix = path.name.partition(".")
        prefix = f"rank{self.rank}_" if self.world_size > 1 else ""
        number = f"_cycle{cycle}" if cycle is not None else ""
        return path.with_name(f"{prefix}{stem}{number}{dot}{suffix}")


def naming_of_process() -> Naming:
    """Return rank and size of the job from torch.distributed, or else from RANK and WORLD_SIZE, or else one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Naming(torch.distributed.get_rank(), torch.distributed.get_world_size())
    try:
        rank = int(os.environ["RANK"])
        return Naming(rank, max(rank + 1, int(os.environ.get("WORLD_SIZE", "1"))))
    except (KeyError, ValueError):
        return Naming()
