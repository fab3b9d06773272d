"""Keep the predictions of a shard: a Parquet file of its rows, and beside it the record that proves them.

The rows have the same bytes whoever predicts the shard. The record has their hash and cost, and is written first.
"""

import hashlib
import io
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from boundby import files
from utils.command import EvaluationFolder
from utils.evaluation.plan import Plan, Shard
from utils.evaluation.rows import rows_sha256


class Record(msgspec.Struct, frozen=True):
    """What a part is made of and what it cost: seconds in all and by phase, bytes at the peak, and where.

    `computed_texts` and `useful_tokens` count texts with equal ids once. `texts_sha256` is of the texts that were read,
    `part_sha256` of the Parquet file.
    """

    plan: str
    shard: int
    part_sha256: str
    texts_sha256: str
    tokens: int
    truncated: int | None
    computed_texts: int
    useful_tokens: int
    computed_tokens: int
    guarded_texts: int
    started_s: float  # on the monotonic clock of the host, which nobody sets
    seconds: float
    phases_s: dict[str, float]
    host: str
    device: str
    device_id: str
    device_peak_bytes: int | None
    process_peak_bytes: int | None
    memory_reasons: tuple[str, ...]
    out_of_memory: int

    @property
    def span(self) -> tuple[float, float]:
        """Start and length in seconds, to be compared within one host alone."""
        return self.started_s, self.seconds


@dataclass(frozen=True)
class Part:
    """The predictions of one shard, in the order of its rows, and their record."""

    table: pa.Table
    record: Record


def encode(table: pa.Table) -> bytes:
    """Return the rows as Parquet."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, store_schema=False)
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    """Return the hash of a part's bytes, as its record has it."""
    return hashlib.sha256(content).hexdigest()


def commit(content: bytes, record: Record, folder: EvaluationFolder) -> None:
    """Write the record and the part of a shard, each all or nothing, the part last."""
    fields = msgspec.to_builtins(record)
    files.write_json(folder.cost(record.shard), {"sha256": files.sha256_of(fields), **fields})
    files.write_bytes(folder.part(record.shard), content)


def load(folder: EvaluationFolder, plan: Plan, shard: Shard) -> Part | None:
    """Return the finished part of `shard`; None where it is absent, damaged, or of another plan or shard."""
    record = load_record(folder, plan, shard)
    if record is None:
        return None
    try:
        with files.naming(folder.part(shard.id)):
            content = folder.part(shard.id).read_bytes()
    except FileNotFoundError:
        return None
    if sha256(content) != record.part_sha256:
        return None
    table = read(content)
    labels = None if table["label"].null_count else table["label"].to_numpy()
    digest = rows_sha256(table["row_id"].to_numpy(), labels, record.texts_sha256)
    return Part(table, record) if digest == shard.rows_sha256 else None


def read(content: bytes) -> pa.Table:
    """Return the rows of a part."""
    return pq.read_table(io.BytesIO(content), use_threads=False)


def load_record(folder: EvaluationFolder, plan: Plan, shard: Shard) -> Record | None:
    """Return the record of `shard`; None where that is absent, damaged or of another plan."""
    try:
        fields = files.read_json(folder.cost(shard.id))
        if fields.pop("sha256") != files.sha256_of(fields):
            return None
        record = msgspec.convert(fields, Record)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if (record.plan, record.shard) == (plan.fingerprint, shard.id) else None
