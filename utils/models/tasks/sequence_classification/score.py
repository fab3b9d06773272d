"""Count and score predicted labels: integers, so that parts can be merged in any order."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import sklearn.metrics

from boundby.timing import wilson_interval
from utils.command import EvaluationFolder
from utils.models.tasks.sequence_classification import quality
from utils.models.tasks.sequence_classification.calibration import Reliability, interval
from utils.models.tasks.sequence_classification.quality import ClassScore, ConfidentMistake, ConfusedPair

COLUMNS = (
    "row_id",
    "label",
    "prediction",
    "label_name",
    "prediction_name",
    "correct",
    "confidence",
    "margin",
    "n_tokens",
)
NO_ROW, NEVER_PREDICTED = "no row has this label", "it was never predicted"
PAIRS = 20  # of classes that are most confused
MISTAKES = 20
LONGEST_TEXT = 500  # characters
CUT = "…"
NO_LABELS = "the dataset has no labels"


class SubsetScores(msgspec.Struct, frozen=True):
    """The scores of the first rows of the sample."""

    samples: int
    accuracy: float
    f1_macro: float
    f1_weighted: float


class Scores(msgspec.Struct, frozen=True):
    """The scores of all parts, as the metrics hold them beside what they cost; older ones lack the calibration.

    Where the dataset has no labels they are None, and `accuracy_reason` says so.
    """

    samples: int
    correct: int | None = None
    accuracy: float | None = None
    f1_macro: float | None = None
    f1_weighted: float | None = None
    accuracy_ci_low: float | None = None
    accuracy_ci_high: float | None = None
    accuracy_reason: str | None = None
    mean_confidence: float | None = None
    ece: float | None = None
    ece_by_chance: float | None = None
    brier_score: float | None = None
    samples_of: tuple[SubsetScores, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Raise ValueError where an accuracy stands without what belongs to it."""
        ends = (self.accuracy_ci_low, self.accuracy_ci_high, self.correct, self.f1_macro, self.f1_weighted)
        if self.accuracy is not None and None in ends:
            raise ValueError("an accuracy has an interval, a count and F1 scores")

    def accuracy_with_ends(self) -> str:
        """Return the accuracy with its 95 % interval."""
        return f"{self.accuracy:.4f} [{self.accuracy_ci_low:.4f}, {self.accuracy_ci_high:.4f}]"


class Score:
    """The counts of the parts seen so far; memory does not grow with the rows."""

    def __init__(self, labels: Sequence[str], subset_sizes: Sequence[int]) -> None:
        self._labels = labels
        self._confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)
        self._subsets = {size: np.zeros_like(self._confusion) for size in subset_sizes}
        self._reliability, self._mistakes = Reliability(), ConfidentMistakes()
        self._unlabelled = 0

    def add(self, table: pa.Table, texts: Sequence[str], ranks: np.ndarray | None) -> None:
        """Count a part, with the texts of its rows and their places in the seeded sample, None where there is none."""
        if table["label"].null_count:
            self._unlabelled += table.num_rows
            return
        labels, predictions = table["label"].to_numpy(), table["prediction"].to_numpy()
        classes = len(self._labels)
        self._confusion += counted(labels, predictions, classes)
        self._reliability.add(table["confidence"].to_numpy(), labels == predictions)
        self._mistakes.add(table, texts)
        for size, counts in self._subsets.items():
            assert ranks is not None  # subsets are of a seeded sample
            inside = ranks < size
            if inside.any():
                counts += counted(labels[inside], predictions[inside], classes)

    def rows(self, table: pa.Table) -> Iterator[dict[str, int | str | None]]:
        """Yield the rows of a part as `predictions.csv` has them."""
        for row in table.drop_columns(["logits"]).to_pylist():
            label, prediction = row["label"], row["prediction"]
            yield {
                **row,
                "label_name": None if label is None else self._labels[label],
                "prediction_name": self._labels[prediction],
                "correct": None if label is None else int(label == prediction),
                "confidence": f"{row['confidence']:.6f}",
                "margin": f"{row['margin']:.6f}",
            }

    def metrics(self) -> Scores:
        """Return the scores of all parts."""
        if self._unlabelled:
            return Scores(self._unlabelled, accuracy_reason=NO_LABELS)
        correct, rows = int(np.trace(self._confusion)), int(self._confusion.sum())
        low, high = wilson_interval(correct, rows)
        calibration = self._reliability.calibration()
        subsets = tuple(SubsetScores(size, **scores(counts)) for size, counts in self._subsets.items())
        return Scores(
            samples=rows,
            correct=correct,
            **scores(self._confusion),  # type: ignore[arg-type]  # its keys are those of floats
            accuracy_ci_low=low,
            accuracy_ci_high=high,
            mean_confidence=calibration.mean_confidence,
            ece=calibration.ece,
            ece_by_chance=calibration.ece_by_chance,
            brier_score=calibration.brier_score,
            samples_of=subsets or msgspec.UNSET,
        )

    def write(self, folder: EvaluationFolder, plan: str) -> None:
        """Write the tables of how right the predictions are, where that is known; `plan` is the fingerprint."""
        if self._unlabelled:
            return
        record = quality.Record(
            schema_version=quality.SCHEMA_VERSION,
            plan=plan,
            classes=per_class(self._confusion, self._labels),
            most_confused=most_confused(self._confusion, self._labels, PAIRS),
            confident_mistakes=self._mistakes.surest(self._labels),
            calibration=self._reliability.calibration(),
        )
        quality.write(folder, quality.Quality(record, self._confusion))


