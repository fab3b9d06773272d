"""Count predictions by label, and score the counts: integers, so that parts can be merged in any order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from boundby.stats import wilson_interval

NO_ROW, NEVER_PREDICTED = "no row has this label", "it was never predicted"
PER_CLASS_COLUMNS = (
    "label",
    "label_name",
    "support",
    "predicted",
    "correct",
    "precision",
    "recall",
    "recall_ci_low",
    "recall_ci_high",
    "f1",
    "reason",
)


def counted(labels: np.ndarray, predictions: np.ndarray, classes: int) -> np.ndarray:
    """Return how many rows of each label (line) got each prediction (column)."""
    cells = np.bincount(labels.astype(np.int64) * classes + predictions, minlength=classes * classes)
    return cells.reshape(classes, classes)


def scores(confusion: np.ndarray) -> dict[str, float]:
    """Return accuracy and F1 of a confusion matrix with at least one row.

    A class that is neither a label nor a prediction of any row does not count; a class without a hit has an F1 of 0.
    """
    hits, support = np.diag(confusion), confusion.sum(axis=1)
    occurrences = support + confusion.sum(axis=0)
    present = occurrences > 0
    f1 = 2 * hits[present] / occurrences[present]
    return {
        "accuracy": float(hits.sum() / support.sum()),
        "f1_macro": float(f1.mean()),
        "f1_weighted": float((f1 * support[present]).sum() / support.sum()),
    }


def per_class(confusion: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return counts, precision, recall (with Wilson's 95 % interval) and F1 of each class, in the order of the labels.

    A share of nothing is None, and `reason` says of what. F1 is 2 hits / (rows with the label + predictions of it), as
    in `scores`, so it is 0 for a class that has rows and is never predicted.
    """
    supports, predicted = confusion.sum(axis=1).tolist(), confusion.sum(axis=0).tolist()
    found = []
    for label, (name, hits) in enumerate(zip(names, np.diag(confusion).tolist(), strict=True)):
        support, predictions = supports[label], predicted[label]
        low, high = interval(hits, support) if support else (None, None)
        reasons = [] if support else [f"recall: {NO_ROW}"]
        reasons += [] if predictions else [f"precision: {NEVER_PREDICTED}"]
        reasons += [] if support or predictions else ["f1: neither"]
        values = (label, name, support, predictions, hits, _share(hits, predictions), _share(hits, support), low, high)
        f1, reason = _share(2 * hits, support + predictions), "; ".join(reasons) or None
        found.append(dict(zip(PER_CLASS_COLUMNS, (*values, f1, reason), strict=True)))
    return found


def most_confused(confusion: np.ndarray, names: Sequence[str], most: int) -> list[dict[str, Any]]:
    """Return the `most` pairs of a label and a wrong prediction that most rows got, the largest first.

    `share` is of the rows with the label. Of equal counts the larger share comes first, then the smaller label.
    """
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    support = confusion.sum(axis=1)
    labels, predictions = np.nonzero(wrong)
    rows = wrong[labels, predictions]
    first = np.lexsort((predictions, labels, support[labels], -rows))[:most]
    pairs = zip(labels[first].tolist(), predictions[first].tolist(), rows[first].tolist(), strict=True)
    return [
        {
            "label_name": names[label],
            "prediction_name": names[prediction],
            "rows": count,
            "support": int(support[label]),
            "share": count / int(support[label]),
        }
        for label, prediction, count in pairs
    ]


def interval(part: int, whole: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval, without the digits in which libraries of two machines may differ."""
    low, high = wilson_interval(part, whole)
    return round(low, 9), round(high, 9)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
