"""What limits one forward, how sure that is, and what the best fix could gain.

The least time of all operators (`boundby.roofline`), as a share of the measured time, says how close the forward is to
what the machine can do; the kind of limit with most of the time is the bound.

Source of the launch rule: trtexec, which says so where issuing takes 0.8 of the device's time.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from boundby.roofline import Attribution, Interval, Limits, OperatorLoad, attribute

Bound = Literal[
    "compute",
    "memory",
    "launch",
    "transfer",
    "input",
    "optimizer",
    "communication",
    "under_utilised",
    "mixed",
    "inconclusive",
]
Confidence = Literal["high", "medium", "low"]
Confirmation = Literal["confirmed", "contradicted", "untested"]

LATE_HOST = 0.8  # of the device's time to issue the work: trtexec calls that bound by enqueue time
IDLE_DEVICE = 0.25  # of the time from idle to idle in which the device waited for the host
UNDER_UTILISED = 0.35  # of the time explained by the limits
CLEAR = 0.6  # share of one kind of work, below which the bound is mixed
LEAST_GAIN = 1.02
MOST_SHARE = 1.02  # of the upper end of the time, before the limits themselves are doubted
REMOVE_PADDING = "remove padding"
BETTER_KERNELS = "better kernels for these shapes"
RIVALS: tuple[Bound, ...] = ("compute", "memory", "launch")  # a test that cannot tell them apart confirms nothing
ARITHMETIC: tuple[Bound, ...] = ("compute", "memory", "mixed", "under_utilised")


@dataclass(frozen=True)
class Times:
    """Measured seconds of one forward, and of what surrounds it; None is not measured.

    `device_s`: the device's own time; on a CPU it is the isolated time. `enqueue_s`: the host's time to issue it.
    `input_s`: to make the input (tokenizing). `transfer_s`: to bring it to the device. `fixed_s`: the part of the
    isolated time that does not grow with the batch, from a fit over batch sizes.
    """

    isolated_s: Interval
    device_s: Interval | None = None
    enqueue_s: float | None = None
    input_s: float | None = None
    transfer_s: float | None = None
    fixed_s: float | None = None

    @property
    def working_s(self) -> Interval:
        """The time that the limits are held against."""
        return self.device_s or self.isolated_s


@dataclass(frozen=True)
class Gain:
    """A fix, the largest factor on the throughput it could bring, and what that bound rests on.

    `relieves` names the bounds that it can help with; () is any.
    """

    fix: str
    at_most: float
    basis: str
    relieves: tuple[Bound, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What limits a forward. `share_of_limit` is the time that the limit alone needs over the time measured."""

    bound: Bound
    alternatives: tuple[Bound, ...]
    share_of_limit: float | None
    confidence: Confidence
    confirmation: Confirmation
    gains: tuple[Gain, ...]
    evidence: tuple[str, ...]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Intervention:
    """A change made on purpose: time before over time after, and the range of it that each bound predicts."""

    name: str
    ratio: Interval
    predicted: Mapping[Bound, tuple[float, float]]


def judge(  # noqa: PLR0913  (each is one kind of evidence)
    times: Times,
    operators: Sequence[OperatorLoad],
    limits: Limits | None,
    *,
    weights_bytes: float = 0.0,
    on_host: bool = True,
    interventions: Sequence[Intervention] = (),
    fixes: Sequence[Gain] = (),
    doubts: Sequence[str] = (),
    reason: str = "work: the work of the forward or the limits of the machine are not known",
) -> Verdict:
    """Return the verdict on one forward.

    The bound is found again at every combination of the ends of the intervals; where it changes, it is `mixed` and
    `alternatives` names what it may be. `fixes` are gains that the caller knows of (padding, batch size); those that
    follow from the evidence are added. `doubts` are about the measurement and lower the confidence.
    """
    if limits is None or not operators:
        return Verdict("inconclusive", (), None, "low", "untested", tuple(fixes), (), (*doubts, reason))
    context = _Context(times, tuple(operators), limits, weights_bytes, on_host)
    bound, share = context.label()
    others = tuple(dict.fromkeys(label for label in context.labels_at_the_ends() if label != bound))
    alternatives = context.runner_up(bound) if not others else ()
    final: Bound = "mixed" if others else bound
    if others:
        alternatives = tuple(each for each in (bound, *others) if each != "mixed")
    confirmation, tried = confirm(bound, interventions)
    found = list(doubts)
    if share * times.working_s.value > MOST_SHARE * times.working_s.high:
        found.append(
            f"share: the limits allow no less than {share:.2f} times the measured time; the ceilings were measured on "
            "a busier machine, or the work is counted too high"
        )
    if confirmation == "contradicted":
        found.append("contradicted: an intervention did not have the effect that this bound predicts")
    return Verdict(
        bound=final,
        alternatives=alternatives,
        share_of_limit=share,
        confidence=_confidence(final, confirmation, found),
        confirmation=confirmation,
        gains=tuple(_worthwhile([*fixes, *context.gains()], {bound, *alternatives})),
        evidence=(*context.evidence(bound), *tried),
        doubts=tuple(found),
    )


