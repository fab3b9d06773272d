"""The command with which Nsight Compute looks into the kernel that takes most of a trace's device time."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boundby.trace.breakdown import KINDS, kinds_of_work
from boundby.trace.links import Links, links
from boundby.trace.reader import Trace
from boundby.trace.table import ABSENT
from boundby.trace.window import Window, window

UNNAMED = re.compile(r"\(anonymous namespace\)|\{anonymous\}|<unnamed>")
TEMPLATE_OR_PARAMETERS = re.compile(r"[<(]")
SPECIAL = re.compile(
    r"([\\^$.|?*+()\[\]{}])"
)  # to a regular expression of C++; what Python escapes beyond is not known
PROGRAM = ("python", "train.py")  # what stands for the program, which a trace does not name


@dataclass(frozen=True)
class KernelLaunch:
    """The longest launch of the kernel that takes most of the device's time; communication cannot be replayed."""

    kernel: str  # as the trace names it
    function: str  # its name without namespaces, template arguments and parameters, as Nsight Compute filters it
    step: int | None  # in which it was launched; None where that is in no step that the trace marks
    skip: int  # launches of functions of this name before it: in that step, or without one in the trace


def slowest_launch(
    trace: Trace, linked: Links | None = None, seen: Window | None = None, kinds: np.ndarray | None = None
) -> KernelLaunch | None:
    """Return which launch to look into; None where no kernel computes for any time."""
    linked = linked or links(trace)
    seen = seen or window(trace, linked)
    kinds = kinds_of_work(trace) if kinds is None else kinds
    kernels = np.flatnonzero(kinds[linked.rows] == KINDS.index("compute"))
    names, spent_ns = trace.name[linked.rows[kernels]], (linked.end_ns - linked.start_ns)[kernels]
    if not spent_ns.any():
        return None
    slowest = int(np.bincount(names, weights=spent_ns).argmax())
    function = function_name(trace.names[slowest])
    if not function:
        return None
    same = np.isin(names, [each for each in set(names.tolist()) if function_name(trace.names[each]) == function])
    launched = _launched(trace, linked, kernels)
    order = np.lexsort((linked.start_ns[kernels], launched))
    order = order[same[order]]
    longest = int(np.where(names[order] == slowest, spent_ns[order], -1).argmax())
    places = np.searchsorted(seen.edges_ns, launched[order], side="right") - 1
    place = int(places[longest])
    if not 0 <= place < len(seen.steps):
        return KernelLaunch(trace.names[slowest], function, None, longest)
    return KernelLaunch(trace.names[slowest], function, seen.steps[place], int((places[:longest] == place).sum()))


def ncu_command(launch: KernelLaunch, program: Sequence[str] = PROGRAM, report: str = "kernel") -> str:
    """Return the command that profiles the launch.

    The step is found by the range `step_N`, which `ProfilerManager` and the callbacks push when Nsight is there.
    """
    where = ["--nvtx", "--nvtx-include", f"step_{launch.step}/"] if launch.step is not None else []
    pattern = SPECIAL.sub(r"\\\1", launch.function)
    return shlex.join(
        [
            *("ncu", *where, "--kernel-name", f"regex:^{pattern}$"),
            *("--launch-skip", str(launch.skip), "--launch-count", "1"),
            *("--set", "full", "--target-processes", "all", "-o", report, *program),
        ]
    )


def function_name(kernel: str) -> str:
    """Return the name of a kernel's function as Nsight Compute filters it by default; "" where it has none."""
    head = TEMPLATE_OR_PARAMETERS.split(UNNAMED.sub("", kernel), maxsplit=1)[0].split()
    return head[-1].rpartition("::")[2] if head else ""


def _launched(trace: Trace, linked: Links, kernels: np.ndarray) -> np.ndarray:
    """Return when each kernel was launched by the host; where that is not known, when it began."""
    launch = linked.launch[kernels]
    return np.where(launch == ABSENT, linked.start_ns[kernels], trace.start_ns[launch])
