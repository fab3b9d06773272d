"""What the analysis of a played program says first, and what playing it without each cause shows."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from boundby.bound.trace_judgement import judge_trace
from boundby.bound.verdict import fix_of_cause
from boundby.trace import analyze, read_trace
from tests.trace_truth.recorder import text
from tests.trace_truth.simulator import Machine, Program, played

# What is gone if a cause of the analysis is, as causes of the simulator. A launching call counts to the launch, so that
# no bound of the latency need hold with it; who launches together is rid of operators and calls as well.
REMOVES: Mapping[str, tuple[str, ...]] = {
    "input": ("input",),
    "tokenizing": ("tokenizing",),
    "python": ("python",),
    "garbage_collection": ("gc",),
    "saving": ("saving",),
    "synchronisation": ("synchronisation",),
    "launch": ("operators", "calls"),
    "launch_latency": ("latency",),
    "allocator": ("allocator",),
    "compile": ("compile",),
    "loading": ("loading",),
    "driver": ("driver",),
    "graph_pause": ("graph_gaps",),
    "communication": ("straggler", "transfer"),
    "memcpy": ("memcpy",),
    "stream_wait": (),
    "untraced": ("unrecorded",),
}
LAUNCHED_TOGETHER = ("operators", "calls", "latency")
CAUSE_OF_FIX = {
    fix.kind: cause for cause in REMOVES for on_host in (True, False) if (fix := fix_of_cause(cause, on_host))
}
ROUNDING = 0.01  # of a gain
EQUAL = 0.02  # so close, two causes gain the same
WORTH = 1.05  # below this nothing needs to be said


@dataclass(frozen=True)
class Compared:
    """One program: the gains that were claimed, the true ones of the same causes, and what is wrong."""

    name: str
    claimed: tuple[tuple[str, float], ...]  # by cause, the first first
    true: Mapping[str, float]  # by cause
    first_is_best: bool
    over_bound: tuple[str, ...]  # causes that gain more than was said possible

    @property
    def is_right(self) -> bool:
        return self.first_is_best and not self.over_bound

    def __str__(self) -> str:
        gains = ", ".join(f"{kind} {gain:.2f}" for kind, gain in self.claimed)
        true = ", ".join(f"{kind} {gain:.2f}" for kind, gain in sorted(self.true.items(), key=lambda item: -item[1]))
        return f"{self.name}: claimed {gains or 'nothing'}; true {true}"


def true_gains(program: Program, whole: Machine, rank: int = 0) -> dict[str, float]:
    """Return what removing each cause of the analysis gains, of those that the program has."""
    spent = {cause for (cause, _), length in whole.spent.items() if length}
    length = whole.length(rank)
    gains = {}
    for word, causes in REMOVES.items():
        present = tuple(cause for cause in causes if cause in spent)
        if present:
            gains[word] = length / max(1, played(program, *present).length(rank))
    return gains


def compare(program: Program, folder: Path, rank: int = 0) -> Compared:
    whole = played(program)
    path = folder / "trace.json"
    path.write_text(text(whole, rank))
    analysis = analyze(read_trace(path))
    gains = [(CAUSE_OF_FIX[gain.fix.kind], gain.at_most) for gain in judge_trace(analysis).gains]
    if not program.has_device:  # nothing can be advised about what is not known, and yet it is what comes first
        unknown = analysis.devices[0].causes_ns["untraced"]
        gains = sorted(
            [*gains, ("untraced", whole.length(rank) / (whole.length(rank) - unknown))], key=lambda item: -item[1]
        )
    true = true_gains(program, whole, rank)
    best = max(true.values(), default=1.0)
    first = true.get(gains[0][0], 1.0) if gains else 1.0
    if gains and gains[0][0] == "launch_latency":
        first = whole.length(rank) / played(program, *LAUNCHED_TOGETHER).length(rank)
    return Compared(
        name=program.name,
        claimed=tuple(gains),
        true=true,
        first_is_best=best < WORTH or first - 1 >= (best - 1) * (1 - EQUAL) - EQUAL,
        over_bound=tuple(kind for kind, at_most in gains if true.get(kind, 1.0) > at_most * (1 + ROUNDING)),
    )


@dataclass(frozen=True)
class Summary:
    """How many programs were compared, in how many the first cause is the best, and what went wrong how often."""

    programs: int
    first_is_best: int
    within_bounds: int
    wrong: Counter[str]
    examples: tuple[str, ...]

    def __str__(self) -> str:
        counts = f"{self.programs} programs: first cause right in {self.first_is_best}, bounds in {self.within_bounds}"
        return "\n".join([counts, *(f"{count} x {what}" for what, count in self.wrong.most_common()), *self.examples])


def summary(compared: Iterable[Compared], examples: int = 3) -> Summary:
    """Count the programs; of each way to be wrong the first few are kept."""
    every = list(compared)
    wrong: Counter[str] = Counter()
    kept: list[str] = []
    for item in every:
        best = max(item.true, key=lambda kind: item.true[kind], default="nothing")
        what = (
            []
            if item.first_is_best
            else [f"first {item.claimed[0][0] if item.claimed else 'nothing'} instead of {best}"]
        )
        for mistake in (*what, *(f"{kind} gains more than its bound" for kind in item.over_bound)):
            wrong[mistake] += 1
            if wrong[mistake] <= examples:
                kept.append(f"{mistake}: {item}")
    return Summary(
        programs=len(every),
        first_is_best=sum(item.first_is_best for item in every),
        within_bounds=sum(not item.over_bound for item in every),
        wrong=wrong,
        examples=tuple(kept),
    )
