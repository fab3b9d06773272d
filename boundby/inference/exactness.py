"""What another precision does to the answers: agreement, logits, accuracy, and how close the calls were."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from boundby.stats import CONFIDENCE, wilson_interval

SMALLEST_MARGINS = 10


@dataclass(frozen=True)
class ExactnessReport:
    """Logits of one precision beside the reference's: one text at a time, float32, the stock forward.

    `agreement_low` and `agreement_high` end a 95 % interval (Wilson) for all texts that the sample stands for; where
    the sample is all texts they are the share itself. A margin is the lead of the reference's best logit over its
    second. Accuracies are None without labels; the interval of their difference is of the pairs (Agresti & Min 2005).
    """

    precision: str
    rows: int
    same_labels: int
    agreement: float
    agreement_low: float
    agreement_high: float
    max_abs_logit_difference: float
    mean_abs_logit_difference: float
    smallest_margins: tuple[float, ...]
    reference_accuracy: float | None = None
    accuracy: float | None = None
    accuracy_difference_low: float | None = None
    accuracy_difference_high: float | None = None

    @property
    def accuracy_difference(self) -> float | None:
        """Accuracy less that of the reference."""
        if self.accuracy is None or self.reference_accuracy is None:
            return None
        return self.accuracy - self.reference_accuracy

    @property
    def guard_margin(self) -> float:
        """The margin below which a label can flip: twice the largest difference of a logit that was seen."""
        return 2 * self.max_abs_logit_difference

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "accuracy_difference": self.accuracy_difference, "guard_margin": self.guard_margin}


def margins(logits: np.ndarray) -> np.ndarray:
    """Return how far the best logit of each row leads the second."""
    two_best = np.partition(logits, -2, axis=1)[:, -2:]
    return two_best[:, 1] - two_best[:, 0]


def compare_logits(
    precision: str,
    found: np.ndarray,
    reference: np.ndarray,
    labels: Sequence[int] | None = None,
    is_all: bool = False,
) -> ExactnessReport:
    """Return how `found` compares with `reference`, both `[rows, labels]`; `is_all`: there are no other texts.

    Raises ValueError where there is nothing to compare or a value is not finite.
    """
    if found.shape != reference.shape or not len(found):
        raise ValueError(f"logits of shape {found.shape} cannot be compared with {reference.shape}")
    if not (np.isfinite(found).all() and np.isfinite(reference).all()):
        raise ValueError(f"logits in {precision} or in the reference are not finite")
    mine, theirs = found.argmax(axis=1), reference.argmax(axis=1)
    rows, same = len(found), int((mine == theirs).sum())
    low, high = (same / rows, same / rows) if is_all else wilson_interval(same, rows)
    difference = np.abs(found.astype(np.float64) - reference)
    return ExactnessReport(
        precision,
        rows,
        same,
        same / rows,
        low,
        high,
        float(difference.max()),
        float(difference.mean()),
        tuple(np.sort(margins(reference))[:SMALLEST_MARGINS].tolist()),
        **({} if labels is None else _accuracies(mine == np.asarray(labels), theirs == np.asarray(labels))),
    )


def _accuracies(mine: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    rows = len(mine)
    gained, lost = int((mine & ~theirs).sum()), int((~mine & theirs).sum())
    gained_half, lost_half, n = gained + 0.5, lost + 0.5, rows + 2  # half a pair more in each of the four cells
    centre = (gained_half - lost_half) / n
    reach = float(ndtri(0.5 + CONFIDENCE / 2)) * math.sqrt(gained_half + lost_half - n * centre**2) / n
    return {
        "reference_accuracy": float(theirs.mean()),
        "accuracy": float(mine.mean()),
        "accuracy_difference_low": centre - reach,
        "accuracy_difference_high": centre + reach,
    }
