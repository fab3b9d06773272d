"""What each profiler should say of each loop: plain values in, sentences out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cause:
    """What is wrong with a loop, in the words of either tool; any of them is right.

    `bounds` and, for what several stages count for, the `stage` that has to take most of the time are ours; `kinds`
    are those of TraceML, with a word that its sentence has to hold. `rank` is the slow process of several.
    """

    bounds: tuple[str, ...]
    kinds: tuple[str, ...]
    stage: str | None = None
    word: str = ""
    rank: int | None = None


WORK = ("compute", "memory", "launch")  # a wait inside the forward is work that waits for the host
# TraceML has no kind for an optimizer: that its sentence names it counts. Nor has it one for tiny batches, where what
# says that the machine is not used counts. H2D-BOUND it says of a GPU alone.
CAUSES = {
    "healthy": Cause(("compute", "memory"), ("COMPUTE_BOUND", "NO_CLEAR_PERFORMANCE_BOTTLENECK")),
    "slow loader": Cause(("input",), ("INPUT_BOUND",)),
    "slow transfer": Cause(("transfer",), ("H2D_BOUND",)),
    "slow optimizer": Cause(("optimizer",), ("COMPUTE_BOUND",), word="optimizer"),
    "slow logging": Cause(("under_utilised",), ("RESIDUAL_HEAVY",), stage="logging"),
    "tiny batches": Cause(("under_utilised", "launch"), ("LOW_GPU_UTILIZATION_UNEXPLAINED",)),
    "slow rank, data": Cause(("input",), ("INPUT_STRAGGLER",), stage="data", word="r1", rank=1),
    "slow rank, forward": Cause(WORK, ("COMPUTE_STRAGGLER",), stage="forward", word="r1", rank=1),
}


@dataclass(frozen=True)
class Answer:
    """What a tool named, whether that is right, and its sentence; None where it gave nothing."""

    named: str
    is_right: bool | None
    said: str


def ours(cause: Cause, document: Mapping[str, Any]) -> Answer:
    """Return what `profiler_summary.json` says."""
    verdict = document["verdict"]
    slow, bound = verdict["straggler"], verdict["bound"]
    named = bound if slow is None else f"{bound}, rank {slow['rank']} in {slow['stage']}"
    is_right = bound in cause.bounds and cause.rank == (slow and slow["rank"])
    if cause.stage:
        is_right &= cause.stage == (slow["stage"] if slow else verdict["stages"][0]["name"])
    return Answer(named, is_right, " | ".join(verdict["text"][:2]))


def traceml(cause: Cause, document: Mapping[str, Any]) -> Answer:
    """Return what TraceML's `final_summary.json` says."""
    verdict = document["primary_diagnosis"]
    is_right = verdict["kind"] in cause.kinds and cause.word in verdict["summary"]
    return Answer(verdict["kind"], is_right, f"{verdict['summary']} {verdict['action']}")


def summary(ours: Sequence[Answer], peer: Sequence[Answer]) -> tuple[bool, str]:
    """Return whether ours is right everywhere, and the last line."""

    def counted(answers: Sequence[Answer]) -> str:
        return f"{sum(each.is_right is True for each in answers)} of {len(answers)} causes"

    is_passed = bool(ours) and all(each.is_right for each in ours)
    beside = f", TraceML {counted(peer)}" if peer else ", TraceML was not asked"
    return is_passed, f"{'passed' if is_passed else 'FAILED'}: ours named {counted(ours)}{beside}"
