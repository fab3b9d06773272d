"""What does profiling a training loop cost? Off, the stage timer, and recorded steps beside other profilers.

A step that spins for exactly 5 ms, in five stages, is timed bare and under a manager that is off or a stage timer that
writes to a folder, in the order bare, method, method, bare. Then the same small fit runs in Lightning's Trainer without
a profiler, with `ProfilerCallback` (disabled and enabled), with Lightning's own PyTorchProfiler and with a bare
torch.profiler, all of them recording the same steps with shapes and memory, in turns that are reversed every second
time; a step is compared with the same steps of the fit without a profiler in the same round. Exit 1: off surely (by the
interval over the repeats) costs more than 0.1 % of the 5 ms, or the stage timer more than 1 %. On a machine that is
disturbed, where the bare step says so, nothing is decided.

    python benchmarks/training_overhead.py [--repeats 10] [--steps 200] [--rounds 5]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from benchmarks import _training_fits, _training_judgement, _training_spin
from benchmarks._training_fits import Fit
from boundby import environment

REFERENCE = "no profiler"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all and print it, then what it amounts to."""
    args = _arguments(argv)
    versions = {name: version for name, version in environment.versions().items() if version}
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    print(f"versions: {json.dumps(versions)}")
    if args.rounds:
        _print_fits(_fits(args.rounds))
    return _judge(*_spins(args.repeats, args.steps))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="of four blocks of spinning steps")
    parser.add_argument("--steps", type=int, default=200, help="of a block: 200 take a second")
    parser.add_argument("--rounds", type=int, default=5, help="of the fits; 0 leaves them out")
    args = parser.parse_args(argv)
    if args.repeats < 2 or args.steps < 10 or args.rounds < 0:
        parser.error("--repeats must be 2 or more, --steps 10 or more and --rounds 0 or more")
    return args


def _spins(repeats: int, steps: int) -> tuple[dict[str, list[float]], float]:
    """Return the ratios of each method, and the seconds that a bare step takes beyond its spins."""
    found: dict[str, list[float]] = {name: [] for name in _training_spin.METHODS}
    spare: list[float] = []
    print(
        f"\nrepeat  a step of {1e3 * _training_spin.STEP_S:.0f} ms, over a bare one; µs that the bare one takes beyond"
    )
    for repeat in range(repeats):
        for name in reversed(found) if repeat % 2 else found:
            bare, watched = _training_spin.abba(_training_spin.METHODS[name], steps)
            found[name].append(watched / bare)
            spare.append(bare - _training_spin.STEP_S)
            print(f"{repeat + 1:>6}  {name:<12} {watched / bare:.5f} {1e6 * spare[-1]:>6.1f}", flush=True)
    return found, median(spare)


def _fits(rounds: int) -> dict[str, list[Fit]]:
    found: dict[str, list[Fit]] = {name: [] for name in _training_fits.METHODS}
    _training_fits.run(REFERENCE)  # the first of a process loads what all of them need
    print("\nround  fit                step ms  recorded ms   whole s")
    for number in range(rounds):
        for name in reversed(found) if number % 2 else found:
            fit = _training_fits.run(name)
            found[name].append(fit)
            times = f"{1e3 * fit.rest_s:>8.3f} {1e3 * fit.active_s:>12.3f} {fit.whole_s:>9.2f}"
            print(f"{number + 1:>5}  {name:<17} {times}", flush=True)
    return found


def _print_fits(found: Mapping[str, Sequence[Fit]]) -> None:
    """Print what each fit takes over the one without a profiler in its round, and what it leaves."""
    print("\nfit                a step at rest; a recorded step; the whole fit; trace; files")
    plain = found[REFERENCE]
    for name, fits in found.items():
        if name == REFERENCE:
            continue
        pairs = list(zip(fits, plain, strict=True))
        rest = _training_judgement.cost([fit.rest_s / bare.rest_s for fit, bare in pairs])
        active = _training_judgement.cost([fit.active_s / bare.active_s for fit, bare in pairs])
        whole = median(fit.whole_s - bare.whole_s for fit, bare in pairs)
        described = f"{_training_judgement.described(rest)}; {_training_judgement.described(active)}"
        print(f"{name:<17}  {described}; {whole:+.2f} s; {fits[-1].trace_bytes / 1e6:.2f} MB; {len(fits[-1].files)}")
        print(f"{'':<17}  {', '.join(fits[-1].files) or 'nothing'}")


def _judge(found: Mapping[str, Sequence[float]], spare_s: float) -> int:
    """Print the costs and what falls short, and return the exit code."""
    print()
    for name, ratios in found.items():
        print(f"{name}: {_training_judgement.described(_training_judgement.cost(ratios))} of a step")
    if spare_s > _training_judgement.MOST_SPARE_S:
        print(f"not settled: a bare step takes {1e6 * spare_s:.0f} µs beyond its spins, so the machine is disturbed")
        return 0
    failures = _training_judgement.failures(found)
    unsettled = _training_judgement.unsettled(found)
    for failure in failures:
        print(f"FAILED: {failure}")
    for name in unsettled:
        print(f"not settled: {name}; quiet the machine or raise --repeats")
    if not failures:
        print("nothing surely falls short" if unsettled else "passed: everything is within its limits")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
