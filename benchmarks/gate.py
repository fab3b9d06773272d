"""How often the regression gate is wrong, and what it finds: simulated runs of known truth, judged as real ones are.

A round of a run is its true time times noise; a run of `ROWS` batch sizes has `rounds` of them each. Noise may
drift: half of its variance wanders, correlated by `MEMORY` from one round to the next and common to all batch sizes. Or
each run has an offset of its own, as from another boot or layout of memory, which no interval of one run can see.

    python benchmarks/gate.py [RUNS]
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from boundby.timing import independent, judge, rounds_to_find, wilson_interval

ROWS = 6
SPREAD = 0.02  # of a round: two shared cores that nothing else used gave 1.4 to 3 %
MEMORY = 0.8
LEAST = 0.03  # the minimum effect on a CPU
NOISE = {  # name: (share of the variance that wanders, spread of the offset of a run)
    "independent rounds": (0.0, 0.0),
    "drift": (0.5, 0.0),
    "1 % between runs": (0.0, 0.01),
    "3 % between runs": (0.0, 0.03),
}


def a_run(generator: np.random.Generator, rounds: int, noise: str, slower: float = 0.0) -> list[np.ndarray]:
    """Return the seconds of the rounds of every batch size of a run, all of them slower by this share."""
    wandering, offset = NOISE[noise]
    walk = generator.normal(size=rounds)
    for at in range(1, rounds):
        walk[at] = MEMORY * walk[at - 1] + math.sqrt(1 - MEMORY**2) * walk[at]
    common = SPREAD * math.sqrt(wandering) * walk + generator.normal(0, offset or 1e-12)
    own = generator.normal(0, SPREAD * math.sqrt(1 - wandering), size=(ROWS, rounds))
    return [np.exp(common + item) * (1 + slower) for item in own]


def alarms(
    runs: int, rounds: int, noise: str = "independent rounds", slower: Sequence[float] = (0.0,), seed: int = 20
) -> tuple[int, int]:
    """Return in how many of so many pairs a row was `slower`, and in how many pairs the first row was."""
    generator = np.random.default_rng(seed)
    any_row = first_row = 0
    for _ in range(runs):
        a, b = a_run(generator, rounds, noise), a_run(generator, rounds, noise, *slower)
        result = judge([independent(one, other) for one, other in zip(a, b, strict=True)], LEAST)
        any_row += any(item.verdict == "slower" for item in result)
        first_row += result[0].verdict == "slower"
    return any_row, first_row


def main(runs: int) -> None:
    """Print false alarms and power as tables."""
    said = f"{runs} pairs of runs, {ROWS} batch sizes, rounds vary by {100 * SPREAD:g} %, minimum effect"
    print(f"{said} {100 * LEAST:g} %\n")
    print("| noise | rounds of each run | truth | pairs with an alarm | 95 % interval | alarms of one row |")
    print("| :-- | --: | --: | --: | --: | --: |")
    for slower in (0.0, 0.05, 0.10):
        for noise in NOISE:
            for rounds in (5, 10, 20, 60):
                result, row = alarms(runs, rounds, noise, (slower,))
                low, high = (100 * end for end in wilson_interval(result, runs))
                truth = f"+{100 * slower:.0f} %" if slower else "equal"
                shares = f"{100 * result / runs:.1f} % | {low:.1f} to {high:.1f} % | {100 * row / runs:.1f} %"
                print(f"| {noise} | {rounds} | {truth} | {shares} |")
    print()
    for effect in (0.05, 0.10):
        needed = rounds_to_find(SPREAD, effect, LEAST, ROWS)
        print(f"foretold: {100 * effect:g} % in nine of ten, in every row, from {needed} rounds in each run")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUNS", nargs="?", type=int, default=500)
    main(parser.parse_args().runs)
