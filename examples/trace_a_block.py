"""Record a few steps of any program and read which operators took the time.

python examples/trace_a_block.py
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find boundby in this checkout; needless once installed

from boundby.capture import capture
from boundby.machine import pick_device
from boundby.trace import op_stats, read_trace

TOP = 5


def main() -> None:
    """Print the operators of a small network's forward and backward."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = pick_device("auto")
    network = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 8)).to(device)
    inputs = torch.randn(64, 512, device=device)

    def step(number: int) -> None:
        network(inputs).sum().backward()

    with tempfile.TemporaryDirectory() as folder:
        manifest = capture(step, device=device, steps=3, warmup=1, trace_path=Path(folder) / "trace.json.gz")
        print(f"recorded {manifest.steps_recorded} of {manifest.steps_expected} steps in {manifest.seconds:.1f} s")
        for remark in (*manifest.downgrades, *manifest.unavailable):
            print(f"not there: {remark.what}: {remark.reason}")
        if manifest.trace_path is None:
            return
        for stat in op_stats(read_trace(manifest.trace_path))[:TOP]:
            print(f"{stat.cpu_self_ns / 1e6:8.2f} ms of its own in {stat.calls:4d} calls of {stat.name}")


if __name__ == "__main__":
    main()
