"""Keeps the runs that the page shows, and reads them again no more often than is cheap."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from utils.monitor.index import Stamp
from utils.monitor.run import Processes, RunFolder

MOST_RUNS = 6  # that are kept, for all who look
COST = 10  # the time between two readings of a run, at least, in times of what one takes


@dataclass(frozen=True)
class _Kept:
    stamp: Stamp
    processes: Processes
    read_at: float
    cost_s: float


class Reader:
    """Gives the processes of a run: from memory while nothing has changed, or while reading would cost too much."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._reading = threading.Lock()

    def processes(self, run: RunFolder) -> Processes:
        """Return what is known of a run."""
        key = str(run.folder)
        with self._reading:
            kept, stamp, began = self._kept.get(key), run.stamp(), self._clock()
            if kept is None or (kept.stamp != stamp and began - kept.read_at >= COST * kept.cost_s):
                found = run.processes()
                kept = _Kept(stamp, found, self._clock(), self._clock() - began)
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_RUNS:
                self._kept.popitem(last=False)
            return kept.processes
