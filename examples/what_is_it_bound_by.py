"""Ask what a piece of PyTorch is bound by on this machine, and what fixing that could gain.

python examples/what_is_it_bound_by.py
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find boundby in this checkout; needless once installed

from boundby.bound import Bench, Call, Machine, bottleneck
from boundby.machine import measure, pick_device


def main() -> None:
    """Print the verdict on a feed-forward block at two batch sizes."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = pick_device("auto")
    ceilings = measure(device, dtypes=("float32",))
    peak = ceilings.configured("float32")
    issue_us = ceilings.dispatch_s * 1e6
    print(f"this machine: {peak.flops_per_s / 1e9:,.0f} GFLOP/s in float32, {issue_us:.1f} us to issue an operator")
    block = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).to(device)
    bench = Bench.of(device).within(8.0)  # seconds for replaying its operators, and for trying fixes

    for rows in (1, 1024):
        inputs = torch.randn(rows, 512, device=device)
        with torch.inference_mode():
            verdict = bottleneck(Call(lambda given=inputs: block(given)), Machine(ceilings, "float32"), bench)
        perhaps = f" ({', '.join(verdict.alternatives)})" if verdict.alternatives else ""
        print(f"{rows} rows: {verdict.bound}{perhaps}, confidence {verdict.confidence}, {verdict.confirmation}")
        for line in verdict.evidence:
            print(f"    {line}")
        if verdict.unsettled:
            print(f"    not settled: {verdict.unsettled.text}")
        for part in verdict.breakdown:
            print(f"    {1e3 * part.seconds:8.3f} ms {part.kind}")
        for gain in verdict.gains:
            predicted = f"{gain.predicted.value:.2f} times, " if gain.predicted else ""
            print(f"    {gain.fix}: {predicted}at most {gain.at_most:.2f} times ({gain.basis})")


if __name__ == "__main__":
    main()
