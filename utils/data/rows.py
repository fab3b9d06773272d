"""The rows of the normalised dataset, as the measuring steps read them."""

import csv
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from utils.artifacts import Layout
from utils.data.tables import LONGEST_CELL
from utils.errors import InputError
from utils.model_source import DOWNLOAD

COLUMNS = ("row_id", "text", "labels", "label_name")


@dataclass(frozen=True, eq=False)
class Rows:
    """Texts with their labels, in the order of the source; `row_ids` are the row numbers there."""

    row_ids: np.ndarray
    texts: Sequence[str]
    labels: np.ndarray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.texts)

    def take(self, positions: np.ndarray) -> "Rows":
        """Return the rows at `positions`, in that order."""
        return Rows(self.row_ids[positions], [self.texts[position] for position in positions], self.labels[positions])


def load_texts(layout: Layout, limit: int | None = None, sha256: str | None = None) -> Rows:
    """Return the normalised rows, the first `limit` of them if given; texts are exactly those of the source.

    With `sha256` they are proven to be read from a file of just that content. Raises InputError where not.
    """
    csv.field_size_limit(LONGEST_CELL)
    row_ids: list[int] = []
    texts: list[str] = []
    labels: list[int] = []
    try:
        with layout.dataset.open("rb") as file:
            digest = hashlib.sha256()

            def lines() -> Iterator[str]:
                for line in file:
                    digest.update(line)
                    yield line.decode("utf-8")

            reader = csv.reader(lines(), strict=True)
            if next(reader, None) != list(COLUMNS):
                raise InputError(f"{layout.dataset}: does not have the columns {', '.join(COLUMNS)}; {DOWNLOAD}")
            for row_id, text, label, _ in islice(reader, limit):
                row_ids.append(int(row_id))
                texts.append(text)
                labels.append(int(label))
            while sha256 and (rest := file.read(2**20)):
                digest.update(rest)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{layout.dataset}: cannot be read ({error}); {DOWNLOAD}") from None
    if sha256 not in (None, digest.hexdigest()):
        raise InputError(f"{layout.dataset}: changed while it was read; {DOWNLOAD}")
    return Rows(np.array(row_ids, dtype=np.int64), texts, np.array(labels, dtype=np.int64))


def sample(rows: Rows, size: int, seed: int = 0) -> Rows:
    """Return `size` rows in a random order, all of them when there are not so many.

    Samples of one seed are nested: the smaller is the start of the larger.
    """
    return rows.take(np.random.default_rng(seed).permutation(len(rows))[:size])
