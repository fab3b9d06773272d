"""The verdict on a training run: which kind of its stages limits it, how sure that is, and what a fix could gain.

Self times of the stages are summed by what they count for. The rule is that of a trace's verdict: the largest share is
the bound, and with less than `AHEAD` times the second it is mixed. It must hold at the ends of the intervals and in
most windows of the run. Time that is in no known stage could be anything, and speaks against every answer.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from boundby.judgement import LATE_HOST
from boundby.training.causes import UNEXPLAINED
from boundby.training.evidence import (
    ENOUGH_STEPS,
    LEAST_STEPS,
    doubts_on_ranks,
    doubts_on_steps,
    evidence,
    failure,
    unexplained,
)
from boundby.training.facts import Facts
from boundby.training.gains import gains_of
from boundby.training.records import StageTimes
from boundby.training.steps import StepTable, averaged, step_table, windows
from boundby.training.stragglers import find_straggler
from boundby.training.verdict import Straggler, TrainingVerdict
from boundby.verdict import Bound, Confidence, Doubt, Verdict

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
MOST_UNEXPLAINED = 0.5  # of the time, to say anything at all
Answer = tuple[Bound, tuple[Bound, ...]]  # the bound, and what else it may be or, if it is mixed, what it is made of


def judge_training(ranks: Sequence[StageTimes], trace: Verdict | None = None) -> TrainingVerdict:
    """Return the verdict on a run from the stage times of its processes, and the verdict on a trace of its steps.

    `inconclusive`, with the reasons as doubts, where there are too few steps, the run failed early, or most of the
    time is in no stage that is known. Raises ValueError when `ranks` is empty.
    """
    if not ranks:
        raise ValueError("there are no stage times to judge; at least those of one process are needed")
    times_of = {each.rank: each for each in ranks}
    tables = {rank: step_table(times) for rank, times in times_of.items()}
    judged = {rank: table for rank, table in tables.items() if table.num_steps >= LEAST_STEPS}
    straggler = find_straggler(judged)
    rank, table = _chosen(tables, judged, straggler)
    are_matched = rank is None or straggler is not None or len(judged) < 2
    times = times_of[next(iter(judged)) if rank is None else rank]
    failed = tuple(each for each in ranks if each.status == "failed")
    found = _verdict(
        Facts(times, table, trace, straggler, failed), tuple(doubts_on_ranks(times_of, judged, are_matched))
    )
    return replace(found, ranks=tuple(times_of), rank=rank if len(times_of) > 1 else None)


def _verdict(facts: Facts, on_ranks: tuple[Doubt, ...]) -> TrainingVerdict:
    """Return the verdict on one table of steps."""
    reasons = tuple(_reasons_to_abstain(facts))
    by_stages = (UNEXPLAINED, ()) if reasons else _by_stages(facts)
    agrees = _agreement(facts, by_stages)
    doubts = (*reasons, *on_ranks, *doubts_on_steps(facts), *_disagreement(facts, by_stages, agrees))
    share = next((each.share for each in facts.causes if each.bound == by_stages[0] != UNEXPLAINED), None)
    bound, others = _refined(facts, by_stages, agrees)
    trace, table = facts.trace, facts.table
    return TrainingVerdict(
        bound=bound,
        alternatives=others,
        share_of_limit=share,
        confidence=_confidence((bound, others), by_stages[0], share, doubts),
        confirmation="untested",
        gains=gains_of(facts.stages, facts.straggler, facts.effect, None if agrees is False else trace),
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
    elif _label({each.bound: each.share for each in facts.causes})[0] == UNEXPLAINED:
        text = f"most of the time is in no stage that is known ({unexplained(facts)})"
        yield Doubt("unexplained", text)


def _by_stages(facts: Facts) -> Answer:
    """Return the bound by the shares, if it is the same at the ends of their intervals and in most windows."""
    bound, others = _label({each.bound: each.share for each in facts.causes})
    if bound == "mixed":
        return bound, others
    shares = {each.bound: each for each in facts.causes if each.bound != UNEXPLAINED}
    first = shares.pop(bound)
    for rival in shares.values():
        if _label({bound: first.ends[0], rival.bound: rival.ends[1]})[0] != bound:
            others += (rival.bound,)
    labels = Counter(_labels_of_windows(facts))
    if labels[bound] < AGREEING * labels.total():
        others += tuple(each for each in labels if each not in (bound, *others, *SAYS_NOTHING))
        return "mixed", (bound, *others)
    return ("mixed", (bound, *others)) if others else (bound, ())


def _labels_of_windows(facts: Facts) -> Iterator[Bound]:
    spent = {cause: facts.table.spent_in(names) for cause, names in facts.names_of.items()}
    whole = facts.table.whole_s
    for each in windows(len(whole)):
        total = float(whole[each].sum())
        if total:
            yield _label({cause: float(seconds[each].sum()) / total for cause, seconds in spent.items()})[0]


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
    if all(trace.bound in WITHIN[each] for each in (others if bound == "mixed" else (bound,))):
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
        return work, tuple(dict.fromkeys(each for each in (*doubtful, *others) if each not in (work, "compute")))
    return bound, tuple(work if each == "compute" else each for each in others)


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


def _confidence(found: Answer, by_stages: Bound, share: float | None, doubts: Collection[Doubt]) -> Confidence:
    """Return how sure the bound is; high where the measured shares say it alone, and nothing else is possible."""
    bound, others = found
    if doubts or bound in SAYS_NOTHING:
        return "low"
    is_measured = bound == by_stages != "compute" and not others
    return "high" if is_measured and (share or 0.0) >= CLEAR else "medium"
