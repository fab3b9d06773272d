"""What a tab is given to show."""

from dataclasses import dataclass
from pathlib import Path

from boundby.training.records import StageTimes
from utils.monitor.index import RunEntry
from utils.monitor.reading import Reader
from utils.monitor.run import Processes, RunFolder


@dataclass(frozen=True)
class Shown:
    """The chosen run, and the runs beside it."""

    root: Path
    entry: RunEntry
    folder: RunFolder
    processes: Processes
    runs: tuple[RunEntry, ...]
    now: float  # seconds of the Unix clock
    stall_s: float
    reader: Reader

    @property
    def ranks(self) -> tuple[StageTimes, ...]:
        """Return the stage times of the processes."""
        return self.processes.ranks
