"""One attempt by optimum-benchmark, in its own environment; prints one line of JSON last. Imports nothing of ours.

The `process` launcher is its default: the parent waits for the child in a loop without a pause, which keeps a core
busy (launchers/process/launcher.py, `while isolated_process.is_alive() and not parent_connection.poll(): pass`).
"""

import argparse
import json

import torch
import transformers
from optimum_benchmark import Benchmark, BenchmarkConfig, InferenceConfig, InlineConfig, ProcessConfig, PyTorchConfig

LAUNCHERS = {"process": ProcessConfig, "inline": InlineConfig}


def main() -> None:
    """Measure the forward pass of a text classifier and print what the tool reports."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("launcher", choices=LAUNCHERS)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    backend = PyTorchConfig(
        model=args.model,
        task="text-classification",
        library="transformers",
        model_type="bert",
        device="cpu",
        torch_dtype="float32",
    )
    scenario = InferenceConfig(
        duration=args.seconds, input_shapes={"batch_size": args.batch_size, "sequence_length": args.tokens}
    )
    config = BenchmarkConfig(
        name="repeatability", backend=backend, scenario=scenario, launcher=LAUNCHERS[args.launcher](), log_report=False
    )
    forward = Benchmark.launch(config).forward
    said = f"mean of {forward.latency.count} forwards, standard deviation {forward.latency.stdev_:.0f} %"
    result = {
        "samples_per_s": float(forward.throughput.value),
        "said": said,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
