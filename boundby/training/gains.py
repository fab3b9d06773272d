"""What the best fix of each kind could gain for a training run: Amdahl's law on the shares of its stages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from boundby.training.causes import UNEXPLAINED
from boundby.training.steps import IN_NO_STAGE, BatchEffect, Share
from boundby.training.verdict import Straggler
from boundby.verdict import LEAST_GAIN, OF_STAGES, Bound, Fix, Gain, Verdict

INSIDE: tuple[Bound, ...] = ("compute", "memory", "launch", "communication")  # what only a trace sees of the work
GROWING: tuple[Bound, ...] = ("input", "transfer")  # with the batch, beside the work itself
LARGEST = 1000.0  # a share that close to one is no claim about what would be left


def gains_of(
    stages: Sequence[Share],
    straggler: Straggler | None,
    effect: BatchEffect | None,
    trace: Verdict | None,
) -> tuple[Gain, ...]:
    """Return the gains worth naming, the largest first; those of the work itself are known from a trace alone."""
    found = [*_of_stages(stages), *_of_batches(stages, effect)]
    if straggler:
        own_ms, others_ms = straggler.own_s * 1e3, straggler.others_s * 1e3
        basis = f"it takes {own_ms:.2f} ms of its own for a step, the others {others_ms:.2f} ms"
        fix = Fix("straggler", {"rank": straggler.rank, "stage": straggler.stage})
        found.append(Gain(fix, straggler.gain, basis))
    if trace:
        inside = (each for each in trace.gains if set(each.relieves) & set(INSIDE))
        found += [replace(each, basis=f"{each.basis}, in steps that recording slows down") for each in inside]
    return tuple(sorted((each for each in found if each.at_most >= LEAST_GAIN), key=lambda each: -each.at_most))


def _of_stages(stages: Sequence[Share]) -> Iterator[Gain]:
    """Yield what it would gain if all of one kind vanished; a copy is hidden behind the rest, if that is longer."""
    for bound, kind in OF_STAGES.items():
        fix = Fix(kind)
        parts = [each for each in stages if each.bound == bound and each.share > 0]
        share = min(1.0, sum(each.share for each in parts))
        left = max(1 - share, share) if bound == "transfer" else 1 - share
        if fix.change.is_bounded and parts:
            yield Gain(fix, _factor(left), _basis(parts, share))
    for each in stages:
        if each.bound == UNEXPLAINED and each.share > 0:
            fix = Fix("leave_out") if each.name == IN_NO_STAGE else Fix("shorten_stage", {"stage": each.name})
            yield Gain(fix, _factor(1 - each.share), _basis([each], each.share))


def _of_batches(stages: Sequence[Share], effect: BatchEffect | None) -> Iterator[Gain]:
    """Yield what batches twice as large would gain, if what does not grow with them stays as it is."""
    if effect is None:
        return
    growing = sum(each.share for each in stages if each.bound in GROWING)
    work = sum(each.share for each in stages if each.bound == "compute")
    factor = 2 / (1 + growing + (1 - effect.fixed) * work)
    basis = f"{100 * effect.fixed:.0f} % of forward and backward does not grow with the {effect.quantity} of a batch"
    yield Gain(Fix("double_batch"), factor, basis)


def _factor(left: float) -> float:
    return min(LARGEST, 1 / left) if left > 0 else LARGEST


def _basis(parts: Sequence[Share], share: float) -> str:
    names = " and ".join(each.name for each in parts)
    return f"{names} {'take' if len(parts) > 1 else 'takes'} {100 * share:.1f} % of the time"
