"""From a trace file to its verdict: what does that cost ours, and what HTA? The same traces, in one run.

The traces: three real ones in ../shared/data/gpu-traces, and one of them repeated in time, from 0.1 to 2.2 million
events. The work of HTA: loading, temporal, kernel and idle breakdown, overlap, launch statistics, without plots. Ours:
reading, the same, the causes of gaps, the statistics of operators, the verdict and the text besides. Every attempt is a
fresh process, timed as a whole, its start and imports included; the tools take turns, in reverse every second time.
Exit 1: ours is less than 8 times as fast on 0.1 or 0.2 million events, 12 times on 1.1 or 17 times on 2.2; holds more
than 0.3 of HTA's memory on one of them; or its time per event, without start and imports, grows by more than 1.3 times
from the smallest to the largest.

    python benchmarks/trace_analysis.py [--repeats 5] [--large-repeats 3] [--copies 1 2 10 20] [--without-real]
                                        [--without-peer]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from benchmarks import _attempts
from benchmarks._trace_attempt import TELL_VERSIONS
from boundby.machine import environment

LEAST_SPEEDUP = {1: 8.0, 2: 8.0, 10: 12.0, 20: 17.0}  # by how often the trace of 109 thousand events is repeated
MOST_MEMORY = 0.3  # of the peer's
# Time per event on the largest trace over that on the smallest, which has 20 times fewer events. A sort, n log n, grows
# by 21/17 = 1.26 from 0.11 to 2.2 million; what grows faster than n^1.09 is beyond 1.3; n^2 would be at 20.
MOST_GROWTH = 1.3

Values = Sequence[float | None]


@dataclass(frozen=True)
class Compared:
    """One trace by both tools, an entry per attempt; a limit of None is not judged."""

    trace: str
    ours_s: Values
    peer_s: Values
    ours_bytes: Values
    peer_bytes: Values
    least_speedup: float | None = None
    most_memory: float | None = None

    @property
    def speedup(self) -> float | None:
        """The peer's time over ours; None where one is unknown."""
        return _ratio(self.peer_s, self.ours_s)

    @property
    def memory(self) -> float | None:
        """Our peak of memory over the peer's; None where one is unknown."""
        return _ratio(self.ours_bytes, self.peer_bytes)


