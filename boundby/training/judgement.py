"""The verdict on a training run: which kind of its stages limits it, how sure that is, and what a fix could gain.

Self times of the stages are summed by what they count for. The rule is that of a trace's verdict: the largest share is
the bound, and with less than `AHEAD` times the second it is mixed. It must hold at the ends of the intervals and in
most windows of the run. Time that is in no known stage could be anything, and speaks against every answer. A gain is
Amdahl's law on the shares: what would be left if the best fix of a kind were perfect. What a trace knows more is about
the work of the model, and gains no more than the stages of that work take.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from boundby.bound import (
    LATE_HOST,
    LEAST_GAIN,
    MOST_UNEXPLAINED,
    OF_STAGES,
    Bound,
    Confidence,
    Doubt,
    Fix,
    Gain,
    Verdict,
)
from boundby.formatting import percent
from boundby.timing import judge, paired
from boundby.training import stages
from boundby.training.records import StageTimes
from boundby.training.steps import (
    IN_NO_STAGE,
    STEADY,
    BatchEffect,
    Share,
    StepTable,
    averaged,
    batch_effect,
    longest_gap,
    matched,
    share_of,
    step_table,
    windows,
)

# Work of the host beside the training leaves the machine idle: of the words for bounds `under_utilised` says so.
# The waits of collectives are stages only in loops that name them.
BOUND_OF_STAGE: dict[str, Bound] = {
    stages.DATA: "input",
    stages.H2D: "transfer",
    stages.FORWARD: "compute",
    stages.BACKWARD: "compute",
    stages.CLIP: "optimizer",
    stages.OPTIMIZER: "optimizer",
    stages.SCHEDULER: "optimizer",
    stages.ZERO_GRAD: "optimizer",
    stages.CALLBACKS: "under_utilised",
    stages.LOGGING: "under_utilised",
    stages.CHECKPOINT: "under_utilised",
    stages.EVALUATION: "under_utilised",
    "validation": "under_utilised",
    stages.GARBAGE_COLLECTION: "under_utilised",
    stages.COMPILE: "under_utilised",
    stages.ROLLOUT: "compute",
    stages.REWARD: "compute",
    stages.REFERENCE: "compute",
    stages.UPDATE: "compute",
    "communication": "communication",
    "all_reduce": "communication",
    "barrier": "communication",
}
UNEXPLAINED: Bound = "inconclusive"
# The stages that have a remedy of their own; that of all others is of what their time counts for (`OF_STAGES`).
FIX_OF_STAGE: dict[str, str] = {
    stages.CLIP: "clip_on_device",
    stages.SCHEDULER: "cheaper_schedule",
    stages.CHECKPOINT: "save_beside",
    stages.EVALUATION: "evaluate_less",
    "validation": "evaluate_less",
    stages.GARBAGE_COLLECTION: "collect_rarely",
    stages.COMPILE: "compile_ahead",
    stages.ROLLOUT: "generate_faster",
    stages.REWARD: "score_faster",
    stages.REFERENCE: "lighter_reference",
}

SLOWER = 0.1  # of the own time of the others, below which nobody is called slow
LEAST_SHARED_STEPS = 10  # two windows
WAITS = frozenset(name for name, bound in BOUND_OF_STAGE.items() if bound == "communication") | {stages.BACKWARD}
# Where parameters are sharded, the forward and the update wait for others too. In these nobody ever waits:
NEVER_WAITS = (stages.DATA, stages.H2D, stages.CALLBACKS, stages.LOGGING, stages.CHECKPOINT)
# What a trace can say of the work in these stages without contradicting their share.
WITHIN: dict[Bound, tuple[Bound, ...]] = {
    "input": ("input",),
    "transfer": ("transfer",),
    "optimizer": ("optimizer", "compute", "memory", "launch", "under_utilised"),
    "communication": ("communication",),
    "compute": ("compute", "memory", "launch", "communication", "under_utilised"),
    "under_utilised": ("under_utilised", "launch"),
}
FIXED: tuple[Bound, ...] = ("compute", "optimizer", "under_utilised")  # what need not grow with the batch
HOLDING_FOR_ALL: tuple[Bound, ...] = ("launch", "under_utilised")  # what may be said of all of that
SAYS_NOTHING: tuple[Bound, ...] = ("mixed", "inconclusive")
AHEAD = 1.5  # times the second largest share, below which the bound is mixed
AGREEING = 2 / 3  # of the windows that show the bound of the whole
CLEAR = 0.6  # share of the time: of the bound, to be of high confidence; of what does not grow with the batch
EXPECTED = (stages.DATA, stages.FORWARD, stages.BACKWARD, stages.OPTIMIZER)
LEAST_STEPS = 5
ENOUGH_STEPS = 20
NOTABLE = 0.1  # share in no known stage, from which it is a doubt
MOST_LISTED = 8  # ranks
INSIDE: tuple[Bound, ...] = ("compute", "memory", "launch", "communication")  # what only a trace sees of the work
GROWING: tuple[Bound, ...] = ("input", "transfer")  # with the batch, beside the work itself
LARGEST = 1000.0  # a share that close to one is no claim about what would be left
MOST_STAGES, MOST_EVIDENCE, MOST_DOUBTS, MOST_GAINS = 5, 4, 3, 3  # with the two lines before them, twelve
SMALL = 0.005  # share that is not worth a word
BURSTS = 0.5  # of the waits for data in a tenth of the steps: where they were even it would be a tenth
OF_UNKNOWN = ("leave_out", "shorten_stage")  # the fixes of time that counts for nothing known
LONGEST_LINE = 240  # characters
NO_STAGE = "what is in no stage"
TELLING_SLOWDOWN = 1.2  # of recorded steps
WITHOUT_GAIN = "nothing that the stages show would gain 2 %"
WITHOUT_TRACE = "record a trace of a few steps: it tells what limits the work inside forward and backward"
WITHOUT_ANSWER = "mark the stages that are missing, or let the loop run on, and ask again"


class Straggler(msgspec.Struct, frozen=True):
    """A process that the others wait for.

    `slower_by` is its own time of a step, without its wait for the others, over the median one of the others. `stage`
    is where it spends more than they do. `gain` is the factor on the speed of the job, if it were as fast as they are:
    the next slowest of them is left.
    """

    rank: int
    slower_by: float
    own_s: float
    others_s: float
    stage: str
    gain: float
    steps: int


class TrainingVerdict(Verdict, frozen=True):
    """What limits the steps of a training run; `share_of_limit` is the share of their time that counts for the bound.

    `at_most` of a gain is a factor on the speed. `stages` are the shares of the stages, the largest first, and
    `causes` those of what they count for. `rank` is the process they are of: the one that the others wait for; None
    where they are the mean over all `ranks`. `str` of it is its text.
    """

    stages: tuple[Share, ...] = ()
    causes: tuple[Share, ...] = ()
    steps: int = 0  # judged
    step_s: float | None = None
    on_device: bool = False  # by whose clock the shares are
    ranks: tuple[int, ...] = ()
    rank: int | None = None
    straggler: Straggler | None = None
    trace_bound: Bound | None = None  # what the trace says, None where there is none
    trace_agrees: bool | None = None  # None: there is no trace, or it says nothing about this

    @property
    def parts(self) -> dict[str, list[str]]:
        """The sentences that a person reads, below what they answer: What, Why, Doubt, Next; at most twelve."""
        return _parts(self)

    def __str__(self) -> str:
        """Return the parts as lines of at most 240 characters."""
        return "\n".join(_lines(self.parts))


def causes_of(table: StepTable) -> dict[str, Bound]:
    """Return what the time of each column counts for; `inconclusive` where nothing tells.

    A stage with a name of the loop's own counts for what the stages around it count for, if they agree.
    """
    return {name: _cause(name, table.around, frozenset()) for name in table.names}


def _cause(name: str, around: Mapping[str, frozenset[str]], seen: frozenset[str]) -> Bound:
    if name in BOUND_OF_STAGE:
        return BOUND_OF_STAGE[name]
    if name == IN_NO_STAGE or name in seen:
        return UNEXPLAINED
    causes = {_cause(outer, around, seen | {name}) for outer in around.get(name, ())}
    return causes.pop() if len(causes) == 1 else UNEXPLAINED


class Facts(msgspec.Struct, frozen=True, dict=True):
    """The steps of one process, or the mean of several, the run they are of, and the verdict on its trace.

    `failed` are the processes of the run that ended by an error.
    """

    times: StageTimes
    table: StepTable
    trace: Verdict | None
    straggler: Straggler | None
    failed: tuple[StageTimes, ...]

    @cached_property
    def names_of(self) -> dict[Bound, set[str]]:
        """The stages that count for each bound."""
        names_by_bound: dict[Bound, set[str]] = {}
        for name, cause in causes_of(self.table).items():
            names_by_bound.setdefault(cause, set()).add(name)
        return names_by_bound if self.table.num_steps else {}

    @cached_property
    def stages(self) -> tuple[Share, ...]:
        """The shares of the stages, the largest first."""
        shares = [self._share(name, cause, {name}) for cause, names in self.names_of.items() for name in sorted(names)]
        return tuple(sorted(shares, key=lambda share: -share.share))

    @cached_property
    def causes(self) -> tuple[Share, ...]:
        """The shares of what the stages count for, the largest first."""
        shares = [self._share(cause, cause, names) for cause, names in self.names_of.items()]
        return tuple(sorted(shares, key=lambda share: -share.share))

    @cached_property
    def effect(self) -> BatchEffect | None:
        """How the work of a step depends on its batch, where that is known."""
        work = self.table.spent_in(self.names_of.get("compute", set()))
        return batch_effect(self.times, self.table.numbers, work) if self.table.has_steps else None

    def _share(self, name: str, cause: Bound, names: Collection[str]) -> Share:
        return share_of(name, cause, self.table.spent_in(names), self.table.whole_s)

    @cached_property
    def issuing(self) -> float | None:
        """The part of the time in which the host issues work to a device; None where there is no device."""
        host = self.table.host_s
        if not self.table.on_device or not host.sum():
            return None
        names = self.names_of.get("compute", set()) | self.names_of.get("optimizer", set())
        return float(host[:, [name in names for name in self.table.names]].sum() / host.sum())


def find_straggler(tables: Mapping[int, StepTable]) -> Straggler | None:
    """Return the process that the others wait for, by the steps that all have; None if none is clearly slower.

    All processes of a job leave a collective together, so each one's steps take the same time, and the slow one shows
    in the others as a wait: the backward, where gradients are reduced, is long in all but the slow one. A process' own
    time of a step is therefore the step without what it spent in those stages beyond whoever spent least there.
    """
    clocks = {table.on_device for table in tables.values()}
    if len(tables) < 2 or len(clocks) > 1 or not all(table.has_steps for table in tables.values()):
        return None
    ranks = list(tables)
    same = matched([tables[rank] for rank in ranks])
    if len(same[0].numbers) < LEAST_SHARED_STEPS:
        return None
    everywhere = frozenset(name for table in same for name in table.names)
    for waits in (WAITS, everywhere - frozenset(NEVER_WAITS)):
        straggler = _slowest(ranks, same, waits)
        if straggler:
            return straggler
    return None


def _slowest(ranks: Sequence[int], tables: Sequence[StepTable], waits: frozenset[str]) -> Straggler | None:
    """Return the process with the longest own time, if it is longer than that of the others in most windows."""
    waited = np.array([table.spent_in(waits) for table in tables])
    own = np.array([table.whole_s for table in tables]) - (waited - waited.min(axis=0))
    slow = int(np.argmax(np.median(own, axis=1)))
    others = np.median(np.delete(own, slow, axis=0), axis=0)
    parts = windows(own.shape[1])
    means = [(float(others[window].mean()), float(own[slow][window].mean())) for window in parts]
    if min(min(pair) for pair in means) <= 0:
        return None
    if judge([paired(*zip(*means, strict=True))], SLOWER)[0].verdict != "slower":
        return None
    stage = _stage(tables, slow, waits)
    own_s, others_s = float(own[slow].mean()), float(others.mean())
    next_s = float(np.delete(own, slow, axis=0).mean(axis=1).max())
    return Straggler(ranks[slow], own_s / others_s, own_s, others_s, stage, own_s / next_s, own.shape[1])


def _stage(tables: Sequence[StepTable], slow: int, waits: frozenset[str]) -> str:
    """Return where the slow process spends more than the others do."""

    def excess(name: str) -> float:
        means = [float(table.spent_in({name}).mean()) for table in tables]
        return means[slow] - float(np.median(means[:slow] + means[slow + 1 :]))

    return max((name for name in tables[slow].names if name not in waits), key=excess, default=IN_NO_STAGE)


Answer = tuple[Bound, tuple[Bound, ...]]  # the bound, and what else it may be or, if it is mixed, what it is made of


def judge_training(ranks: Sequence[StageTimes], trace: Verdict | None = None) -> TrainingVerdict:
    """Return the verdict on a run from the stage times of its processes, and the verdict on a trace of its steps.

    `inconclusive`, with the reasons as doubts, where there are too few steps, the run failed early, or most of the
    time is in no stage that is known. Raises ValueError when `ranks` is empty.
    """
    if not ranks:
        raise ValueError("there are no stage times to judge; at least those of one process are needed")
    times_of = {times.rank: times for times in ranks}
    tables = {rank: step_table(times) for rank, times in times_of.items()}
    judged = {rank: table for rank, table in tables.items() if table.num_steps >= LEAST_STEPS}
    straggler = find_straggler(judged)
    rank, table = _chosen(tables, judged, straggler)
    are_matched = rank is None or straggler is not None or len(judged) < 2
    times = times_of[next(iter(judged)) if rank is None else rank]
    failed = tuple(times for times in ranks if times.status == "failed")
    # A trace of a process that waits for the slow one says so, and nothing of the work that is slow.
    of_work = None if straggler and trace and trace.bound == "communication" else trace
    verdict = _verdict(
        Facts(times, table, of_work, straggler, failed), tuple(doubts_on_ranks(times_of, judged, are_matched))
    )
    return msgspec.structs.replace(
        verdict,
        ranks=tuple(times_of),
        rank=rank if len(times_of) > 1 else None,
        trace_bound=trace.bound if trace else None,
    )


def _verdict(facts: Facts, on_ranks: tuple[Doubt, ...]) -> TrainingVerdict:
    """Return the verdict on one table of steps."""
    reasons = tuple(_reasons_to_abstain(facts))
    by_stages = (UNEXPLAINED, ()) if reasons else _by_stages(facts)
    agrees = _agreement(facts, by_stages)
    doubts = (*reasons, *on_ranks, *doubts_on_steps(facts), *_disagreement(facts, by_stages, agrees))
    share = next((cause.share for cause in facts.causes if cause.bound == by_stages[0] != UNEXPLAINED), None)
    bound, others = _refined(facts, by_stages, agrees)
    trace, table = facts.trace, facts.table
    return TrainingVerdict(
        bound=bound,
        alternatives=others,
        share_of_limit=share,
        confidence=_confidence((bound, others), by_stages[0], share, doubts),
        confirmation="untested",
        gains=gains_of(facts, None if agrees is False else trace),
        evidence=tuple(evidence(facts, agrees)),
        doubts=doubts,
        stages=facts.stages,
        causes=facts.causes,
        steps=table.num_steps,
        step_s=float(table.whole_s.mean()) if table.num_steps else None,
        on_device=table.on_device,
        straggler=facts.straggler,
        trace_bound=trace.bound if trace else None,
        trace_agrees=agrees,
    )


def _chosen(
    tables: Mapping[int, StepTable], judged: Mapping[int, StepTable], straggler: Straggler | None
) -> tuple[int | None, StepTable]:
    """Return whose steps are judged: those of the slow process, the mean of all (None), or those of the longest."""
    if straggler:
        return straggler.rank, judged[straggler.rank]
    mean = averaged(list(judged.values())) if len(judged) > 1 else None
    longest = max(tables, key=lambda rank: tables[rank].num_steps)
    return (longest, tables[longest]) if mean is None else (None, mean)


def _reasons_to_abstain(facts: Facts) -> Iterator[Doubt]:
    steps, needed = facts.table.num_steps, ENOUGH_STEPS if facts.failed else LEAST_STEPS
    if steps < needed:
        failed = f"; {failure(facts.failed)}" if facts.failed else ""
        yield Doubt("steps", f"{steps} undisturbed ones are known, {needed} are needed{failed}")
    elif _label({cause.bound: cause.share for cause in facts.causes})[0] == UNEXPLAINED:
        text = f"more of the time is in no known stage than in any kind of them ({unexplained(facts)})"
        yield Doubt("unexplained", text)


def _by_stages(facts: Facts) -> Answer:
    """Return the bound by the shares, if it is the same at the ends of their intervals and in most windows."""
    bound, others = _label({cause.bound: cause.share for cause in facts.causes})
    if bound == "mixed":
        return bound, others
    shares = {cause.bound: cause for cause in facts.causes if cause.bound != UNEXPLAINED}
    first = shares.pop(bound)
    for rival in shares.values():
        if _label({bound: first.ends[0], rival.bound: rival.ends[1]})[0] != bound:
            others += (rival.bound,)
    labels = Counter(_labels_of_windows(facts))
    if labels[bound] < AGREEING * labels.total():
        others += tuple(label for label in labels if label not in (bound, *others, *SAYS_NOTHING))
        next_one = max(shares.values(), key=lambda share: share.share, default=None)
        if not others and labels["mixed"] and next_one:
            others = (next_one.bound,)
        return ("mixed", (bound, *others)) if others else (UNEXPLAINED, ())
    return ("mixed", (bound, *others)) if others else (bound, ())


def _labels_of_windows(facts: Facts) -> Iterator[Bound]:
    spent = {cause: facts.table.spent_in(names) for cause, names in facts.names_of.items()}
    whole = facts.table.whole_s
    for window in windows(len(whole)):
        total = float(whole[window].sum())
        if total:
            yield _label({cause: float(seconds[window].sum()) / total for cause, seconds in spent.items()})[0]


def _label(shares: Mapping[Bound, float]) -> Answer:
    """Return the bound with the largest share; mixed, of the two largest, where the second one is close."""
    ranked = sorted((bound for bound in shares if bound != UNEXPLAINED), key=lambda bound: -shares[bound])
    unknown = shares.get(UNEXPLAINED, 0.0)
    if not ranked or shares[ranked[0]] <= unknown or unknown >= MOST_UNEXPLAINED:
        return UNEXPLAINED, ()
    if len(ranked) == 1 or shares[ranked[0]] >= AHEAD * shares[ranked[1]]:
        return ranked[0], ()
    return "mixed", (ranked[0], ranked[1])


def _agreement(facts: Facts, by_stages: Answer) -> bool | None:
    """Tell whether the trace says the same, as far as it can; None where one of the two says nothing.

    That the host is late may have any cause in it, so a trace that says so contradicts nothing.
    """
    (bound, others), trace = by_stages, facts.trace
    if trace is None or trace.bound in SAYS_NOTHING or bound == UNEXPLAINED:
        return None
    if all(trace.bound in WITHIN[label] for label in (others if bound == "mixed" else (bound,))):
        return True
    return None if bound == "mixed" or trace.bound == "launch" else False


def _disagreement(facts: Facts, by_stages: Answer, agrees: bool | None) -> Iterator[Doubt]:
    if agrees is False and facts.trace:
        text = (
            f"it says {facts.trace.bound}, the stages say {by_stages[0]}; its steps are other ones, and slowed down by "
            "the recording"
        )
        yield Doubt("trace", text)


def _refined(facts: Facts, by_stages: Answer, agrees: bool | None) -> Answer:
    """Return what limits the work itself, where that takes most of the time: by the trace and by the batches."""
    bound, others = by_stages
    if bound == UNEXPLAINED:
        trace = facts.trace
        return bound, (trace.bound,) if trace and trace.bound not in SAYS_NOTHING else ()
    kinds = others if bound == "mixed" else (bound,)
    is_fixed = bound == "mixed" and set(kinds) <= set(FIXED)
    if "compute" not in kinds and not is_fixed:
        return by_stages
    work, doubtful = _kind_of_work(facts, bool(agrees))
    if bound == "compute" or (is_fixed and work in HOLDING_FOR_ALL):
        return work, tuple(dict.fromkeys(other for other in (*doubtful, *others) if other not in (work, "compute")))
    return bound, tuple(work if other == "compute" else other for other in others)


def _kind_of_work(facts: Facts, agrees: bool) -> Answer:
    """Return what limits forward and backward, and what else it may be."""
    trace, effect = facts.trace if agrees else None, facts.effect
    grows = effect is not None and effect.fixed <= 1 - CLEAR
    if trace and trace.bound in ("launch", "communication", "under_utilised") and not grows:
        return trace.bound, trace.alternatives
    if effect and effect.fixed_low >= CLEAR:
        return "under_utilised", ("launch",)
    if trace and trace.bound != "launch":
        return trace.bound, trace.alternatives
    is_ahead = grows or (facts.issuing is not None and facts.issuing < LATE_HOST)
    return "compute", ("memory",) if is_ahead and not trace else ("memory", "launch")


def _confidence(answer: Answer, by_stages: Bound, share: float | None, doubts: Collection[Doubt]) -> Confidence:
    """Return how sure the bound is; high where the measured shares say it alone, and nothing else is possible."""
    bound, others = answer
    if doubts or bound in SAYS_NOTHING:
        return "low"
    is_measured = bound == by_stages != "compute" and not others
    return "high" if is_measured and (share or 0.0) >= CLEAR else "medium"


def doubts_on_steps(facts: Facts) -> Iterator[Doubt]:
    """Yield what speaks against trusting the shares."""
    table = facts.table
    if not table.num_steps:
        return
    if not table.has_steps:
        yield Doubt("steps", "only totals are known, and not whether the shares stay the same")
    elif LEAST_STEPS <= table.num_steps < ENOUGH_STEPS:
        yield Doubt("steps", f"only {table.num_steps} undisturbed ones; {ENOUGH_STEPS} tell more")
    if facts.times.device is not None and not table.on_device:
        text = f"the times of {facts.times.device} are not known; on the host, work is where it waits for it"
        yield Doubt("device", text)
    unknown = next((cause for cause in facts.causes if cause.bound == UNEXPLAINED), None)
    if unknown and unknown.share >= NOTABLE and unknown != facts.causes[0]:
        text = f"{percent(unknown.share)} of the time is in no known stage ({unexplained(facts)})"
        yield Doubt("unexplained", text)
    for cause in facts.causes:
        names = " and ".join(NO_STAGE if name == IN_NO_STAGE else name for name in sorted(facts.names_of[cause.bound]))
        yield from _doubts_on_share(cause, names)


def _doubts_on_share(share: Share, names: str) -> Iterator[Doubt]:
    if share.drift is not None and abs(share.drift) > STEADY:
        change = "more" if share.drift > 0 else "less"
        text = f"{names}: {percent(abs(share.drift))} {change} of the time at the end than at the beginning"
        yield Doubt("drift", text)
    elif share.iqr is not None and share.iqr > STEADY:
        points = f"the middle half of its values spans {100 * share.iqr:.0f} points"
        yield Doubt("unsteady", f"{names}: the share of the time swings over the run: {points}")


def doubts_on_ranks(times_of: Mapping[int, StageTimes], judged: Collection[int], are_matched: bool) -> Iterator[Doubt]:
    """Yield which processes are missing in what is judged."""
    size = max(times.world_size for times in times_of.values())
    missing = [rank for rank in range(size) if rank not in times_of]
    if missing:
        yield Doubt("ranks", f"nothing is known of {_listed(missing)} of {size}")
    short = [rank for rank in times_of if rank not in judged] if judged else []
    if short:
        yield Doubt("ranks", f"too few steps are known of {_listed(short)}")
    if not are_matched:
        yield Doubt("ranks", "no steps are known that all of them have; those of one are judged")


def evidence(facts: Facts, agrees: bool | None) -> Iterator[str]:
    """Yield the figures behind the verdict, beside the shares of the stages."""
    who, effect = facts.straggler, facts.effect
    if who:
        yield (
            f"rank {who.rank} takes {who.own_s * 1e3:.2f} ms of its own for a step, the others "
            f"{who.others_s * 1e3:.2f} ms; it is the one that waits least, over {who.steps} common steps"
        )
    if effect:
        yield (
            f"forward and backward: {percent(effect.fixed)} of their time does not grow with the batch "
            f"({effect.smaller:.4g} and {effect.larger:.4g} {effect.quantity}, {effect.steps} steps)"
        )
    if agrees and facts.trace and facts.causes[0].bound in ("compute", facts.trace.bound):
        yield f"a trace of some of the steps says {facts.trace.bound} ({facts.trace.confidence} confidence)"
    if facts.issuing is not None:
        yield f"the host issues work for {percent(facts.issuing)} of the time"
    if facts.failed:
        yield failure(facts.failed)
    left_out = [(facts.table.warm_up, "of warm-up"), (facts.table.disturbed, "disturbed")]
    if any(steps for steps, _ in left_out):
        yield f"steps left out: {', '.join(f'{steps} {why}' for steps, why in left_out if steps)}"


def failure(failed: Collection[StageTimes]) -> str:
    """Return which processes failed, and why the first of them did."""
    first = min(failed, key=lambda process: process.last_step if process.last_step is not None else -1)
    after = "before any step had ended" if first.last_step is None else f"after step {first.last_step}"
    return f"rank {_listed([process.rank for process in failed])} failed, {after}: {first.error}"


def unexplained(facts: Facts) -> str:
    """Return what takes the time that nothing explains, and which of the usual stages are not marked."""
    known = [stage for stage in facts.stages if stage.bound == UNEXPLAINED and stage.share >= SMALL]
    missing = [name for name in EXPECTED if name not in facts.table.names]
    parts = ", ".join(f"{_called(stage)} {percent(stage.share)}" for stage in known)
    return f"{parts}{'; not marked: ' + ', '.join(missing) if missing else ''}"


def _listed(ranks: Collection[int]) -> str:
    shown = [str(rank) for rank in sorted(ranks)]
    return ", ".join(shown if len(shown) <= MOST_LISTED else [*shown[:MOST_LISTED], f"{len(shown) - MOST_LISTED} more"])


def gains_of(facts: Facts, trace: Verdict | None) -> tuple[Gain, ...]:
    """Return the gains worth naming, the largest first; those inside the work are known from a trace alone.

    Where the trace promises more than the work takes, most of it lies elsewhere: such gains come last. Those of the
    steps are ranked by what they leave of the run, of which the steps are a part.
    """
    gains = [*_of_stages(facts), *_of_batches(facts.stages, facts.effect)]
    between, of_steps = _of_excluded(facts.times)
    who, inside, capped = facts.straggler, list[tuple[float, Gain]](), list[Gain]()
    if who:
        basis = f"it takes {who.own_s * 1e3:.2f} ms of its own for a step, the others {who.others_s * 1e3:.2f} ms"
        gains.append(Gain(Fix("straggler", {"rank": who.rank, "stage": who.stage}), who.gain, basis))
    if trace:
        inside, capped = _inside_work(facts, trace, {gain.fix.kind for gain in gains})
    of_step = [*((gain.at_most, gain) for gain in gains), *inside]
    ranked = [
        *((1 - of_steps + of_steps / factor, gain) for factor, gain in of_step),
        *((1 / gain.at_most, gain) for gain in between),
    ]
    largest = [gain for _, gain in sorted(ranked, key=lambda pair: pair[0]) if gain.at_most >= LEAST_GAIN]
    return tuple([*largest, *(gain for gain in capped if gain.at_most >= LEAST_GAIN)])


def _inside_work(facts: Facts, trace: Verdict, known: Collection[str]) -> tuple[list[tuple[float, Gain]], list[Gain]]:
    """Return what a trace says that the work could gain, each after its factor there, and what exceeds all that work.

    Recording slows steps down: what would vanish from a recorded one is the most that can vanish from another, up to
    all of the work. Where that is all of a step, and the work is in no stage, the trace bounds nothing.
    """
    parts = [stage for stage in facts.stages if stage.bound == "compute" and stage.name not in FIX_OF_STAGE]
    share = min(1.0, sum(stage.share for stage in parts))
    least = 1 - share if parts else 0.0
    mean_s = float(facts.table.whole_s.mean()) if facts.table.num_steps else 0.0
    slowed = max(1.0, trace.step_s / mean_s) if trace.step_s and mean_s else 1.0
    how = f"took {slowed:.1f} times as long" if slowed >= TELLING_SLOWDOWN else "recording slows down"
    inside, capped = [], []
    for gain in trace.gains:
        if not set(gain.relieves) & set(INSIDE) or gain.fix.kind in known:
            continue
        left = 1 - slowed * (1 - 1 / gain.at_most)
        basis = f"of the work alone: {_basis(parts, share)}" if left < least else f"by the trace, whose steps {how}"
        bounded = msgspec.structs.replace(gain, at_most=_factor(max(left, least)), basis=basis)
        if parts and 1 / gain.at_most < least:
            capped.append(bounded)
        elif parts or left > 0:
            inside.append((gain.at_most, bounded))
    return inside, capped


def _of_stages(facts: Facts) -> Iterator[Gain]:
    """Yield what it would gain if all of one kind vanished; a copy is hidden behind the rest, if that is longer."""
    parts_of: dict[Fix, list[Share]] = {}
    for stage in facts.stages:
        if stage.share <= 0:
            continue
        if stage.bound == UNEXPLAINED:
            fix = Fix("leave_out") if stage.name == IN_NO_STAGE else Fix("shorten_stage", {"stage": stage.name})
        else:
            fix = Fix(FIX_OF_STAGE.get(stage.name, OF_STAGES[stage.bound]))
        parts_of.setdefault(fix, []).append(stage)
    for fix, parts in parts_of.items():
        share = min(1.0, sum(stage.share for stage in parts))
        left = max(1 - share, share) if fix.kind == OF_STAGES["transfer"] else 1 - share
        if fix.change.is_bounded:
            where = ""
            if fix.kind == "leave_out" and (gap := longest_gap(facts.times)):
                where = f", {100 * gap[2]:.0f} % of that between {gap[0]} and {gap[1]}"
            elif fix.kind == OF_STAGES["input"] and facts.table.num_steps >= ENOUGH_STEPS and facts.table.has_steps:
                waits = np.sort(facts.table.spent_in({part.name for part in parts}))
                longest = float(waits[-(len(waits) // 10) :].sum() / waits.sum())
                if longest >= BURSTS:
                    where = f", {100 * longest:.0f} % of that in a tenth of the steps, as where an epoch begins"
            yield Gain(fix, _factor(left), _basis(parts, share) + where)


def _of_excluded(times: StageTimes) -> tuple[list[Gain], float]:
    """Return what the run would gain without what it does between its steps, such as evaluating; the steps' share."""
    steps = times.step
    if steps is None or steps.host_s.mean is None or times.last_step is None:
        return [], 1.0
    in_steps_s = steps.host_s.mean * (times.last_step - times.first_step + 1)  # the disturbed ones too, undisturbed
    between = [stage for stage in times.stages if stage.kind == "excluded" and stage.host_s.total > 0]
    run_s = in_steps_s + sum(stage.host_s.total for stage in between)
    gains = []
    for stage in between:
        share = stage.host_s.total / run_s
        kind = FIX_OF_STAGE.get(stage.name) or OF_STAGES.get(BOUND_OF_STAGE.get(stage.name, UNEXPLAINED), "")
        fix = Fix(kind) if stage.name in BOUND_OF_STAGE else Fix("shorten_stage", {"stage": stage.name})
        gains.append(
            Gain(fix, _factor(1 - share), f"{stage.name}, between steps, takes {100 * share:.1f} % of the run")
        )
    return gains, in_steps_s / run_s if run_s else 1.0


