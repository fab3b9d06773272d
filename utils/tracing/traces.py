"""Find traces, read and judge them one after another, so that the events of only one are held in memory at a time."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from boundby.bound import Verdict, Waiting, judge_trace
from boundby.formatting import clean, listed
from boundby.trace import (
    Analysis,
    Grouping,
    NotATrace,
    OpStat,
    Trace,
    analyze,
    by_name,
    by_process,
    callers,
    folded_stacks,
    op_stats,
    read_trace,
    waits_ns,
)
from utils.command import InputError

if TYPE_CHECKING:  # a tenth of what is loaded, for `--diff` alone
    from boundby.trace import Callers, Diff

PATTERNS = ("*.json", "*.json.gz", "*.json.zst")
RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
NUMBER = re.compile(r"_(\d+)(?=\.|$)")  # it may also be a process: believed only where it fits the number of traces


class Examined(msgspec.Struct, frozen=True):
    """One trace: what it says, the verdict on it, and its operators grouped as was asked for."""

    analysis: Analysis
    verdict: Verdict
    operators: tuple[OpStat, ...]
    rank: int | None  # by the trace itself, else by its file name
    called_by: "Callers | None" = None  # who calls each operator; None: it was not asked for
    waits_ns: int | None = None  # of its communication, for other ranks; None where their traces do not tell

    @classmethod
    def of(
        cls, analysis: Analysis, operators: tuple[OpStat, ...] | None = None, called_by: "Callers | None" = None
    ) -> "Examined":
        """Return the judged trace, its operators grouped by shapes unless others are given."""
        return cls(analysis, judge_trace(analysis), operators or analysis.operators, analysis.rank, called_by)

    @property
    def is_inconclusive(self) -> bool:
        """Whether nothing can be concluded from it."""
        return self.verdict.bound == "inconclusive" or not self.analysis.is_conclusive

    @property
    def own_ns_per_step(self) -> float:
        """The time of a step without the communication that nothing hides; without steps that of the window.

        In a collective every rank waits for the last one, so that all steps last equally long: the rank that makes the
        others wait is the one that takes longest for itself.
        """
        own = self.analysis.window_ns - self.analysis.devices[0].exposed_ns.get("communication", 0)
        return own / (len(self.analysis.step_numbers) or 1)


class LeftOut(msgspec.Struct, frozen=True):
    """A file that could not be used; one that is merely something else than a trace is no fault."""

    path: str
    reason: str
    is_fault: bool


class Examination(msgspec.Struct, frozen=True):
    """All traces that were asked for, by rank and name, and the files that gave none."""

    traces: tuple[Examined, ...]
    left_out: tuple[LeftOut, ...]
    group_by: str

    @property
    def is_finding(self) -> bool:
        """Whether a trace is inconclusive or a file that should be one is unreadable."""
        return any(trace.is_inconclusive for trace in self.traces) or any(file.is_fault for file in self.left_out)

    @property
    def slowest(self) -> int:
        """The index of the trace that takes longest for itself."""
        return max(range(len(self.traces)), key=lambda index: self.traces[index].own_ns_per_step)

    def index_of(self, rank: int | None) -> int:
        """Return the index of the trace of this rank, for None of the slowest. Raises InputError without one."""
        if rank is None:
            return self.slowest
        ranks = [trace.rank for trace in self.traces]
        if rank not in ranks:
            known = listed([known for known in ranks if known is not None]) or "none"
            raise InputError(f"no trace is of rank {rank}; the ranks that are known are: {known}")
        if ranks.count(rank) > 1:
            raise InputError(f"{ranks.count(rank)} of the traces are of rank {rank}; name the one file instead")
        return ranks.index(rank)

    def only(self, rank: int | None) -> Examined:
        """Return the trace of this rank, or the only one. Raises InputError where it is not clear which is meant."""
        if rank is None and len(self.traces) > 1:
            apart = any(trace.analysis.process is not None for trace in self.traces)
            way_out = "give the file of one process" if apart else "say which with --rank N"
            raise InputError(f"there are {len(self.traces)} traces to choose from; {way_out}")
        return self.traces[0 if len(self.traces) == 1 else self.index_of(rank)]


class Pair(msgspec.Struct, frozen=True, dict=True):
    """Two traces, and what differs in B from A; the operators of both are grouped as `group_by` says."""

    a: Examined
    b: Examined
    group_by: str = "shapes"

    @cached_property
    def diff(self) -> "Diff":
        """What differs."""
        from boundby.trace import diff

        a, b = self.a, self.b
        known = None if a.called_by is None or b.called_by is None else (a.called_by, b.called_by)
        by = cast(Literal["name"] | Grouping, self.group_by)
        return diff(a.analysis, b.analysis, group_by=by, operators=(a.operators, b.operators), called_by=known)


def check_counts(**counts: int | None) -> None:
    """Raise InputError where a number that was asked for is less than 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"--{name} is {count}; give a whole number of 1 or more")


