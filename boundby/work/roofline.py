"""Every operator held against three measured limits, so that a matrix product and a LayerNorm are not averaged away.

Its FLOPs over FLOP/s, its bytes over bytes/s, its calls times the cost to issue one: the largest of the three is the
least time it can take (the roofline model of Williams, Waterman & Patterson 2009, with a third roof for issuing).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

if TYPE_CHECKING:  # it loads scipy, half of the time in which a trace is read and judged
    from boundby.timing import Estimate

Shapes = tuple[tuple[int, ...], ...]
ALWAYS_MAPPED_BYTES = 32 * 2**20  # glibc's largest threshold: larger blocks come from the system every time


class Interval(msgspec.Struct, frozen=True):
    """A value with the ends of its range."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> "Interval":
        """Return an interval of no width."""
        return cls(value, value, value)

    @classmethod
    def of(cls, estimate: "Estimate") -> "Interval":
        """Return the interval of an estimate; one round has none, and its ends are the value."""
        return cls(estimate.value, estimate.low or estimate.value, estimate.high or estimate.value)

    def times(self, factor: float) -> "Interval":
        """Return the interval of `factor` times the value."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


class Limits(msgspec.Struct, frozen=True):
    """Measured limits: FLOP/s, bytes/s by the size of what is touched (ascending), seconds to issue an operator.

    `new_bytes_per_s` holds for results that a CPU's allocator takes from the system anew, those above 32 MiB.
    """

    flops_per_s: Interval
    bytes_per_s: tuple[tuple[int, Interval], ...]
    dispatch_s: Interval
    new_bytes_per_s: Interval | None = None

    def at(self, rate_end: str, bytes_end: str) -> "Limits":
        """Return the limits at one end of their intervals: "low" or "high" for FLOP/s, and for all bytes/s."""

        def end(of: Interval) -> Interval:
            return Interval.exact(getattr(of, bytes_end))

        return Limits(
            flops_per_s=Interval.exact(getattr(self.flops_per_s, rate_end)),
            bytes_per_s=tuple((size, end(rate)) for size, rate in self.bytes_per_s),
            dispatch_s=self.dispatch_s,
            new_bytes_per_s=end(self.new_bytes_per_s) if self.new_bytes_per_s else None,
        )

    def bandwidth(self, touched_bytes: float) -> Interval:
        """Return bytes/s at the smallest measured size that holds `touched_bytes`, else at the largest."""
        fitting = [rate for size, rate in self.bytes_per_s if size >= touched_bytes]
        return fitting[0] if fitting else self.bytes_per_s[-1][1]


class OperatorLoad(msgspec.Struct, frozen=True):
    """What one operator does in one forward, over all its calls with the same shapes of its input tensors.

    `name` is the profiler's, as "aten::addmm". `weight_bytes` are read from what was there before the forward, the
    model's parameters above all, which come from as far as all of them together lie; `new_bytes` are those of
    `other_bytes` that are written to memory the operator allocates; `seconds` is the measured time of all calls, where
    it is known. `shapes` are those of every tensor argument in order, those in lists too.
    """

    name: str
    calls: float
    flops: float
    weight_bytes: float
    other_bytes: float
    new_bytes: float = 0.0
    seconds: float | None = None
    shapes: Shapes = ()

    @property
    def bytes(self) -> float:
        """What it reads and writes."""
        return self.weight_bytes + self.other_bytes

    def __add__(self, other: "OperatorLoad") -> "OperatorLoad":
        """Return the work of both, under the name and the shapes of the first."""
        return OperatorLoad(
            self.name,
            self.calls + other.calls,
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.other_bytes + other.other_bytes,
            self.new_bytes + other.new_bytes,
            None if self.seconds is None or other.seconds is None else self.seconds + other.seconds,
            self.shapes,
        )

    def shared(self, forwards: int) -> "OperatorLoad":
        """Return the work of each of so many forwards that did this together."""
        one = self.resized(1 / forwards)
        seconds = None if self.seconds is None else self.seconds / forwards
        return structs.replace(one, calls=self.calls / forwards, flops=self.flops / forwards, seconds=seconds)

    def resized(self, ratio: float) -> "OperatorLoad":
        """Return the same work on elements of `ratio` times the bytes, which nobody timed."""
        return structs.replace(
            self,
            weight_bytes=ratio * self.weight_bytes,
            other_bytes=ratio * self.other_bytes,
            new_bytes=ratio * self.new_bytes,
            seconds=None,
        )


class Attribution(msgspec.Struct, frozen=True):
    """Least seconds of a forward by kind of limit.

    `memory_share` is that of memory in the time of operators that compute or move data, `launch_share` that of small
    operators and of the host's work between operators in the whole time; measured where operators are timed.
    """

    compute_s: float
    memory_s: float
    launch_s: float
    memory_share: float
    launch_share: float

    @property
    def least_s(self) -> float:
        """The least time in which this machine could do the forward, operator after operator."""
        return self.compute_s + self.memory_s + self.launch_s


def attribute(
    operators: Sequence[OperatorLoad], limits: Limits, weights_bytes: float, seconds: float, on_host: bool
) -> Attribution:
    """Return the least time by kind of limit, for a forward of `seconds`.

    `on_host`: to issue an operator takes time from computing, as on a CPU.
    """
    sums = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    measured = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    for operator in operators:
        needs = _needs(operator, limits, weights_bytes, on_host)
        kind = max(needs, key=lambda name: needs[name])
        sums[kind] += needs[kind]
        measured[kind] += needs[kind] if operator.seconds is None else operator.seconds
    data = measured["compute"] + measured["memory"]
    between = (
        seconds - data - measured["launch"] if all(operator.seconds is not None for operator in operators) else 0.0
    )
    launching = measured["launch"] + max(0.0, between) if on_host else 0.0
    return Attribution(
        sums["compute"],
        sums["memory"],
        sums["launch"],
        memory_share=measured["memory"] / data if data else 0.0,
        launch_share=min(1.0, launching / seconds),
    )


def least_seconds(operator: OperatorLoad, limits: Limits, weights_bytes: float) -> tuple[float, float]:
    """Return the least seconds of an operator, over all its calls: by the limit of arithmetic, and by that of memory.

    `weights_bytes` are those of the whole model: its parameters come from as far as all of them together lie.
    """
    touched = operator.bytes / operator.calls
    is_new = limits.new_bytes_per_s is not None and operator.new_bytes / operator.calls > ALWAYS_MAPPED_BYTES
    new = operator.new_bytes if is_new else 0.0
    memory = operator.weight_bytes / limits.bandwidth(weights_bytes).value
    memory += (operator.other_bytes - new) / limits.bandwidth(touched).value
    if is_new and limits.new_bytes_per_s:
        memory += new / limits.new_bytes_per_s.value
    return operator.flops / limits.flops_per_s.value, memory


def _needs(operator: OperatorLoad, limits: Limits, weights_bytes: float, on_host: bool) -> dict[str, float]:
    """Return the least seconds that one operator needs under each limit, over all its calls."""
    compute, memory = least_seconds(operator, limits, weights_bytes)
    launch = operator.calls * limits.dispatch_s.value if on_host else 0.0
    return {"compute": compute, "memory": memory, "launch": launch}


def fixed_cost(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the seconds that do not grow with the work, from (work, seconds) pairs; None below three of them.

    It is the intercept of a line fitted with equal relative weight to every point, 0 where the fit is below.
    """
    if len({work for work, _ in points}) < 3:
        return None
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    centre = sum(weight * work for weight, (work, _) in zip(weights, points, strict=True)) / total
    height = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(weight * (work - centre) ** 2 for weight, (work, _) in zip(weights, points, strict=True))
    joint = sum(
        weight * (work - centre) * (seconds - height) for weight, (work, seconds) in zip(weights, points, strict=True)
    )
    return max(0.0, height - joint / spread * centre)
