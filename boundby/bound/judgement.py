"""What limits one forward, how sure that is, and what the best fix could gain.

Where the forward was replayed, the part with most of its time is what limits it (`boundby.bound`). Where it was not,
the least time of all operators (`boundby.work`), as a share of the measured time, says how close it is to what the
machine can do, and the kind of limit with most of that time is the bound. Trials come last and weigh most: a bound that
one of them refutes gives way to the one that they confirm, or the verdict is not settled.

Source of the launch rule: trtexec, which says so where issuing takes 0.8 of the device's time.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Literal

import msgspec

from boundby.bound.split import Cut, Split
from boundby.bound.verdict import (
    LEAST_GAIN,
    Bound,
    Cause,
    CauseKind,
    Confidence,
    Confirmation,
    Doubt,
    Fix,
    Gain,
    PartKind,
    Reference,
    Sign,
    Trial,
    Tried,
    Unsettled,
    Verdict,
    inconclusive,
    plain,
    untested,
)
from boundby.formatting import Missing, known
from boundby.work import Attribution, Interval, Limits, OperatorLoad, attribute

LATE_HOST = 0.8  # of the device's time to issue the work: trtexec calls that bound by enqueue time
IDLE_DEVICE = 0.25  # of the time from idle to idle in which the device waited for the host
UNDER_UTILISED = 0.35  # of the time explained by the limits
CLEAR = 0.6  # share of one kind of work, below which the bound is mixed
MOST_SHARE = 1.02  # of the upper end of the time, before the limits themselves are doubted
REPLAY_ERROR = 0.12  # of a part's seconds: parts that are no further apart are not told apart
WIDE = 0.10  # half of an interval, as a share: with a narrower one a bound on the edge is on the edge
UNEXPLAINED = 0.25  # of the time, which did not show when the forward was run again
MOST_UNEXPLAINED = 0.5  # of the time, to call anything else what limits
LEAST_CAUSE = 0.02  # of the time, for a part to be named
LEAST_RIVAL = 0.2  # of the time, for a bound to be what limits after all
CLEAR_PREDICTION = 1.1  # a factor, or one over it, that shows whether a prediction came true
SAID: dict[Sign, str] = {
    "confirms": "as expected",
    "too_uncertain": "too uncertain to tell",
    "refutes": "not as expected",
    "silent": "says nothing about this bound",
}

Brought = Literal["input", "transfer"]

# What a part of the time counts for.
BOUND_OF_PART: dict[PartKind, Bound] = {
    "compute": "compute",
    "memory": "memory",
    "host": "launch",
    "kernels": "under_utilised",
    "around": "under_utilised",
}


class Times(msgspec.Struct, frozen=True):
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


class Forward(msgspec.Struct, frozen=True, dict=True):
    """One forward as it was measured and counted, and the limits that it is held against.

    `weights_bytes` is what it cannot help reading; `on_host`: to issue an operator takes time from computing.
    """

    times: Times
    operators: tuple[OperatorLoad, ...]
    limits: Limits
    weights_bytes: float = 0.0
    on_host: bool = True

    @cached_property
    def attribution(self) -> Attribution:
        """The least time by kind of limit."""
        return self.attributed(self.operators, self.limits, self.weights_bytes)

    def attributed(self, operators: Sequence[OperatorLoad], limits: Limits, weights_bytes: float) -> Attribution:
        """Return the least time of other operators, or under other limits, in the time of this forward."""
        return attribute(operators, limits, weights_bytes, self.times.working_s.value, self.on_host)


class Evidence(msgspec.Struct, frozen=True):
    """What is known beside the forward itself.

    `split` is where the time of the `reference` batch goes, or why that is not known; None: nobody asked. `padding` is
    the share of the FLOPs that is for padding. `gains` are those that the caller knows of. `doubts` are about the
    measurement and lower the confidence.
    """

    split: Split | Missing | None = None
    reference: Reference | None = None
    padding: float | None = None
    tried: Tried = Tried()
    gains: Sequence[Gain] = ()
    doubts: Sequence[Doubt] = ()


NOTHING_ELSE = Evidence()


def judge(forward: Forward | Doubt, evidence: Evidence = NOTHING_ELSE) -> Verdict:
    """Return the verdict on one forward; inconclusive where a doubt says why there is none to be judged.

    Without a split the bound is found again at every combination of the ends of the intervals. Where evidence leaves
    several bounds, or trials speak against it, the trials decide; where they cannot, the bound is `mixed`,
    `alternatives` names what it may be, and `unsettled` what would settle it.

    To the gains of the caller those are added that follow from the evidence, and none stays that was tried or is too
    small to tell.
    """
    split, trials = known(evidence.split), evidence.tried.trials
    if isinstance(forward, Doubt):
        doubts = [*evidence.doubts, *evidence.tried.doubts, forward]
        nothing = inconclusive(doubts, evidence.gains)
        return msgspec.structs.replace(nothing, trials=trials, untried=evidence.tried.untried)
    times = forward.times
    context = _Context(forward, split)
    outcome = _decided(context, trials)
    confirmation = _confirmation(outcome.bound, trials, is_split=split is not None)
    doubts = [*evidence.doubts, *evidence.tried.doubts, *outcome.doubts, *_share_doubts(times, context.label.share)]
    doubts = list(dict.fromkeys(doubts))
    figures = list(context.evidence(outcome.bound))
    if isinstance(evidence.split, Missing):
        figures.append(f"where the time goes is not known: {evidence.split.reason}")
    gains = untested([*evidence.gains, *context.gains(evidence.gains)], trials)
    return Verdict(
        bound=outcome.bound,
        alternatives=outcome.alternatives or context.runner_up(outcome.bound),
        share_of_limit=context.share_of(outcome.bound),
        confidence=_confidence(outcome, confirmation, doubts),
        confirmation=confirmation,
        gains=_worthwhile(gains, outcome.bounds, times.isolated_s),
        evidence=(*figures, *(_trial_line(trial, outcome.bound) for trial in trials)),
        doubts=tuple(doubts),
        trials=trials,
        untried=evidence.tried.untried,
        reference=evidence.reference,
        breakdown=split.breakdown if split else (),
        limited_by=tuple(_causes(context, evidence.padding, trials)),
        matmul=split.matmul if split else None,
        unsettled=outcome.unsettled,
    )


def confirm(bound: Bound, trials: Iterable[Trial]) -> Sign:
    """Return what the trials say of a bound; one that speaks against it outweighs those that speak for it."""
    signs = {trial.says_of(bound) for trial in trials}
    order: tuple[Sign, ...] = ("refutes", "confirms", "ambiguous", "too_uncertain")
    return next((sign for sign in order if sign in signs), "silent")


class _Label(msgspec.Struct, frozen=True):
    """The bound by the evidence without trials, its share, and the bounds that this evidence cannot tell from it."""

    bound: Bound
    share: float
    rivals: tuple[Bound, ...] = ()


class _Outcome(msgspec.Struct, frozen=True):
    """The bound that all evidence leaves, what it may be instead, and why that is not settled."""

    bound: Bound
    alternatives: tuple[Bound, ...] = ()
    unsettled: Unsettled | None = None
    doubts: tuple[Doubt, ...] = ()

    @property
    def bounds(self) -> set[Bound]:
        """All that it may be."""
        return {self.bound, *self.alternatives}


def _decided(context: "_Context", trials: Sequence[Trial]) -> _Outcome:
    """Return what the trials leave of the evidence."""
    label = context.label
    may_be: tuple[Bound, ...] = tuple(name for name in (label.bound, *label.rivals) if name != "mixed")
    said = {name: confirm(name, trials) for name in may_be}
    left = [name for name in may_be if said[name] != "refutes"]
    unexplained = context.unexplained()
    if may_be and not left:
        outcome = _after_refutation(context, may_be, trials)
        return msgspec.structs.replace(outcome, unsettled=outcome.unsettled or unexplained)
    if not label.rivals:
        return _Outcome(label.bound, unsettled=unexplained)
    confirmed = [name for name in left if said[name] == "confirms"]
    if len(left) == 1 < len(may_be) or len(confirmed) == 1:
        return _Outcome((confirmed or left)[0], unsettled=unexplained)
    close = None
    if context.half_width > WIDE:
        text = (
            f"{_either(left)} would explain the time, which is known to ±{_percent(context.half_width)}; a longer "
            "measurement on a quiet machine would tell"
        )
        close = Unsettled("close", text)
    return _Outcome("mixed", tuple(left), unsettled=unexplained or close)


def _after_refutation(context: "_Context", refuted: Sequence[Bound], trials: Sequence[Trial]) -> _Outcome:
    """Return the bound that trials put in the place of those they refuted; not settled, if they do not agree on one."""
    speaker = next(trial for trial in trials if trial.says_of(refuted[0]) == "refutes")
    gave = f"{speaker.name} gave {speaker.measured.value:.2f} times the speed"
    others = [name for name, share in context.shares.items() if share >= LEAST_RIVAL and name not in refuted]
    confirmed = [name for name in others if confirm(name, trials) == "confirms"]
    if len(confirmed) == 1:
        text = f"the breakdown points to {_either(refuted)}, which a trial refuted: {gave}"
        return _Outcome(confirmed[0], doubts=(Doubt("changed", text),))
    allowed = [name for name in others if confirm(name, trials) != "refutes"]
    text = (
        f"the breakdown points to {_either(refuted)}, but {gave}, which does not fit; the trials on "
        "a quiet machine, or a trace of the same batch, would tell"
    )
    alternatives = (*refuted, *allowed)
    return _Outcome("mixed", alternatives, unsettled=Unsettled("trials_disagree", text))


def _confirmation(bound: Bound, trials: Sequence[Trial], is_split: bool) -> Confirmation:
    """Return whether trials bear the bound out: by what they are expected to give, or by predictions from its parts.

    Of the predictions that a trial can tell from no change, most have to come true.
    """
    if confirm(bound, trials) == "confirms":
        return "confirmed"
    if not is_split:
        return "untested"
    came_true = [_came_true(trial) for trial in trials if _is_clear(trial)]
    return "confirmed" if came_true and 3 * sum(came_true) >= 2 * len(came_true) else "untested"


def _is_clear(trial: Trial) -> bool:
    """Tell whether the trial shows if the prediction came true: it was made from parts, and is not of no change."""
    predicted = trial.predicted
    return predicted is not None and not 1 / CLEAR_PREDICTION < predicted.value < CLEAR_PREDICTION


def _came_true(trial: Trial) -> bool:
    predicted = trial.predicted
    return predicted is not None and trial.measured.low <= predicted.high and predicted.low <= trial.measured.high


def _causes(context: "_Context", padding: float | None, trials: Sequence[Trial]) -> list[Cause]:
    """Return what limits, most of the time first: padding, what brings the input, and parts without their padding."""
    forward_s = context.forward.times.isolated_s.value
    whole_s = forward_s + sum(context.brought.values())
    causes = [Cause(kind, seconds / whole_s) for kind, seconds in context.brought.items()]
    net, wasted = context.net_shares(padding)
    of_forward = forward_s / whole_s
    if wasted:
        causes.append(Cause("padding", wasted * of_forward, flops_share=padding))
    causes += [
        Cause(kind, share * of_forward)
        for kind, share in net.items()
        if kind != "unexplained" or share > MOST_UNEXPLAINED
    ]
    ranked = sorted((cause for cause in causes if cause.share >= LEAST_CAUSE), key=lambda cause: -cause.share)
    return [msgspec.structs.replace(cause, confirmed_by=_confirming(cause, trials)) for cause in ranked]


def _confirming(cause: Cause, trials: Sequence[Trial]) -> Fix | None:
    """Return the fix whose trial bears a cause out."""
    if cause.kind == "padding":
        half = 1 + 0.5 * (1 / (1 - cause.share) - 1)  # of what leaving out that share of the time gives
        proofs = [trial for trial in trials if trial.fix.kind == "remove_padding" and trial.measured.low >= half]
    elif cause.kind == "input":
        proofs = [trial for trial in trials if trial.fix.kind == "overlap_input" and trial.outcome == "gains"]
    else:
        bound = BOUND_OF_PART.get(cause.kind) if cause.kind != "transfer" else None
        proofs = [trial for trial in trials if bound is not None and trial.says_of(bound) == "confirms"]
    return proofs[0].fix if proofs else None


def _share_doubts(times: Times, share: float) -> Iterator[Doubt]:
    if share * times.working_s.value > MOST_SHARE * times.working_s.high:
        text = (
            f"the limits ask for {share:.2f} times the measured time; the ceilings were measured on a "
            "busier machine, or the work is counted too high"
        )
        yield Doubt("share", text)


def _either(bounds: Sequence[Bound]) -> str:
    return " or ".join(map(plain, bounds))


def _trial_line(trial: Trial, bound: Bound) -> str:
    """Return a line on what a trial gave, and what it says of the bound."""
    sign, ratio = trial.says_of(bound), trial.measured
    said = f"as expected, but just as expected for {' and '.join(map(plain, trial.rivals(bound)))}"
    said = SAID.get(sign, said)
    if sign != "silent":
        low, high = trial.expected[bound]
        said += f" ({low:.2f} or more)" if high == float("inf") else f" ({low:.2f} to {high:.2f})"
    return f"{trial.name}: {ratio.value:.2f} times the speed [{ratio.low:.2f}, {ratio.high:.2f}], {said}"


def _ends(of: Interval) -> tuple[Interval, Interval]:
    return Interval.exact(of.low), Interval.exact(of.high)


class _Context(msgspec.Struct, frozen=True, dict=True):
    forward: Forward
    split: Split | None = None

    @property
    def brought(self) -> "dict[Brought, float]":
        """The seconds to make the input and to bring it to the device, the longer first, where they last longest.

        That is where they take no less than the forward, with the host's time to issue it.
        """
        named: dict[Brought, float | None] = {
            "input": self.forward.times.input_s,
            "transfer": self.forward.times.transfer_s,
        }
        least = self.forward.times.isolated_s.value
        slow = [(kind, seconds) for kind, seconds in named.items() if seconds is not None and seconds >= least]
        return dict(sorted(slow, key=lambda item: -item[1]))

    @cached_property
    def label(self) -> _Label:
        """The bound without trials, and the time that this limit alone needs over the time measured."""
        bound, share = self._bound()
        if bound in ("input", "transfer"):
            return _Label(bound, share)
        if self.split is None:
            others = dict.fromkeys(name for name in self._bounds_at_the_ends() if name != bound)
            return _Label(bound, share, tuple(others))
        (first, most), *rest = sorted(self.shares.items(), key=lambda item: -item[1])
        explained = self.split.share("compute") + self.split.share("memory")
        near = [name for name, least in rest if least * (1 + REPLAY_ERROR) >= most * (1 - REPLAY_ERROR)]
        return _Label(first, self.shares["launch"] if first == "launch" else explained, tuple(near))

    def share_of(self, bound: Bound) -> float:
        """Return the time that this limit alone needs over the time measured, whatever the evidence without trials."""
        if bound == self.label.bound or self.label.bound in ("input", "transfer"):
            return self.label.share
        if bound == "launch":
            return self.shares["launch"]
        if self.split is not None:
            return self.split.share("compute") + self.split.share("memory")
        return self.forward.attribution.least_s / self.forward.times.working_s.value

    @cached_property
    def shares(self) -> Mapping[Bound, float]:
        """The share of the time by bound: of its parts, or of its least time by the limits."""
        if self.split is None:
            attribution, seconds = self.forward.attribution, self.forward.times.working_s.value
            least: dict[Bound, float] = {
                "compute": attribution.compute_s / seconds,
                "memory": attribution.memory_s / seconds,
                "launch": attribution.launch_share,
            }
            return {**least, "under_utilised": max(0.0, 1 - sum(least.values()))}
        sums = dict.fromkeys(BOUND_OF_PART.values(), 0.0)
        for kind, bound in BOUND_OF_PART.items():
            sums[bound] += self.split.share(kind)
        return {bound: max(0.0, share) for bound, share in sums.items()}

    def net_shares(self, padding: float | None) -> tuple[dict[CauseKind, float], float | None]:
        """Return the share of the time by part without its padding, and that of all padding."""
        if self.split is not None:
            whole = seconds = self.split.seconds
            if self.unexplained():  # the batch took longer when it was run again: no part is more than all of that
                whole = max(seconds, sum(max(0.0, part.seconds) for part in self.split.breakdown))
            net: dict[CauseKind, float] = {
                part.kind: part.seconds * (1 - (part.padding_share or 0.0)) / whole for part in self.split.breakdown
            }
            wasted_of_all = self.split.padding_share
            return net, wasted_of_all and wasted_of_all * seconds / whole
        least, wasted = self.shares, padding or 0.0
        host = least["launch"]
        names: tuple[Literal["compute", "memory"], ...] = ("compute", "memory")
        return {"host": host, **{kind: least[kind] * (1 - wasted) for kind in names}}, wasted * (1 - host) or None

    def unexplained(self) -> Unsettled | None:
        """Return why nothing is settled where much of the time did not show again."""
        rest = self.split.share("unexplained") if self.split else 0.0
        if abs(rest) <= UNEXPLAINED:
            return None
        text = (
            f"the batch took {_percent(abs(rest))} {'less' if rest > 0 else 'more'} when it was run again beside the "
            "replays; a run on a quiet machine would tell"
        )
        return Unsettled("unexplained", text)

    @property
    def half_width(self) -> float:
        """Half of the widest interval that the bound rests on, as a share of its value."""
        known = [self.forward.times.isolated_s, self.forward.times.working_s, self.forward.limits.flops_per_s]
        return max((interval.high - interval.low) / (2 * interval.value) for interval in known)

    def _bound(self) -> tuple[Bound, float]:
        """Return the bound, and the time that this limit alone needs over the time measured."""
        times, attribution = self.forward.times, self.forward.attribution
        isolated, working = times.isolated_s.value, times.working_s.value
        if self.brought:
            kind, seconds = next(iter(self.brought.items()))
            return kind, seconds / (seconds + isolated)
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
        device, enqueue = self.forward.times.working_s.value, self.forward.times.enqueue_s
        if self.forward.on_host:
            return False
        is_late = enqueue is not None and enqueue >= LATE_HOST * device
        return is_late or 1 - device / self.forward.times.isolated_s.value >= IDLE_DEVICE

    def _bounds_at_the_ends(self) -> Iterator[Bound]:
        """Yield the bound at every combination of the ends of isolated and device time, FLOP/s and bytes/s."""
        device = self.forward.times.device_s
        for rate_end, bytes_end in itertools.product(("low", "high"), repeat=2):
            limits = self.forward.limits.at(rate_end, bytes_end)
            for isolated in _ends(self.forward.times.isolated_s):
                for working in _ends(device) if device else (None,):
                    times = msgspec.structs.replace(self.forward.times, isolated_s=isolated, device_s=working)
                    forward = msgspec.structs.replace(self.forward, limits=limits, times=times)
                    yield _Context(forward, self.split)._bound()[0]

    def runner_up(self, bound: Bound) -> tuple[Bound, ...]:
        """Return what limits most after the bound, or what the bound is made of."""
        attribution = self.forward.attribution
        needs: list[tuple[float, Bound]] = [
            (attribution.compute_s, "compute"),
            (attribution.memory_s, "memory"),
            (attribution.launch_s, "launch"),
        ]
        ranked = [name for seconds, name in sorted(needs, reverse=True) if seconds > 0 and name != bound]
        return tuple(ranked[:2] if bound in ("mixed", "under_utilised") else ())

    def gains(self, known: Iterable[Gain]) -> Iterator[Gain]:
        """Yield what follows from the evidence and is not known yet: reaching the limits, issuing less, and so on."""
        fixes = [gain.fix for gain in known]
        yield from (gain for gain in self._gains() if gain.fix not in fixes)

    def _gains(self) -> Iterator[Gain]:
        times, attribution = self.forward.times, self.forward.attribution
        isolated, working = times.isolated_s.value, times.working_s.value
        if times.input_s:
            gain = (times.input_s + isolated) / max(times.input_s, isolated)
            basis = f"it takes {times.input_s / isolated:.2f} times as long as the forward; the slower of both is left"
            yield Gain(Fix("overlap_input"), gain, basis)
        if times.device_s is not None and isolated > working:
            basis = "time from idle to idle over the device's own time"
            yield Gain(Fix("issue_at_once"), isolated / working, basis)
        elif self.forward.on_host:
            calls = sum(operator.calls for operator in self.forward.operators)
            basis = f"dispatching {calls:.0f} operators takes {_percent(attribution.launch_share)} of the time"
            rest = (1 - attribution.launch_share) * working
            left = max(rest, attribution.compute_s + attribution.memory_s, self.forward.limits.dispatch_s.value)
            yield Gain(Fix("fuse_operators"), working / left, basis)
        elif times.device_s is None:
            left = max(attribution.compute_s + attribution.memory_s, self.forward.limits.dispatch_s.value)
            basis = "the device's own time is not known; by the limits it needs that much of the time, or more"
            yield Gain(Fix("issue_at_once"), isolated / left, basis)
        if attribution.least_s > 0:
            basis = f"the measured limits explain {_percent(attribution.least_s / working)} of the time"
            yield Gain(Fix("better_kernels"), working / attribution.least_s, basis)

    def evidence(self, bound: Bound) -> Iterator[str]:
        """Yield the figures behind the bound, in the order in which they are asked for."""
        forward, times, attribution = self.forward, self.forward.times, self.forward.attribution
        working, isolated_ms = times.working_s.value, times.isolated_s.value * 1e3
        rate = sum(operator.flops for operator in forward.operators) / working
        peak, bandwidths = (
            forward.limits.flops_per_s.value,
            [interval.value / 1e9 for _, interval in forward.limits.bytes_per_s],
        )
        yield f"{rate / 1e9:,.1f} GFLOP/s of {peak / 1e9:,.1f} measured on this machine ({_percent(rate / peak)})"
        moved = sum(operator.bytes for operator in forward.operators) / working / 1e9
        yield (
            f"{moved:,.1f} GB/s moved; main memory gives {bandwidths[-1]:,.1f}, the nearest cache {bandwidths[0]:,.1f}"
        )
        least = {"compute": attribution.compute_s, "memory": attribution.memory_s, "launch": attribution.launch_s}
        shares = ", ".join(f"{name} {_percent(seconds / working)}" for name, seconds in least.items())
        needed = _percent(attribution.least_s / working)
        yield f"the roofline of each operator adds up to {needed} of the time: {shares}"
        if forward.on_host:
            yield (
                f"{_percent(attribution.launch_share)} of the time is dispatch overhead; of the rest "
                f"{_percent(attribution.memory_share)} is in operators that memory limits"
            )
        if times.fixed_s is not None:
            fixed = min(1.0, times.fixed_s / times.isolated_s.value)
            yield f"{_percent(fixed)} of the time does not grow with the batch"
        if times.device_s is not None:
            issuing = "" if times.enqueue_s is None else f"; the host issues for {times.enqueue_s * 1e3:.2f} ms"
            yield f"the device computes for {times.device_s.value * 1e3:.2f} of {isolated_ms:.2f} ms{issuing}"
        if bound == "input" and times.input_s is not None:
            yield f"making the input takes {times.input_s * 1e3:.2f} ms, the forward {isolated_ms:.2f} ms"
        if self.split and self.split.cut:
            yield "; ".join(_cut_said(cut, self.split.seconds) for cut in self.split.cut)


def _cut_said(cut: Cut, seconds: float) -> str:
    return f"operators with {_percent(cut.seconds / seconds)} of the time were not run alone: {cut.reason}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _worthwhile(gains: Sequence[Gain], bounds: Set[Bound], seconds: Interval) -> tuple[Gain, ...]:
    """Return the gains worth naming for what the bound may be: those that are predicted first, the largest first.

    A prediction stands whatever the bound; what is only bounded has to help against it. Nothing stands that is smaller
    than what the interval of the time can tell.
    """
    least = max(LEAST_GAIN, 1 + (seconds.high - seconds.low) / seconds.value)
    fitting = [gain for gain in gains if gain.predicted or not gain.relieves or bounds & set(gain.relieves)]
    worth = [gain for gain in fitting if _factor(gain) >= least]
    return tuple(sorted(worth, key=lambda gain: (gain.predicted is None, -_factor(gain))))


def _factor(gain: Gain) -> float:
    return min(gain.at_most, gain.predicted.value) if gain.predicted else gain.at_most


def _confidence(outcome: _Outcome, confirmation: Confirmation, doubts: Sequence[Doubt]) -> Confidence:
    """Return how sure the bound is, by the rule in docs/method.md."""
    if outcome.unsettled or outcome.bound == "inconclusive" or "share" in [doubt.kind for doubt in doubts]:
        return "low"
    is_doubted = bool(doubts) or outcome.bound == "mixed"
    if confirmation == "confirmed":
        return "medium" if is_doubted else "high"
    return "low" if is_doubted else "medium"
