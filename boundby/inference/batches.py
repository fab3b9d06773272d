"""Which texts go together: padded batches and packs, both a pure function of the lengths and the token budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from boundby.inference.tokens import Tokens


@dataclass(frozen=True)
class Batch:
    """Texts padded on the right to the longest of them, on the device. `rows` are their positions in the source."""

    rows: tuple[int, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    tokens_real: int

    @property
    def tokens_padded(self) -> int:
        """Tokens that the model computes: rows times the longest."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on another device."""
        return replace(self, input_ids=self.input_ids.to(device), attention_mask=self.attention_mask.to(device))

    @property
    def is_padded(self) -> bool:
        """Tell whether any row is shorter than the longest."""
        return self.tokens_real < self.tokens_padded


def collate(tokens: Tokens, rows: Sequence[int], pad_id: int, device: torch.device) -> Batch:
    """Return the texts at `rows` as one batch on `device`, padded on the right with `pad_id`."""
    chosen = [tokens.ids[row] for row in rows]
    lengths = np.fromiter((each.size for each in chosen), dtype=np.int64, count=len(chosen))
    is_real = np.arange(lengths.max()) < lengths[:, None]
    input_ids = np.full(is_real.shape, pad_id, dtype=np.int64)
    input_ids[is_real] = np.concatenate(chosen)
    return Batch(
        rows=tuple(rows),
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy(is_real.astype(np.int64)).to(device),
        tokens_real=int(lengths.sum()),
    )


def token_budget_batches(lengths: Sequence[int] | np.ndarray, budget: int) -> list[list[int]]:
    """Return rows in batches of similar length, each of at most `budget` padded tokens (or one row, if it is longer).

    The longest come first, so that memory runs out at the start or not at all; rows of equal length keep their order,
    so that the batches are a pure function of the lengths and the budget.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches: list[list[int]] = []
    room = 0
    for row in order.tolist():
        if room < 1:
            batches.append([])
            room = max(1, budget // int(lengths[row]))
        batches[-1].append(row)
        room -= 1
    return batches


def packs(lengths: Sequence[int] | np.ndarray, budget: int) -> list[list[int]]:
    """Return rows in packs of at most `budget` tokens without padding (or one row, if it is longer), longest first.

    Rows of equal length stand together and in their order: a pure function of the lengths and the budget.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    found: list[list[int]] = []
    room = 0
    for row in order.tolist():
        needed = int(lengths[row])
        if not found or needed > room:
            found.append([])
            room = budget
        found[-1].append(row)
        room -= needed
    return found


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Return the logits of one batch, `[rows, labels]`, on the device and in the model's dtype.

    A batch without padding goes in without a mask: attention then needs none, and the labels are the same.
    """
    mask = batch.attention_mask if batch.is_padded else None
    return model(input_ids=batch.input_ids, attention_mask=mask).logits
