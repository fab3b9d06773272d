"""What the predictions are like beyond one number: by class, by pair of classes, by confidence, and where they fail.

All of it is a function of the parts and the dataset: the same bytes wherever it is written.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from boundby import files
from utils.artifacts import EvaluationFolder

SCHEMA_VERSION = 1
CORNER = "label \\ prediction"  # of the table of the confusion matrix
MISTAKE_COLUMNS = ("row_id", "label_name", "prediction_name", "confidence", "margin", "n_tokens", "text")
PARTS = ("classes", "most_confused", "confident_mistakes", "calibration")

Record = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Quality:
    """What `quality.json` says, and the matrix: how many rows of each label (line) got each prediction (column)."""

    classes: Sequence[Record]
    most_confused: Sequence[Record]
    confident_mistakes: Sequence[Record]
    calibration: Record
    confusion: np.ndarray

    @property
    def names(self) -> list[str]:
        """The names of the classes in the order of the matrix."""
        return [each["label_name"] for each in self.classes]


def write(
    folder: EvaluationFolder,
    plan: str,
    counts: np.ndarray,
    classes: Sequence[Record],
    pairs: Sequence[Record],
    mistakes: Sequence[Record],
    calibration: Record,
) -> None:
    """Write the tables for people and, last, `quality.json` for programs; `plan` is the fingerprint."""
    names = [row["label_name"] for row in classes]
    lines = [
        {CORNER: name, **dict(zip(names, line, strict=True))} for name, line in zip(names, counts.tolist(), strict=True)
    ]
    files.write_csv(folder.per_class, classes, list(classes[0]))
    files.write_csv(folder.confusion_matrix, lines, [CORNER, *names])
    files.write_csv(folder.confident_mistakes, mistakes, MISTAKE_COLUMNS)
    record = {
        "schema_version": SCHEMA_VERSION,
        "plan": plan,
        "classes": classes,
        "most_confused": pairs,
        "confident_mistakes": mistakes,
        "calibration": calibration,
    }
    files.write_json(folder.quality, record)


def read(folder: EvaluationFolder, plan: str | None) -> tuple[Quality | None, str | None]:
    """Return what was written for this plan, or None and the reason."""
    name = folder.quality.name
    try:
        record = files.read_json(folder.quality)
        if record["schema_version"] != SCHEMA_VERSION:
            return None, f"{name} is of version {record['schema_version']}, this program reads {SCHEMA_VERSION}"
        if record["plan"] != plan:
            return None, f"{name} is of another evaluation than the metrics"
        with folder.confusion_matrix.open(encoding="utf-8", newline="") as file:
            _, *lines = csv.reader(file)
        counts = np.array([[int(cell) for cell in line[1:]] for line in lines], dtype=np.int64)
        if counts.shape != (len(record["classes"]),) * 2:
            return None, f"{folder.confusion_matrix.name} and {name} are not of the same classes"
        return Quality(*(record[part] for part in PARTS), counts), None
    except FileNotFoundError as error:
        return None, f"there is no {folder.path.name}/{error.filename.rpartition('/')[2]}"
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        return None, f"{name} or {folder.confusion_matrix.name} cannot be read: {error!r}"
