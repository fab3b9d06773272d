"""The wrong predictions that the model is surest of: wrong labels, and texts that it misunderstands."""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

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
    text: str


class ConfidentMistakes:
    """The `KEPT` surest mistakes of the parts seen so far."""

    def __init__(self) -> None:
        self._heap: list[Mistake] = []

    def add(self, table: pa.Table, texts: Sequence[str]) -> None:
        """Take in a part and the texts of its rows."""
        columns = {name: table[name].to_numpy() for name in table.column_names if name != "logits"}
        wrong = np.flatnonzero(columns["label"] != columns["prediction"])
        keys = [-columns[name][wrong] for name in ("margin", "confidence")]
        for place in wrong[np.lexsort(keys)[:KEPT]].tolist():  # rows ascend, and sorting keeps the order of equal ones
            found = Mistake(
                *(columns[name][place].item() for name in ("confidence", "margin")),
                -columns["row_id"][place].item(),
                *(columns[name][place].item() for name in ("label", "prediction", "n_tokens")),
                texts[place],
            )
            heapq.heappush(self._heap, found)
            if len(self._heap) > KEPT:
                heapq.heappop(self._heap)

    def described(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the mistakes with texts and the names of the labels, the surest first."""
        return [_described(mistake, names) for mistake in sorted(self._heap, reverse=True)]


def _described(mistake: Mistake, names: Sequence[str]) -> dict[str, Any]:
    text = mistake.text
    return {
        "row_id": -mistake.negative_row_id,
        "label_name": names[mistake.label],
        "prediction_name": names[mistake.prediction],
        "confidence": round(mistake.confidence, 6),
        "margin": round(mistake.margin, 6),
        "n_tokens": mistake.n_tokens,
        "text": text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}{CUT}",
    }
