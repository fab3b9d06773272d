"""Which tool names what is wrong with a training loop? Ours and TraceML on the same loops, in one run.

The loops: a healthy one, and the same with a slow loader, a slow copy to the device (a wait in its place), a slow
optimizer, slow logging, tiny batches, and two processes of which one waits in its loader or in its forward. Float32,
CPU. Each tool gets what its documentation asks of a plain loop: `ProfilerManager` with marked stages and three traced
steps; `traceml run` with `init(mode="auto")` and `trace_step`, and its own summary at the end. Every attempt is a
process of its own, and the tools take turns. TraceML times copies to a GPU alone, so the stand-in of one is beyond
what it can name. It is left out, with the reason, where it is not installed:
`pip install -r benchmarks/requirements-traceml.txt`.
Exit 1: ours does not name the right cause of each loop, every time.

    python benchmarks/training_verdict.py [--repeats 1] [--only CASE ...] [--without-peer]
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from benchmarks import _attempts
from boundby.machine import environment


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


# A wait inside the forward is work that waits for the host; its seconds do not grow with the batch, as in slow logging.
WORK = ("compute", "memory", "launch", "under_utilised")
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
        return f"{sum(answer.is_right is True for answer in answers)} of {len(answers)} causes"

    is_passed = bool(ours) and all(our.is_right for our in ours)
    beside = f", TraceML {counted(peer)}" if peer else ", TraceML was not asked"
    return is_passed, f"{'passed' if is_passed else 'FAILED'}: ours named {counted(ours)}{beside}"


HERE = Path(__file__).resolve().parent
LOOP = HERE / "_training_loop.py"
OURS, PEER = "ours", "TraceML"
RANKS = 2
MOST_SECONDS = 600.0  # of one attempt
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
WIDTH = 150


def main(argv: Sequence[str] | None = None) -> int:
    """Run all attempts and print them, then what they amount to."""
    args = _arguments(argv)
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    tools = [OURS] if args.without_peer else [OURS, *_peer()]
    result: dict[str, list[Answer]] = {tool: [] for tool in tools}
    print(f"\n{'loop':<20}{'tool':<9}{'right':<7}{'named':<36}what it says")
    for repeat in range(args.repeats):
        for case in args.only or CAUSES:
            for tool in reversed(tools) if repeat % 2 else tools:
                answer = _answer(case, tool)
                result[tool].append(answer)
                is_right = {True: "yes", False: "NO", None: "–"}[answer.is_right]
                print(f"{case:<20}{tool:<9}{is_right:<7}{answer.named:<36}{answer.said[:WIDTH]}", flush=True)
    is_passed, line = summary(result[OURS], result.get(PEER, []))
    print(f"\n{line}")
    return 0 if is_passed else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="of each loop")
    parser.add_argument("--only", nargs="+", choices=CAUSES, help="these loops alone")
    parser.add_argument("--without-peer", action="store_true", help=f"leave {PEER} out")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return args


def _peer() -> list[str]:
    """Return the peer, nothing where it is not installed."""
    try:
        version = metadata.version("traceml-ai")
    except metadata.PackageNotFoundError:
        print(f"{PEER}: left out, it is not installed (pip install -r benchmarks/requirements-traceml.txt)")
        return []
    if not shutil.which(_launcher()):
        print(f"{PEER}: left out, {_launcher()} is missing")
        return []
    print(f"{PEER}: traceml-ai {version}")
    return [PEER]


def _launcher() -> str:
    return str(Path(sys.executable).with_name("traceml"))


def _answer(case: str, tool: str) -> Answer:
    """Return what a tool says of a loop that has just run."""
    cause = CAUSES[case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loop = ["--case", case, "--folder", str(folder)]
        ranks = 1 if cause.rank is None else RANKS
        if tool == OURS:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [*(start if ranks > 1 else [sys.executable]), str(LOOP), "--tool", "boundby", *loop]
            path, judge = folder / "profiler_summary.json", ours
        else:
            start = [_launcher(), "run", str(LOOP), f"--nproc-per-node={ranks}", f"--logs-dir={folder}"]
            command = [*start, "--run-name=run", "--args", "--tool", "traceml", *loop]
            path, judge = folder / "run" / "final_summary.json", traceml
        try:
            _attempts.last_line(command, MOST_SECONDS, ONE_THREAD)
            return judge(cause, json.loads(path.read_text(encoding="utf-8")))
        except (_attempts.AttemptFailed, OSError, KeyError, ValueError) as reason:
            return Answer("nothing", None, str(reason))


if __name__ == "__main__":
    raise SystemExit(main())
