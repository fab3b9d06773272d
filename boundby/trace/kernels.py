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
    whole = int(duration_ns.sum())
    order = np.lexsort((duration_ns, name))
    stats = []
    for rows in np.split(order, np.flatnonzero(np.diff(name[order])) + 1):
        if not len(rows):
            continue
        total = int(duration_ns[rows].sum())
        stats.append(
            KernelStat(
                name=names[name[rows[0]]],
                kind=KINDS[kind[rows[0]]],
                calls=len(rows),
                total_ns=total,
                median_ns=int(duration_ns[rows[len(rows) // 2]]),
                max_ns=int(duration_ns[rows[-1]]),
                share=total / whole if whole else None,
                operator=_most(names, operator[rows], duration_ns[rows]),
                module=_most(names, module[rows], duration_ns[rows]),
            )
        )
    return sorted(stats, key=lambda stat: -stat.total_ns)


def _most(names: tuple[str, ...], numbers: np.ndarray, duration_ns: np.ndarray) -> str | None:
    """Return the name that most of the time belongs to."""
    known = numbers != ABSENT
    different, place = np.unique(numbers[known], return_inverse=True)
    return names[different[np.bincount(place, weights=duration_ns[known]).argmax()]] if len(different) else None
