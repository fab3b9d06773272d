"""What the demo loops train on: scikit-learn's handwritten digits, and the texts of the quickstart. No network."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from utils.quickstart.texts import LABELS, LabelledText, generate

EVALUATION_SHARE = 0.2
TEXTS, TEXT_SEED = 2000, 7
LONGEST_TEXT = 64  # tokens
DIGITS = 10
TEXT_LABELS = LABELS

Row = Mapping[str, torch.Tensor]
Collate = Callable[[Sequence[Row]], dict[str, torch.Tensor]]


class Repeated(Dataset[Row]):
    """`length` rows: the given ones in their order, and again from the first."""

    def __init__(self, rows: Sequence[Row], length: int) -> None:
        self._rows = rows
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._rows[index % len(self._rows)]


@dataclass(frozen=True)
class Split:
    """Rows to learn from and rows to be judged by, and how some of them become a batch."""

    training: Sequence[Row]
    evaluation: Sequence[Row]
    collate: Collate


def digits(size: int, share: float, seed: int) -> Split:
    """Return 1797 grey digits of 8 x 8 pixels, or the given share of them, enlarged to `size` x `size`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    if size != pixels.shape[-1]:
        pixels = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear")
    rows = [
        {"pixel_values": each, "labels": label}
        for each, label in zip(pixels, torch.tensor(labels, dtype=torch.long), strict=True)
    ]
    return _split(rows, share, seed, stacked)


def quickstart_texts() -> list[LabelledText]:
    """Return the texts, the same every time; their labels are indices of TEXT_LABELS."""
    return generate(TEXTS, TEXT_SEED)


def tokenised(texts: Sequence[LabelledText], tokenizer: Any, share: float, seed: int) -> Split:
    """Return the texts as tokens, padded batch by batch."""
    token_ids = tokenizer([each.text for each in texts], truncation=True, max_length=LONGEST_TEXT)["input_ids"]
    rows = [
        {"input_ids": torch.tensor(ids), "labels": torch.tensor(text.label)}
        for text, ids in zip(texts, token_ids, strict=True)
    ]
    return _split(rows, share, seed, functools.partial(padded, padding=tokenizer.pad_token_id))


def stacked(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return a batch of rows of one shape."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def padded(rows: Sequence[Row], padding: int) -> dict[str, torch.Tensor]:
    """Return a batch of token ids, padded on the right, with the mask that says so and the labels."""
    ids = [row["input_ids"] for row in rows]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": pad(ids, padding_value=padding),
        "attention_mask": pad([torch.ones_like(each) for each in ids]),
        "labels": torch.stack([row["labels"] for row in rows]),
    }


def _split(rows: Sequence[Row], share: float, seed: int, collate: Collate) -> Split:
    """Return the share of the rows, at least one for each use, in an order that the seed decides."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(2, round(share * len(rows)))
    chosen = [rows[index] for index in order[:count]]
    held_out = max(1, round(EVALUATION_SHARE * count))
    return Split(chosen[held_out:], chosen[:held_out], collate)
