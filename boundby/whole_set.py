"""The batches that a dataset makes in order of arrival: their shapes, known exactly before anything is timed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, order=True)
class Shape:
    """The shape of a batch: so many samples, each padded to so many tokens."""

    samples: int
    tokens: int

    def __str__(self) -> str:
        """Return the shape as a person reads it: `8 × 154 tokens`."""
        return f"{self.samples} × {self.tokens} tokens"


@dataclass(frozen=True)
class Arrivals:
    """A dataset in batches of `batch_size`, in order of arrival; the last one holds what is left.

    `samples`, `longest` and `tokens_real` are arrays with one entry per batch: its texts, the tokens of the longest of
    them, to which all are padded, and the tokens of all of them without padding.
    """

    batch_size: int
    samples: np.ndarray
    longest: np.ndarray
    tokens_real: np.ndarray

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, batch_size: int) -> "Arrivals":
        """Return the batches of texts with these tokens each. Raises ValueError where there are none."""
        tokens = np.asarray(lengths, dtype=np.int64)
        if tokens.size == 0 or batch_size < 1:
            raise ValueError(f"{tokens.size} texts make no batches of {batch_size}")
        starts = np.arange(0, tokens.size, batch_size)
        samples = np.diff(np.append(starts, tokens.size))
        return cls(batch_size, samples, np.maximum.reduceat(tokens, starts), np.add.reduceat(tokens, starts))

    def __len__(self) -> int:
        """Return how many batches there are."""
        return int(self.samples.size)

    def rows(self, index: int) -> range:
        """Return the places in the dataset of the texts of the batch at `index`."""
        start = index * self.batch_size
        return range(start, start + int(self.samples[index]))

    def shape(self, index: int) -> Shape:
        """Return the shape of the batch at `index`."""
        return Shape(int(self.samples[index]), int(self.longest[index]))

    @property
    def reference(self) -> int:
        """The index of the batch of typical cost: nearest to the mean in padded tokens, then in real ones.

        A batch costs nearly in proportion to its padded tokens, so that the batch nearest to their mean takes about
        the mean time. The last, shorter batch is none, unless it is the only one.
        """
        full = int((self.samples == self.batch_size).sum()) or 1
        longest, real = self.longest[:full], self.tokens_real[:full]
        return int(np.lexsort((np.abs(real - real.mean()), np.abs(longest - longest.mean())))[0])
