"""The same short fit with Lightning's Trainer under different profilers, all of which record the same steps."""

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def run(method: str) -> Fit:
    """Fit once under one of the `METHODS`."""
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
        settings = METHODS[method](folder)
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
    from boundby.integrations.lightning import ProfilerCallback

    return {"callbacks": [ProfilerCallback(False, folder)]}


def _ours(folder: Path) -> dict[str, Any]:
    from boundby.integrations.lightning import ProfilerCallback

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


METHODS: dict[str, Callable[[Path], dict[str, Any]]] = {
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
