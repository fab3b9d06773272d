"""Profile the layers of a model, and plan how to split it over two nodes.

python examples/layers_and_a_plan.py [FOLDER]        # for the dashboard, else a new temporary one
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find boundby in this checkout; needless once installed

from boundby.layers import ObservabilityEngine
from boundby.partition import ExecutionPlanner, Link, VirtualNode


def main() -> None:
    """Print the longest blocks of a stack of layers, and the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?")
    layers = [torch.nn.Sequential(torch.nn.Linear(width, 512), torch.nn.GELU()) for width in (256, 512, 512, 512)]
    model, inputs = torch.nn.Sequential(*layers, torch.nn.Linear(512, 8)).eval(), torch.randn(64, 256)
    folder = parser.parse_args().folder or tempfile.mkdtemp()
    with ObservabilityEngine(model, folder, {"model_name": "mine"}) as engine:
        engine.instrument()
        engine.warmup(inputs)
        report = engine.profile(inputs, num_runs=20)
        print(f"{report}\n\nthe dashboard: {engine.save_dashboard()}\n")
    nodes = [VirtualNode("node_a", "cpu", ram_gb=8), VirtualNode("node_b", "cpu", ram_gb=8)]
    print(ExecutionPlanner(report).generate_plan(nodes, "throughput", Link(bytes_per_s=1e9, latency_s=50e-6)))


if __name__ == "__main__":
    main()
