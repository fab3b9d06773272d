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
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from boundby.machine import environment
from boundby.timing import Estimate, estimate

STEPS, WAIT, WARMUP, ACTIVE = 90, 50, 2, 10
EDGE = 2  # steps at either end of a recording, in which a profiler starts or stops
WIDTH, LAYERS, BATCH_SIZE = 128, 4, 32


@dataclass(frozen=True)
class Fit:
    """What one fit took and left; seconds of a step are medians."""

    rest_s: float  # outside the recording
    active_s: float
    whole_s: float
    trace_bytes: int
    files: tuple[str, ...]


def fit_under(method: str) -> Fit:
    """Fit once under one of the `PROFILERS`."""
    import lightning.pytorch as pl
    import torch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    ends: list[float] = []

    class Clock(pl.Callback):
        """Notes when each batch ends."""

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        settings = PROFILERS[method](folder)
        callbacks = [Clock(), *settings.pop("callbacks", [])]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=STEPS, enable_checkpointing=False, callbacks=callbacks, **quiet, **settings
        )
        data = torch.utils.data.TensorDataset(torch.randn(STEPS * BATCH_SIZE, WIDTH))
        module = _module()
        begin = time.perf_counter()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE))
        whole_s = time.perf_counter() - begin
        left = sorted(path for path in folder.rglob("*") if path.is_file())
        traces = [path for path in left if path.name.endswith(".json") and "trace" in path.name]
        size = max((path.stat().st_size for path in traces), default=0)
        names = tuple(path.name for path in left)
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    first = WAIT + WARMUP
    return Fit(
        rest_s=statistics.median(steps[10 : WAIT - EDGE]),
        active_s=statistics.median(steps[first + EDGE : first + ACTIVE - EDGE]),
        whole_s=whole_s,
        trace_bytes=size,
        files=names,
    )


def _bare(_: Path) -> dict[str, Any]:
    return {}


def _disabled(folder: Path) -> dict[str, Any]:
    from boundby.training import ProfilerCallback

    return {"callbacks": [ProfilerCallback(False, folder)]}


def _ours(folder: Path) -> dict[str, Any]:
    from boundby.training import ProfilerCallback

    schedule = {"wait_steps": WAIT, "warmup_steps": WARMUP, "active_steps": ACTIVE, "repeat_cycles": 1}
    return {"callbacks": [ProfilerCallback(True, folder, **schedule, say=lambda _: None)]}


def _of_lightning(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.profilers import PyTorchProfiler

    kinds = {"record_shapes": True, "profile_memory": True, "export_to_chrome": True}
    return {"profiler": PyTorchProfiler(folder, "fit", schedule=_schedule(), **kinds)}


def _of_torch(folder: Path) -> dict[str, Any]:
    """A callback of a few lines, as people write it: no stages, nothing beside the trace."""
    import lightning.pytorch as pl
    import torch

    profile = torch.profiler.profile(
        schedule=_schedule(),
        record_shapes=True,
        profile_memory=True,
        on_trace_ready=lambda it: it.export_chrome_trace(str(folder / "trace.json")),
    )

    class Bare(pl.Callback):
        """Starts, steps and stops a profiler."""

        def on_train_start(self, *_: Any) -> None:
            profile.start()

        def on_train_batch_end(self, *_: Any) -> None:
            profile.step()

        def on_train_end(self, *_: Any) -> None:
            profile.stop()

    return {"callbacks": [Bare()]}


def _schedule() -> Any:
    import torch

    return torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)


PROFILERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "no profiler": _bare,
    "boundby, disabled": _disabled,
    "boundby": _ours,
    "PyTorchProfiler": _of_lightning,
    "torch.profiler": _of_torch,
}


def _module() -> Any:
    import lightning.pytorch as pl
    import torch

    class Layers(pl.LightningModule):
        """Some layers and their mean."""

        def __init__(self) -> None:
            super().__init__()
            parts = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
            self.layers = torch.nn.Sequential(*parts)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Layers()


MOST = {"off": 0.001, "stage timer": 0.01}  # of a step of 5 ms; a thousandth is 0.0 %, as the marks that do nothing
MOST_SPARE_S = 20e-6  # of a bare step beyond its spins: 2 µs on an idle machine, 70 with seven programs to a core


