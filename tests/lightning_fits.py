"""Small fits with a real Trainer of either package of Lightning, and what their parts saw while they ran."""

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from boundby.training import StageTimes, read_stage_times
from boundby.training.lightning import ProfilerCallback

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
LIGHTNING = PACKAGES[0]
WARNINGS = (  # of Lightning itself
    "ignore:.*does not have many workers",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:Checkpoint directory .* exists and is not empty",
)
STEPS, BATCH = 6, 2  # per epoch; rows
Told = Callable[[str], object]


def nobody(_: str) -> None:
    """Take note of nothing."""


class Rows(Dataset):
    def __init__(self, count: int, tell: Told) -> None:
        self.values = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
        self.tell = tell

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.tell("read")
        return self.values[index]


class Endless(IterableDataset):
    """The same rows, whose number nobody knows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.rows[index] for index in range(len(self.rows)))


class Telling(torch.optim.SGD):
    tell: Told = staticmethod(nobody)

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        self.tell("optimize")
        super().step()
        return loss


def module_of(package: str, tell: Told = nobody, **kinds: Any) -> Any:
    """Return a module with dropout whose parts tell when they run.

    `kinds`: `fail_at` a step and with what `error`; `manual` optimization; a `scheduler`.
    """
    base = importlib.import_module(package).LightningModule
    fail_at, error = kinds.get("fail_at"), kinds.get("error", RuntimeError("the model fails"))

    class Tiny(base):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            self.losses: list[float] = []
            self.automatic_optimization = not kinds.get("manual")

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            tell("transfer")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            tell("forward")
            if batch_idx == fail_at:
                raise error
            output = self.layers(batch)
            output.register_hook(lambda _: tell("backward"))
            loss = output.square().mean()
            self.losses.append(loss.item())
            if kinds.get("manual"):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            tell("validate")

        def configure_optimizers(self) -> Any:
            optimizer = Telling(self.parameters(), lr=0.1, momentum=0.9)
            optimizer.tell = tell
            if not kinds.get("scheduler"):
                return optimizer
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: tell("schedule") or 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Tiny()


def watcher_of(package: str, tell: Told) -> Any:
    """Return another callback of the user, which tells when it is called."""
    base = importlib.import_module(package).Callback

    class Watcher(base):
        def on_train_batch_start(self, *_: Any) -> None:
            tell("callback before")

        def on_train_batch_end(self, *_: Any) -> None:
            tell("callback behind")

    return Watcher()


def fit(package: str, module: Any, data: Any, *callbacks: Any, **settings: Any) -> Any:
    """Train a module and return its trainer; `val` and `ckpt` are those of `fit`, the rest goes to the trainer."""
    val, ckpt = settings.pop("val", None), settings.pop("ckpt", None)
    pl = importlib.import_module(package)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(
        **{**quiet, "enable_checkpointing": False, "max_epochs": 1, **settings}, callbacks=list(callbacks)
    )
    torch.manual_seed(7)
    trainer.fit(module, data, val, ckpt_path=ckpt)
    return trainer


class Witness:
    """What was open on the profiler's timer whenever a part of the program told that it runs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[str, ...]]] = []
        self.callback: ProfilerCallback | None = None

    def __call__(self, part: str) -> None:
        manager = self.callback.manager if self.callback else None
        if manager is not None:
            self.seen.append((part, tuple(stage.name for stage in manager.snapshot().open)))

    def around(self, part: str) -> set[tuple[str, ...]]:
        """Return the stages in which a part has run."""
        return {stages for seen, stages in self.seen if seen == part}


@dataclass(frozen=True)
class Fit:
    folder: Path
    trainer: Any
    module: Any
    callback: ProfilerCallback
    witness: Witness
    said: list[str]

    @property
    def times(self) -> StageTimes:
        return read_stage_times(self.callback.manager.folder)

    def order(self) -> list[str]:
        return [self.times.names[index].name for index in self.times.occurrences["stage"].tolist()]

    def document(self, name: str) -> dict[str, Any]:
        return json.loads((self.callback.manager.folder / name).read_text())


def profiled(folder: Path, package: str = LIGHTNING, *, data: Any = None, **settings: Any) -> Fit:
    witness = Witness()
    said: list[str] = []
    kinds = settings.pop("kinds", {})
    usual: dict[str, Any] = {"wait_steps": 0, "active_steps": 1, "repeat_cycles": 1, "say": said.append}
    callback = ProfilerCallback(True, folder / "logs", **{**usual, **settings.pop("given", {})})
    witness.callback = callback
    module = module_of(package, witness, **kinds)
    others = [watcher_of(package, witness) for _ in range(2)]
    loader = DataLoader(Rows(STEPS * BATCH, witness), batch_size=BATCH, shuffle=True) if data is None else data(witness)
    trainer = fit(package, module, loader, others[0], callback, others[1], **settings)
    return Fit(folder, trainer, module, callback, witness, said)


def losses_of(package: str = LIGHTNING, *callbacks: Any, **settings: Any) -> list[float]:
    """Return the losses of the same fit without a profiler."""
    module = module_of(package, **settings.pop("kinds", {}))
    loader = DataLoader(Rows(STEPS * BATCH, nobody), batch_size=BATCH, shuffle=True)
    fit(package, module, loader, watcher_of(package, nobody), *callbacks, **settings)
    return module.losses


def main() -> None:
    """Fit with two processes, as the arguments say: package and folder. They are forks: importing takes seconds."""
    package, folder = sys.argv[1], Path(sys.argv[2])
    rows = DataLoader(Rows(24, nobody), batch_size=2)
    callback = ProfilerCallback(True, folder / "traces", repeat_cycles=1, run_folder=folder, say=print)
    fit(package, module_of(package), rows, callback, devices=2, strategy="ddp_fork")


if __name__ == "__main__":
    main()
