"""The work of the devices by name: how often, how long, and which operator and module asked for it."""

from dataclasses import dataclass

import numpy as np

from boundby.trace.breakdown import KINDS
from boundby.trace.table import ABSENT


@dataclass(frozen=True)
class KernelStat:
    """All work of one name: a kernel, or the copies or memsets of one sort."""

    name: str
    kind: str  # one of KINDS
    calls: int
    total_ns: int
    median_ns: int
    max_ns: int
    share: float | None  # of the time of all work; None where that is zero
    operator: str | None  # that launched most of its time; None where the trace tells of none
    module: str | None  # likewise; recorded with Python stacks only


def kernel_stats(  # noqa: PLR0913  (parallel columns of the work)
    names: tuple[str, ...],
    name: np.ndarray,
    kind: np.ndarray,
    duration_ns: np.ndarray,
    operator: np.ndarray,
    module: np.ndarray,
) -> list[KernelStat]:
    """Return one record per name, the one with the most time first.

    The arrays are parallel, one value per piece of work; `name`, `operator` and `module` are numbers of `names`, or
    `ABSENT`.
    """
    if not len(name):
        return []
    whole = int(duration_ns.sum())
    order = np.lexsort((duration_ns, name))
    first = np.flatnonzero(np.append(True, np.diff(name[order]) != 0))
    calls = np.diff(np.append(first, len(order)))
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.repeat(np.arange(len(first)), calls)
    columns = zip(
        order[first].tolist(),
        calls.tolist(),
        np.add.reduceat(duration_ns[order], first).tolist(),
        duration_ns[order[first + calls // 2]].tolist(),
        duration_ns[order[first + calls - 1]].tolist(),
        _most(group, len(first), operator, duration_ns),
        _most(group, len(first), module, duration_ns),
        strict=True,
    )
    stats = [
        KernelStat(
            name=names[name[row]],
            kind=KINDS[kind[row]],
            calls=count,
            total_ns=total,
            median_ns=median,
            max_ns=longest,
            share=total / whole if whole else None,
            operator=None if asked == ABSENT else names[asked],
            module=None if inside == ABSENT else names[inside],
        )
        for row, count, total, median, longest, asked, inside in columns
    ]
    return sorted(stats, key=lambda stat: -stat.total_ns)


def _most(group: np.ndarray, groups: int, numbers: np.ndarray, duration_ns: np.ndarray) -> list[int]:
    """Return the number that most of the time of each group belongs to; `ABSENT` where it has none."""
    found = np.full(groups, ABSENT, dtype=np.int64)
    known = np.flatnonzero(numbers != ABSENT)
    if len(known):
        base = int(numbers.max()) + 1
        keys, place = np.unique(group[known] * base + numbers[known], return_inverse=True)
        spent = np.bincount(place, weights=duration_ns[known])
        ascending = np.argsort(spent, kind="stable")
        found[keys[ascending] // base] = keys[ascending] % base  # the last one written to each group has the most
    return found.tolist()
