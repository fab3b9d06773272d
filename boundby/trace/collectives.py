"""What of communication is waiting for other ranks: each collective takes as long as its transfer, and as the wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boundby.trace.intervals import distinct


@dataclass(frozen=True)
class Collectives:
    """The collectives of one rank inside the window, in the order of their starts; the arrays are parallel."""

    names: tuple[str, ...]
    name: np.ndarray  # number of `names`
    step: np.ndarray  # place of the step in which each begins
    duration_ns: np.ndarray

    @property
    def total_ns(self) -> int:
        """The sum of all durations."""
        return int(self.duration_ns.sum())


def collectives(
    names: Sequence[str], name: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray, edges_ns: np.ndarray
) -> Collectives:
    """Return those of the given names, times and edges of steps, of which only the first counts where there is none."""
    used = distinct(np.sort(name))
    return Collectives(
        names=tuple(names[number] for number in used.tolist()),
        name=np.searchsorted(used, name),
        step=np.searchsorted(edges_ns, start_ns, side="right") - 1,
        duration_ns=end_ns - start_ns,
    )


def least_wait_ns(own: Collectives) -> int | None:
    """Return how much of the time of one rank is waiting at least; None where nothing repeats.

    Of the same collective in every step (the n-th of its name, where all steps have as many) the shortest one is taken
    for its transfer. What every step waits alike is not seen.
    """
    count = len(own.names)
    steps, step = np.unique(own.step, return_inverse=True)
    if len(steps) < 2:
        return None
    per_step = np.zeros((len(steps), count), dtype=np.int64)
    np.add.at(per_step, (step, own.name), 1)
    is_regular = (per_step == per_step[0]).all(axis=0)[own.name]
    order = np.lexsort((np.arange(len(step)), own.name, step))
    first = np.searchsorted(step[order] * count + own.name[order], step[order] * count + own.name[order])
    ordinal = np.empty(len(step), dtype=np.int64)
    ordinal[order] = np.arange(len(step)) - first
    if not is_regular.any():
        return None
    largest = int(ordinal.max()) + 1
    kept = np.flatnonzero(is_regular)
    _, place = np.unique(own.name[kept] * largest + ordinal[kept], return_inverse=True)
    shortest = np.full(int(place.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, place, own.duration_ns[kept])
    return int((own.duration_ns[kept] - shortest[place]).sum())


def waits_ns(ranks: Sequence[Collectives]) -> tuple[int, ...] | None:
    """Return how long each rank waits for the others; None where their collectives do not fit one another.

    A collective ends everywhere at once and the last rank to come waits for nobody: the shortest of all ranks is the
    transfer. Needs no clock that the ranks share.
    """
    if len(ranks) < 2 or any(rank.names != ranks[0].names for rank in ranks):
        return None
    orders = [np.argsort(rank.name, kind="stable") for rank in ranks]
    names = [rank.name[order] for rank, order in zip(ranks, orders, strict=True)]
    if any(len(name) != len(names[0]) or (name != names[0]).any() for name in names) or not len(names[0]):
        return None
    durations = np.stack([rank.duration_ns[order] for rank, order in zip(ranks, orders, strict=True)])
    return tuple((durations - durations.min(axis=0)).sum(axis=1).tolist())
