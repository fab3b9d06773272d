"""Run one forward again as its operators: each distinct one alone and hot, and all of them in the model's order.

A forward is recorded once, below its modules, and becomes a straight program: the same operators on the same tensors,
with each layer's own weights, no Python between them, and nothing kept longer than it is needed. (Operators replayed on
one pool of hot tensors miss the weights that stay in no cache, and what a result costs that is allocated anew.)
The forward and its program take turns in rounds, so that a drift of the machine hits both alike.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from operator import add
from statistics import mean, median
from typing import Any

import torch
from msgspec import structs
from torch.utils._pytree import tree_map_only

from boundby.bound.bench import Bench
from boundby.bound.recording import Marked, Program, Recording, Step, program, record
from boundby.bound.split import Cut, CutKind, Replay, ReplayedOperator, ShapeTime, Variant
from boundby.bound.verdict import Fix
from boundby.formatting import Missing, first_line
from boundby.machine import raise_if_lost
from boundby.timing import CHUNK, Chunked, DeviceQueue, Timer, Work, estimate
from boundby.work import Interval

HOT_SHARE = 0.45  # of the budget for operators alone; the rest is for rounds of the whole forward
WALKS = 2  # through the program, at which operators are timed alone: a disturbance hits one of them
MOST_WALKS = 4  # where some were disturbed, or operators were slower alone than in the model
SLOWER_ALONE = 1.05
HOT_BLOCKS = 5  # of each operator and walk
HOT_BLOCK_S = 2e-3
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
ROUND_BLOCK_S = 0.02  # of repeated forwards, whose median is the round's value
TINY_CALLS = 200
MOST_CALLS = 1000  # in a block
CONFIDENCE = 0.9  # of the ratios
OVER_BUDGET = "the seconds for replays were used up by operators that take more of the time"
FRACTIONS = (2, 4)  # of the padded length, at which the forward is timed and counted again


@dataclass(frozen=True)
class Setting:
    """A fix to replay the operators under: another dtype, or a setting of the process.

    `dtype` takes the place of the dtype of weights and activations; `entered` makes the context that is entered for the
    time of a replay.
    """

    fix: Fix
    dtype: torch.dtype | None = None
    entered: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Lengths:
    """What is padding in the batch: the tokens of each text, to how many they are padded, and the same batch shorter.

    `cut_to(tokens)` returns the same forward with every text cut, or padded, to so many tokens.
    """

    real: Sequence[int]
    padded_to: int
    cut_to: Callable[[int], Work]


@dataclass(frozen=True)
class OnHost:
    """The clock of a CPU, where a call is done when it returns.

    `dispatch_s` is what one call costs in a replay, `stepping_s` what a program adds to each call, which no forward
    has; of a device both are 0, since the host's time is not in its own.
    """

    timer: Timer
    dispatch_s: float
    stepping_s: float

    @classmethod
    def calibrated(cls, timer: Timer) -> "OnHost":
        """Return the instruments with the cost of one call: that of adding one number to another."""
        add = torch.ops.aten.add.Tensor._op
        args, kwargs = (torch.ones(1), torch.ones(1)), dict[str, Any]()

        def issue() -> None:  # as operators are called alone
            for _ in range(TINY_CALLS):
                add(*args, **kwargs)

        stepped = program(record(issue)).run
        times: list[list[float]] = [[], []]
        for work, taken in zip((issue, stepped) * (HOT_BLOCKS + 1), times * (HOT_BLOCKS + 1), strict=True):
            taken.append(timer.isolated(work) / TINY_CALLS)
        dispatch_s, step_s = (median(taken[1:]) for taken in times)  # the first is not warm
        return cls(timer, dispatch_s, max(0.0, step_s - dispatch_s))

    def whole(self, work: Work) -> float:
        """Return the seconds of one call."""
        return self.timer.isolated(work)

    def busy(self, run: Chunked) -> float | None:
        """Return the seconds of one call."""
        return self.timer.isolated(lambda: run(_nothing))

    def marked(self, run: Marked) -> list[float] | None:
        """Return the seconds between the marks that `run` makes around each of its steps."""
        return [end - start for start, end in run(self.timer.clock, _nothing)]


@dataclass(frozen=True)
class OnDevice:
    """The events of a device that runs behind the host: what issuing costs the host is not in its times."""

    timer: Timer
    queue: DeviceQueue
    dispatch_s: float = 0.0
    stepping_s: float = 0.0

    def whole(self, work: Work) -> float:
        """Return the seconds of one call, from an idle device to an idle device."""
        return self.timer.isolated(work)

    def busy(self, run: Chunked) -> float | None:
        """Return the device's own seconds for one call, behind backlogs; None where it had to wait for the host."""
        return self.timer.in_chunks(run, self.queue, self.timer.enqueue_chunks(run)).seconds

    def marked(self, run: Marked) -> list[float] | None:
        """Return the device's seconds between the events around each step; None as in `busy`."""
        marks: list[tuple[Any, Any]] = []

        def noted(begin: Callable[[], None]) -> None:
            marks[:] = run(self.queue.mark, begin)

        if self.busy(noted) is None:
            return None
        return [self.queue.seconds_between(start, end) for start, end in marks]


