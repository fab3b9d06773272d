"""What an evaluation says of its predictions, for the tests of pictures and report."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.baseline_document import PLAN
from utils.command.artifacts import EvaluationFolder
from utils.models.tasks.sequence_classification import quality, score
from utils.models.tasks.sequence_classification.calibration import Calibration, Reliability

NAMES = ("negative", "neutral", "positive")
COUNTS = np.array([[90, 8, 2], [30, 60, 0], [0, 0, 0]])


def reliability(rows: int = 3000, overconfident: float = 0.0, seed: int = 0) -> Calibration:
    """Return the calibration of so many predictions that are right as often as they say, less `overconfident`."""
    source = np.random.default_rng(seed)
    confidences = source.uniform(0.4, 1.0, rows).astype(np.float32)
    result = Reliability()
    result.add(confidences, source.random(rows) < confidences - overconfident)
    return result.calibration()


def mistakes(count: int = 2, text: str = "a text", name: str = "neutral") -> tuple[quality.ConfidentMistake, ...]:
    return tuple(
        quality.ConfidentMistake(7 * number, name, "negative", 0.99 - number / 100, 4.5, 5, f"{text} {number}")
        for number in range(count)
    )


def store(folder: EvaluationFolder, names: Sequence[str] = NAMES, counts: np.ndarray = COUNTS, **changes: Any) -> None:
    """Write what `finalize` writes of the predictions of the plan that `baseline_document` speaks of."""
    content = {"plan": PLAN, "mistakes": mistakes(), "calibration": reliability(), **changes}
    classes, pairs = score.per_class(counts, names), score.most_confused(counts, names, score.PAIRS)
    record = quality.Record(1, content["plan"], classes, pairs, content["mistakes"], content["calibration"])
    quality.write(folder, quality.Quality(record, counts))


def random_counts(classes: int, rows: int, seed: int = 0) -> np.ndarray:
    source = np.random.default_rng(seed)
    labels, luck = source.integers(0, classes, rows), source.random(rows)
    near = np.minimum(labels // 3 * 3 + source.integers(0, 3, rows), classes - 1)
    predictions = np.where(luck < 0.85, labels, np.where(luck < 0.95, near, source.integers(0, classes, rows)))
    return score.counted(labels, predictions, classes)
