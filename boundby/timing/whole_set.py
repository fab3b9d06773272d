"""The batches that a dataset makes in order of arrival: their shapes, known exactly before anything is timed."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

import numpy as np

GOLDEN = (5**0.5 - 1) / 2  # multiples of it spread evenly over 0 to 1 however many there are

LEAST_TERM = 0.01  # of the relative error a term must explain to be in the cost


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

    @property
    def totals(self) -> "Totals":
        """What all batches hold together."""
        padded = self.samples * self.longest
        return Totals(
            batches=len(self),
            samples=int(self.samples.sum()),
            tokens_real=int(self.tokens_real.sum()),
            tokens_padded=int(padded.sum()),
            tokens_squared=int((padded * self.longest).sum()),
        )

    @property
    def largest(self) -> int:
        """The index of the batch with the most padded tokens, which needs the most memory."""
        return int(np.argmax(self.samples * self.longest))

    def sample(self, count: int, number: int) -> list[int]:
        """Return the indices of `count` batches for the round of this number, in order of arrival; all if too few.

        The batches stand in order of length, and every n-th is taken from a place that moves on from round to round:
        each sample holds short and long ones as the whole set does, every batch is as likely as any other, and rounds
        differ. The same call always returns the same batches.
        """
        if count >= len(self):
            return list(range(len(self)))
        rng = np.random.default_rng([self.batch_size, count])
        by_length = np.lexsort((rng.permutation(len(self)), self.longest))
        start = (rng.random() + number * GOLDEN) % 1
        positions = (np.arange(count) + start) * len(self) / count
        return sorted(by_length[positions.astype(np.int64)].tolist())


@dataclass(frozen=True)
class Totals:
    """Sums over batches; `tokens_squared` is of samples times the square of the longest."""

    batches: float
    samples: float
    tokens_real: float
    tokens_padded: float
    tokens_squared: float

    @classmethod
    def one(cls, samples: int, tokens_padded: int, tokens_real: int) -> "Totals":
        """Return what a single batch holds."""
        return cls(1, samples, tokens_real, tokens_padded, tokens_padded**2 / samples)

    @classmethod
    def none(cls) -> "Totals":
        """Return what no batches hold, the start of a sum."""
        return cls(0, 0, 0, 0, 0)

    def __add__(self, other: "Totals") -> "Totals":
        """Return what these and the other batches hold."""
        return Totals(*map(add, astuple(self), astuple(other)))

    def __mul__(self, times: float) -> "Totals":
        """Return what these batches hold so many times."""
        return Totals(*(times * mine for mine in astuple(self)))


@dataclass(frozen=True)
class Cost:
    """Seconds of a batch: some for any, some by padded token, and some by its square, as in attention; none below 0.

    Over two passes of two models and three datasets at six batch sizes the sum over each fifth of the lengths was
    within 3 % of what was measured, save where the machine changed its speed.
    """

    by_batch: float
    by_token: float
    by_square: float

    @classmethod
    def fit(cls, batches: Sequence[Totals], seconds: Sequence[float]) -> "Cost":
        """Return the cost with the least relative errors at these batches (non-negative least squares, Lawson 1974).

        Where lengths hardly differ the terms cannot be told apart, and the cost is nearly all by token.
        """
        from scipy.optimize import nnls

        terms = np.array([(batch.batches, batch.tokens_padded, batch.tokens_squared) for batch in batches], dtype=float)
        relative = terms / np.asarray(seconds, dtype=float)[:, None]
        scale = np.linalg.norm(relative, axis=0)
        by_token_alone = LEAST_TERM * np.array([[1, 0, 0], [0, 0, 1]])
        aim = np.append(np.ones(len(relative)), [0, 0])
        factors, _ = nnls(np.vstack([relative / scale, by_token_alone]), aim)
        by_batch, by_token, by_square = (factors / scale).tolist()
        return cls(by_batch, by_token, by_square)

    def of(self, batches: Totals) -> float:
        """Return the seconds that these batches take together."""
        return (
            self.by_batch * batches.batches
            + self.by_token * batches.tokens_padded
            + self.by_square * batches.tokens_squared
        )


Timed = tuple[Totals, float]  # one or more batches and the seconds they took together


def seconds_per_sample(
    rounds: Sequence[Sequence[Timed]], whole: Totals, at_the_ends: Sequence[Timed] = ()
) -> list[float]:
    """Return for each round what a sample of the whole set takes on average, by the batches that were timed in it.

    A round's seconds are scaled by what the whole set costs over what its batches cost, by one cost fitted to all
    rounds and to `at_the_ends` (the ratio estimator of model-assisted surveys: Särndal, Swensson & Wretman 1992, 6.4).
    Means and not medians, since a plain loop waits for its slow batches too: in full passes over three datasets the
    median batch, by its cost, was 1 to 2 % faster than the mean one on a quiet machine, and up to 10 % on another.
    """
    timed = [(batches, seconds) for batches_timed in rounds for batches, seconds in batches_timed]
    if not timed:
        return []
    fitted = [(batches, seconds) for batches, seconds in [*timed, *at_the_ends] if seconds > 0]
    cost = Cost.fit(*zip(*fitted, strict=True))
    expected = cost.of(whole) / whole.samples
    return [
        expected * sum(seconds for _, seconds in batches_timed) / sum(cost.of(batches) for batches, _ in batches_timed)
        for batches_timed in rounds
        if batches_timed
    ]
