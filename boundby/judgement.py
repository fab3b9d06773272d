"""What limits one forward, how sure that is, and what the best fix could gain.

The least time of all operators (`boundby.roofline`), as a share of the measured time, says how close the forward is to
what the machine can do; the kind of limit with most of the time is the bound.

Source of the launch rule: trtexec, which says so where issuing takes 0.8 of the device's time.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from boundby.roofline import Attribution, Interval, Limits, OperatorLoad, attribute
from boundby.verdict import (
    LEAST_GAIN,
    Bound,
    Confidence,
    Confirmation,
    Doubt,
    Fix,
    Gain,
    Sign,
    Trial,
    Verdict,
    inconclusive,
    untested,
)

LATE_HOST = 0.8  # of the device's time to issue the work: trtexec calls that bound by enqueue time
IDLE_DEVICE = 0.25  # of the time from idle to idle in which the device waited for the host
UNDER_UTILISED = 0.35  # of the time explained by the limits
CLEAR = 0.6  # share of one kind of work, below which the bound is mixed
MOST_SHARE = 1.02  # of the upper end of the time, before the limits themselves are doubted
UNKNOWN_WORK = Doubt("work", "the work of the forward or the limits of the machine are not known")
SAID: dict[Sign, str] = {
    "confirms": "as predicted",
    "too_uncertain": "too uncertain to tell",
    "refutes": "not as predicted",
    "silent": "says nothing about this bound",
}

# The evidence that tells most about a bound, beside the rate; the first that is there.
TELLING: dict[Bound, tuple[str, ...]] = {
    "input": ("input",),
    "launch": ("device", "host"),
    "transfer": ("device",),
}


@dataclass(frozen=True)
class Times:
    """Measured seconds of one forward and of what surrounds it; None where not measured.

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


def judge(  # noqa: PLR0913  (each is one kind of evidence)
    times: Times,
    operators: Sequence[OperatorLoad],
    limits: Limits | None,
    *,
    weights_bytes: float = 0.0,
    on_host: bool = True,
    trials: Sequence[Trial] = (),
    gains: Sequence[Gain] = (),
    doubts: Sequence[Doubt] = (),
    unknown: Doubt = UNKNOWN_WORK,
) -> Verdict:
    """Return the verdict on one forward.

    The bound is found again at every combination of the ends of the intervals; where it changes, it is `mixed` and
    `alternatives` names what it may be. `gains` are those that the caller knows of (padding, batch size); those that
    follow from the evidence are added. `doubts` are about the measurement and lower the confidence. `unknown` says why
    there are no operators or limits.
    """
    if limits is None or not operators:
        return inconclusive((*doubts, unknown), gains)
    context = _Context(times, tuple(operators), limits, weights_bytes, on_host)
    bound, share = context.label()
    others = tuple(dict.fromkeys(label for label in context.labels_at_the_ends() if label != bound))
    alternatives = context.runner_up(bound) if not others else ()
    final: Bound = "mixed" if others else bound
    if others:
        alternatives = tuple(label for label in (bound, *others) if label != "mixed")
    confirmation = confirm(bound, trials)
    all_doubts = [*doubts, *_doubts(times, share, confirmation)]
    evidence = context.evidence(bound)
    return Verdict(
        bound=final,
        alternatives=alternatives,
        share_of_limit=share,
        confidence=_confidence(final, confirmation, all_doubts),
        confirmation=confirmation,
        gains=tuple(untested(_worthwhile([*gains, *context.gains()], {bound, *alternatives}), trials)),
        evidence=(*evidence.values(), *(_told(trial, bound) for trial in trials)),
        doubts=tuple(all_doubts),
        telling=tuple(evidence[name] for name in ("rate", *TELLING.get(final, ("limits",))) if name in evidence)[:2],
        trials=tuple(trials),
    )


