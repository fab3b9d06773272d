"""One attempt at watching a model's layers, in a fresh process; prints one line of JSON last.

Each forward that is watched has one that is not beside it, so that it is compared with its neighbour and not with a
process that met another state of the machine. Only forwards are timed: attaching the probes, starting and stopping the
profiler lie outside.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

WARMUP_RUNS = 5
LEAST_RUNS, MOST_RUNS = 10, 1000
SMALL_BLOCKS, SMALL_WIDTH = 40, 16
QWEN_LAYERS = 4  # of 24: the time of the whole model would go into waiting for the same thing six times
MINILM = Path(__file__).resolve().parents[2] / "shared" / "models" / "minilm-banking77"

Run = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """The seconds of forwards and of the watched ones beside them, and what our probes alone tell."""

    plain_s: Sequence[float]
    watched_s: Sequence[float]
    calls: int | None = None  # of modules in a forward
    coverage: float | None = None
    probe_us: float | None = None  # as calibrated, not as found here

    @property
    def ratio(self) -> float:
        """Time watched over time not watched, the median over neighbours."""
        return median(watched / plain for watched, plain in zip(self.watched_s, self.plain_s, strict=True))


@dataclass(frozen=True)
class Case:
    """A model and the shape of what it reads; images have one size."""

    batch_size: int = 1
    tokens: int = 0


CASES = {
    "small modules": Case(),
    "minilm": Case(4, 32),
    "resnet-50": Case(),
    "bert-base": Case(1, 32),
    "gpt2": Case(1, 32),
    "qwen2-0.5b": Case(1, 16),
}


def cases() -> list[str]:
    """Return the names of the cases that can be run here."""
    return [name for name in CASES if name != "minilm" or MINILM.is_dir()]


def plain(model: Any, run: Run, count: int) -> Times:
    """Return the times of forwards with nothing on the model on either side: what noise alone does to the ratio."""
    return _alternating(run, count, contextlib.nullcontext)


def profiler(model: Any, run: Run, count: int) -> Times:
    """Return the times of forwards under torch.profiler, with what tells layers apart: shapes, stacks and memory."""
    import torch

    def watch() -> Any:
        activities = [torch.profiler.ProfilerActivity.CPU]
        return torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True, profile_memory=True)

    with watch():  # the first one of a process loads the profiler
        run()
    return _alternating(run, count, watch)


def probes(model: Any, run: Run, count: int) -> Times:
    """Return the times of forwards with our probes, as the time pass makes them, and what they account for."""
    from boundby.layers import CallTree, find_targets, timing

    targets = find_targets(model)
    tree = CallTree(targets.names)
    cost_ns = timing.probe_cost_ns(time.perf_counter_ns)
    result = timing.time_runs(run, tree, targets, count, time.perf_counter_ns, lambda: None)
    root = next(iter(result.runs[0]))
    roots_ns = [timing.corrected(run, cost_ns)[1][root] for run in result.runs]
    return Times(
        plain_s=[time_ns / 1e9 for time_ns in result.reference_ns],
        watched_s=[time_ns / 1e9 for time_ns in result.instrumented_ns],
        calls=sum(value.calls for value in result.runs[-1].values()),
        coverage=median(spent / whole for spent, whole in zip(roots_ns, result.reference_ns, strict=True)),
        probe_us=cost_ns / 1e3,
    )


METHODS = {"plain": plain, "probes": probes, "profiler": profiler}


def main() -> None:
    """Measure once and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    import torch

    torch.manual_seed(0)
    model, run = prepared(args.case)
    with torch.inference_mode():
        result = METHODS[args.method](model, run, count_forwards(run, args.seconds))
    message = {
        "plain_s": median(result.plain_s),
        "ratio": result.ratio,
        "runs": len(result.plain_s),
        "calls": result.calls,
        "coverage": result.coverage,
        "probe_us": result.probe_us,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(message))


def prepared(name: str) -> tuple[Any, Run]:
    """Return the model and one forward of it."""
    import torch
    import transformers

    from utils.tracing import models

    case = CASES[name]
    if name == "small modules":
        model, example = _small_modules(), torch.randn(1, SMALL_WIDTH)
        return model, lambda: model(example)
    if name == "minilm":
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(MINILM, local_files_only=True, dtype=torch.float32).eval()
    elif name == "qwen2-0.5b":
        configuration, kind, sizes = models.PRESETS[name]
        config = getattr(transformers, configuration)(**sizes | {"num_hidden_layers": QWEN_LAYERS})
        model = getattr(transformers, kind)(config).eval()
    else:
        model = models.build(name)
    inputs = models.inputs_for(model, case.batch_size, case.tokens)
    return model, lambda: model(**inputs)


def _small_modules() -> Any:
    """Return a model of 201 modules that compute next to nothing: the worst case for anything that acts per call."""
    from torch import nn

    def block() -> nn.Module:
        return nn.Sequential(
            nn.Linear(SMALL_WIDTH, SMALL_WIDTH),
            nn.LayerNorm(SMALL_WIDTH),
            nn.GELU(),
            nn.Linear(SMALL_WIDTH, SMALL_WIDTH),
        )

    return nn.Sequential(*(block() for _ in range(SMALL_BLOCKS))).eval()


def _alternating(run: Run, count: int, watch: Callable[[], Any]) -> Times:
    """Return the times of forwards outside and inside the context that `watch` gives, which take turns.

    One forward goes before each that is timed: what a profiler does only once it has been started counts for nothing.
    """
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(count):
        for is_watched in (False, True) if number % 2 == 0 else (True, False):
            with watch() if is_watched else contextlib.nullcontext():
                run()
                times[is_watched].append(seconds_of(run))
    return Times(times[False], times[True])


def count_forwards(run: Run, seconds: float) -> int:
    """Return how many forwards fit into half of the seconds, after a few to warm up."""
    item = median(seconds_of(run) for _ in range(WARMUP_RUNS))
    return max(LEAST_RUNS, min(MOST_RUNS, round(seconds / 2 / item)))


def seconds_of(run: Run) -> float:
    """Return the seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
