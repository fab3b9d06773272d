"""Python stacks of a trace that was recorded with `with_stack=True`, folded as flame-graph tools read them."""

import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from boundby.trace.intervals import host_tree
from boundby.trace.table import ABSENT, ANNOTATION, OPERATOR, PYTHON_FRAME, Trace

MAX_FRAMES = 256  # of a deeper stack the outer frames are left out; it also ends a circle of parents
PROFILER_FILE = "torch/profiler/profiler.py"  # starting the recorder takes milliseconds that are not the program's
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # would make every call of a bound method a frame of its own
BUILT_IN = re.compile(r"<built-in (?:method|function) (?P<function>\S+)(?: of .+)?>")
OWN_FILE = re.compile(r"^(?!.*(?:\btorch/|site-packages|<frozen|threading\.py|contextlib\.py)).+\.py\(\d+\): ")
MODULE_CALL = re.compile(r"^nn\.Module: ")
SEPARATORS = str.maketrans(" ;\t\r\n", "_____")


def frame_name(name: str) -> str:
    """Return the name of an event of the host; a function of C loses its address and the object that it belongs to."""
    built_in = BUILT_IN.fullmatch(name)
    return f"{built_in['function']} (built-in)" if built_in else name


def folded_stacks(trace: Trace) -> list[str]:
    """Return lines `outer;inner;innermost weight`, the heaviest first; the weight is the stack's own time in ns.

    Frames of the profiler itself are left out, and so are threads on which no operator ran, unless there is no other:
    they mostly wait (a progress bar's monitor, an idle pool). The list is empty where the trace holds no Python frames.
    """
    frames = [ADDRESS.sub("", name).translate(SEPARATORS) for name in trace.names]
    is_frame = trace.in_categories([PYTHON_FRAME])
    works = np.isin(trace.thread, trace.thread[trace.in_categories([OPERATOR])])
    rows = np.flatnonzero(is_frame & works if (is_frame & works).any() else is_frame).tolist()
    row_of_id = {int(trace.python_id[row]): row for row in rows if trace.python_id[row] != ABSENT}
    parent = {row: row_of_id.get(int(trace.python_parent_id[row]), ABSENT) for row in rows}
    duration_ns = {row: max(int(trace.duration_ns[row]), 0) for row in rows}
    self_ns = dict(duration_ns)
    for row in rows:
        if parent[row] != ABSENT:
            self_ns[parent[row]] -= duration_ns[row]
    weights: Counter[str] = Counter()
    for row in rows:
        stack = [frames[trace.name[at]] for at in _outwards(row, parent)]
        if self_ns[row] > 0 and not any(PROFILER_FILE in frame for frame in stack):
            weights[";".join(reversed(stack))] += self_ns[row]
    return [f"{stack} {weight}" for stack, weight in weights.most_common()]


def _outwards(row: int, parent: dict[int, int]) -> list[int]:
    """Return `row`, its caller, the caller's caller and so on, at most `MAX_FRAMES` of them."""
    chain: list[int] = []
    while row != ABSENT and len(chain) < MAX_FRAMES:
        chain.append(row)
        row = parent[row]
    return chain


class Caller(NamedTuple):
    """Who calls an operator: the operator around it, and where in the program; None where the trace does not tell."""

    operator: str | None
    place: str | None  # the innermost frame of the program's own files, else nn.Module, else range that it marks


def callers(trace: Trace) -> dict[str, dict[Caller, int]]:
    """Return how often each operator is called by whom."""
    tree = host_tree(trace)
    rows = np.flatnonzero(trace.is_operator)
    around = np.append(tree.parent, ABSENT)[rows]
    annotations = trace.in_categories([ANNOTATION]) & ~trace.is_step_mark
    frames = trace.in_categories([PYTHON_FRAME])
    place = np.full(len(rows), ABSENT)
    for wanted in (trace.named(OWN_FILE, frames), trace.named(MODULE_CALL, frames), annotations):
        if wanted.any():
            place = np.where(place == ABSENT, tree.nearest(around, wanted), place)
    columns = [trace.name[rows]]
    columns += [
        np.where(each == ABSENT, ABSENT, trace.name[each]) for each in (tree.nearest(around, trace.is_operator), place)
    ]
    names = (*trace.names, None)  # the last is that of ABSENT
    found: dict[str, dict[Caller, int]] = {}
    calls = Counter(zip(*(column.tolist() for column in columns), strict=True))
    for (name, operator, where), count in calls.items():
        found.setdefault(trace.names[name], {})[Caller(names[operator], names[where])] = count
    return found
