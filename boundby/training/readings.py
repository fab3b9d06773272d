"""What the machine says beside the stages: memory of the process and of the GPU, load, clock events."""

import time
from collections.abc import Callable

from boundby.sampler import Source

INTERVAL_S = 1.0  # psutil answers in 0.1 ms, NVML in up to 1 ms


class Readings:
    """Reads a source at intervals, in the thread of the loop and between two steps, so that no stage is delayed."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._next = clock()

    def due(self) -> dict[str, float]:
        """Return the values of now, {} where the last ones are younger. Raises what the source does."""
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + INTERVAL_S
        return self._source.read()
