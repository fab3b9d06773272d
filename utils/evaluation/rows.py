"""Read the normalised dataset by ranges of rows: a shard's rows and no others are in memory."""

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from utils.command import InputError, PipelineError, contents
from utils.data import Row, Rows, scan
from utils.evaluation.plan import Identity, Shard
from utils.models import DOWNLOAD

RESTORE = f"restore what was planned for, or {DOWNLOAD} and evaluate anew"


class Extremes:
    """The `count` rows with the fewest and with the most tokens of all that it sees; `tokens` are those of all."""

    def __init__(self, count: int, lengths_of: Callable[[Sequence[str]], np.ndarray]) -> None:
        self._count, self._lengths_of = count, lengths_of
        self.tokens = 0
        self._shortest: list[tuple[int, int]] = []  # heaps of tokens, less than none for the shortest, and offset
        self._longest: list[tuple[int, int]] = []

    def see(self, rows: Sequence[Row]) -> None:
        """Take the rows into account. Raises PipelineError, with the rows, for a text that has no tokens."""
        try:
            lengths = self._lengths_of([row.text for row in rows])
        except ValueError as error:
            raise PipelineError(f"{span(rows[0].row_id, rows[-1].row_id)}: {error}") from error
        self.tokens += int(lengths.sum())
        for row, length in zip(rows, lengths.tolist(), strict=True):
            for kept, key in ((self._shortest, -length), (self._longest, length)):
                if len(kept) < self._count:
                    heapq.heappush(kept, (key, row.offset))
                elif key > kept[0][0]:
                    heapq.heapreplace(kept, (key, row.offset))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The bytes of the dataset where these rows begin, ascending."""
        return tuple(sorted({offset for _, offset in (*self._shortest, *self._longest)}))


def evaluated_positions(dataset_rows: int, rows: int, seed: int | None) -> np.ndarray | None:
    """Return the positions of the evaluated rows, ascending; None when it is every row."""
    return None if seed is None else np.sort(seeded_order(dataset_rows, seed)[:rows])


def seeded_order(dataset_rows: int, seed: int) -> np.ndarray:
    """Return all positions in a random order; the first n of them are the sample of n rows."""
    return np.random.default_rng(seed).permutation(dataset_rows)


def split(path: Path, identity: Identity, shard_rows: int, extremes: Extremes | None = None) -> Iterator[Shard]:
    """Yield consecutive shards of at most `shard_rows` rows, in one pass that `extremes` sees.

    Raises InputError when the dataset is not the one of `identity`: too short, too long or with unordered row ids.
    """
    positions = evaluated_positions(identity.dataset_rows, identity.rows, identity.sample_seed)
    chosen = _chosen(scan(path), positions)
    last_id = -1
    for number, start in enumerate(range(0, identity.rows, shard_rows)):
        size = min(shard_rows, identity.rows - start)
        read = list(islice(chosen, size))
        if len(read) < size:
            raise InputError(f"{path}: ends after {start + len(read)} of {identity.rows} rows to evaluate; {DOWNLOAD}")
        if extremes is not None:
            extremes.see(read)
        rows = Rows.of(read)
        row_ids = rows.row_ids
        if row_ids[0] <= last_id or (np.diff(row_ids) <= 0).any():
            raise InputError(f"{path}: row_id does not ascend in the rows {row_ids[0]} to {row_ids[-1]}; {DOWNLOAD}")
        last_id = int(row_ids[-1])
        sha256 = rows_sha256(row_ids, rows.labels, rows.texts_sha256)
        yield Shard(number, start, start + size, read[0].offset, int(row_ids[0]), last_id, sha256)
    if positions is None and next(chosen, None) is not None:
        raise InputError(f"{path}: has more than the {identity.rows} rows that its receipt states; {DOWNLOAD}")


def require_planned(path: Path, identity: Identity) -> None:
    """Raise InputError unless the dataset at `path` has just the bytes that are planned for."""
    try:
        digest = contents.sha256(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error}); {DOWNLOAD}") from None
    if digest != identity.dataset_sha256:
        raise InputError(
            f"{path}: has changed under the evaluation (sha256 {digest[:12]}, planned was "
            f"{identity.dataset_sha256[:12]}); {RESTORE}"
        )


def read(path: Path, shard: Shard, positions: np.ndarray | None) -> Rows:
    """Return the rows of `shard`. Raises InputError when they are not those that were planned."""
    wanted = None if positions is None else positions[shard.start : shard.stop]
    first = shard.start if wanted is None else int(wanted[0])
    rows = Rows.of(list(islice(_chosen(scan(path, shard.offset, first), wanted), shard.rows)))
    if rows_sha256(rows.row_ids, rows.labels, rows.texts_sha256) != shard.rows_sha256:
        raise InputError(
            f"{path}: its rows {shard.first_row_id} to {shard.last_row_id} are not those that were planned; {RESTORE}"
        )
    return rows


def first_rows(path: Path, shards: Sequence[Shard], rows: int) -> Rows:
    """Return about `rows` rows, from the starts of shards that are spread over the dataset."""
    chosen = [shards[number] for number in sorted({round(index) for index in np.linspace(0, len(shards) - 1, 16)})]
    count = -(-rows // len(chosen))
    return Rows.of([row for shard in chosen for row in islice(scan(path, shard.offset), min(count, shard.rows))])


def first_texts(path: Path, shards: Sequence[Shard], rows: int) -> Sequence[str]:
    """Return the texts of `first_rows`."""
    return first_rows(path, shards, rows).texts


def check_texts(path: Path, shards: Sequence[Shard], offsets: Sequence[int], rows: int) -> Sequence[str]:
    """Return what a predictor checks itself on: about `rows` texts from all over, and those that begin at `offsets`."""
    texts = [*first_texts(path, shards, rows)]
    for offset in offsets:
        texts += [row.text for row in islice(scan(path, offset), 1)]
    return texts


def span(first_row_id: int, last_row_id: int) -> str:
    """Return which rows these are, as a message begins."""
    return f"rows {first_row_id} to {last_row_id} of the dataset"


def rows_sha256(row_ids: np.ndarray, labels: np.ndarray | None, texts_sha256: str) -> str:
    """Return a hash of which rows these are, in which order, with their texts and, where they have any, labels."""
    columns = [row_ids] if labels is None else [row_ids, labels]
    return hashlib.sha256(np.stack(columns).astype("<i8").tobytes() + texts_sha256.encode()).hexdigest()


def _chosen(rows: Iterator[Row], positions: np.ndarray | None) -> Iterator[Row]:
    if positions is None:
        yield from rows
        return
    wanted = iter(positions.tolist())
    following = next(wanted, None)
    for row in rows:
        if following is None:
            return
        if row.position == following:
            yield row
            following = next(wanted, None)
