"""Which texts are timed together: the batches that the whole dataset makes in order of arrival."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from boundby.inference import Batch, Tokens, collate, tokenize
from boundby.timing import Arrivals


@dataclass(frozen=True)
class Selection:
    """All texts of a dataset in order of arrival, with their tokens; the same call always returns the same batches."""

    texts: Sequence[str]
    tokens: Tokens
    tokenizer: Any
    max_length: int
    device: torch.device
    _arrivals: dict[int, Arrivals] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Any, max_length: int, device: torch.device) -> "Selection":
        """Return the selection from these texts. Raises ValueError where there are none."""
        if not texts:
            raise ValueError("there are no texts to profile with")
        return cls(texts, tokenize(tokenizer, texts, max_length), tokenizer, max_length, device)

    def arrivals(self, batch_size: int) -> Arrivals:
        """Return the shapes of all batches that the dataset makes at this size, in order of arrival."""
        if batch_size not in self._arrivals:
            self._arrivals[batch_size] = Arrivals.of(self.tokens.lengths, batch_size)
        return self._arrivals[batch_size]

    def reference(self, batch_size: int) -> Batch:
        """Return the batch of typical cost, the same in every step that asks; see `Arrivals.reference`."""
        arrivals = self.arrivals(batch_size)
        return self.batch(arrivals.rows(arrivals.reference))

    def batches(self, batch_size: int, count: int) -> list[Batch]:
        """Return `count` batches spread evenly over the lengths of all; every one where there are no more."""
        arrivals = self.arrivals(batch_size)
        indexes = (np.arange(min(count, len(arrivals))) + 0.5) * len(arrivals) / min(count, len(arrivals))
        chosen = np.argsort(arrivals.longest, kind="stable")[indexes.astype(np.int64)]
        return [self.batch(arrivals.rows(index)) for index in chosen.tolist()]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the texts at `rows` as one batch on the device."""
        return collate(self.tokens, rows, self.tokenizer.pad_token_id, self.device)

    def tokenize(self, batch: Batch) -> None:
        """Tokenize the texts of one batch, as a server would."""
        self.tokenizer([self.texts[row] for row in batch.rows], truncation=True, max_length=self.max_length)
