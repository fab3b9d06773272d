"""Tiny trainings of the Hugging Face Trainer, whose parts take known times on a clock that stands still otherwise."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.data_loader
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from boundby.training import StageTimer
from boundby.training.transformers import ProfCallback
from tests.fakes import FakeNanoseconds

SAMPLES, BATCH = 48, 2
EVALUATING = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 5}
LOAD, TRANSFER, FORWARD, BACKWARD, CLIP, OPTIMIZER, CALLBACK, EVALUATE = (2**power for power in range(8, 16))  # ns


class Rows(torch.utils.data.Dataset):
    """Rows of which the first one of each batch takes time to load."""

    def __init__(self, watch: FakeNanoseconds, size: int = SAMPLES) -> None:
        self._watch = watch
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        self._watch.wait(LOAD)
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "labels": torch.tensor(float(index % 2))}


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward takes time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watch: FakeNanoseconds) -> torch.Tensor:
        ctx.watch = watch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.watch.wait(BACKWARD)
        return gradient, None


class Model(nn.Module):
    """Two layers with dropout, whose noise comes from the global generator."""

    def __init__(self, watch, fail_at=None, error=RuntimeError):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        self._watch = watch
        self.fail_at, self._error = fail_at, error
        self._calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self._calls += self.training
        if self._calls == self.fail_at:
            raise self._error("the model fails")
        self._watch.wait(FORWARD if self.training else EVALUATE)
        y = SlowBackward.apply(self.layers(x)[:, 0], self._watch)
        return {"loss": nn.functional.mse_loss(y.float(), labels), "logits": y}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.layer(x)[:, 0]
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class SlowAdam(torch.optim.Adam):
    watch: FakeNanoseconds

    def step(self, closure: Any = None) -> Any:
        self.watch.wait(OPTIMIZER)
        return super().step(closure)


class SlowCallback(TrainerCallback):
    def __init__(self, watch: FakeNanoseconds) -> None:
        self._watch = watch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.wait(CALLBACK)


class SlowTrainer(Trainer):
    watch: FakeNanoseconds

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self.watch.wait(CLIP)
        return super()._clip_grad_norm(model)


def make_trainer(folder, callback=None, *, watch=None, model=None, **settings):
    watch = watch or FakeNanoseconds()
    torch.manual_seed(0)
    defaults = {
        "output_dir": str(folder / "results"),
        "max_steps": 10,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    model = model or Model(watch)
    optimizer = SlowAdam(model.parameters(), lr=0.01)
    optimizer.watch = watch
    trainer = SlowTrainer(
        model,
        TrainingArguments(**defaults | settings),
        train_dataset=Rows(watch),
        eval_dataset=Rows(watch, 2 * 8),
        optimizers=(optimizer, None),
        callbacks=[given for given in (callback, SlowCallback(watch)) if given],
    )
    trainer.watch = watch
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses(folder: Path, callback: ProfCallback | None = None, *, attach: bool = False, **settings: Any) -> list[float]:
    trainer = make_trainer(folder, callback, **settings)
    if attach and callback:
        callback.attach(trainer)
    trainer.train()
    return losses_of(trainer)


@contextlib.contextmanager
def slow_copies(watch: FakeNanoseconds) -> Iterator[None]:
    original = accelerate.data_loader.send_to_device

    def slow(*args: Any, **kwargs: Any) -> Any:
        watch.wait(TRANSFER)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.data_loader, "send_to_device", slow)
        yield


@contextlib.contextmanager
def on_watch(watch: FakeNanoseconds) -> Iterator[None]:
    """Let every timer that is made meanwhile read this clock, and the loader's copies take time."""
    with pytest.MonkeyPatch.context() as patch, slow_copies(watch):
        patch.setitem(StageTimer.__init__.__kwdefaults__, "clock", watch)
        yield


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def manifest_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def given_up_in(folder: Path) -> dict[str, str]:
    return {downgrade["what"]: downgrade["reason"] for downgrade in manifest_in(folder)["downgrades"]}
