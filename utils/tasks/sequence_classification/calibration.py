"""How far the confidence of a prediction can be taken for its chance of being right.

The confidence is the softmax probability of the predicted label. It is counted in cells of a fixed width, and summed in
integers: memory does not grow with the rows, and parts can be merged in any order and on any machine with the same
result. Neighbouring cells are then joined to bins that hold about as many rows each (equal mass), so that every bin
says equally much; bins of equal width would leave most of them nearly empty where a model is mostly sure.
"""

import math
from typing import Any

import numpy as np

from boundby.stats import wilson_interval

CELLS = 2**16  # of the confidence from 0 to 1
UNIT = 2.0**-32  # in which confidences are summed: exact from 2**-8 on, where float32 has no finer steps
SQUARE_UNIT = 2.0**-40
BINS = 15  # as Guo et al. 2017
LEAST_ROWS = 30  # of a bin, to say something
BARS = 32  # of the distribution of the confidence; divides CELLS
ACCURACIES = (0.9, 0.95, 0.99)  # for which a threshold is looked for


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

    def as_dict(self) -> dict[str, Any]:
        """Return the errors over all rows, the bins, the thresholds and the distribution. At least one row is needed.

        `ece`: expected calibration error, the mean distance of confidence and share of right predictions over the bins,
        weighted by their rows (Naeini, Cooper & Hauskrecht 2015; of the predicted label, Guo et al. 2017; bins of equal
        mass, Nixon et al. 2019). `ece_by_chance` is what these bins would show on average if every confidence was
        right: the mean distance of a normal distribution, sqrt(2 / pi) standard deviations, per bin.
        `brier_score`: mean of (confidence - 1)² over right and confidence² over wrong predictions (Brier 1950, for the
        event that the predicted label is right; with two labels it is scikit-learn's `brier_score_loss`).
        """
        bins, rows, correct = self._bins(), int(self._rows.sum()), int(self._correct.sum())
        low, high = interval(correct, rows)
        return {
            "rows": rows,
            "accuracy": correct / rows,
            "accuracy_ci_low": low,
            "accuracy_ci_high": high,
            "mean_confidence": int(self._units.sum()) * UNIT / rows,
            "ece": sum(each["rows"] * abs(each["accuracy"] - each["mean_confidence"]) for each in bins) / rows,
            "ece_by_chance": sum(each["rows"] * _distance_by_chance(each) for each in bins) / rows,
            "brier_score": self._squares * SQUARE_UNIT / rows,
            "bins": bins,
            "thresholds": [_threshold(bins, rows, accuracy) for accuracy in ACCURACIES],
            "distribution": {
                "rows": self._rows.reshape(BARS, -1).sum(axis=1).tolist(),
                "correct": self._correct.reshape(BARS, -1).sum(axis=1).tolist(),
            },
        }

    def _bins(self) -> list[dict[str, Any]]:
        """Return bins of equal mass, the lowest confidence first; rows of one cell stay together."""
        below = np.cumsum(self._rows)
        rows = int(below[-1])
        wanted = max(1, min(BINS, rows // LEAST_ROWS))
        # The cell that reaches each share of the rows ends a bin; a full cell can reach several at once.
        ends = np.unique(np.searchsorted(below, [-(-rows * part // wanted) for part in range(1, wanted + 1)]))
        starts = [0, *(ends[:-1] + 1).tolist()]
        return [self._bin(start, int(end) + 1) for start, end in zip(starts, ends, strict=True)]

    def _bin(self, start: int, stop: int) -> dict[str, Any]:
        rows, correct = int(self._rows[start:stop].sum()), int(self._correct[start:stop].sum())
        filled = start + np.flatnonzero(self._rows[start:stop])
        low, high = interval(correct, rows)
        return {
            "confidence_from": int(filled[0]) / CELLS,
            "confidence_to": (int(filled[-1]) + 1) / CELLS,
            "rows": rows,
            "correct": correct,
            "mean_confidence": int(self._units[start:stop].sum()) * UNIT / rows,
            "accuracy": correct / rows,
            "accuracy_ci_low": low,
            "accuracy_ci_high": high,
            "has_few_rows": rows < LEAST_ROWS,
        }


def _distance_by_chance(one: dict[str, Any]) -> float:
    share = one["mean_confidence"]
    return math.sqrt(2 / math.pi * max(0.0, share * (1 - share)) / one["rows"])


def _threshold(bins: list[dict[str, Any]], rows: int, accuracy: float) -> dict[str, Any]:
    """Return the lowest start of a bin above which surely (95 %) at least this share of the predictions is right."""
    found: dict[str, Any] = {"accuracy_at_least": accuracy, "confidence": None}
    above = correct = 0
    for each in reversed(bins):
        above, correct = above + each["rows"], correct + each["correct"]
        low, high = interval(correct, above)
        if low >= accuracy:
            found |= {"confidence": each["confidence_from"], "rows": above, "share": above / rows}
            found |= {"accuracy": correct / above, "accuracy_ci_low": low, "accuracy_ci_high": high}
    reason = "above no confidence are there enough right predictions to be sure of it"
    return found if found["confidence"] is not None else {**found, "reason": reason}


def interval(part: int, whole: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval, without the digits in which libraries of two machines may differ."""
    low, high = wilson_interval(part, whole)
    return round(low, 9), round(high, 9)
