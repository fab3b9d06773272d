"""Where the time of a forward goes: parts that add up to the measured time exactly.

Each operator is timed twice beside the forward it belongs to (`boundby.bound`): alone and hot, and in the model's
order with its own weights. The differences have names: beyond the least time by the limits it is the kernels at these
shapes, beyond the hot kernels it is what the model around them costs (cold caches, threads, other streams), beyond the
operators it is the host (dispatch, and Python between them). Nothing is clipped: a time that comes out negative is
printed so, since it says how far the others are off.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from boundby.bound.verdict import Fix, MatmulSpeed, Part, PartKind
from boundby.formatting import Missing
from boundby.work import Interval, Limits, OperatorLoad, least_seconds

CutKind = Literal["budget", "failed", "not_replayable"]
LEAST_KNOWN_SHARE = 0.9  # of a part's time, to say how much of it is padding


class Cut(msgspec.Struct, frozen=True):
    """Operators that were not replayed alone, and why; their time is that within the model's order.

    "budget": the seconds for replays were used up, by operators that take more of the time. "failed": the operator
    raised. "not_replayable": to call it again would change what it returns, or nothing can be timed of it.
    """

    kind: CutKind
    operators: tuple[str, ...]
    seconds: float  # of the forward, in the model's order
    reason: str


class ReplayedOperator(msgspec.Struct, frozen=True):
    """One distinct operator of a forward: all calls with the same shapes, strides, dtypes and other arguments.

    `hot_s` and `in_order_s` are the seconds of all its calls: alone, one after another on the same tensors; and
    between its neighbours, with each call's own tensors. None where it was not replayed so. `padding_share` is the
    share of its work that is for padding.
    """

    load: OperatorLoad
    hot_s: float | None
    in_order_s: float | None
    padding_share: float | None = None


class Replay(msgspec.Struct, frozen=True):
    """One forward, timed whole and by its operators in the same rounds.

    `forward_s` and `in_order_s` are medians of the rounds with the ends of their middle half. `dispatch_s` is what one
    call costs the host inside a replay (0 where the device is timed by its own events), `views_s` what all views and
    bare allocations cost it, `calls` how many operators the forward calls, views among them. `padding` says why shares
    of padding are not known. `variants` are the same operators under fixes, `shapes` the forward at other sizes;
    `seconds` is what all of it took, `rounds` how often the forward and its operators took turns; `doubts` say what
    else used the machine meanwhile.
    """

    operators: tuple[ReplayedOperator, ...]
    forward_s: Interval
    in_order_s: Interval
    dispatch_s: float
    views_s: float
    calls: int
    weights_bytes: float
    on_host: bool
    cut: tuple[Cut, ...] = ()
    padding: Missing | None = None
    variants: "tuple[Variant, ...]" = ()
    shapes: "tuple[ShapeTime, ...]" = ()
    seconds: float = 0.0
    rounds: int = 0
    threads: int = 1
    doubts: tuple[str, ...] = ()


class Variant(msgspec.Struct, frozen=True):
    """The same operators in order under a fix, over the time without it, from pairs; or why there is no such time."""

    fix: Fix
    time_ratio: Interval | Missing


class ShapeTime(msgspec.Struct, frozen=True):
    """The forward at other sizes: its samples, tokens of each, and seconds."""

    samples: int
    tokens: int
    seconds: float


class Split(msgspec.Struct, frozen=True):
    """The parts of `seconds`, in the order of `PartKind`; they add up to it.

    `matmul` is the speed of matrix products, over all of them, as a share of the machine's peak; None where there are
    none. `cut` says what was not replayed.
    """

    seconds: float
    breakdown: tuple[Part, ...]
    matmul: MatmulSpeed | None
    cut: tuple[Cut, ...] = ()

    def __getitem__(self, kind: PartKind) -> Part:
        """Return the part of this kind."""
        return next(part for part in self.breakdown if part.kind == kind)

    def share(self, kind: PartKind) -> float:
        """Return the part's share of the time, with its sign."""
        return self[kind].seconds / self.seconds

    @property
    def largest(self) -> Part:
        """The part with most of the time."""
        return max(self.breakdown, key=lambda part: part.seconds)

    @property
    def padding_share(self) -> float | None:
        """The share of all the time that is spent on padding; None where it is not known of any part."""
        times = [part.seconds * part.padding_share for part in self.breakdown if part.padding_share is not None]
        return sum(times) / self.seconds if times else None


