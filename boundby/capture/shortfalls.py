"""What is noted where a device, a torch or a recording gives less than was asked for."""

from collections.abc import Sequence

import torch
import torch.profiler

from boundby.capture.export import Exported
from boundby.capture.manifest import Record
from boundby.capture.snapshot import UNAVAILABLE, memory_module


def note_unavailable(log: Record, device: torch.device, activities: Sequence[torch.profiler.ProfilerActivity]) -> None:
    """Note what this torch cannot record for `device`."""
    if len(activities) == 1:
        log.lacks("device events", f"the profiler of this torch records none for {device.type}")
    if memory_module(device) is None:
        log.lacks(UNAVAILABLE, f"torch keeps the history of an allocator for CUDA and XPU only, not for {device.type}")


def note_warmup(log: Record, warmup: int) -> None:
    """Note a recording without warm-up."""
    if warmup == 0:
        log.foresee("warm-up", "none was asked for: the first recorded step also pays for starting the profiler")


def note_missing_steps(log: Record, found: int, ended: int, steps: int) -> None:
    """Note that a trace holds fewer `steps` than were wanted; it should hold those that have `ended`."""
    if found < steps:
        note = log.downgrade if found < ended else log.foresee
        note("steps", f"{found} of {steps} are in the trace")


def note_missing_events(log: Record, exported: Exported, activities: Sequence[torch.profiler.ProfilerActivity]) -> None:
    """Note that a trace holds nothing of the device, though the profiler was to record it."""
    if len(activities) > 1 and not exported.has_device_events:
        log.downgrade("device events", "the trace holds none; run with KINETO_LOG_LEVEL=0 to see why")