def confirm(bound: Bound, trials: Iterable[Trial]) -> Confirmation:
    """Return whether the trials bear out `bound`; one that speaks against it outweighs those that speak for it."""
    signs = {trial.says_of(bound) for trial in trials}
    if "refutes" in signs:
        return "contradicted"
    return "confirmed" if "confirms" in signs else "untested"


def precision_gain(fix: Fix, attribution: Attribution, ceiling_ratio: float, bytes_factor: float) -> Gain:
    """Return the most that another precision could bring: Amdahl's law over compute and memory.

    `ceiling_ratio`: its measured FLOP/s over those in use. `bytes_factor`: how much smaller its values are.
    """
    remaining = (1 - attribution.memory_share) / ceiling_ratio + attribution.memory_share / bytes_factor
    basis = (
        f"measured ceiling ratio {ceiling_ratio:.2f}, {100 * attribution.memory_share:.0f} % of the time is memory's"
    )
    return Gain(fix, 1 / remaining, basis)


def _doubts(times: Times, share: float, confirmation: Confirmation) -> Iterator[Doubt]:
    if share * times.working_s.value > MOST_SHARE * times.working_s.high:
        text = (
            f"the limits allow no less than {share:.2f} times the measured time; the ceilings were measured on a "
            "busier machine, or the work is counted too high"
        )
        yield Doubt("share", text)
    if confirmation == "contradicted":
        yield Doubt("contradicted", "an intervention did not have the effect that this bound predicts")


def _told(trial: Trial, bound: Bound) -> str:
    """Return a line on what a trial gave, and what it says of the bound."""
    sign, ratio = trial.says_of(bound), trial.measured
    said = f"as predicted, and so it would be for {' and '.join(trial.rivals(bound))}"
    said = SAID.get(sign, said)
    if sign != "silent":
        low, high = trial.expected[bound]
        said += f" ({low:.2f} or more)" if high == float("inf") else f" ({low:.2f} to {high:.2f})"
    return f"{trial.name}: {ratio.value:.2f} times the speed [{ratio.low:.2f}, {ratio.high:.2f}], {said}"


