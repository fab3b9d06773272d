"""The losses of a model that somebody else's loop calls."""

from types import TracebackType
from typing import Any

import torch


class Losses:
    """Keeps the loss of each batch that a model is trained on, while the context lasts; fetches nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._losses: list[torch.Tensor] = []

    def __enter__(self) -> "Losses":
        self._hook = self._model.register_forward_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()

    def take(self) -> torch.Tensor:
        """Return the mean of the losses since the last time, NaN where there was none."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean() if losses else torch.tensor(float("nan"))

    def _keep(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if model.training:
            self._losses.append(output["loss"].detach())
