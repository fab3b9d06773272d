"""How far the confidence of a prediction can be taken for its chance of being right.

The confidence is the softmax probability of the predicted label. It is counted in cells of a fixed width, and summed in
integers: memory does not grow with the rows, and parts can be merged in any order and on any machine with the same
result. Neighbouring cells are then joined to bins that hold about as many rows each (equal mass), so that every bin
says equally much; bins of equal width would leave most of them nearly empty where a model is mostly sure.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from boundby.timing import wilson_interval

CELLS = 2**16  # of the confidence from 0 to 1
UNIT = 2.0**-32  # in which confidences are summed: exact from 2**-8 on, where float32 has no finer steps
SQUARE_UNIT = 2.0**-40
BINS = 15  # as Guo et al. 2017
LEAST_ROWS = 30  # of a bin, to say something
BARS = 32  # of the distribution of the confidence; divides CELLS
ACCURACIES = (0.9, 0.95, 0.99)  # for which a threshold is looked for


class Bin(msgspec.Struct, frozen=True):
    """Predictions of neighbouring confidences, and how many of them are right."""

    confidence_from: float
    confidence_to: float
    rows: Annotated[int, msgspec.Meta(ge=1)]
    correct: int
    mean_confidence: float
    accuracy: float
    accuracy_ci_low: float
    accuracy_ci_high: float
    has_few_rows: bool

    @property
    def distance_by_chance(self) -> float:
        """How far accuracy and confidence would be apart on average if the confidence was right."""
        share = self.mean_confidence
        return math.sqrt(2 / math.pi * max(0.0, share * (1 - share)) / self.rows)


class Threshold(msgspec.Struct, frozen=True, omit_defaults=True):
    """The confidence from which on so large a share of the predictions is surely right; None with a reason."""

    accuracy_at_least: float
    confidence: float | None
    rows: int | None = None
    share: float | None = None
    accuracy: float | None = None
    accuracy_ci_low: float | None = None
    accuracy_ci_high: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where a threshold stands without what it does."""
        if self.confidence is not None and None in (
            self.share,
            self.accuracy,
            self.accuracy_ci_low,
            self.accuracy_ci_high,
        ):
            raise ValueError("a threshold has a share and an accuracy")


class Distribution(msgspec.Struct, frozen=True):
    """Predictions, and right ones, by confidence in steps of equal width from 0 to 1."""

    rows: tuple[int, ...]
    correct: tuple[int, ...]


class Calibration(msgspec.Struct, frozen=True):
    """The errors over all rows, the bins, the thresholds and the distribution.

    `ece`: expected calibration error, the mean distance of confidence and share of right predictions over the bins,
    weighted by their rows (Naeini, Cooper & Hauskrecht 2015; of the predicted label, Guo et al. 2017; bins of equal
    mass, Nixon et al. 2019). `ece_by_chance` is what these bins would show on average if every confidence was
    right: the mean distance of a normal distribution, sqrt(2 / pi) standard deviations, per bin.
    `brier_score`: mean of (confidence - 1)² over right and confidence² over wrong predictions (Brier 1950, for the
    event that the predicted label is right; with two labels it is scikit-learn's `brier_score_loss`).
    """

    rows: int
    accuracy: float
    accuracy_ci_low: float
    accuracy_ci_high: float
    mean_confidence: float
    ece: float
    ece_by_chance: float
    brier_score: float
    bins: tuple[Bin, ...]
    thresholds: tuple[Threshold, ...]
    distribution: Distribution


class Reliability:
    """The confidences seen so far, and which of the predictions were right."""

    def __init__(self) -> None:
        self._rows, self._correct, self._units = (np.zeros(CELLS, dtype=np.int64) for _ in range(3))
        self._squares = 0

    def add(self, confidences: np.ndarray, is_right: np.ndarray) -> None:
        """Count rows by their confidence, from 0 to 1."""
        exact = confidences.astype(np.float64)
        cells = np.minimum((exact * CELLS).astype(np.int64), CELLS - 1)
        self._rows += np.bincount(cells, minlength=CELLS)
        self._correct += np.bincount(cells[is_right], minlength=CELLS)
        # The weights are whole numbers, and their sums below 2**53: exact in float64.
        self._units += np.bincount(cells, weights=np.rint(exact / UNIT), minlength=CELLS).astype(np.int64)
        self._squares += int(np.rint((exact - is_right) ** 2 / SQUARE_UNIT).astype(np.int64).sum())

    def calibration(self) -> Calibration:
        """Return what has been counted; at least one row is needed."""
        bins, rows, correct = self._bins(), int(self._rows.sum()), int(self._correct.sum())
        low, high = interval(correct, rows)
        return Calibration(
            rows=rows,
            accuracy=correct / rows,
            accuracy_ci_low=low,
            accuracy_ci_high=high,
            mean_confidence=int(self._units.sum()) * UNIT / rows,
            ece=sum(one.rows * abs(one.accuracy - one.mean_confidence) for one in bins) / rows,
            ece_by_chance=sum(one.rows * one.distance_by_chance for one in bins) / rows,
            brier_score=self._squares * SQUARE_UNIT / rows,
            bins=bins,
            thresholds=tuple(_threshold(bins, rows, accuracy) for accuracy in ACCURACIES),
            distribution=Distribution(
                tuple(self._rows.reshape(BARS, -1).sum(axis=1).tolist()),
                tuple(self._correct.reshape(BARS, -1).sum(axis=1).tolist()),
            ),
        )

    def _bins(self) -> tuple[Bin, ...]:
        """Return bins of equal mass, the lowest confidence first; rows of one cell stay together."""
        below = np.cumsum(self._rows)
        rows = int(below[-1])
        wanted = max(1, min(BINS, rows // LEAST_ROWS))
        # The cell that reaches each share of the rows ends a bin; a full cell can reach several at once.
        ends = np.unique(np.searchsorted(below, [-(-rows * part // wanted) for part in range(1, wanted + 1)]))
        starts = [0, *(ends[:-1] + 1).tolist()]
        return tuple(self._bin(start, int(end) + 1) for start, end in zip(starts, ends, strict=True))

    def _bin(self, start: int, stop: int) -> Bin:
        rows, correct = int(self._rows[start:stop].sum()), int(self._correct[start:stop].sum())
        filled = start + np.flatnonzero(self._rows[start:stop])
        low, high = interval(correct, rows)
        return Bin(
            confidence_from=int(filled[0]) / CELLS,
            confidence_to=(int(filled[-1]) + 1) / CELLS,
            rows=rows,
            correct=correct,
            mean_confidence=int(self._units[start:stop].sum()) * UNIT / rows,
            accuracy=correct / rows,
            accuracy_ci_low=low,
            accuracy_ci_high=high,
            has_few_rows=rows < LEAST_ROWS,
        )


def _threshold(bins: Sequence[Bin], rows: int, accuracy: float) -> Threshold:
    """Return the lowest start of a bin above which surely (95 %) at least this share of the predictions is right."""
    threshold = Threshold(
        accuracy, None, reason="above no confidence are there enough right predictions to be sure of it"
    )
    above = correct = 0
    for one in reversed(bins):
        above, correct = above + one.rows, correct + one.correct
        low, high = interval(correct, above)
        if low >= accuracy:
            threshold = Threshold(accuracy, one.confidence_from, above, above / rows, correct / above, low, high)
    return threshold


def interval(part: int, whole: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval, without the digits in which libraries of two machines may differ."""
    low, high = wilson_interval(part, whole)
    return round(float(low), 9), round(float(high), 9)