def _ends(of: Interval) -> tuple[Interval, Interval]:
    return Interval.exact(of.low), Interval.exact(of.high)


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
        times, attribution = self.times, self.attribution
        isolated, working = times.isolated_s.value, times.working_s.value
        if times.input_s is not None and times.input_s >= isolated:
            return "input", times.input_s / (times.input_s + isolated)
        if times.transfer_s is not None and times.transfer_s >= working:
            return "transfer", times.transfer_s / (times.transfer_s + working)
        if self._waits_for_host():
            return "launch", min(1.0, (times.enqueue_s or isolated - working) / isolated)
        explained = attribution.least_s / working
        if attribution.launch_share >= CLEAR:
            return "launch", attribution.launch_share
        if explained < UNDER_UTILISED:
            return "under_utilised", explained
        if attribution.memory_share >= CLEAR:
            return "memory", explained
        return ("compute" if attribution.memory_share <= 1 - CLEAR else "mixed"), explained

    def _waits_for_host(self) -> bool:
        """Tell whether the device waits for the host; an unknown device time is replaced by the isolated one."""
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
        attribution = self.attribution
        needs: list[tuple[float, Bound]] = [
            (attribution.compute_s, "compute"),
            (attribution.memory_s, "memory"),
            (attribution.launch_s, "launch"),
        ]
        ranked = [name for seconds, name in sorted(needs, reverse=True) if seconds > 0 and name != bound]
        return tuple(ranked[:2] if bound in ("mixed", "under_utilised") else ())

    def gains(self) -> Iterator[Gain]:
        """Yield what follows from the evidence: reaching the limits, issuing less, overlapping the input."""
        times, attribution = self.times, self.attribution
        isolated, working = times.isolated_s.value, times.working_s.value
        if times.input_s:
            gain = (times.input_s + isolated) / max(times.input_s, isolated)
            basis = f"it takes {times.input_s / isolated:.2f} times as long as the forward; the slower of both is left"
            yield Gain(Fix("overlap_input"), gain, basis)
        if times.device_s is not None and isolated > working:
            basis = "time from idle to idle over the device's own time"
            yield Gain(Fix("issue_at_once"), isolated / working, basis)
        elif self.on_host:
            calls = sum(operator.calls for operator in self.operators)
            basis = (
                f"small ones among {calls:.0f} operators and the host take {_percent(attribution.launch_share)} of "
                "the time"
            )
            rest = (1 - attribution.launch_share) * working
            left = max(rest, attribution.compute_s + attribution.memory_s, self.limits.dispatch_s.value)
            yield Gain(Fix("fuse_operators"), working / left, basis)
        if attribution.least_s > 0:
            basis = f"the measured limits account for {_percent(attribution.least_s / working)} of the time"
            yield Gain(Fix("better_kernels"), working / attribution.least_s, basis)

    def evidence(self, bound: Bound) -> dict[str, str]:
        """Return the figures behind the bound, in the order to tell them, by what they are about."""
        times, attribution, working = self.times, self.attribution, self.times.working_s.value
        isolated_ms = times.isolated_s.value * 1e3
        flops = sum(operator.flops for operator in self.operators)
        moved = sum(operator.weight_bytes + operator.other_bytes for operator in self.operators)
        peak, rates = self.limits.flops_per_s.value, [rate.value / 1e9 for _, rate in self.limits.bytes_per_s]
        parts = {"compute": attribution.compute_s, "memory": attribution.memory_s, "launch": attribution.launch_s}
        shares = ", ".join(f"{name} {_percent(seconds / working)}" for name, seconds in parts.items())
        said = {
            "rate": f"{flops / working / 1e9:,.1f} GFLOP/s of {peak / 1e9:,.1f} measured on this machine "
            f"({_percent(flops / working / peak)})",
            "moved": f"{moved / working / 1e9:,.1f} GB/s moved; main memory gives {rates[-1]:,.1f}, "
            f"the nearest cache {rates[0]:,.1f}",
            "limits": f"operator by operator the limits need {_percent(attribution.least_s / working)} of the time: "
            f"{shares}",
        }
        if self.on_host:
            said["host"] = (
                f"of the measured time {_percent(attribution.launch_share)} is small operators and the host between "
                f"them; of the rest {_percent(attribution.memory_share)} is in operators that memory limits"
            )
        if times.fixed_s is not None:
            fixed = min(1.0, times.fixed_s / times.isolated_s.value)
            said["fixed"] = f"{_percent(fixed)} of the time does not grow with the batch"
        if times.device_s is not None:
            issuing = "" if times.enqueue_s is None else f"; the host issues for {times.enqueue_s * 1e3:.2f} ms"
            device_ms = times.device_s.value * 1e3
            said["device"] = f"the device computes for {device_ms:.2f} of {isolated_ms:.2f} ms{issuing}"
        if bound == "input" and times.input_s is not None:
            said["input"] = f"making the input takes {times.input_s * 1e3:.2f} ms, the forward {isolated_ms:.2f} ms"
        return said


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _worthwhile(gains: Sequence[Gain], bounds: Set[Bound]) -> list[Gain]:
    """Return the gains worth naming for what the bound may be, the largest first."""
    fitting = [gain for gain in gains if not gain.relieves or bounds & set(gain.relieves)]
    return sorted((gain for gain in fitting if gain.at_most >= LEAST_GAIN), key=lambda gain: -gain.at_most)


def _confidence(bound: Bound, confirmation: Confirmation, doubts: Sequence[Doubt]) -> Confidence:
    """Return how sure the bound is; the ends of the intervals already account for the spread of the figures."""
    if confirmation == "contradicted" or bound == "inconclusive" or "share" in [doubt.kind for doubt in doubts]:
        return "low"
    is_doubted = bool(doubts) or bound == "mixed"
    if confirmation == "confirmed":
        return "medium" if is_doubted else "high"
    return "low" if is_doubted else "medium"
