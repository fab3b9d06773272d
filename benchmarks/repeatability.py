"""Is a reported throughput right, and does it repeat? A plain loop, Boundby and optimum-benchmark on the same work.

The work: the MiniLM classifier in ../shared/models, 8 texts of 32 tokens, float32, CPU, the default number of threads.
Every attempt is a fresh process with the same time budget; the methods take turns, in reverse every second
time. At the end ours runs once more while another process keeps one core busy: its row must say that it was disturbed.
Exit 1: ours is more than 3 % from the plain loop in the same repeat (median over the repeats), spreads wider than the
plain loop, or does not notice the busy core. The peer is shown, never judged.

    python benchmarks/repeatability.py [--repeats 5] [--seconds 10] [--without-peer]
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from benchmarks import _attempts
from benchmarks._attempts import spread
from benchmarks._throughput import BATCH_SIZE, TOKENS
from boundby.machine import environment

WITHIN = 0.03  # of the plain loop, by the median over the repeats


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Return ours over theirs for every repeat in which both have a value."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True) if mine is not None and other is not None]


def says_disturbed(doubts: Sequence[str]) -> bool:
    """Tell whether any doubt of a row says that the measurement was disturbed."""
    return any("disturbed" in doubt.lower() for doubt in doubts)


def shortfalls(
    ours: Sequence[float | None], plain: Sequence[float | None], disturbed_doubts: Sequence[str] | None
) -> list[str]:
    """Return what falls short, one sentence each; [] where all holds.

    `ours` and `plain` hold the samples per second of each repeat, None for an attempt without a value;
    `disturbed_doubts` are those of our row with one core loaded, None where that run gave no row.
    """
    result = [
        f"{name} gave no value in {missing} of {len(values)} repeats"
        for name, values in (("ours", ours), ("the plain loop", plain))
        if (missing := sum(value is None for value in values))
    ]
    result += _off(ratios(ours, plain))
    result += _wider(spread(_known(ours)), spread(_known(plain)))
    if disturbed_doubts is None:
        result.append("ours gave no row with one core loaded")
    elif not says_disturbed(disturbed_doubts):
        result.append("with one core loaded by another process our row has no doubt that says 'disturbed'")
    return result


def _off(each: Sequence[float]) -> list[str]:
    if each and abs(median(each) - 1) > WITHIN:
        return [f"ours is {100 * (median(each) - 1):+.1f} % from the plain loop, allowed are {100 * WITHIN:.0f} %"]
    return []


def _wider(ours: float | None, plain: float | None) -> list[str]:
    if ours is not None and plain is not None and ours > plain:
        return [f"ours spreads over {100 * ours:.1f} %, the plain loop over {100 * plain:.1f} %"]
    return []


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODEL = ROOT.parent / "shared" / "models" / "minilm-banking77"
PLAIN, OURS = "plain loop", "ours"
PEER = {launcher: f"optimum-benchmark, {launcher}" for launcher in ("process", "inline")}
OVERHEAD_S = 300.0  # loading, warm-up and repeats of disturbed rounds on a busy machine
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass\n"


@dataclass(frozen=True)
class Attempt:
    """What one process found; `samples_per_s` is None, with the reason in `said`, where it failed."""

    method: str
    samples_per_s: float | None
    said: str
    doubts: tuple[str, ...] = ()
    threads: int | None = None
    versions: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all attempts and print them, then what they amount to."""
    args = _arguments(argv)
    if not MODEL.is_dir():
        print(f"skipped: {MODEL} is missing")
        return 0
    commands = {**_own_commands(args.seconds), **_peer_commands(args)}
    _print_machine()
    repeats = _repeats(commands, args)
    print("\nonce more, with one core kept busy by another process")
    with _busy_core():
        disturbed = _show("loaded", _attempt(OURS, commands[OURS], args.seconds))
    _print_summary(repeats, disturbed)
    return _judge(repeats, disturbed)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of each attempt")
    parser.add_argument("--without-peer", action="store_true", help="leave optimum-benchmark out")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.seconds < 1:
        parser.error("--repeats and --seconds must be 1 or more")
    return args


def _own_commands(seconds: float) -> dict[str, list[str]]:
    return {
        name: [sys.executable, str(HERE / "_throughput.py"), method, str(MODEL), "--seconds", str(seconds)]
        for name, method in ((PLAIN, "plain"), (OURS, "ours"))
    }