Instruments = OnHost | OnDevice


def _nothing() -> None:
    """Do nothing before a chunk: a CPU has no queue."""


def replay(
    work: Work,
    bench: Bench,
    *,
    weights_bytes: float | None = None,
    lengths: Lengths | None = None,
    settings: Sequence[Setting] = (),
) -> Replay:
    """Return what one forward, `work`, takes whole, in order and operator by operator.

    `weights_bytes` are those of the model's parameters; without them those of all tensors that were there before the
    call. `settings` are replayed in turns with what is in use.
    Raises ValueError where no operator is seen, or where one has FLOPs that are not known.
    """
    clock, threads = bench.timer.clock, torch.get_num_threads()
    start = clock()
    with torch.inference_mode(), torch.random.fork_rng(enabled=bench.on_host):
        recording = record(work)
        shorter = _shorter(lengths)
        instruments: Instruments = (
            OnHost.calibrated(bench.timer) if bench.queue is None else OnDevice(bench.timer, bench.queue)
        )
        replayer = _Replayer(recording, instruments, bench, start + bench.replay_s)
        rounds_end = start + (1 - HOT_SHARE) * bench.replay_s
        rounds = replayer.rounds(work, [cut.work for cut in shorter], settings, rounds_end)
        in_order = rounds.steps or [rounds.in_order_s / len(recording.steps)] * len(recording.steps)
        hot = replayer.hot(in_order)
    shares = _padding_shares(recording, shorter, lengths)
    return Replay(
        operators=tuple(_operators(recording, rounds.steps, hot, shares)),
        forward_s=_middle([turn.forward for turn in rounds.counted]),
        in_order_s=_middle([turn.in_order for turn in rounds.counted]),
        dispatch_s=instruments.dispatch_s,
        views_s=sum(hot.seconds.get(step.key, 0.0) for step in recording.steps if step.load is None),
        calls=len(recording.steps),
        weights_bytes=recording.leaf_bytes if weights_bytes is None else weights_bytes,
        on_host=bench.on_host,
        cut=tuple(_cuts(recording, in_order, hot)),
        padding=shares if isinstance(shares, Missing) else None,
        variants=tuple(rounds.variants(settings)),
        shapes=tuple(_shape_times(lengths, shorter, rounds)),
        seconds=clock() - start,
        rounds=len(rounds.counted),
        threads=threads,
        doubts=tuple(dict.fromkeys((*rounds.doubts, *hot.disturbances))),
    )


@dataclass(frozen=True)
class _Round:
    """The seconds of one round: of the forward, its operators in order and each step, shorter forwards, settings."""

    forward: float
    in_order: float
    steps: list[float] | None
    shorter: list[float]
    under: dict[Fix, float]
    disturbances: tuple[str, ...]