def middle(values: Values) -> float | None:
    """Return the median of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def growth(seconds: Mapping[int, Values]) -> float | None:
    """Return the time per event of the largest trace over that of the smallest; `seconds` by number of events."""
    if len(seconds) < 2:
        return None
    least, most = min(seconds), max(seconds)
    result = _ratio(seconds[most], seconds[least])
    return None if result is None else result * least / most


def failures(traces: Sequence[Compared], grown: float | None) -> list[str]:
    """Return what falls short, one sentence each; [] where all that is known holds."""
    result = []
    for item in traces:
        if missing := sum(value is None for value in item.ours_s):
            result.append(f"{item.trace}: ours gave no value in {missing} of {len(item.ours_s)} attempts")
        if item.least_speedup is not None and item.speedup is not None and item.speedup < item.least_speedup:
            result.append(
                f"{item.trace}: ours is {item.speedup:.2f} times as fast, {item.least_speedup:.0f} are wanted"
            )
        if item.most_memory is not None and item.memory is not None and item.memory > item.most_memory:
            result.append(
                f"{item.trace}: ours holds {item.memory:.2f} of the peer's memory, {item.most_memory} at most"
            )
    if grown is not None and grown > MOST_GROWTH:
        result.append(f"ours takes {grown:.2f} times as long per event at the largest size, {MOST_GROWTH} at most")
    return result


def unjudged(traces: Sequence[Compared], grown: float | None) -> list[str]:
    """Return what has a limit and could not be held against it, a few words each."""
    result = []
    for item in traces:
        if item.least_speedup is not None and item.speedup is None:
            result.append(f"the speed on {item.trace}")
        if item.most_memory is not None and item.memory is None:
            result.append(f"the memory on {item.trace}")
    if grown is None:
        result.append("the time per event as traces grow")
    return result


def _ratio(above: Values, below: Values) -> float | None:
    upper, lower = middle(above), middle(below)
    return None if upper is None or lower is None else upper / lower


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRACES = ROOT.parent / "shared" / "data" / "gpu-traces"
SUFFIX = ".pt.trace.json.gz"
REAL = ("a100-nccl", "a100-rank0", "v100-resnet-ns")
REPEATED = "a100-rank0"
COPIES = tuple(LEAST_SPEEDUP)
MANY_COPIES = 5  # from here on an attempt takes so long that a few do
OURS, PEER = "ours", "HTA"
PEER_LARGE_REPEATS = 1  # it takes more than a minute
MOST_SECONDS = 1800.0  # of one process
SETTINGS = {"PYTHONDONTWRITEBYTECODE": ""}  # as where nobody sets it: modules are compiled once

Commands = Mapping[str, list[str]]  # how to run each tool; the trace comes last


@dataclass(frozen=True)
class Case:
    """A tool on a trace, `repeats` times."""

    trace: str
    tool: str
    command: list[str]
    repeats: int


@dataclass(frozen=True)
class Attempt:
    """What one process found; the numbers are None, with the reason in `said`, where it failed."""

    load_s: float | None
    analyses_s: float | None
    peak_bytes: int | None
    said: str
    whole_s: float | None = None  # of the process, from its start to its end

    @property
    def stages_s(self) -> float | None:
        """The time of both stages."""
        return None if self.load_s is None or self.analyses_s is None else self.load_s + self.analyses_s


Found = dict[tuple[str, str], list[Attempt]]  # by trace and tool


def main(argv: Sequence[str] | None = None) -> int:
    """Run all attempts and print them, then what they amount to."""
    args = _arguments(argv)
    real = {name: TRACES / f"{name}{SUFFIX}" for name in REAL}
    if absent := [str(path) for path in real.values() if not path.is_file()]:
        print(f"skipped: {', '.join(absent)} missing")
        return 0
    tools = {OURS: [sys.executable, str(HERE / "_trace_attempt.py"), OURS], **_peer(args.without_peer)}
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    print(f"settings: {json.dumps(environment.settings())}")
    result: Found = {}
    for tool, command in tools.items():  # which also compiles its modules
        print(f"{tool}: {_versions([*command, str(real[REPEATED])])}")
    if not args.without_real:
        for name, path in real.items():
            result |= _take_turns([Case(name, tool, [*run, str(path)], args.repeats) for tool, run in tools.items()])
    events: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        paths, events = _generate(real[REPEATED], Path(folder).resolve(), args.copies)
        for copies in args.copies:
            result |= _take_turns(_repeated_cases(copies, paths, tools, args))
    _print_medians(result)
    return _judge(list(compared(result)), _seconds_by_events(result, events))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of each tool on each real trace")
    parser.add_argument("--large-repeats", type=int, default=3, help=f"of ours; {PEER} has {PEER_LARGE_REPEATS}")
    parser.add_argument("--copies", type=int, nargs="+", default=COPIES, help="how often the trace is repeated")
    parser.add_argument("--folder", type=Path, help="where the repeated traces lie meanwhile, 0.8 GB")
    parser.add_argument("--without-real", action="store_true", help="leave the traces out that are not repeated")
    parser.add_argument("--without-peer", action="store_true", help=f"leave {PEER} out")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.large_repeats < 1:
        parser.error("--repeats and --large-repeats must be 1 or more")
    if args.folder and not args.folder.is_dir():
        parser.error(f"--folder {args.folder} is no folder")
    return args


def _peer(is_left_out: bool) -> dict[str, list[str]]:
    """Return how to run the peer; {} where it is left out or cannot be installed."""
    if is_left_out:
        print(f"{PEER}: left out")
        return {}
    try:
        python = _attempts.prepare(ROOT, "hta")
        print(f"packages of the peer: {_attempts.packages(python)}")
    except _attempts.PeerLacks as reason:
        print(f"{PEER}: its environment cannot be made: {reason}")
        return {}
    return {PEER: [str(python), str(HERE / "_trace_attempt.py"), PEER]}


def _generate(source: Path, folder: Path, copies: Sequence[int]) -> tuple[dict[str, str], dict[str, int]]:
    """Write the repeated traces; return the path and the number of events of each, by its name."""
    command = [sys.executable, str(HERE / "_repeated_trace.py"), str(source), str(folder), *map(str, copies)]
    made = json.loads(_attempts.last_line(command, MOST_SECONDS))
    for item in made:
        print(f"{_repeated(item['copies'])}: {item['events']} events, {item['bytes'] / 1e6:.0f} MB")
    paths = {_repeated(item["copies"]): item["path"] for item in made}
    return paths, {_repeated(item["copies"]): item["events"] for item in made}


def _repeated(copies: int) -> str:
    return f"{copies} x {REPEATED}"


def _repeated_cases(copies: int, paths: Mapping[str, str], tools: Commands, args: argparse.Namespace) -> list[Case]:
    """Return both tools on one repeated trace, the peer once where it takes long."""
    name, is_large = _repeated(copies), copies >= MANY_COPIES
    repeats = {OURS: args.large_repeats, PEER: PEER_LARGE_REPEATS} if is_large else dict.fromkeys(tools, args.repeats)
    return [Case(name, tool, [*command, paths[name]], repeats[tool]) for tool, command in tools.items()]


def _take_turns(cases: Sequence[Case]) -> Found:
    """Return the attempts of each case; every second round runs backwards, so that no tool is always first."""
    result: Found = {(case.trace, case.tool): [] for case in cases}
    _print_head("what it says of it")
    for turn in range(max(case.repeats for case in cases)):
        for case in reversed(cases) if turn % 2 else cases:
            if turn < case.repeats:
                attempt = _attempt(case.command)
                result[case.trace, case.tool].append(attempt)
                _print_row(case.trace, case.tool, [attempt], attempt.said)
    return result


def _attempt(command: Sequence[str]) -> Attempt:
    start = time.perf_counter()
    try:
        message = json.loads(_attempts.last_line(command, MOST_SECONDS, SETTINGS))
        whole_s = time.perf_counter() - start
    except _attempts.AttemptFailed as reason:
        return Attempt(None, None, None, str(reason))
    return Attempt(message["load_s"], message["analyses_s"], message["peak_bytes"], message["said"], whole_s)


def _versions(command: Sequence[str]) -> str:
    """Return the packages that matter with their versions, or why the command gives none."""
    try:
        message = json.loads(_attempts.last_line(command, MOST_SECONDS, {**SETTINGS, TELL_VERSIONS: "1"}))
    except _attempts.AttemptFailed as reason:
        return str(reason)
    return ", ".join(f"{name} {version}" for name, version in message["versions"].items())


def _print_head(last: str) -> None:
    print(f"\ntrace            tool   load s  analyses s   whole s  peak MB  {last}", flush=True)


def _print_row(trace: str, tool: str, attempts: Sequence[Attempt], said: str) -> None:
    """Print the medians of the attempts as a line of a table."""
    load = _number(middle([attempt.load_s for attempt in attempts]), 3)
    analyses = _number(middle([attempt.analyses_s for attempt in attempts]), 3)
    total = _number(middle([attempt.whole_s for attempt in attempts]), 3)
    peak = _number(middle([attempt.peak_bytes for attempt in attempts]), 0, 1e-6)
    print(f"{trace:<16} {tool:<4} {load:>8} {analyses:>11} {total:>9} {peak:>8}  {said}", flush=True)


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "unknown" if value is None else f"{scale * value:.{digits}f}"


def _print_medians(found: Found) -> None:
    _print_head("medians; attempts and their spread as a whole")
    for (trace, tool), attempts in found.items():
        width = _attempts.spread([attempt.whole_s for attempt in attempts if attempt.whole_s is not None])
        spread = "unknown" if width is None else f"{100 * width:.1f} %"
        _print_row(trace, tool, attempts, f"n {len(attempts)}, {spread}")


def compared(found: Found) -> Iterator[Compared]:
    """Yield every trace with what both tools took."""
    limits = {_repeated(copies): limit for copies, limit in LEAST_SPEEDUP.items()}
    for trace in dict.fromkeys(name for name, _ in found):
        ours, peer = found[trace, OURS], found.get((trace, PEER), [])
        yield Compared(
            trace,
            ours_s=[our.whole_s for our in ours],
            peer_s=[item.whole_s for item in peer],
            ours_bytes=[our.peak_bytes for our in ours],
            peer_bytes=[item.peak_bytes for item in peer],
            least_speedup=limits.get(trace),
            most_memory=MOST_MEMORY if trace in limits else None,
        )


def _seconds_by_events(found: Found, events: Mapping[str, int]) -> dict[int, list[float | None]]:
    return {count: [item.stages_s for item in found[trace, OURS]] for trace, count in events.items()}


def _judge(traces: list[Compared], seconds: Mapping[int, Sequence[float | None]]) -> int:
    """Print the ratios and what falls short of them, and return the exit code."""
    print()
    for item in traces:
        if item.speedup is not None and item.memory is not None:
            print(f"{item.trace}: ours is {item.speedup:.2f} times as fast, with {item.memory:.2f} of the memory")
    for events, values in seconds.items():
        print(f"{events} events: ours takes {_number(middle(values), 3, 1e6 / events)} µs per event")
    grown = growth(seconds)
    short = failures(traces, grown)
    for failure in short:
        print(f"FAILED: {failure}")
    for item in unjudged(traces, grown):
        print(f"not judged: {item}")
    if not short:
        print("passed: nothing that was judged falls short")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