def _of_batches(stages: Sequence[Share], effect: BatchEffect | None) -> Iterator[Gain]:
    """Yield what batches twice as large would gain, if what does not grow with them stays as it is."""
    if effect is None:
        return
    growing = sum(stage.share for stage in stages if stage.bound in GROWING)
    work = sum(stage.share for stage in stages if stage.bound == "compute")
    factor = 2 / (1 + growing + (1 - effect.fixed) * work)
    basis = f"{100 * effect.fixed:.0f} % of forward and backward does not grow with the {effect.quantity} of a batch"
    yield Gain(Fix("double_batch"), factor, basis)


def _factor(left: float) -> float:
    return min(LARGEST, 1 / left) if left > 0 else LARGEST


def _basis(parts: Sequence[Share], share: float) -> str:
    names = " and ".join(map(_called, parts))
    return f"{names} {'take' if len(parts) > 1 else 'takes'} {100 * share:.1f} % of the time"


def _parts(verdict: TrainingVerdict) -> dict[str, list[str]]:
    gains = [f"{gain.fix}: at most {gain.at_most:.2f} times the speed ({gain.basis})" for gain in verdict.gains]
    # What the work could gain is not known before it is tried: half of its time is much.
    work = sum(cause.share for cause in verdict.causes if cause.bound == "compute")
    ahead = sum(gain.at_most > _factor(1 - work / 2) for gain in verdict.gains[: MOST_GAINS - 1])
    if verdict.bound == "inconclusive":
        gains.insert(int(bool(verdict.gains) and verdict.gains[0].fix.kind in OF_UNKNOWN), WITHOUT_ANSWER)
    elif not any("compute" in gain.relieves for gain in verdict.gains):
        if verdict.trace_bound is None and "compute" in (verdict.bound, *verdict.alternatives):
            gains.insert(ahead, WITHOUT_TRACE)
        elif verdict.bound in ("compute", "memory"):
            gains.insert(ahead, str(Fix("faster_work")))
    return {
        "What": [_what(verdict)],
        "Why": [*_main_stages(verdict), *verdict.evidence][:MOST_EVIDENCE],
        "Doubt": [str(doubt) for doubt in verdict.doubts[:MOST_DOUBTS]],
        "Next": gains[:MOST_GAINS] or [WITHOUT_GAIN],
    }