@dataclass(frozen=True)
class _Rounds:
    """The rounds that count: those that nothing disturbed, where there are enough of them, else all."""

    counted: list[_Round]
    refused: dict[Fix, Missing]

    @classmethod
    def of(cls, rounds: list[_Round], refused: dict[Fix, Missing]) -> "_Rounds":
        """Choose by the counters of the machine, never by the times."""
        quiet = [turn for turn in rounds if not turn.disturbances]
        return cls(quiet if len(quiet) >= min(LEAST_ROUNDS, len(rounds)) else rounds, refused)

    @cached_property
    def steps(self) -> list[float] | None:
        """The median seconds of each step, in the model's order; None where they were not taken."""
        taken = [turn.steps for turn in self.counted if turn.steps]
        return [median(seconds) for seconds in zip(*taken, strict=True)] if taken else None

    @cached_property
    def in_order_s(self) -> float:
        """The median seconds of all operators in order."""
        return median(turn.in_order for turn in self.counted)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What else used the machine in the rounds that count."""
        return tuple(dict.fromkeys(text for turn in self.counted for text in turn.disturbances))[:1]

    def variants(self, settings: Iterable[Setting]) -> Iterator[Variant]:
        """Yield the time under each setting, over that without it in the same round."""
        for setting in settings:
            ratios = [turn.under[setting.fix] / turn.in_order for turn in self.counted if setting.fix in turn.under]
            yield Variant(setting.fix, self.refused.get(setting.fix) or _ratio(ratios))


@dataclass
class _Hot:
    """Seconds of one call of each distinct operator alone; or why there are none, in `cut`."""

    seconds: dict[Any, float] = field(default_factory=dict)
    cut: dict[Any, tuple[CutKind, str]] = field(default_factory=dict)
    disturbances: tuple[str, ...] = ()


class _NotReplayableError(Exception):
    """An operator that changes what was there before the forward: a second call is another call."""


@dataclass(frozen=True)
class _Turns:
    """What takes turns in a round: the forward, its program, the shorter forwards, the program under each setting."""

    work: Work
    own: Program
    shorter: Sequence[Work]
    programs: Mapping[Setting, Program]
    calls: int  # in a block


@dataclass
class _Replayer:
    recording: Recording
    instruments: Instruments
    bench: Bench
    deadline: float

    @property
    def left_s(self) -> float:
        """The seconds until the deadline."""
        return self.deadline - self.bench.timer.clock()

    def tell(self) -> None:
        """Tell how many seconds are left for replays and trials."""
        self.bench.tell("replays", self.left_s + self.bench.trials_s)

    def rounds(self, work: Work, shorter: Sequence[Work], settings: Sequence[Setting], deadline: float) -> _Rounds:
        """Time the forward, its operators in order, shorter forwards and settings, in turns until the deadline."""
        own = program(self.recording)
        changed = {setting: self._changed(setting, own) for setting in settings}
        refused = {setting.fix: run for setting, run in changed.items() if isinstance(run, Missing)}
        programs = {setting: run for setting, run in changed.items() if not isinstance(run, Missing)}
        turns = _Turns(work, own, shorter, programs, _calls(ROUND_BLOCK_S, self.instruments.whole(work)))
        own.run()
        clock = self.bench.timer.clock
        rounds: list[_Round] = []
        longest, quiet = 0.0, 0
        while quiet < MOST_ROUNDS:
            start = clock()
            latest = deadline if len(rounds) >= LEAST_ROUNDS else (deadline + self.deadline) / 2
            if rounds and start + longest > latest:
                break
            rounds.append(self._round(turns, is_whole_first=len(rounds) % 2 == 0))
            quiet += not rounds[-1].disturbances
            longest = max(longest, clock() - start)
            self.tell()
        return _Rounds.of(rounds, refused)

    def _round(self, turns: _Turns, is_whole_first: bool) -> _Round:
        """Time everything once, the forward and its operators one right after the other."""
        self.bench.watch.start()
        whole, calls = self.instruments.whole, turns.calls
        forward = self._block(turns.work, calls, whole) if is_whole_first else None
        in_order = self._in_order(turns.own.run, calls)
        if forward is None:
            forward = self._block(turns.work, calls, whole)
        steps = self.instruments.marked(turns.own.marked)
        shorter = [self._block(cut, calls, whole) for cut in turns.shorter]
        under = {}
        for setting, changed in turns.programs.items():
            with setting.entered():
                under[setting.fix] = self._in_order(changed.run, calls)
        disturbances = self.bench.watch.stop().disturbances(self.bench.threads)
        return _Round(forward, in_order, steps, shorter, under, tuple(disturbance.text for disturbance in disturbances))

    def _changed(self, setting: Setting, own: Program) -> Program | Missing:
        """Return the program under a setting, run once."""
        try:
            with setting.entered():
                changed = own if setting.dtype is None else program(self.recording, setting.dtype)
                changed.run()
        except (RuntimeError, TypeError, ValueError) as error:  # an operator that does not take this dtype
            raise_if_lost(error)
            return Missing(first_line(error))
        return changed

    def _in_order(self, run: Chunked, calls: int) -> float:
        """Return the seconds of a program; one that the device had to wait for is timed from idle to idle."""
        whole = partial(run, _nothing)
        seconds = self._block(whole, calls, lambda work: self.instruments.busy(run) or self.instruments.whole(work))
        own = len(self.recording.steps) * self.instruments.stepping_s
        return seconds - own if seconds > own else seconds

    @staticmethod
    def _block(work: Work, calls: int, timed: Callable[[Work], float]) -> float:
        if calls > 1:  # what ran before was something else; a long call is hardly touched by that
            timed(work)
        return median(timed(work) for _ in range(calls))

    def hot(self, in_order: Sequence[float]) -> _Hot:
        """Time each distinct operator alone, in walks through the forward, those with most of the time above all."""
        hot = _Hot()
        planned = self._planned(in_order, hot)
        longest = self._longest(in_order)
        quiet = 0
        for _ in range(MOST_WALKS):
            wanted = {key for key in planned if quiet < WALKS or hot.seconds.get(key, 0.0) > longest[key]}
            self.bench.watch.start()
            for step, args, kwargs in self.recording.walk() if wanted else ():
                if step.key not in wanted or step.key in hot.cut or self.left_s < 0:
                    continue
                wanted.discard(step.key)
                try:
                    seconds = self._alone(step, args, kwargs, planned[step.key])
                except _NotReplayableError as error:
                    hot.cut[step.key] = ("not_replayable", str(error))
                except RuntimeError as error:
                    raise_if_lost(error)
                    hot.cut[step.key] = ("failed", first_line(error))
                else:
                    hot.seconds[step.key] = min(seconds, hot.seconds.get(step.key, math.inf))
                self.tell()
            hot.disturbances = tuple(
                disturbance.text for disturbance in self.bench.watch.stop().disturbances(self.bench.threads)
            )
            quiet += not hot.disturbances
        if quiet:
            hot.disturbances = ()
        late = (key for key in planned if key not in hot.seconds and key not in hot.cut)
        hot.cut.update((key, ("budget", OVER_BUDGET)) for key in late)
        return hot

    def _longest(self, in_order: Sequence[float]) -> dict[Any, float]:
        """Return the seconds above which an operator alone is slower than in the model: something disturbed it."""
        by_key: dict[Any, list[float]] = {}
        for step, seconds in zip(self.recording.steps, in_order, strict=True):
            by_key.setdefault(step.key, []).append(seconds)
        return {key: SLOWER_ALONE * mean(seconds) for key, seconds in by_key.items()}

    def _planned(self, in_order: Sequence[float], hot: _Hot) -> dict[Any, int]:
        """Return how many blocks of each operator fit into the time left, the costliest operators first."""
        totals: dict[Any, float] = {}
        calls: dict[Any, int] = {}
        for step, seconds in zip(self.recording.steps, in_order, strict=True):
            if step.load is not None or self.instruments.dispatch_s:
                totals[step.key] = totals.get(step.key, 0.0) + seconds
                calls[step.key] = calls.get(step.key, 0) + 1
        left = self.left_s / WALKS - sum(in_order)
        planned: dict[Any, int] = {}
        ranked = sorted(totals, key=lambda key: -totals[key])
        for blocks, is_first in ((1, True), (HOT_BLOCKS - 1, False)):
            for key in ranked:
                once = totals[key] / calls[key]
                needed = blocks * max(once, HOT_BLOCK_S) + once * is_first
                if (is_first or key in planned) and needed <= left:
                    planned[key] = planned.get(key, 0) + blocks
                    left -= needed
        hot.cut.update((key, ("budget", OVER_BUDGET)) for key in ranked if key not in planned)
        return planned

    def _alone(self, step: Step, args: Sequence[Any], kwargs: dict[str, Any], blocks: int) -> float:
        """Return the seconds of one call of an operator, one after another on the same tensors."""
        if any(not slot.made for slot in step.changed):
            raise _NotReplayableError("it changes what was there before the forward")
        if step.changed:  # what it changes is needed by the steps that follow
            args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        call = step.func._op

        def several(number: int) -> Chunked:
            def block(begin: Callable[[], None]) -> None:
                for first in range(0, number, CHUNK):
                    begin()
                    for _ in range(first, min(number, first + CHUNK)):
                        call(*args, **kwargs)

            return block

        call(*args, **kwargs)
        once = self.instruments.busy(several(1))
        if once is None:
            raise _NotReplayableError("the device waited for the host")
        number = _calls(HOT_BLOCK_S, once)
        times = [self.instruments.busy(several(number)) for _ in range(blocks)]
        timed = [seconds / number for seconds in times if seconds is not None]
        return median(timed) if timed else once


def _calls(block_s: float, once: float) -> int:
    """Return how many calls make a block."""
    return min(MOST_CALLS, max(1, math.ceil(block_s / max(once, 1e-9))))


def _operators(
    recording: Recording, in_order: Sequence[float] | None, hot: _Hot, shares: dict[Any, float] | Missing
) -> Iterator[ReplayedOperator]:
    """Yield each distinct operator with all its calls."""
    groups: dict[Any, list[int]] = {}
    for number, step in enumerate(recording.steps):
        if step.load is not None:
            groups.setdefault(step.key, []).append(number)
    for key, numbers in groups.items():
        hot_s = hot.seconds.get(key)
        in_order_s = None if in_order is None else sum(in_order[number] for number in numbers)
        load = reduce(add, filter(None, (recording.steps[number].load for number in numbers)))
        yield ReplayedOperator(
            load=structs.replace(load, seconds=in_order_s),
            hot_s=None if hot_s is None else hot_s * len(numbers),
            in_order_s=in_order_s,
            padding_share=None if isinstance(shares, Missing) else shares.get(key),
        )


def _cuts(recording: Recording, in_order: Sequence[float], hot: _Hot) -> Iterator[Cut]:
    """Yield what was not timed alone, by its reason."""
    for reason in dict.fromkeys(hot.cut.values()):
        cut = [
            (step.name, seconds)
            for step, seconds in zip(recording.steps, in_order, strict=True)
            if hot.cut.get(step.key) == reason
        ]
        names = tuple(dict.fromkeys(name for name, _ in cut))
        yield Cut(reason[0], names, sum(seconds for _, seconds in cut), reason[1])


Amounts = dict[str, list[float]]  # FLOPs, or bytes where there are none, of each call of an operator in order


@dataclass(frozen=True)
class _Shorter:
    """The same batch with fewer tokens: its forward, and the work in it."""

    tokens: int
    work: Work
    amounts: Amounts


def _shorter(lengths: Lengths | None) -> list[_Shorter]:
    if lengths is None:
        return []
    mean_tokens = round(mean(min(tokens, lengths.padded_to) for tokens in lengths.real))  # as many as without padding
    counted = {mean_tokens, *(lengths.padded_to // fraction for fraction in FRACTIONS)}
    tokens = sorted(counted - {0, lengths.padded_to})
    works = [(number, lengths.cut_to(number)) for number in tokens]
    return [_Shorter(number, work, _amounts(record(work))) for number, work in works]


def _amounts(recording: Recording) -> Amounts:
    amounts: Amounts = {}
    for step in recording.steps:
        if step.load is not None:
            amounts.setdefault(step.name, []).append(step.load.flops or step.load.bytes)
    return amounts


def _padding_shares(
    recording: Recording, shorter: Sequence[_Shorter], lengths: Lengths | None
) -> dict[Any, float] | Missing:
    """Return the share of each operator's work that is for padding, where the shorter forwards have it as often.

    Its work is the parabola of the tokens through the counted lengths: a constant (weights, one row per text), what
    grows with the tokens, and with their square. Of a batch without padding it is the mean over its texts.
    """
    if lengths is None:
        return Missing("the tokens of each text are not known")
    if len(shorter) < len(FRACTIONS):
        return Missing(f"texts of {lengths.padded_to} tokens are too short to tell how the work grows with them")
    nodes = [*(float(other.tokens) for other in shorter), float(lengths.padded_to)]
    real = [min(tokens, lengths.padded_to) for tokens in lengths.real]
    done: dict[Any, float] = {}
    useful: dict[Any, float] = {}
    counted = [*(cut.amounts for cut in shorter), _amounts(recording)]
    positions: dict[str, int] = {}
    for step in recording.steps:
        if step.load is None:
            continue
        position = positions[step.name] = positions.get(step.name, -1) + 1
        if len({len(amounts.get(step.name, ())) for amounts in counted}) > 1:
            continue
        work = [float(amounts[step.name][position]) for amounts in counted]
        done[step.key] = done.get(step.key, 0.0) + work[-1]
        useful[step.key] = useful.get(step.key, 0.0) + mean(parabola(nodes, work, tokens) for tokens in real)
    return {key: max(0.0, 1 - useful[key] / amount) if amount else 0.0 for key, amount in done.items()}


def parabola(nodes: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at `at` of the polynomial through the values at distinct nodes (Lagrange)."""
    return sum(
        value * math.prod((at - other) / (node - other) for other in nodes if other != node)
        for node, value in zip(nodes, values, strict=True)
    )


def _shape_times(lengths: Lengths | None, shorter: Sequence[_Shorter], rounds: _Rounds) -> Iterator[ShapeTime]:
    if lengths is None:
        return
    for number, other in enumerate(shorter):
        seconds = median(turn.shorter[number] for turn in rounds.counted)
        yield ShapeTime(len(lengths.real), other.tokens, seconds)
    yield ShapeTime(len(lengths.real), lengths.padded_to, median(turn.forward for turn in rounds.counted))


def _middle(seconds: Sequence[float]) -> Interval:
    """Return the median with the ends of the middle half."""
    ordered = sorted(seconds)
    return Interval(median(ordered), ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4])


def _ratio(ratios: Sequence[float]) -> Interval:
    return Interval.of(estimate(ratios, CONFIDENCE))