def _peer_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return how to run the peer, with each of its two launchers; {} where it is left out or cannot be installed."""
    if args.without_peer:
        print("optimum-benchmark: left out")
        return {}
    try:
        python = _attempts.prepare(ROOT, "optimum")
        print(f"packages of the peer: {_attempts.packages(python)}")
    except _attempts.PeerLacks as reason:
        print(f"optimum-benchmark: its environment cannot be made: {reason}")
        return {}
    work = ["--seconds", str(args.seconds), "--batch-size", str(BATCH_SIZE), "--tokens", str(TOKENS)]
    return {
        name: [str(python), str(HERE / "_optimum.py"), launcher, str(MODEL), *work] for launcher, name in PEER.items()
    }


def _print_machine() -> None:
    versions = {name: version for name, version in environment.versions().items() if version}
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    print(f"settings: {json.dumps(environment.settings())}")
    print(f"our versions: {json.dumps(versions)}")


def _repeats(commands: dict[str, list[str]], args: argparse.Namespace) -> dict[str, list[Attempt]]:
    """Return the attempts of each method, one per repeat.

    Every second repeat runs backwards: none is always first, and the plain loop and ours stay neighbours, so that the
    machine has the least time to change between the two that are compared.
    """
    result: dict[str, list[Attempt]] = {name: [] for name in commands}
    print("\nrepeat  method                      samples/s  what it says of it")
    for repeat in range(args.repeats):
        for name in reversed(commands) if repeat % 2 else commands:
            result[name].append(_show(str(repeat + 1), _attempt(name, commands[name], args.seconds)))
    return result


def _attempt(method: str, command: list[str], seconds: float) -> Attempt:
    """Run one process and return what it found."""
    try:
        line = _attempts.last_line(command, OVERHEAD_S + 10 * seconds, {"HF_HUB_OFFLINE": "1", "LOG_TO_FILE": "0"})
    except _attempts.AttemptFailed as reason:
        return Attempt(method, None, str(reason))
    return _read(method, line)


def _read(method: str, line: str) -> Attempt:
    """Return the attempt that the last line of a process tells of."""
    result: dict[str, Any] = json.loads(line)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    doubts = tuple(result.get("doubts", ()))
    return Attempt(method, result["samples_per_s"], result["said"], doubts, result["threads"], versions)


def _show(repeat: str, attempt: Attempt) -> Attempt:
    value = "none" if attempt.samples_per_s is None else f"{attempt.samples_per_s:.1f}"
    print(f"{repeat:<6}  {attempt.method:<26} {value:>10}  {attempt.said}")
    for doubt in attempt.doubts:
        print(f"{'':<45}  doubt: {doubt}")
    sys.stdout.flush()
    return attempt


@contextlib.contextmanager
def _busy_core() -> Iterator[None]:
    """Keep one core busy; the process ends with the block, and by itself should this one be killed."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _print_summary(repeats: dict[str, list[Attempt]], disturbed: Attempt) -> None:
    print("\nmethod                         median    spread  threads  versions")
    for name, attempts in repeats.items():
        values = [value for value in _values(attempts) if value is not None]
        middle = f"{median(values):.1f}" if values else "unknown"
        width = _attempts.spread(values)
        known = next((attempt for attempt in attempts if attempt.threads), attempts[0])
        spread = "unknown" if width is None else f"{100 * width:.1f} %"
        print(f"{name:<26} {middle:>10} {spread:>9} {known.threads or 'unknown':>8}  {known.versions}")
    for name in (OURS, *PEER.values()):
        print(f"{name} / {PLAIN}: {_relative(repeats.get(name, []), repeats[PLAIN])}")
    doubted = sum(says_disturbed(repeat.doubts) for repeat in repeats[OURS])
    print(f"rows of ours that say 'disturbed': {doubted} of {len(repeats[OURS])} in the repeats,", end=" ")
    print(f"{int(says_disturbed(disturbed.doubts))} of 1 with one core loaded")


def _relative(attempts: list[Attempt], plain: list[Attempt]) -> str:
    item = ratios(_values(attempts), _values(plain)) if attempts else []
    if not item:
        return "unknown"
    return f"{median(item):.3f} (by repeat: {', '.join(f'{ratio:.3f}' for ratio in item)})"


def _judge(repeats: dict[str, list[Attempt]], disturbed: Attempt) -> int:
    doubts = None if disturbed.samples_per_s is None else disturbed.doubts
    result = shortfalls(_values(repeats[OURS]), _values(repeats[PLAIN]), doubts)
    if len(repeats[OURS]) == 1:
        print("one repeat has no spread: it was not judged")
    for failure in result:
        print(f"FAILED: {failure}")
    if not result:
        print(f"passed: ours is within {100 * WITHIN:.0f} % of the plain loop, spreads no wider, and notices")
    return 1 if result else 0


def _values(attempts: list[Attempt]) -> list[float | None]:
    return [attempt.samples_per_s for attempt in attempts]


if __name__ == "__main__":
    sys.exit(main())