def hits(table: pa.Table) -> int | None:
    """Return how many rows of a part got their label; None where they have none."""
    if table["label"].null_count:
        return None
    return int((table["label"].to_numpy() == table["prediction"].to_numpy()).sum())


def pace(correct: int | None, rows: int) -> str:
    """Return how good the rows so far are, in a few words."""
    return f"{rows:,} texts" if correct is None else f"accuracy {correct / rows:.4f}"


def described(metrics: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the score as titles and values for terminal and report; nothing where there is no score."""
    score = msgspec.convert(metrics, Scores)
    if score.accuracy is None:
        return []
    return [
        ("Accuracy", f"{score.accuracy_with_ends()} ({score.correct:,} correct; 95 % interval)"),
        ("F1-Score (Macro)", f"{score.f1_macro:.4f}"),
        ("F1-Score (Weighted)", f"{score.f1_weighted:.4f}"),
    ]


def headline(metrics: Mapping[str, object]) -> str:
    """Return the score in one line."""
    score = msgspec.convert(metrics, Scores)
    if score.accuracy is None:
        return f"unknown: {score.accuracy_reason}"
    return f"{score.accuracy_with_ends()}, F1 macro {score.f1_macro:.4f}, on {score.samples:,} texts"


def table(row_ids: np.ndarray, labels: np.ndarray | None, lengths: np.ndarray, logits: np.ndarray) -> pa.Table:
    """Return the rows of a part: prediction, confidence (softmax) and margin (lead of the best logit) from logits."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    two_best = np.partition(logits, -2, axis=1)[:, -2:]
    offsets = np.arange(0, logits.size + 1, logits.shape[1], dtype=np.int32)
    return pa.table(
        {
            "row_id": pa.array(row_ids, pa.int64()),
            "label": pa.nulls(len(row_ids), pa.int32()) if labels is None else pa.array(labels, pa.int32()),
            "prediction": pa.array(logits.argmax(axis=1), pa.int32()),
            "confidence": pa.array(probabilities.max(axis=1), pa.float32()),
            "margin": pa.array(two_best[:, 1] - two_best[:, 0], pa.float32()),
            "n_tokens": pa.array(lengths, pa.int32()),
            "logits": pa.ListArray.from_arrays(offsets, pa.array(logits.ravel(), pa.float32())),
        }
    )


def fault(table: pa.Table, labels: int) -> str | None:
    """Return what is wrong with the rows of a part, None when nothing is: labels in range, finite logits."""
    named = ("prediction",) if table["label"].null_count else ("label", "prediction")
    for name in named:
        values = table[name].to_numpy()
        if values.min() < 0 or values.max() >= labels:
            wrong = int(((values < 0) | (values >= labels)).argmax())
            return f"row {table['row_id'][wrong]}: {name} {values[wrong]} is not one of {labels} labels"
    logits = table["logits"].combine_chunks()
    values = logits.flatten().to_numpy()
    if values.size != labels * table.num_rows:
        return f"{values.size} logits for {table.num_rows} rows and {labels} labels"
    broken = ~np.isfinite(values.reshape(-1, labels)).all(axis=1)
    return f"row {table['row_id'][int(broken.argmax())]} has logits that are not finite" if broken.any() else None


def counted(labels: np.ndarray, predictions: np.ndarray, classes: int) -> np.ndarray:
    """Return how many rows of each label (line) got each prediction (column)."""
    return np.asarray(sklearn.metrics.confusion_matrix(labels, predictions, labels=np.arange(classes)))


def scores(confusion: np.ndarray) -> dict[str, float]:
    """Return accuracy and F1 of a confusion matrix with at least one row.

    A class that is neither a label nor a prediction of any row does not count; a class without a hit has an F1 of 0.
    """
    labels, predictions, rows = _cells(confusion)
    f1 = {
        f"f1_{average}": float(
            sklearn.metrics.f1_score(labels, predictions, average=average, sample_weight=rows, zero_division=0)
        )
        for average in ("macro", "weighted")
    }
    return {"accuracy": float(sklearn.metrics.accuracy_score(labels, predictions, sample_weight=rows)), **f1}


def per_class(confusion: np.ndarray, names: Sequence[str]) -> tuple[ClassScore, ...]:
    """Return counts, precision, recall (with Wilson's 95 % interval) and F1 of each class, in the order of the labels.

    F1 is 2 hits / (rows with the label + predictions of it), as in `scores`, so it is 0 for a class that has rows and
    is never predicted.
    """
    labels, predictions, rows = _cells(confusion)
    precision, recall, f1, _ = sklearn.metrics.precision_recall_fscore_support(
        labels, predictions, labels=np.arange(len(names)), sample_weight=rows, zero_division=np.nan
    )
    counts = zip(
        confusion.sum(axis=1).tolist(), confusion.sum(axis=0).tolist(), np.diag(confusion).tolist(), strict=True
    )
    classes = []
    for label, (support, predicted, correct) in enumerate(counts):
        low, high = interval(correct, support) if support else (None, None)
        reasons = [] if support else [f"recall: {NO_ROW}"]
        reasons += [] if predicted else [f"precision: {NEVER_PREDICTED}"]
        reasons += [] if support or predicted else ["f1: neither"]
        classes.append(
            ClassScore(
                label,
                names[label],
                support,
                predicted,
                correct,
                _known(precision[label]),
                _known(recall[label]),
                low,
                high,
                _known(f1[label]),
                "; ".join(reasons) or None,
            )
        )
    return tuple(classes)


def _known(share: float) -> float | None:
    return None if np.isnan(share) else float(share)


def _cells(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return label, prediction and rows of each cell of the matrix that is not empty, as scikit-learn takes weights."""
    labels, predictions = np.nonzero(confusion)
    return labels, predictions, confusion[labels, predictions]


def most_confused(confusion: np.ndarray, names: Sequence[str], most: int) -> tuple[ConfusedPair, ...]:
    """Return the `most` pairs of a label and a wrong prediction that most rows got, the largest first.

    Of equal counts the larger share comes first, then the smaller label.
    """
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    support = confusion.sum(axis=1)
    labels, predictions = np.nonzero(wrong)
    rows = wrong[labels, predictions]
    first = np.lexsort((predictions, labels, support[labels], -rows))[:most]
    pairs = zip(labels[first].tolist(), predictions[first].tolist(), rows[first].tolist(), strict=True)
    return tuple(
        ConfusedPair(names[label], names[prediction], count, int(support[label]), count / int(support[label]))
        for label, prediction, count in pairs
    )


class Mistake(NamedTuple):
    """A wrong prediction; the larger of two is the surer one, and of equally sure ones that with the smaller row id."""

    confidence: float
    margin: float
    negative_row_id: int
    label: int
    prediction: int
    n_tokens: int
    text: str


class ConfidentMistakes:
    """The `MISTAKES` surest mistakes of the parts seen so far."""

    def __init__(self) -> None:
        self._heap: list[Mistake] = []

    def add(self, table: pa.Table, texts: Sequence[str]) -> None:
        """Take in a part and the texts of its rows."""
        columns = {name: table[name].to_numpy() for name in table.column_names if name != "logits"}
        wrong = np.flatnonzero(columns["label"] != columns["prediction"])
        keys = [-columns[name][wrong] for name in ("margin", "confidence")]
        for row in wrong[np.lexsort(keys)[:MISTAKES]].tolist():  # rows ascend, equal ones keep their order
            mistake = Mistake(  # type: ignore[call-arg]  # it cannot count what a star yields
                *(columns[name][row].item() for name in ("confidence", "margin")),
                -columns["row_id"][row].item(),
                *(columns[name][row].item() for name in ("label", "prediction", "n_tokens")),
                texts[row],
            )
            heapq.heappush(self._heap, mistake)
            if len(self._heap) > MISTAKES:
                heapq.heappop(self._heap)

    def surest(self, names: Sequence[str]) -> tuple[ConfidentMistake, ...]:
        """Return the mistakes with texts, long ones cut, and the names of the labels, the surest first."""
        return tuple(
            ConfidentMistake(
                row_id=-mistake.negative_row_id,
                label_name=names[mistake.label],
                prediction_name=names[mistake.prediction],
                confidence=round(mistake.confidence, 6),
                margin=round(mistake.margin, 6),
                n_tokens=mistake.n_tokens,
                text=mistake.text if len(mistake.text) <= LONGEST_TEXT else f"{mistake.text[: LONGEST_TEXT - 1]}{CUT}",
            )
            for mistake in sorted(self._heap, reverse=True)
        )
