"""Which texts are timed together: batches of one size whose mean length is that of all texts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from boundby.inference import Batch, Tokens, collate, tokenize

DRAWS = 200  # selections of texts, of which the one closest to the mean length of all is timed


@dataclass(frozen=True)
class Selection:
    """A pool of texts with its tokens; the same call always returns the same batches."""

    texts: Sequence[str]
    tokens: Tokens
    tokenizer: Any
    max_length: int
    device: torch.device

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Any, max_length: int, device: torch.device) -> "Selection":
        """Return the selection from these texts. Raises ValueError where there are none."""
        if not texts:
            raise ValueError("there are no texts to profile with")
        return cls(texts, tokenize(tokenizer, texts, max_length), tokenizer, max_length, device)

    def batches(self, batch_size: int, count: int) -> list[Batch]:
        """Return `count` batches of texts in random order, as they would arrive: not sorted by length."""
        rows = self._rows(batch_size * count)
        return [self.batch(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the texts at `rows` as one batch on the device."""
        return collate(self.tokens, rows, self.tokenizer.pad_token_id, self.device)

    def tokenize(self, batch: Batch) -> None:
        """Tokenize the texts of one batch, as a server would."""
        self.tokenizer([self.texts[row] for row in batch.rows], truncation=True, max_length=self.max_length)

    def _rows(self, count: int) -> list[int]:
        """Return `count` random rows whose mean length is that of all; rows repeat where there are too few.

        Ten texts at batch size 1 and 640 at 64 would otherwise differ by a fifth in length, and so would their times.
        """
        lengths = self.tokens.lengths
        if count >= len(lengths):
            return [row % len(lengths) for row in range(count)]
        rng = random.Random(count)
        draws = (rng.sample(range(len(lengths)), count) for _ in range(DRAWS))
        return min(draws, key=lambda rows: abs(lengths[rows].mean() - lengths.mean()))
