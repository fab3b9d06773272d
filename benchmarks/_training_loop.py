"""One training loop with one bottleneck, under one profiler: a process of its own for benchmarks/training_verdict.py.

`traceml run` and torchrun start it; --tool says who watches: `boundby` or `traceml`. Both get what their documentation
asks of a plain loop: stages marked and batches timed, or `init(mode="auto")` and `trace_step`.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SLOW_S = 0.08  # of what is slow, some times a healthy step
BATCHES = 12  # of an epoch, and a smaller last one


@dataclass(frozen=True)
class Injected:
    """What is wrong with a loop: seconds in a part of each step, or a tiny batch."""

    data_s: float = 0.0
    transfer_s: float = 0.0
    forward_s: float = 0.0
    optimizer_s: float = 0.0
    logging_s: float = 0.0
    batch_size: int = 256
    width: int = 512
    epochs: int = 5
    slow_rank: int | None = None  # it alone has the seconds


CASES = {
    "healthy": Injected(),
    "slow loader": Injected(data_s=SLOW_S),
    "slow transfer": Injected(transfer_s=SLOW_S),
    "slow optimizer": Injected(optimizer_s=SLOW_S),
    "slow logging": Injected(logging_s=SLOW_S),
    "tiny batches": Injected(batch_size=4, width=32, epochs=100),
    "slow rank, data": Injected(data_s=SLOW_S, slow_rank=1, batch_size=128, width=256),
    "slow rank, forward": Injected(forward_s=SLOW_S, slow_rank=1, batch_size=128, width=256),
}


def wait(seconds: float) -> None:
    """Wait; even no time at all would give the processor away."""
    if seconds:
        time.sleep(seconds)


class Batches(Dataset):
    """Random batches, of which the last one is smaller; to get one takes its time."""

    def __init__(self, injected: Injected) -> None:
        self._wait_s = injected.data_s
        self._samples = [injected.batch_size] * BATCHES + [injected.batch_size // 4]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        wait(self._wait_s)
        samples = self._samples[index]
        return torch.randn(samples, 64), torch.arange(samples) % 10


class Model(nn.Module):
    """Some layers, after a wait."""

    def __init__(self, injected: Injected) -> None:
        super().__init__()
        width = injected.width
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self._wait_s = injected.forward_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wait(self._wait_s)
        return self.layers(inputs)


class SlowSGD(torch.optim.SGD):
    """SGD after a wait."""

    wait_s = 0.0

    def step(self, closure=None):  # noqa: D102
        wait(self.wait_s)
        return super().step(closure)


class Boundby:
    """The marks of a `ProfilerManager`."""

    def __init__(self, folder: Path, steps: int) -> None:
        from boundby.training import ProfilerManager

        self._manager = ProfilerManager(folder, device=torch.device("cpu"), say=lambda text: print(text, flush=True))
        self._manager.start(steps)
        self.stage = self._manager.stage
        self.batches = self._manager.timed

    @contextlib.contextmanager
    def step(self, model: nn.Module, samples: int) -> Iterator[None]:
        """Mark a step."""
        yield
        self._manager.metrics({"samples": samples})
        self._manager.step()

    def stop(self) -> None:
        """Write what is known."""
        self._manager.stop()


class TraceML:
    """The marks of TraceML, which finds the stages itself."""

    def __init__(self) -> None:
        import traceml_ai

        traceml_ai.init(mode="auto")
        self._trace_step = traceml_ai.trace_step

    def stage(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def batches(self, loader: Iterable) -> Iterable:
        """Return the loader, whose class is patched."""
        return loader

    def step(self, model: nn.Module, samples: int) -> contextlib.AbstractContextManager[None]:
        """Mark a step."""
        return self._trace_step(model)

    def stop(self) -> None:
        """Do nothing: the launcher sums up."""


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=["boundby", "traceml"], required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    injected = CASES[args.case]
    if injected.slow_rank is not None:
        torch.distributed.init_process_group("gloo")
        if torch.distributed.get_rank() != injected.slow_rank:
            injected = replace(injected, data_s=0.0, forward_s=0.0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tool = Boundby(args.folder, injected.epochs * (BATCHES + 1)) if args.tool == "boundby" else TraceML()
    _train(tool, injected)
    tool.stop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _train(tool: Boundby | TraceML, injected: Injected) -> None:
    is_parallel = torch.distributed.is_initialized()
    model: nn.Module = Model(injected)
    if is_parallel:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    optimizer.wait_s = injected.optimizer_s
    loss_of = nn.CrossEntropyLoss()
    loader = DataLoader(Batches(injected), batch_size=None)
    for _ in range(injected.epochs):
        for inputs, labels in tool.batches(loader):
            with tool.step(model, len(inputs)):
                with tool.stage("h2d"):
                    wait(injected.transfer_s)  # in the place of a copy to a GPU
                    inputs, labels = inputs.to("cpu"), labels.to("cpu")
                with tool.stage("forward"):
                    loss = loss_of(model(inputs), labels)
                with tool.stage("backward"):
                    loss.backward()
                with tool.stage("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                with tool.stage("logging"):
                    wait(injected.logging_s)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
