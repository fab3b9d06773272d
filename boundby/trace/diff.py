"""What differs between two traces: the step, where the time went, operators and kernels. It claims no significance.

One trace is one sample: another run of the same program differs as well. The only spread that is known is that between
the steps inside each trace, and the change of the step time is held against it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from boundby.trace.analysis import Analysis
from boundby.trace.judgement import LEAST_STEPS


@dataclass(frozen=True)
class StepSpread:
    """How long the steps of one trace are, in ns."""

    steps: int
    median_ns: float
    q1_ns: float
    q3_ns: float


@dataclass(frozen=True)
class Amount:
    """What one trace spent on an operator or kernel; of a kernel only calls and device time are known.

    `device_self_ns` leaves out what called operators launched, `device_total_ns` holds it. None is not recorded.
    """

    calls: float
    device_self_ns: float | None
    device_total_ns: float | None
    cpu_self_ns: float | None

    @property
    def per_call_ns(self) -> float | None:
        """The device time of one call."""
        return None if self.device_total_ns is None else self.device_total_ns / self.calls


@dataclass(frozen=True)
class Change:
    """One operator or kernel in both traces; a side is None where its trace has no call of it."""

    name: str
    input_shapes: str | None  # of an operator, where both traces have recorded shapes
    kind: str | None  # of a kernel: one of `breakdown.KINDS`
    a: Amount | None
    b: Amount | None

    def difference(self, quantity: str) -> float | None:
        """Return B minus A of a field of `Amount`, a missing side being 0; None where it is not recorded."""
        values = [getattr(side, quantity) for side in (self.a, self.b) if side is not None]
        if None in values:
            return None
        return (getattr(self.b, quantity) if self.b else 0) - (getattr(self.a, quantity) if self.a else 0)

    @property
    def only_in(self) -> Literal["a", "b"] | None:
        """The only trace with a call of it; None: both have some."""
        return "a" if self.b is None else "b" if self.a is None else None

    @property
    def weight(self) -> float:
        """The larger of the absolute changes of device and CPU self time: what the changes are sorted by.

        Self times, since the total of an operator repeats in every operator around it.
        """
        return max(abs(self.difference(field) or 0) for field in ("device_self_ns", "cpu_self_ns"))


@dataclass(frozen=True)
class TimeChange:
    """Time of the window that the busiest device spent on a kind of work or a cause of idling; None: no such thing."""

    name: str
    a_ns: float | None
    b_ns: float | None

    @property
    def change_ns(self) -> float:
        """B minus A, a missing side being 0."""
        return (self.b_ns or 0) - (self.a_ns or 0)


@dataclass(frozen=True)
class Diff:
    """B against A; the largest changes first.

    All amounts are per step where `is_per_step`: what the whole trace holds, over the number of its steps. Otherwise a
    trace has no steps, and they are totals: traces of different length then differ in everything.
    """

    is_per_step: bool
    by_shapes: bool  # False: a trace lacks shapes, and operators are matched by name alone
    window_a_ns: int
    window_b_ns: int
    step_a: StepSpread | None
    step_b: StepSpread | None
    busy: tuple[TimeChange, ...]  # by kind of work; overlapping time is booked once
    idle: tuple[TimeChange, ...]  # by cause
    operators: tuple[Change, ...]
    kernels: tuple[Change, ...]

    @property
    def matched_by(self) -> str:
        """What operators of both traces are told apart by."""
        return "name and shapes" if self.by_shapes else "name"

    @property
    def is_beyond_spread(self) -> bool | None:
        """Whether the middle halves of the steps lie apart; None where a trace has fewer than `LEAST_STEPS` steps."""
        a, b = self.step_a, self.step_b
        if a is None or b is None or min(a.steps, b.steps) < LEAST_STEPS:
            return None
        return a.q3_ns < b.q1_ns or b.q3_ns < a.q1_ns


def diff(a: Analysis, b: Analysis) -> Diff:
    """Return what differs in `b` from `a`. Names must be equal to match, template arguments of kernels included."""
    steps = len(a.step_numbers), len(b.step_numbers)
    scale = (1 / steps[0], 1 / steps[1]) if all(steps) else (1.0, 1.0)
    by_shapes = all(any(operator.input_shapes for operator in side.operators) for side in (a, b))
    operators = [_operators(side, by_shapes, factor) for side, factor in zip((a, b), scale, strict=True)]
    kernels = [_kernels(side, factor) for side, factor in zip((a, b), scale, strict=True)]
    first, second = a.devices[0], b.devices[0]
    return Diff(
        is_per_step=all(steps),
        by_shapes=by_shapes,
        window_a_ns=a.window_ns,
        window_b_ns=b.window_ns,
        step_a=_step_spread(a),
        step_b=_step_spread(b),
        busy=_times(first.exposed_ns, second.exposed_ns, scale),
        idle=_times(first.causes_ns, second.causes_ns, scale),
        operators=_heaviest_first(Change(*key, None, *sides) for key, sides in _paired(*operators)),
        kernels=_heaviest_first(Change(name, None, kind, *sides) for (name, kind), sides in _paired(*kernels)),
    )


def _step_spread(side: Analysis) -> StepSpread | None:
    durations = [step.duration_ns for step in side.devices[0].steps]
    if not durations:
        return None
    q1, middle, q3 = (float(quartile) for quartile in np.percentile(durations, [25, 50, 75]))
    return StepSpread(len(durations), middle, q1, q3)


def _operators(side: Analysis, by_shapes: bool, factor: float) -> dict[tuple[str, str | None], Amount]:
    """Return the amounts by name and shapes, or by name alone."""
    amounts: dict[tuple[str, str | None], Amount] = {}
    for operator in side.operators:
        own = Amount(
            calls=operator.calls * factor,
            device_self_ns=_scaled(operator.device_self_ns, factor),
            device_total_ns=_scaled(operator.device_total_ns, factor),
            cpu_self_ns=operator.cpu_self_ns * factor,
        )
        key = operator.name, operator.input_shapes if by_shapes else None
        amounts[key] = _sum(amounts[key], own) if key in amounts else own
    return amounts


def _kernels(side: Analysis, factor: float) -> dict[tuple[str, str | None], Amount]:
    return {
        (kernel.name, kernel.kind): Amount(
            kernel.calls * factor, kernel.total_ns * factor, kernel.total_ns * factor, None
        )
        for kernel in side.kernels
    }


def _sum(one: Amount, other: Amount) -> Amount:
    return Amount(
        calls=one.calls + other.calls,
        device_self_ns=_plus(one.device_self_ns, other.device_self_ns),
        device_total_ns=_plus(one.device_total_ns, other.device_total_ns),
        cpu_self_ns=_plus(one.cpu_self_ns, other.cpu_self_ns),
    )


def _plus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _paired(
    a: Mapping[tuple[str, str | None], Amount], b: Mapping[tuple[str, str | None], Amount]
) -> Iterable[tuple[tuple[str, str | None], tuple[Amount | None, Amount | None]]]:
    return [(key, (a.get(key), b.get(key))) for key in dict.fromkeys([*a, *b])]


def _heaviest_first(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: -change.weight))


def _times(a: Mapping[str, int], b: Mapping[str, int], scale: tuple[float, float]) -> tuple[TimeChange, ...]:
    changes = [TimeChange(name, _scaled(a.get(name), scale[0]), _scaled(b.get(name), scale[1])) for name in {**a, **b}]
    return tuple(sorted(changes, key=lambda change: -abs(change.change_ns)))


def _scaled(nanoseconds: int | None, factor: float) -> float | None:
    return None if nanoseconds is None else nanoseconds * factor
