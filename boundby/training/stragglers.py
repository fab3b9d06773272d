"""The process that the others wait for.

All processes of a job leave a collective together, so each one's steps take the same time, and the slow one shows in
the others as a wait: the backward, where gradients are reduced, is long in all but the slow one. A process' own time
of a step is therefore the step without what it spent in those stages beyond the process that spent least there.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from boundby.compare import judge, paired
from boundby.training import stages
from boundby.training.causes import BOUND_OF_STAGE
from boundby.training.steps import IN_NO_STAGE, StepTable, matched, windows
from boundby.training.verdict import Straggler

SLOWER = 0.1  # of the own time of the others, below which nobody is called slow
LEAST_STEPS = 10  # two windows
WAITS = frozenset(name for name, bound in BOUND_OF_STAGE.items() if bound == "communication") | {stages.BACKWARD}
# Where parameters are sharded, the forward and the update wait for others too. In these nobody ever waits:
NEVER_WAITS = (stages.DATA, stages.H2D, stages.CALLBACKS, stages.LOGGING, stages.CHECKPOINT)


def find_straggler(tables: Mapping[int, StepTable]) -> Straggler | None:
    """Return the process that is clearly slower than the others, by the steps that all have; None if none is."""
    clocks = {each.on_device for each in tables.values()}
    if len(tables) < 2 or len(clocks) > 1 or not all(each.has_steps for each in tables.values()):
        return None
    ranks = list(tables)
    same = matched([tables[rank] for rank in ranks])
    if len(same[0].numbers) < LEAST_STEPS:
        return None
    everywhere = frozenset(name for each in same for name in each.names)
    for waits in (WAITS, everywhere - frozenset(NEVER_WAITS)):
        found = _slowest(ranks, same, waits)
        if found:
            return found
    return None


def _slowest(ranks: Sequence[int], tables: Sequence[StepTable], waits: frozenset[str]) -> Straggler | None:
    """Return the process with the longest own time, if it is longer than that of the others in most windows."""
    waited = np.array([each.spent_in(waits) for each in tables])
    own = np.array([each.whole_s for each in tables]) - (waited - waited.min(axis=0))
    slow = int(np.argmax(np.median(own, axis=1)))
    others = np.median(np.delete(own, slow, axis=0), axis=0)
    parts = windows(own.shape[1])
    means = [(float(others[each].mean()), float(own[slow][each].mean())) for each in parts]
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
        means = [float(each.spent_in({name}).mean()) for each in tables]
        return means[slow] - float(np.median(means[:slow] + means[slow + 1 :]))

    return max((name for name in tables[slow].names if name not in waits), key=excess, default=IN_NO_STAGE)