def _lines(parts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for head, sentences in parts.items():
        for number, sentence in enumerate(sentences):
            line = f"{'' if number else head + ':':<7}{' '.join(sentence.split())}"
            yield line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def _what(verdict: TrainingVerdict) -> str:
    bound = verdict.bound.replace("_", "-")
    others = " or ".join(label.replace("_", "-") for label in verdict.alternatives)
    if verdict.bound == "inconclusive":
        return f"inconclusive{f'; maybe {others}' if others else ''}"
    if others:
        others = f"; {others}" if verdict.bound == "mixed" else f"; maybe {others}"
    said = f"{bound} ({verdict.confidence} confidence{others})"
    who = verdict.straggler
    if who is None:
        return said
    return f"{said}; the others wait for rank {who.rank}, {who.slower_by:.2f} times as slow, in {who.stage}"


def _main_stages(verdict: TrainingVerdict) -> list[str]:
    """Return a line on the largest stage, and one on the others."""
    shares = [stage for stage in verdict.stages if stage.share >= SMALL]
    if not shares or verdict.step_s is None:
        return []
    first, rest = shares[0], shares[1 : MOST_STAGES + 1]
    low, high = (percent(end) for end in first.ends)
    ends = "" if low == high else f" ({low.removesuffix(' %')} to {high})"
    clock = " of the device" if verdict.on_device else ""
    whose = "" if verdict.rank is None else f" of rank {verdict.rank}"
    line = (
        f"{_called(first)} takes {percent(first.share)}{ends} of the time{clock}: {first.step_s * 1e3:.2f} of "
        f"{verdict.step_s * 1e3:.2f} ms, over {verdict.steps} steps{whose}"
    )
    others = ", ".join(f"{_called(stage)} {percent(stage.share)}" for stage in rest)
    return [line, f"then {others}"] if others else [line]


def _called(share: Share) -> str:
    return NO_STAGE if share.name == IN_NO_STAGE else share.name
