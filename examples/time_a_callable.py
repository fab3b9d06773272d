"""Time a piece of PyTorch with Boundby's instruments: cold call, warm-up, rounds, an interval and honest percentiles.

python examples/time_a_callable.py
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find boundby in this checkout; needless once installed

from boundby.machine import pick_device, synchronizer
from boundby.timing import Timer, WarmUpRule, estimate, summarize, warm_up

ROUNDS, RUNS = 5, 20


def main() -> None:
    """Print how long one encoder layer takes at batch size 8."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = pick_device("auto")
    layer = torch.nn.TransformerEncoderLayer(d_model=256, nhead=4, batch_first=True).to(device).eval()
    inputs = torch.randn(8, 64, 256, device=device)
    timer = Timer(synchronize=synchronizer(device))

    def work() -> torch.Tensor:
        with torch.inference_mode():
            return layer(inputs)

    print(f"cold call {timer.isolated(work) * 1e3:.2f} ms on {device}")
    warm = warm_up(work, timer, WarmUpRule(least_s=0.2))
    print(f"warm after {warm.runs} calls, converged: {warm.converged}")

    rounds = [[timer.isolated(work) for _ in range(RUNS)] for _ in range(ROUNDS)]
    latency = estimate([summarize(samples).median for samples in rounds])
    print(f"latency {latency.value * 1e3:.3f} ms, 95 % interval [{latency.low * 1e3:.3f}, {latency.high * 1e3:.3f}]")

    everything = summarize([seconds for samples in rounds for seconds in samples])
    print(f"p95 {everything.p95 * 1e3:.3f} ms; p99 needs 299 calls, here {everything.n}: {everything.p99}")
    for doubt in everything.doubts:
        print(f"doubt: {doubt}")


if __name__ == "__main__":
    main()
