"""From texts to predictions: tokens, batches, and one forward of a sequence classifier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

TOKENIZER_CHUNK = 1000  # texts per call: the Rust tokenizer is fed well, and memory stays flat


@dataclass(frozen=True)
class Tokens:
    """Token ids of texts, cut to a length; `truncated` counts the texts that were cut, None where it is not known."""

    ids: list[np.ndarray]
    truncated: int | None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text."""
        return np.fromiter((each.size for each in self.ids), dtype=np.int64, count=len(self.ids))


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


def tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> Tokens:
    """Return the token ids of each text, cut to `max_length` tokens including special ones."""
    ids: list[np.ndarray] = []
    truncated: int | None = 0
    for start in range(0, len(texts), TOKENIZER_CHUNK):
        encoded = tokenizer(
            list(texts[start : start + TOKENIZER_CHUNK]),
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
        )
        ids += [np.asarray(each, dtype=np.int32) for each in encoded["input_ids"]]
        if truncated is not None:
            encodings = encoded.encodings  # None from a tokenizer written in Python
            truncated = None if encodings is None else truncated + sum(bool(each.overflowing) for each in encodings)
    empty = next((row for row, each in enumerate(ids) if each.size == 0), None)
    if empty is not None:
        raise ValueError(f"text {empty} has no tokens: {texts[empty][:60]!r}; leave such rows out")
    return Tokens(ids, truncated)


def collate(tokens: Tokens, rows: Sequence[int], pad_id: int, device: torch.device) -> Batch:
    """Return the texts at `rows` as one batch on `device`, padded on the right with `pad_id`."""
    chosen = [tokens.ids[row] for row in rows]
    longest = max(each.size for each in chosen)
    input_ids = np.full((len(chosen), longest), pad_id, dtype=np.int64)
    mask = np.zeros((len(chosen), longest), dtype=np.int64)
    for line, each in enumerate(chosen):
        input_ids[line, : each.size] = each
        mask[line, : each.size] = 1
    return Batch(
        rows=tuple(rows),
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy(mask).to(device),
        tokens_real=int(mask.sum()),
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


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Return the logits of one batch, `[rows, labels]`, on the device and in the model's dtype.

    A batch without padding goes in without a mask: attention then needs none, and the labels are the same.
    """
    mask = batch.attention_mask if batch.is_padded else None
    return model(input_ids=batch.input_ids, attention_mask=mask).logits
