"""The wrong predictions that the model is surest of: wrong labels, and texts that it misunderstands."""

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from utils.evaluation import rows
from utils.evaluation.plan import Plan, Shard

KEPT = 20
LONGEST_TEXT = 500  # characters
CUT = "…"


class Mistake(NamedTuple):
    """A wrong prediction; the larger of two is the surer one, and of equally sure ones that with the smaller row id."""

    confidence: float
    margin: float
    negative_row_id: int
    label: int
    prediction: int
    n_tokens: int
    shard: int


class ConfidentMistakes:
    """The `KEPT` surest mistakes of the parts seen so far."""

    def __init__(self) -> None:
        self._heap: list[Mistake] = []

    def add(self, shard: Shard, table: pa.Table) -> None:
        """Take in the part of `shard`."""
        columns = {name: table[name].to_numpy() for name in table.column_names if name != "logits"}
        wrong = np.flatnonzero(columns["label"] != columns["prediction"])
        keys = [-columns[name][wrong] for name in ("margin", "confidence")]
        for place in wrong[np.lexsort(keys)[:KEPT]].tolist():  # rows ascend, and sorting keeps the order of equal ones
            found = Mistake(
                *(columns[name][place].item() for name in ("confidence", "margin")),
                -columns["row_id"][place].item(),
                *(columns[name][place].item() for name in ("label", "prediction", "n_tokens")),
                shard.id,
            )
            heapq.heappush(self._heap, found)
            if len(self._heap) > KEPT:
                heapq.heappop(self._heap)

    def described(self, plan: Plan, dataset: Path) -> list[dict[str, Any]]:
        """Return the mistakes with texts and names, the surest first; of the dataset a shard at a time is in memory.

        Raises InputError when the dataset is not the one that was planned.
        """
        texts = self._texts(plan, dataset)
        names = plan.identity.labels
        return [_described(each, names, texts[-each.negative_row_id]) for each in sorted(self._heap, reverse=True)]

    def _texts(self, plan: Plan, dataset: Path) -> dict[int, str]:
        identity, found = plan.identity, {}
        positions = rows.evaluated_positions(identity.dataset_rows, identity.rows, identity.sample_seed)
        for shard in sorted({each.shard for each in self._heap}):
            wanted = {-each.negative_row_id for each in self._heap if each.shard == shard}
            read = rows.read(dataset, plan.shards[shard], positions)
            found |= {row: text for row, text in zip(read.row_ids.tolist(), read.texts, strict=True) if row in wanted}
        return found


def _described(mistake: Mistake, names: Sequence[str], text: str) -> dict[str, Any]:
    return {
        "row_id": -mistake.negative_row_id,
        "label_name": names[mistake.label],
        "prediction_name": names[mistake.prediction],
        "confidence": round(mistake.confidence, 6),
        "margin": round(mistake.margin, 6),
        "n_tokens": mistake.n_tokens,
        "text": text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}{CUT}",
    }