def failures(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return what surely costs more than it may, one sentence each."""
    return [
        f"{name} costs {_percent(estimate(ratios).value)}, {_percent(1 + MOST[name])} at most"
        for name, ratios in found.items()
        if (low := estimate(ratios).low) is not None and low > 1 + MOST[name]
    ]


def unsettled(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names of what neither surely fails nor surely passes."""
    passed = [name for name, ratios in found.items() if (high := estimate(ratios).high) and high <= 1 + MOST[name]]
    failed = [name for name, ratios in found.items() if (low := estimate(ratios).low) and low > 1 + MOST[name]]
    return [name for name in found if name not in passed and name not in failed]


def described(ratio: Estimate) -> str:
    """Return a cost in percent with its interval."""
    if ratio.low is None or ratio.high is None:
        return _percent(ratio.value)
    return f"{_percent(ratio.value)} [{_percent(ratio.low)}, {_percent(ratio.high)}]"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


STAGES = ("data", "h2d", "forward", "backward", "optimizer")
STEP_S = 0.005
INTERRUPTED_S = 0.002
PART_NS = round(STEP_S * 1e9 / len(STAGES))
NOTHING = nullcontext()


def bare(count: int) -> float:
    """Return the seconds of a step with nothing around its parts."""
    return _timed(count, lambda _: NOTHING, lambda: None)


def off(count: int) -> float:
    """Return the seconds of a step under a manager that is not enabled."""
    from boundby.training import ProfilerManager

    with ProfilerManager("never", enabled=False) as manager:
        return _timed(count, manager.stage, manager.step)


def timed(count: int) -> float:
    """Return the seconds of a step under a stage timer that writes to a folder from its own thread."""
    from boundby.training import StageTimer

    with tempfile.TemporaryDirectory() as folder, StageTimer(Path(folder)) as timer:
        return _timed(count, timer.stage, timer.step)


WATCHES = {"off": off, "stage timer": timed}


def abba(method: Callable[[int], float], count: int) -> tuple[float, float]:
    """Return the seconds of a bare step and of one with the method, from blocks bare, method, method, bare."""
    first = bare(count)
    watched = method(count) + method(count)
    return (first + bare(count)) / 2, watched / 2


def _timed(count: int, stage: Callable[[str], Any], step: Callable[[], object]) -> float:
    """Return the mean seconds of a step. Raises ValueError where every one was interrupted."""
    beyond = []
    others = time.process_time() - time.thread_time()
    for _ in range(count):
        spun = 0
        begin = time.perf_counter_ns()
        for name in STAGES:
            with stage(name):
                spun += _spin()
        step()
        beyond.append((time.perf_counter_ns() - begin - spun) / 1e9)
    others = time.process_time() - time.thread_time() - others
    kept = [item for item in beyond if item < INTERRUPTED_S]
    if not kept:
        raise ValueError(f"each of {count} steps was interrupted; quiet the machine")
    return STEP_S + statistics.fmean(kept) + others / count


def _spin() -> int:
    """Return the nanoseconds that it took."""
    clock = time.perf_counter_ns
    begin = clock()
    end = begin + PART_NS
    while (now := clock()) < end:
        pass
    return now - begin


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
    result: dict[str, list[float]] = {name: [] for name in WATCHES}
    spare: list[float] = []
    print(f"\nrepeat  a step of {1e3 * STEP_S:.0f} ms, over a bare one; µs that the bare one takes beyond")
    for repeat in range(repeats):
        for name in reversed(result) if repeat % 2 else result:
            bare, watched = abba(WATCHES[name], steps)
            result[name].append(watched / bare)
            spare.append(bare - STEP_S)
            print(f"{repeat + 1:>6}  {name:<12} {watched / bare:.5f} {1e6 * spare[-1]:>6.1f}", flush=True)
    return result, median(spare)


def _fits(rounds: int) -> dict[str, list[Fit]]:
    result: dict[str, list[Fit]] = {name: [] for name in PROFILERS}
    fit_under(REFERENCE)  # the first of a process loads what all of them need
    print("\nround  fit                step ms  recorded ms   whole s")
    for number in range(rounds):
        for name in reversed(result) if number % 2 else result:
            fit = fit_under(name)
            result[name].append(fit)
            times = f"{1e3 * fit.rest_s:>8.3f} {1e3 * fit.active_s:>12.3f} {fit.whole_s:>9.2f}"
            print(f"{number + 1:>5}  {name:<17} {times}", flush=True)
    return result


def _print_fits(found: Mapping[str, Sequence[Fit]]) -> None:
    """Print what each fit takes over the one without a profiler in its round, and what it leaves."""
    print("\nfit                a step at rest; a recorded step; the whole fit; trace; files")
    plain = found[REFERENCE]
    for name, fits in found.items():
        if name == REFERENCE:
            continue
        pairs = list(zip(fits, plain, strict=True))
        rest = estimate([fit.rest_s / bare.rest_s for fit, bare in pairs])
        active = estimate([fit.active_s / bare.active_s for fit, bare in pairs])
        whole = median(fit.whole_s - bare.whole_s for fit, bare in pairs)
        steps = f"{described(rest)}; {described(active)}"
        print(f"{name:<17}  {steps}; {whole:+.2f} s; {fits[-1].trace_bytes / 1e6:.2f} MB; {len(fits[-1].files)}")
        print(f"{'':<17}  {', '.join(fits[-1].files) or 'nothing'}")


def _judge(found: Mapping[str, Sequence[float]], spare_s: float) -> int:
    """Print the costs and what falls short, and return the exit code."""
    print()
    for name, ratios in found.items():
        print(f"{name}: {described(estimate(ratios))} of a step")
    if spare_s > MOST_SPARE_S:
        print(f"not settled: a bare step takes {1e6 * spare_s:.0f} µs beyond its spins, so the machine is disturbed")
        return 0
    short, still_open = failures(found), unsettled(found)
    for failure in short:
        print(f"FAILED: {failure}")
    for name in still_open:
        print(f"not settled: {name}; quiet the machine or raise --repeats")
    if not short:
        print("nothing surely falls short" if still_open else "passed: everything is within its limits")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