def confirm(bound: Bound, interventions: Sequence[Intervention]) -> tuple[Confirmation, tuple[str, ...]]:
    """Return whether the interventions bear out `bound`, and a line on each.

    One confirms where its whole interval lies in the predicted range and not in that of compute, memory or launch, if
    these are not the bound; it contradicts where none of it lies in the predicted range.
    """
    verdicts, lines = [], []
    for each in interventions:
        expected = each.predicted.get(bound)
        result = "says nothing about this bound"
        if expected is not None:
            low, high = expected
            rivals = {name: ends for name, ends in each.predicted.items() if name in RIVALS and name != bound}
            others = [name for name, ends in rivals.items() if _lies_in(each.ratio, ends)]
            if _lies_in(each.ratio, expected) and not others:
                result = "as predicted"
            elif _lies_in(each.ratio, expected):
                result = f"as predicted, and so it would be for {' and '.join(others)}"
            elif each.ratio.high < low or each.ratio.low > high:
                result = "not as predicted"
            else:
                result = "too uncertain to tell"
            verdicts.append(result)
            result += f" ({low:.2f} or more)" if high == float("inf") else f" ({low:.2f} to {high:.2f})"
        ends = f"[{each.ratio.low:.2f}, {each.ratio.high:.2f}]"
        lines.append(f"{each.name}: {each.ratio.value:.2f} times the speed {ends}, {result}")
    if "not as predicted" in verdicts:
        return "contradicted", tuple(lines)
    return ("confirmed" if "as predicted" in verdicts else "untested"), tuple(lines)


def precision_gain(fix: str, found: Attribution, ceiling_ratio: float, bytes_factor: float) -> Gain:
    """Return the most that another precision could bring: Amdahl's law over compute and memory.

    `ceiling_ratio`: its measured FLOP/s over those in use. `bytes_factor`: how much smaller its values are.
    """
    remaining = (1 - found.memory_share) / ceiling_ratio + found.memory_share / bytes_factor
    basis = f"measured ceiling ratio {ceiling_ratio:.2f}, {100 * found.memory_share:.0f} % of the time is memory's"
    return Gain(fix, 1 / remaining, basis, relieves=ARITHMETIC)


def _ends(of: Interval) -> tuple[Interval, Interval]:
    return Interval.exact(of.low), Interval.exact(of.high)


def _lies_in(ratio: Interval, ends: tuple[float, float]) -> bool:
    return ends[0] <= ratio.low and ratio.high <= ends[1]


