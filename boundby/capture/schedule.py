"""Which steps of a loop are recorded: cycles of wait, warm-up and active steps, as torch.profiler counts them."""

import sys
from dataclasses import dataclass, replace

from torch.profiler import ProfilerAction

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
