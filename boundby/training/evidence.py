"""The figures behind a verdict on a training run, and what speaks against trusting them, as sentences."""

from collections.abc import Collection, Iterator, Mapping

from boundby.training import stages
from boundby.training.causes import UNEXPLAINED
from boundby.training.facts import Facts
from boundby.training.records import StageTimes
from boundby.training.steps import STEADY, Share
from boundby.training.verdict import SMALL, called, percent
from boundby.verdict import Doubt

EXPECTED = (stages.DATA, stages.FORWARD, stages.BACKWARD, stages.OPTIMIZER)
LEAST_STEPS = 5
ENOUGH_STEPS = 20
NOTABLE = 0.1  # share in no known stage, from which it is a doubt
MOST_LISTED = 8  # ranks


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
    unknown = next((each for each in facts.causes if each.bound == UNEXPLAINED), None)
    if unknown and unknown.share >= NOTABLE and unknown != facts.causes[0]:
        text = f"{percent(unknown.share)} of the time is in no known stage ({unexplained(facts)})"
        yield Doubt("unexplained", text)
    for each in facts.causes:
        yield from _doubts_on_share(each, " and ".join(sorted(facts.names_of[each.bound])))


def _doubts_on_share(share: Share, names: str) -> Iterator[Doubt]:
    if share.drift is not None and abs(share.drift) > STEADY:
        change = "more" if share.drift > 0 else "less"
        text = f"{names}: {percent(abs(share.drift))} {change} of the time at the end than at the beginning"
        yield Doubt("drift", text)
    elif share.iqr is not None and share.iqr > STEADY:
        text = f"{names}: the middle half of the shares over the run spans {percent(share.iqr)} of the time"
        yield Doubt("unsteady", text)


def doubts_on_ranks(times_of: Mapping[int, StageTimes], judged: Collection[int], are_matched: bool) -> Iterator[Doubt]:
    """Yield which processes are missing in what is judged."""
    size = max(each.world_size for each in times_of.values())
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
    if agrees and facts.trace:
        yield f"a trace of some of the steps says {facts.trace.bound} ({facts.trace.confidence} confidence)"
    if facts.issuing is not None:
        yield f"the host issues work for {percent(facts.issuing)} of the time"
    if facts.failed:
        yield failure(facts.failed)
    if facts.table.warm_up or facts.table.disturbed:
        yield f"left out: {facts.table.warm_up} steps of warm-up, {facts.table.disturbed} disturbed ones"


def failure(failed: Collection[StageTimes]) -> str:
    """Return which processes failed, and why the first of them did."""
    first = min(failed, key=lambda each: each.last_step if each.last_step is not None else -1)
    after = "before any step had ended" if first.last_step is None else f"after step {first.last_step}"
    return f"rank {_listed([each.rank for each in failed])} failed, {after}: {first.error}"


def unexplained(facts: Facts) -> str:
    """Return what takes the time that nothing explains, and which of the usual stages are not marked."""
    known = [each for each in facts.stages if each.bound == UNEXPLAINED and each.share >= SMALL]
    missing = [name for name in EXPECTED if name not in facts.table.names]
    parts = ", ".join(f"{called(each)} {percent(each.share)}" for each in known)
    return f"{parts}{'; not marked: ' + ', '.join(missing) if missing else ''}"


def _listed(ranks: Collection[int]) -> str:
    shown = [str(rank) for rank in sorted(ranks)]
    return ", ".join(shown if len(shown) <= MOST_LISTED else [*shown[:MOST_LISTED], f"{len(shown) - MOST_LISTED} more"])
