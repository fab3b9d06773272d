"""Which steps of a loop are recorded, as torch.profiler counts them, and what of them; what is given up for size."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.profiler import ProfilerAction

from boundby.capture.remarks import Remark

NEVER = sys.maxsize  # as the number of a step
LEAST = {"wait": 0, "warmup": 0, "active": 1, "repeat": 1, "every": 0}
NOT_ENDLESS = " (0 means without end in torch's own schedule, not here)"


@dataclass(frozen=True)
class Schedule:
    """`repeat` cycles of `wait` steps at rest, `warmup` steps thrown away and `active` steps recorded.

    With `every`, cycles start that many steps apart; otherwise the next one follows at once.
    """

    wait: int
    warmup: int
    active: int
    repeat: int = 1
    every: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that cannot be."""
        for field in LEAST:
            _check(f"schedule: {field}", getattr(self, field), field)

    @classmethod
    def of_parameters(cls, **parameters: int) -> "Schedule":
        """Return the schedule of a callback's parameters, in the order of the fields and with names of their own.

        Raises ValueError naming the parameter that cannot be.
        """
        for (name, value), field in zip(parameters.items(), LEAST, strict=True):
            _check(name, value, field)
        return cls(*parameters.values())

    @property
    def cycle(self) -> int:
        """Return the steps of one cycle."""
        return self.wait + self.warmup + self.active

    @property
    def period(self) -> int:
        """Return the steps from the start of one cycle to the start of the next."""
        return max(self.cycle, self.every)

    @property
    def steps(self) -> int:
        """Return the steps that a loop needs for all cycles."""
        return (self.repeat - 1) * self.period + self.cycle

    def fitted(self, total_steps: int) -> "Schedule | None":
        """Return the schedule shortened to a loop of `total_steps`; None where there is no step to record.

        Whole cycles go first, then wait steps, warm-up down to one step, active steps down to one, and the last
        warm-up step.
        """
        if self.steps <= total_steps:
            return self
        if total_steps >= self.cycle:
            return replace(self, repeat=1 + (total_steps - self.cycle) // self.period)
        if total_steps < 1:
            return None
        missing = self.cycle - total_steps
        parts = {"wait": self.wait, "warmup": self.warmup, "active": self.active}
        for name, least in (("wait", 0), ("warmup", min(1, self.warmup)), ("active", 1), ("warmup", 0)):
            given = min(missing, parts[name] - least)
            parts[name] -= given
            missing -= given
        return Schedule(**parts)

    def __str__(self) -> str:
        return f"{self.repeat} x ({self.wait} wait + {self.warmup} warm-up + {self.active} active)"


def _check(name: str, value: object, field: str) -> None:
    least = LEAST[field]
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    hint = NOT_ENDLESS if field == "repeat" and value == 0 else ""
    raise ValueError(f"{name} is {value!r}; give an int of at least {least}{hint}")


@dataclass(frozen=True)
class Span:
    """The steps of one cycle under the instruments: `warmup` of them from number `first` on, then `active`."""

    first: int
    warmup: int
    active: int

    @property
    def length(self) -> int:
        """Return the steps of warm-up and recording."""
        return self.warmup + self.active

    def action(self, number: int) -> ProfilerAction:
        """Return what torch's profiler does in step `number`."""
        at = max(number - self.first, 0)
        if at >= self.length:
            return ProfilerAction.NONE
        if at < self.warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if at < self.length - 1 else ProfilerAction.RECORD_AND_SAVE


@dataclass(frozen=True)
class Content:
    """The recorded steps of one cycle and the details of their events."""

    steps: int
    shapes: bool
    memory: bool
    stacks: bool = False

    def settings(self, activities: Sequence[Any]) -> dict[str, Any]:
        """Return the content as arguments of torch's profiler, with what it records of them."""
        return {
            "activities": activities,
            "record_shapes": self.shapes,
            "profile_memory": self.memory,
            "with_stack": self.stacks,
        }

    def within(self, step_bytes: float, limit: int) -> tuple["Content", Remark | None]:
        """Return as many steps as fit when each makes `step_bytes` of JSON, and a remark where they are fewer."""
        fewer = max(1, min(self.steps, int(limit / step_bytes)))
        if fewer == self.steps:
            return self, None
        estimate = f"would make about {_excess(step_bytes * self.steps, limit)}"
        return replace(self, steps=fewer), Remark("steps", f"{self.steps} step(s) {estimate}; {fewer} instead")

    def less(self, json_bytes: int, limit: int) -> tuple["Content | None", Remark]:
        """Return what to try after these steps made `json_bytes`, None where nothing is left to give up."""
        excess = self.excess(json_bytes, limit)
        if self.steps > 1:
            fewer = max(1, self.steps * limit // json_bytes)
            return replace(self, steps=fewer), Remark("steps", f"{excess}; {fewer} instead")
        if self.stacks:
            return replace(self, stacks=False), Remark("stacks", f"{excess}; left out")
        if self.shapes or self.memory:
            return replace(self, shapes=False, memory=False), Remark("shapes and memory", f"{excess}; left out")
        return None, Remark("trace", f"{excess}; not written")

    def excess(self, json_bytes: int, limit: int) -> str:
        """Describe how large the recording of these steps became."""
        return f"{self.steps} step(s) made {_excess(json_bytes, limit)}"


def _excess(json_bytes: float, limit: int) -> str:
    return f"{json_bytes / 1e6:.1f} MB of JSON, above the limit of {limit / 1e6:.1f} MB"
