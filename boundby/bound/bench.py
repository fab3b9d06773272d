"""The instruments that a call is looked into with: its clock, its device's queue, who watches, how long it may take."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from boundby.machine import Source, Watch, device_queue, gpu_source, release_memory, synchronizer
from boundby.timing import DeviceQueue, Timer

REPLAY_S = 10.0
TRIALS_S = 10.0


@dataclass(frozen=True)
class Bench:
    """The instruments on one device, and the seconds that replays and trials may take.

    `queue` is that of the GPU, None on a CPU. `watch` notices what else uses the machine, by default on the host;
    `source` reads the clock of the GPU. `release` gives memory back. `tell` hears what goes on and how many of the
    seconds are left.
    """

    timer: Timer = Timer()
    queue: DeviceQueue | None = None
    watch: Watch = field(default_factory=Watch)
    source: Source | None = None
    release: Callable[[], object] = lambda: None
    tell: Callable[[str, float], object] = lambda text, left_s: None
    replay_s: float = REPLAY_S
    trials_s: float = TRIALS_S

    @classmethod
    def of(cls, device: torch.device) -> "Bench":
        """Return the instruments that this device has."""
        source = gpu_source(device)
        return cls(
            timer=Timer(synchronize=synchronizer(device)),
            queue=device_queue(device),
            watch=Watch(source=source),
            source=source,
            release=lambda: release_memory(device),
        )

    def within(self, seconds: float) -> "Bench":
        """Return the same instruments, with half of the seconds for replays and half for trials."""
        return replace(self, replay_s=seconds / 2, trials_s=seconds / 2)

    @property
    def on_host(self) -> bool:
        """Whether a call is done when it returns."""
        return self.queue is None

    @property
    def threads(self) -> int:
        """The threads that the work keeps busy: behind a device it is one."""
        return torch.get_num_threads() if self.on_host else 1
