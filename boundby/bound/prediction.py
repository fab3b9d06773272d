"""What each fix would do to the time of a forward, from its replays and shapes, with a bound that limits alone set.

A prediction is made of what was timed: operators in order under a setting, shorter forwards, the parts of the time.
Its 90 % interval joins the noise of the rounds and the error of the rule, which was calibrated on models whose fixes
were then tried (docs/method.md). A bound takes nothing but the measured limits and the work that must remain.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from boundby.bound.split import Replay, ReplayedOperator, Split
from boundby.bound.verdict import Fix, Gain
from boundby.work import Interval, Limits, least_seconds

# Half widths of the 90 % intervals, on the logarithm of the time, beside the noise of the rounds.
RULE_ERRORS = {
    "dtype": 0.10,
    "matmul_precision": 0.10,
    "threads": 0.12,
    "remove_padding": 0.10,
    "batch_size": 0.20,
    "overlap_input": 0.08,
    "issue_at_once": 0.08,
}
ONE_ROUND_ERROR = 0.25  # where too few rounds fit into the budget to tell the noise
LEAST_ROUNDS = 3
# Half the 90 % interval of the ratio of two medians over the width of their middle half, times the root of the rounds.
OF_MIDDLE_HALF = 1.645 * 1.253 / 1.349 * math.sqrt(2)
# What each further length of text costs an attention without padding, over issuing one operator: its texts are cut out,
# transposed and put back by 24 operators in Python. 51 and 57 us were measured where a dispatch takes 1.5 us.
GROUP_DISPATCHES = 36
HALF_SIZES = {"float16": 0.5, "bfloat16": 0.5}  # bytes, over those of float32


@dataclass(frozen=True)
class Batches:
    """What is known of the batch and of others: the tokens of each of its texts, and the seconds to make its input.

    The input is made on one core. `sizes` are the batch sizes to predict, with the tokens to which texts are padded
    there.
    """

    lengths: Sequence[int] | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    input_s: float | None = None


def predictions(
    replay: Replay, split: Split, limits_under: Callable[[Fix], Limits | None], batches: Batches
) -> tuple[Gain, ...]:
    """Return the gain that is predicted of each fix that applies, with its 90 % interval, and the most it can bring.

    `limits_under` returns the machine's limits under a fix (its dtype, its precision of products; those in use for any
    other); a fix for which it returns None has no bound and no prediction. Both ends of a gain are factors of the
    throughput.
    """
    known = _Known(replay, split, limits_under)
    gains = [*known.variants()]
    if batches.lengths is not None:
        gains += known.without_padding(batches.lengths)
    gains += known.batch_sizes(batches.sizes)
    gains += known.issued_otherwise()
    if batches.input_s:
        gains += known.input_ahead(batches.input_s)
    return tuple(gains)


@dataclass(frozen=True)
class _Known:
    replay: Replay
    split: Split
    limits_under: Callable[[Fix], Limits | None]

    @property
    def forward_s(self) -> float:
        return self.replay.forward_s.value

    @property
    def between_s(self) -> float:
        """The time of the forward that is not in its operators: Python stays as it is under another dtype."""
        return max(0.0, self.forward_s - self.replay.in_order_s.value)

    @property
    def noise(self) -> float:
        """Half the 90 % interval of one time of a forward over another, on the logarithm."""
        if self.replay.rounds < LEAST_ROUNDS:
            return ONE_ROUND_ERROR
        forward = self.replay.forward_s
        return OF_MIDDLE_HALF * math.log(forward.high / forward.low) / math.sqrt(self.replay.rounds)

    def variants(self) -> Iterator[Gain]:
        """Yield the gains of fixes that the operators were replayed under."""
        for variant in self.replay.variants:
            ratio, fix = variant.time_ratio, variant.fix
            least_s = self.least_s(fix)
            if not isinstance(ratio, Interval) or least_s is None:
                continue
            least_s += self.issuing_s(fix)
            seconds = [
                self.replay.in_order_s.value * end + self.between_s for end in (ratio.value, ratio.low, ratio.high)
            ]
            noise = math.log(seconds[2] / seconds[1]) / 2 if self.replay.rounds >= LEAST_ROUNDS else ONE_ROUND_ERROR
            yield self.gain(
                fix, seconds[0], noise, least_s, f"the limits under it, {_ms(least_s)} of {_ms(self.forward_s)}"
            )

    def without_padding(self, lengths: Sequence[int]) -> Iterator[Gain]:
        """Yield the gain of computing no padding, by the forward at as many tokens as are left; else by its work."""
        fix, share = Fix("remove_padding"), self.split.padding_share
        useful_s = self.least_s(fix, lambda operator: 1 - (operator.padding_share or 0.0))
        if share is None or useful_s is None or share <= 0:
            return
        useful_s += self.issuing_s(fix)
        shorter_s = self.seconds_at(sum(lengths) / len(lengths))
        seconds = self.forward_s * (1 - share) if shorter_s is None else shorter_s + self.attention_s(lengths)
        yield self.gain(fix, seconds, self.noise, useful_s, f"{100 * share:.0f} % of the time is for padding")

    def attention_s(self, lengths: Sequence[int]) -> float:
        """Return what attention within texts of these lengths takes beyond that of as many texts of the mean length.

        Its work grows with the square of a text's tokens, and on a host each length is a call of its own.
        """
        padded = self.replay.shapes[-1].tokens
        mean = sum(lengths) / len(lengths) / padded
        square = sum(tokens**2 for tokens in lengths) / len(lengths) / padded**2
        beyond_s = calls = 0.0
        for operator in self.replay.operators:
            left = 1 - (operator.padding_share or 0.0)
            if square < mean and left < mean:  # less is left than of what grows with the tokens
                quadratic = min(1.0, (mean - left) / (mean - square))
                beyond_s += quadratic * (square - mean**2) * self.without_dispatch(operator)
                products = 1 if "attention" in operator.load.name else 2  # of each attention
                calls += operator.load.calls / products if operator.load.flops and quadratic > 0.5 else 0
        groups = len(set(lengths)) - 1 if self.replay.on_host else 0
        return beyond_s + groups * calls * GROUP_DISPATCHES * self.replay.dispatch_s

    def batch_sizes(self, sizes: Mapping[int, int]) -> Iterator[Gain]:
        """Yield the gain of other batch sizes: a forward of these samples takes as long with as many tokens in all."""
        if not self.replay.shapes:
            return
        own = self.replay.shapes[-1]
        for samples, tokens in sizes.items():
            per_batch_s = self.seconds_at(tokens * samples / own.samples)
            fix = Fix("batch_size", {"batch_size": samples})
            least_s = self.least_of_shape(fix, samples / own.samples, tokens / own.tokens)
            if samples == own.samples or per_batch_s is None or least_s is None:
                continue
            apart = 0.05 * abs(math.log2(samples / own.samples))  # further away, further off
            basis = "the compute limit alone"
            noise = math.hypot(apart, self.noise)
            yield self.gain(fix, per_batch_s * own.samples / samples, noise, least_s, basis)

    def least_of_shape(self, fix: Fix, samples_ratio: float, tokens_ratio: float) -> float | None:
        """Return the least time of as many samples in batches of another shape."""
        arithmetic = self.least_s(fix, lambda _: min(tokens_ratio, tokens_ratio**2), compute_only=True)
        return None if arithmetic is None else arithmetic + self.issuing_s(fix) / samples_ratio

    def issuing_s(self, fix: Fix) -> float:
        """Return the least time to issue the operators, which a host does one after another."""
        limits = self.limits_under(fix)
        if limits is None or not self.replay.on_host:
            return 0.0
        return limits.dispatch_s.value * sum(operator.load.calls for operator in self.replay.operators)

    def issued_otherwise(self) -> Iterator[Gain]:
        """Yield what a graph that issues operators in one go gains, and the most that joining them can."""
        operators = self.replay.operators
        if not self.replay.on_host:
            fix = Fix("issue_at_once")
            if (least_s := self.least_s(fix)) is not None:
                yield self.gain(fix, self.replay.in_order_s.value, 0.0, least_s, "the device's limits alone")
            return
        # What a compiler gains on a host was not calibrated: there is a bound, and no prediction.
        fix = Fix("fuse_operators")
        joined = [self.least_of(fix, operator) for operator in operators if not operator.load.flops]
        least_s = self.least_s(fix, lambda operator: 1.0 if operator.load.flops else 0.0)
        if least_s is None or not operators:
            return
        least_s = max(least_s, max((seconds or 0.0 for seconds in joined), default=0.0))
        at_most = self.forward_s / least_s if least_s > 0 else math.inf
        yield Gain(fix, at_most, "the limits of matmul alone, everything else fused into it")

    def input_ahead(self, input_s: float) -> Iterator[Gain]:
        """Yield the gain of making the input beside the forward; on a host it takes a core from it meanwhile."""
        both, longer = self.forward_s + input_s, max(self.forward_s, input_s)
        seconds = max(input_s, self.forward_s + input_s / self.replay.threads) if self.replay.on_host else longer
        yield _gain(
            Fix("overlap_input"), both, seconds, RULE_ERRORS["overlap_input"], longer, "the slower of both is left"
        )

    def seconds_at(self, tokens: float) -> float | None:
        """Return the time of a forward of the same samples at other tokens; between and beyond two lengths a line."""
        points = sorted((shape.tokens, shape.seconds) for shape in self.replay.shapes)
        if len(points) < 2:
            return None
        above = next((index for index in range(1, len(points)) if points[index][0] >= tokens), len(points) - 1)
        (before, low), (after, high) = points[above - 1], points[above]
        line = low + (high - low) * (tokens - before) / (after - before)
        return max(line, 0.5 * min(seconds for _, seconds in points))

    def without_dispatch(self, operator: ReplayedOperator) -> float:
        """Return the seconds of an operator's kernels in the model."""
        seconds = operator.in_order_s if operator.in_order_s is not None else operator.hot_s or 0.0
        return max(0.0, seconds - operator.load.calls * self.replay.dispatch_s)

    def least_s(
        self, fix: Fix, left: Callable[[ReplayedOperator], float] = lambda _: 1.0, compute_only: bool = False
    ) -> float | None:
        """Return the least time under a fix, where `left` is the share of each operator's work that remains."""
        total = 0.0
        for operator in self.replay.operators:
            seconds = self.least_of(fix, operator, compute_only)
            if seconds is None:
                return None
            total += seconds * left(operator)
        return total

    def least_of(self, fix: Fix, operator: ReplayedOperator, compute_only: bool = False) -> float | None:
        """Return the least time of an operator under a fix; no more than it took alone where that beats the limits."""
        limits, now = self.limits_under(fix), self.limits_under(Fix("better_kernels"))
        if limits is None or now is None:
            return None
        factor = HALF_SIZES.get(str(fix.settings.get("dtype")), 1.0)
        load, weights_bytes = operator.load, self.replay.weights_bytes
        compute, memory = least_seconds(load.resized(factor), limits, weights_bytes * factor)
        own = max(least_seconds(load, now, weights_bytes))
        hot = own if operator.hot_s is None else max(0.0, operator.hot_s - load.calls * self.replay.dispatch_s)
        beaten = min(1.0, hot / own) if own else 1.0
        return beaten * (compute if compute_only else max(compute, memory))

    def gain(self, fix: Fix, seconds: float, noise: float, least_s: float, basis: str) -> Gain:
        """Return the gain of a forward that then takes `seconds`, and at least `least_s`."""
        return _gain(fix, self.forward_s, seconds, math.hypot(noise, RULE_ERRORS.get(fix.kind, 0.0)), least_s, basis)


def _gain(fix: Fix, now_s: float, seconds: float, error: float, least_s: float, basis: str) -> Gain:
    value = now_s / seconds
    at_most = now_s / least_s if least_s > 0 else math.inf
    ends = [min(at_most, value * math.exp(side * error)) for side in (-1, 0, 1)]
    return Gain(fix, at_most, basis, Interval(ends[1], ends[0], ends[2]))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