class _OperatorTime(msgspec.Struct, frozen=True):
    """The time of one distinct operator, taken apart."""

    operator: ReplayedOperator
    limit: Literal["compute", "memory"]
    least_s: float
    dispatch_s: float

    @property
    def hot_s(self) -> float:
        """The time alone and hot; what was not replayed so counts as it was in the model's order."""
        hot, in_order = self.operator.hot_s, self.operator.in_order_s
        return hot if hot is not None else in_order if in_order is not None else self.least_s + self.dispatch_s

    @property
    def in_order_s(self) -> float:
        return self.hot_s if self.operator.in_order_s is None else self.operator.in_order_s

    @property
    def beyond_s(self) -> float:
        return self.hot_s - self.least_s - self.dispatch_s


def split(replay: Replay, limits: Limits, measured_s: float | None = None) -> Split:
    """Return where the time of a forward goes.

    `measured_s` is its time as measured elsewhere, by a sweep; `unexplained` is how much that differs from the time
    that was taken beside the replays, which the other parts add up to. Without it that is 0.
    """
    times = [_operator_time(operator, replay, limits) for operator in replay.operators]
    forward_s, in_order_s = replay.forward_s.value, replay.in_order_s.value
    seconds = forward_s if measured_s is None else measured_s
    hot_s = sum(time.hot_s for time in times)
    dispatch_s = sum(time.dispatch_s for time in times)
    compute, memory = ([time for time in times if time.limit == kind] for kind in ("compute", "memory"))
    compute_s, memory_s = (sum(time.least_s for time in kind) for kind in (compute, memory))
    parts = (
        Part("compute", compute_s, _padding(compute, lambda time: time.least_s)),
        Part("memory", memory_s, _padding(memory, lambda time: time.least_s)),
        Part("kernels", hot_s - compute_s - memory_s - dispatch_s, _padding(times, lambda time: time.beyond_s)),
        Part("around", in_order_s - hot_s - replay.views_s, _padding(times, lambda time: time.hot_s)),
        Part("host", forward_s - in_order_s + dispatch_s + replay.views_s, None if replay.padding is not None else 0.0),
        Part("unexplained", seconds - forward_s),
    )
    return Split(seconds, parts, _matmul_speed(times, limits), replay.cut)


def _operator_time(operator: ReplayedOperator, replay: Replay, limits: Limits) -> _OperatorTime:
    compute_s, memory_s = least_seconds(operator.load, limits, replay.weights_bytes)
    limit: Literal["compute", "memory"] = "compute" if compute_s >= memory_s else "memory"
    return _OperatorTime(operator, limit, max(compute_s, memory_s), operator.load.calls * replay.dispatch_s)


def _padding(times: Iterable[_OperatorTime], weight: Callable[[_OperatorTime], float]) -> float | None:
    """Return the share of padding in the positive seconds of the times; None where it is known of too few of them."""
    weighted = [(max(0.0, weight(time)), time.operator.padding_share) for time in times]
    total = sum(seconds for seconds, _ in weighted)
    known = [(seconds, share) for seconds, share in weighted if share is not None]
    known_s = sum(seconds for seconds, _ in known)
    if not known or known_s < LEAST_KNOWN_SHARE * total:
        return None
    return sum(seconds * share for seconds, share in known) / known_s if known_s else 0.0


def _matmul_speed(times: Sequence[_OperatorTime], limits: Limits) -> MatmulSpeed | None:
    """Return FLOP/s of matrix products over the peak; in the model they own their share of what is around too."""
    products = [time for time in times if time.operator.load.flops]
    if not products:
        return None
    least_s = sum(time.operator.load.flops for time in products) / limits.flops_per_s.value
    alone_s = sum(time.hot_s - time.dispatch_s for time in products)
    in_model_s = sum(time.in_order_s - time.dispatch_s for time in products)
    return MatmulSpeed(in_model=least_s / in_model_s, alone=least_s / alone_s) if alone_s > 0 < in_model_s else None