def examine(
    paths: Sequence[Path], *, group_by: str = "name", expected_steps: int | None = None, with_callers: bool = False
) -> Examination:
    """Return what the traces say. Of a folder, every file that holds a trace is taken.

    A file of several processes gives a trace of trace, where what they launched can be told apart.

    Raises InputError where not a single one is usable.
    """
    examined: list[Examined] = []
    left_out: list[LeftOut] = []
    for path, is_named in _candidates(paths):
        try:
            trace = read_trace(path)
            if not (is_named or len(trace.start_ns)):
                raise NotATrace(f"{path} is no trace: none of its entries is an event")
        except (OSError, ValueError) as error:
            is_fault = is_named or not isinstance(error, NotATrace)
            left_out.append(LeftOut(str(path), _reason(error), is_fault))
            continue
        for process in by_process(trace):
            analysis = analyze(process, expected_steps=expected_steps)
            called_by = callers(process) if with_callers else None
            examined.append(Examined.of(analysis, _grouped(process, analysis, group_by), called_by))
    if not examined:
        reasons = "; ".join(file.reason for file in left_out) or f"no *.json, plain or packed, in {listed(paths)}"
        raise InputError(f"no trace to analyse: {reasons}; give files that torch.profiler wrote, or their folder")
    traces = _judged_together(sorted(_ranked(examined), key=_order))
    return Examination(traces, tuple(left_out), group_by)


def write_flame_graph(trace_path: str, path: Path) -> bool:
    """Write the Python stacks of a trace as a flame graph; return whether there were any. Nothing is written else."""
    from boundby import files
    from utils.render import flame_graph

    stacks = folded_stacks(read_trace(trace_path))
    if stacks:
        title = f"Where {Path(trace_path).name} spent its time"
        files.write_text(path, flame_graph.page(stacks, title, "Python stacks, by the time of the host in trace frame"))
    return bool(stacks)


def _judged_together(traces: Sequence[Examined]) -> tuple[Examined, ...]:
    """Return the traces judged again where those of all ranks tell who waits for whom; the slowest waits for nobody."""
    known = [trace.analysis.collectives for trace in traces]
    ranks = [trace.rank for trace in traces]
    met = [collectives for collectives in known if collectives is not None]
    waits = waits_ns(met) if len(met) == len(traces) and None not in ranks and len(set(ranks)) == len(ranks) else None
    if waits is None:
        return tuple(traces)
    last = ranks[min(range(len(waits)), key=waits.__getitem__)]
    return tuple(
        msgspec.structs.replace(
            trace, verdict=judge_trace(trace.analysis, Waiting(wait / own.total_ns, last)), waits_ns=wait
        )
        if last is not None and trace.rank != last and own.total_ns
        else msgspec.structs.replace(trace, waits_ns=wait)
        for trace, own, wait in zip(traces, met, waits, strict=True)
    )


def _candidates(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield each file once, and whether it was named."""
    seen = set()
    for path in paths:
        inside = sorted(file for pattern in PATTERNS for file in path.glob(pattern)) if path.is_dir() else [path]
        for file in inside:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield file, file is path


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} is missing"
    return clean(error, longest=300)


def _grouped(trace: Trace, analysis: Analysis, group_by: str) -> tuple[OpStat, ...]:
    if group_by == "name":
        return tuple(by_name(analysis.operators))
    return analysis.operators if group_by == "shapes" else tuple(op_stats(trace, (cast(Grouping, group_by),)))


def _ranked(traces: Sequence[Examined]) -> Iterator[Examined]:
    """Yield the traces with the rank in their file name where they do not state one."""
    for trace in traces:
        name = Path(trace.analysis.path).name
        named = RANK.search(name)
        number = NUMBER.search(name) if len(traces) > 1 else None
        if trace.rank is not None:
            yield trace
        elif named:
            yield msgspec.structs.replace(trace, rank=int(named[1]))
        elif number and int(number[1]) < len(traces):
            yield msgspec.structs.replace(trace, rank=int(number[1]))
        else:
            yield trace


def _order(trace: Examined) -> tuple[bool, int, str]:
    return trace.rank is None, trace.rank or 0, trace.analysis.path
