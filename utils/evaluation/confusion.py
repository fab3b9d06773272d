"""Count predictions by label, and score the counts: integers, so that parts can be merged in any order."""

import numpy as np


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
