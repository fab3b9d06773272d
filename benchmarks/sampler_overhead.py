"""What does the sampler cost? The same work with and without a running sampler, in turns.

The work is one encoder layer, called as often in every block; the order within a pair alternates. Totals are compared,
not medians: a reading disturbs a few calls only, which a median would hide. Exit 1: the lower end of the interval of
the cost is above 1 %, or the sampler read nothing.

    python benchmarks/sampler_overhead.py [--pairs 20] [--seconds 1]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from boundby.machine import environment
from boundby.timing import Estimate, estimate

MOST_COST = 0.01
WIDTH, HEADS, BATCH_SIZE, TOKENS = 384, 12, 8, 32  # a layer of the MiniLM classifier


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all pairs and print them, then the cost with its interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one block; five readings fall into a second")
    args = parser.parse_args(argv)
    if args.pairs < 2 or args.seconds < 0.5:
        parser.error("--pairs must be 2 or more and --seconds 0.5 or more: an interval and two readings need them")
    print(f"machine {environment.machine_fingerprint()}: {json.dumps(environment.machine())}")
    work = _work()
    calls = _calls(work, args.seconds)
    ratios, readings = _pairs(work, calls, args.pairs)
    result = estimate(ratios)
    print(f"cost of the sampler: {describe(result)}, {args.pairs} pairs of {calls} calls, {readings} readings")
    print(judge(result, readings))
    return 1 if readings == 0 or costs_too_much(result) else 0


def costs_too_much(ratio: Estimate) -> bool:
    """Tell whether even the lower end of the interval is above the cost allowed."""
    return ratio.low is not None and ratio.low - 1 > MOST_COST


def judge(ratio: Estimate, readings: int) -> str:
    """Return what the ratio of time with to time without the sampler says, as a sentence."""
    limit = f"{100 * MOST_COST:.0f} %"
    if readings == 0:
        return "FAILED: the sampler read nothing, so its cost is unknown"
    if costs_too_much(ratio):
        return f"FAILED: the sampler costs more than {limit}"
    if ratio.high is not None and ratio.high - 1 <= MOST_COST:
        return f"passed: the sampler costs at most {limit}"
    return f"not settled: the interval holds {limit}; quiet the machine or raise --pairs"


def describe(ratio: Estimate) -> str:
    """Return the cost in percent with its interval."""
    if ratio.low is None or ratio.high is None:
        return f"{100 * (ratio.value - 1):+.2f} %, {ratio.reason}"
    low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
    return f"{100 * (ratio.value - 1):+.2f} % [{low:+.2f}, {high:+.2f}]"


def _work() -> Callable[[], object]:
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True).eval()
    inputs = torch.randn(BATCH_SIZE, TOKENS, WIDTH)

    def call() -> object:
        with torch.inference_mode():
            return layer(inputs)

    return call


def _calls(work: Callable[[], object], seconds: float) -> int:
    """Return how many calls fill a block, after a warm-up as long as one."""
    made, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        work()
        made += 1
    return max(1, round(made * seconds / spent))


def _pairs(work: Callable[[], object], calls: int, pairs: int) -> tuple[list[float], int]:
    """Return the time with over the time without the sampler for each pair, and how many readings were taken."""
    ratios, readings = [], 0
    print("pair  without (s)  with (s)   ratio")
    for pair in range(pairs):
        if pair % 2:
            sampled, taken = _with_sampler(work, calls)
            plain = _seconds(work, calls)
        else:
            plain = _seconds(work, calls)
            sampled, taken = _with_sampler(work, calls)
        ratios.append(sampled / plain)
        readings += taken
        print(f"{pair + 1:>4}  {plain:>11.4f}  {sampled:>8.4f}  {sampled / plain:.4f}", flush=True)
    return ratios, readings


def _seconds(work: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - start


def _with_sampler(work: Callable[[], object], calls: int) -> tuple[float, int]:
    """Return the seconds of one block beside a running sampler, and how many readings that took."""
    from boundby.machine import PsutilSource, Sampler

    with Sampler(PsutilSource()) as sampler:
        begin = sampler.clock()
        seconds = _seconds(work, calls)
        return seconds, len(sampler.between(begin, sampler.clock()))


if __name__ == "__main__":
    sys.exit(main())
