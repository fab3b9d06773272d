"""Score vectors by retrieval: how often the nearest other text of a sample has the same label."""

import heapq
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa
from sklearn.neighbors import NearestNeighbors

from boundby import files
from boundby.timing import wilson_interval
from utils.command import EvaluationFolder

COLUMNS = ("row_id", "label", "label_name", "n_tokens")
SAMPLE = 5000  # rows among which neighbours are sought: 5000 x 5000 cosines take a second, 370,000 squared hours
SCATTER, RANGE = 2654435761, 2**32  # Knuth's multiplier: the sample is the same whatever order the parts come in
NO_LABELS, NO_NEIGHBOUR = "the dataset has no labels", "a single text has no neighbour"
LENGTH_TOLERANCE = 1e-3  # of a vector from one


class Neighbour(msgspec.Struct, frozen=True):
    """A row of the sample and its nearest neighbour there."""

    row_id: int
    label: int
    label_name: str
    neighbour_row_id: int
    neighbour_label_name: str
    cosine: str


class Scores(msgspec.Struct, frozen=True):
    """How many rows of the sample have a nearest neighbour with their label; None, and the reason, for a single row."""

    samples: int
    neighbour_rows: int
    neighbour_accuracy: float | None
    neighbour_accuracy_ci_low: float | None
    neighbour_accuracy_ci_high: float | None
    neighbour_accuracy_reason: str | None

    def __post_init__(self) -> None:
        """Raise ValueError where a share stands without its interval."""
        if self.neighbour_accuracy is not None and None in (
            self.neighbour_accuracy_ci_low, self.neighbour_accuracy_ci_high,
        ):  # fmt: skip
            raise ValueError("an accuracy has an interval")


class Score:
    """The vectors of a sample of the rows; memory does not grow with them."""

    def __init__(self, labels: Sequence[str], subset_sizes: Sequence[int]) -> None:
        self._labels = labels
        self._rows = 0
        self._unlabelled = False
        self._sample: list[tuple[int, int, int, int, bytes]] = []  # a heap: less its place, then the row

    def add(self, table: pa.Table, texts: Sequence[str], ranks: np.ndarray | None) -> None:
        """Take in the rows of a part that belong to the sample."""
        self._rows += table.num_rows
        if table["label"].null_count:
            self._unlabelled = True
            return
        ids = table["row_id"].to_numpy()
        places = ids.astype(np.uint64) * np.uint64(SCATTER) % np.uint64(RANGE)
        vectors = _vectors(table)
        labels, tokens = table["label"].to_numpy(), table["n_tokens"].to_numpy()
        for row in np.argsort(places)[:SAMPLE].tolist():
            key = (-int(places[row]), int(ids[row]), int(labels[row]), int(tokens[row]))
            if len(self._sample) < SAMPLE:
                heapq.heappush(self._sample, (*key, vectors[row].tobytes()))
            elif key > self._sample[0][:4]:
                heapq.heapreplace(self._sample, (*key, vectors[row].tobytes()))

    def rows(self, table: pa.Table) -> Iterator[dict[str, int | str | None]]:
        """Yield the rows of a part as `predictions.csv` has them; the vectors stay in the part."""
        for row in table.drop_columns(["logits"]).to_pylist():
            yield {**row, "label_name": None if row["label"] is None else self._labels[row["label"]]}

    def metrics(self) -> Scores:
        """Return the score of all parts."""
        rows = self._neighbours()
        same = sum(row.label_name == row.neighbour_label_name for row in rows)
        low, high = wilson_interval(same, len(rows)) if rows else (None, None)
        return Scores(
            samples=self._rows,
            neighbour_rows=len(rows),
            neighbour_accuracy=same / len(rows) if rows else None,
            neighbour_accuracy_ci_low=low,
            neighbour_accuracy_ci_high=high,
            neighbour_accuracy_reason=None if rows else NO_LABELS if self._unlabelled else NO_NEIGHBOUR,
        )

    def write(self, folder: EvaluationFolder, plan: str) -> None:
        """Write the nearest neighbour of each row of the sample, where its label is known."""
        if self._unlabelled:
            return
        rows = map(msgspec.to_builtins, self._neighbours())
        files.write_csv(folder.path / "neighbours.csv", rows, Neighbour.__struct_fields__)

    def _neighbours(self) -> list[Neighbour]:
        sample = sorted(self._sample, key=lambda row: row[1])
        if len(sample) < 2:
            return []
        vectors = np.stack([np.frombuffer(row[-1], dtype=np.float32) for row in sample])
        # No query points: scikit-learn then leaves each row itself out.
        distances, places = NearestNeighbors(n_neighbors=1, metric="cosine").fit(vectors).kneighbors()
        return [
            Neighbour(
                row_id=row[1],
                label=row[2],
                label_name=self._labels[row[2]],
                neighbour_row_id=sample[neighbour][1],
                neighbour_label_name=self._labels[sample[neighbour][2]],
                cosine=f"{1 - distance:.6f}",
            )
            for row, neighbour, distance in zip(sample, places[:, 0].tolist(), distances[:, 0].tolist(), strict=True)
        ]


def table(row_ids: np.ndarray, labels: np.ndarray | None, lengths: np.ndarray, logits: np.ndarray) -> pa.Table:
    """Return the rows of a part; `logits` are the vectors."""
    offsets = np.arange(0, logits.size + 1, logits.shape[1], dtype=np.int32)
    return pa.table(
        {
            "row_id": pa.array(row_ids, pa.int64()),
            "label": pa.nulls(len(row_ids), pa.int32()) if labels is None else pa.array(labels, pa.int32()),
            "n_tokens": pa.array(lengths, pa.int32()),
            "logits": pa.ListArray.from_arrays(offsets, pa.array(logits.ravel(), pa.float32())),
        }
    )


def fault(table: pa.Table, labels: int) -> str | None:
    """Return what is wrong with the rows of a part, None when nothing is: a vector is of length one."""
    lengths = np.linalg.norm(_vectors(table), axis=1)
    wrong = ~(np.abs(lengths - 1) <= LENGTH_TOLERANCE)  # so that NaN is wrong
    row = int(wrong.argmax())
    return f"row {table['row_id'][row]}: its vector is of length {lengths[row]}" if wrong.any() else None


def hits(table: pa.Table) -> None:
    """Return None: what is right shows when all vectors are there."""


def pace(correct: int | None, rows: int) -> str:
    """Return how far it is, in a few words."""
    return f"{rows:,} vectors"


def described(metrics: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the score as titles and values for terminal and report; nothing where there are no labels."""
    if metrics.get("neighbour_accuracy_reason") == NO_LABELS:
        return []
    return [("Nearest neighbour has the label", headline(metrics))]


def headline(metrics: Mapping[str, object]) -> str:
    """Return the score in one line."""
    score = msgspec.convert(metrics, Scores)
    if score.neighbour_accuracy is None:
        return f"unknown: {score.neighbour_accuracy_reason}"
    ends = f"[{score.neighbour_accuracy_ci_low:.4f}, {score.neighbour_accuracy_ci_high:.4f}]"
    return f"{score.neighbour_accuracy:.4f} {ends}, among {score.neighbour_rows:,} texts"


def _vectors(table: pa.Table) -> np.ndarray:
    return np.asarray(table["logits"].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1))