@dataclass(frozen=True)
class _Context:
    times: Times
    operators: tuple[OperatorLoad, ...]
    limits: Limits
    weights_bytes: float
    on_host: bool

    @property
    def attribution(self) -> Attribution:
        seconds = self.times.working_s.value
        return attribute(self.operators, self.limits, self.weights_bytes, seconds, self.on_host)

    def label(self) -> tuple[Bound, float]:
        """Return the bound, and the time that this limit alone needs over the time measured."""
        times, found = self.times, self.attribution
        isolated, working = times.isolated_s.value, times.working_s.value
        if times.input_s is not None and times.input_s >= isolated:
            return "input", times.input_s / (times.input_s + isolated)
        if times.transfer_s is not None and times.transfer_s >= working:
            return "transfer", times.transfer_s / (times.transfer_s + working)
        if self._waits_for_host():
            return "launch", min(1.0, (times.enqueue_s or isolated - working) / isolated)
        explained = found.least_s / working
        if found.launch_share >= CLEAR:
            return "launch", found.launch_share
        if explained < UNDER_UTILISED:
            return "under_utilised", explained
        if found.memory_share >= CLEAR:
            return "memory", explained
        return ("compute" if found.memory_share <= 1 - CLEAR else "mixed"), explained

    def _waits_for_host(self) -> bool:
        """Tell whether the device waits; without its own time the isolated one, which is no shorter, stands for it."""
        device, enqueue = self.times.working_s.value, self.times.enqueue_s
        if self.on_host:
            return False
        is_late = enqueue is not None and enqueue >= LATE_HOST * device
        return is_late or 1 - device / self.times.isolated_s.value >= IDLE_DEVICE

    def labels_at_the_ends(self) -> Iterator[Bound]:
        """Yield the bound at every combination of the ends of isolated and device time, FLOP/s and bytes/s."""
        device = self.times.device_s
        for rate_end, bytes_end in itertools.product(("low", "high"), repeat=2):
            limits = self.limits.at(rate_end, bytes_end)
            for isolated in _ends(self.times.isolated_s):
                for working in _ends(device) if device else (None,):
                    times = replace(self.times, isolated_s=isolated, device_s=working)
                    yield replace(self, limits=limits, times=times).label()[0]

    def runner_up(self, bound: Bound) -> tuple[Bound, ...]:
        """Return what limits most after the bound, or what the bound is made of."""
        found = self.attribution
        kinds: list[tuple[float, Bound]] = [
            (found.compute_s, "compute"),
            (found.memory_s, "memory"),
            (found.launch_s, "launch"),
        ]
        ranked = [name for seconds, name in sorted(kinds, reverse=True) if seconds > 0 and name != bound]
        return tuple(ranked[:2] if bound in ("mixed", "under_utilised") else ())

    def gains(self) -> Iterator[Gain]:
        """Yield what follows from the evidence: reaching the limits, issuing less, overlapping the input."""
        times, found = self.times, self.attribution
        isolated, working = times.isolated_s.value, times.working_s.value
        if times.input_s:
            gain = (times.input_s + isolated) / max(times.input_s, isolated)
            basis = f"it takes {times.input_s / isolated:.2f} times as long as the forward; the slower of both is left"
            yield Gain("prepare the input ahead, in another thread or process", gain, basis)
        if times.device_s is not None and isolated > working:
            basis = "time from idle to idle over the device's own time"
            yield Gain("issue the work in one go (CUDA graphs, torch.compile)", isolated / working, basis)
        elif self.on_host:
            calls = sum(each.calls for each in self.operators)
            basis = (
                f"small ones among {calls:.0f} operators and the host take {_percent(found.launch_share)} of the time"
            )
            rest = (1 - found.launch_share) * working
            left = max(rest, found.compute_s + found.memory_s, self.limits.dispatch_s.value)
            yield Gain("fuse operators (torch.compile)", working / left, basis)
        if found.least_s > 0:
            basis = f"the measured limits account for {_percent(found.least_s / working)} of the time"
            yield Gain(BETTER_KERNELS, working / found.least_s, basis, relieves=ARITHMETIC)

    def evidence(self, bound: Bound) -> Iterator[str]:
        """Yield the figures behind the bound."""
        times, working = self.times, self.times.working_s.value
        flops = sum(each.flops for each in self.operators)
        moved = sum(each.weight_bytes + each.other_bytes for each in self.operators)
        peak, rates = self.limits.flops_per_s.value, [rate.value / 1e9 for _, rate in self.limits.bytes_per_s]
        yield (
            f"{flops / working / 1e9:,.1f} GFLOP/s of {peak / 1e9:,.1f} measured on this machine "
            f"({_percent(flops / working / peak)})"
        )
        yield (
            f"{moved / working / 1e9:,.1f} GB/s moved; main memory gives {rates[-1]:,.1f}, "
            f"the nearest cache {rates[0]:,.1f}"
        )
        yield from self._shares()
        if times.fixed_s is not None:
            fixed = min(1.0, times.fixed_s / times.isolated_s.value)
            yield f"{_percent(fixed)} of the time does not grow with the batch"
        isolated_ms = times.isolated_s.value * 1e3
        if times.device_s is not None:
            issuing = "" if times.enqueue_s is None else f"; the host issues for {times.enqueue_s * 1e3:.2f} ms"
            yield f"the device computes for {times.device_s.value * 1e3:.2f} of {isolated_ms:.2f} ms{issuing}"
        if bound == "input" and times.input_s is not None:
            yield f"making the input takes {times.input_s * 1e3:.2f} ms, the forward {isolated_ms:.2f} ms"

    def _shares(self) -> Iterator[str]:
        """Yield how the time divides, by the limits and, on a host, as it was measured."""
        found, working = self.attribution, self.times.working_s.value
        parts = {"compute": found.compute_s, "memory": found.memory_s, "launch": found.launch_s}
        each = ", ".join(f"{name} {_percent(seconds / working)}" for name, seconds in parts.items())
        yield f"operator by operator the limits need {_percent(found.least_s / working)} of the time: {each}"
        if self.on_host:
            yield (
                f"of the measured time {_percent(found.launch_share)} is small operators and the host between them; "
                f"of the rest {_percent(found.memory_share)} is in operators that memory limits"
            )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _worthwhile(gains: Sequence[Gain], bounds: Set[Bound]) -> list[Gain]:
    """Return the gains worth naming for what the bound may be, the largest first."""
    fitting = [each for each in gains if not each.relieves or bounds & set(each.relieves)]
    return sorted((each for each in fitting if each.at_most >= LEAST_GAIN), key=lambda each: -each.at_most)


def _confidence(bound: Bound, confirmation: Confirmation, doubts: Sequence[str]) -> Confidence:
    """Return how sure the bound is; the spread of the figures is in it already, by the ends of their intervals."""
    if confirmation == "contradicted" or bound == "inconclusive" or any(each.startswith("share:") for each in doubts):
        return "low"
    is_doubted = bool(doubts) or bound == "mixed"
    if confirmation == "confirmed":
        return "medium" if is_doubted else "high"
    return "low" if is_doubted else "medium"
