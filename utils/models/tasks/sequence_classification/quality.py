"""What the predictions are like beyond one number: by class, by pair of classes, by confidence, and where they fail.

All of it is a function of the parts and the dataset: the same bytes wherever it is written.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from boundby import files
from boundby.formatting import Missing
from utils.command import EvaluationFolder
from utils.models.tasks.sequence_classification.calibration import Calibration

SCHEMA_VERSION = 1
CORNER = "label \\ prediction"  # of the table of the confusion matrix


class ClassScore(msgspec.Struct, frozen=True):
    """Counts and scores of a class; a share of nothing is None, and `reason` says of what."""

    label: int
    label_name: str
    support: int
    predicted: int
    correct: int
    precision: float | None
    recall: float | None
    recall_ci_low: float | None
    recall_ci_high: float | None
    f1: float | None
    reason: str | None

    def __post_init__(self) -> None:
        """Raise ValueError where a class that has rows has no scores."""
        if self.support and None in (self.recall, self.f1):
            raise ValueError("a class that has rows has scores")


class ConfusedPair(msgspec.Struct, frozen=True):
    """A label and a wrong prediction that `rows` got; `share` is of the `support`, the rows with the label."""

    label_name: str
    prediction_name: str
    rows: int
    support: int
    share: float


class ConfidentMistake(msgspec.Struct, frozen=True):
    """A wrong prediction with its text."""

    row_id: int
    label_name: str
    prediction_name: str
    confidence: float
    margin: float
    n_tokens: int
    text: str


class Record(msgspec.Struct, frozen=True):
    """What `quality.json` holds; `plan` is the fingerprint."""

    schema_version: int
    plan: str
    classes: tuple[ClassScore, ...]
    most_confused: tuple[ConfusedPair, ...]
    confident_mistakes: tuple[ConfidentMistake, ...]
    calibration: Calibration


@dataclass(frozen=True, eq=False)
class Quality:
    """What `quality.json` says, and the matrix: how many rows of each label (line) got each prediction (column)."""

    record: Record
    confusion: np.ndarray

    @property
    def names(self) -> list[str]:
        """The names of the classes in the order of the matrix."""
        return [score.label_name for score in self.record.classes]


def write(folder: EvaluationFolder, quality: Quality) -> None:
    """Write the tables for people and, last, `quality.json` for programs."""
    record = quality.record
    _table(folder.per_class, record.classes, ClassScore)
    matrix = [dict(zip(quality.names, line, strict=True)) for line in quality.confusion.tolist()]
    lines = [{CORNER: name, **line} for name, line in zip(quality.names, matrix, strict=True)]
    files.write_csv(folder.confusion_matrix, lines, [CORNER, *quality.names])
    _table(folder.confident_mistakes, record.confident_mistakes, ConfidentMistake)
    files.write_json(folder.quality, msgspec.to_builtins(record))


def _table(path: Path, lines: Sequence[msgspec.Struct], kind: type[msgspec.Struct]) -> None:
    files.write_csv(path, map(msgspec.to_builtins, lines), kind.__struct_fields__)


def read(folder: EvaluationFolder, plan: str | None) -> Quality | Missing:
    """Return what was written for this plan, or why there is none."""
    name = folder.quality.name
    try:
        content = files.read_json(folder.quality)
        if content["schema_version"] != SCHEMA_VERSION:
            return Missing(f"{name} is of version {content['schema_version']}, this program reads {SCHEMA_VERSION}")
        record = msgspec.convert(content, Record)
        if record.plan != plan:
            return Missing(f"{name} is of another evaluation than the metrics")
        with folder.confusion_matrix.open(encoding="utf-8", newline="") as file:
            _, *lines = csv.reader(file)
        counts = np.array([[int(cell) for cell in line[1:]] for line in lines], dtype=np.int64)
        if counts.shape != (len(record.classes),) * 2:
            return Missing(f"{folder.confusion_matrix.name} and {name} are not of the same classes")
        return Quality(record, counts)
    except FileNotFoundError as error:
        return Missing(f"there is no {folder.path.name}/{error.filename.rpartition('/')[2]}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:  # msgspec's is a ValueError
        return Missing(f"{name} or {folder.confusion_matrix.name} cannot be read: {error!r}")
