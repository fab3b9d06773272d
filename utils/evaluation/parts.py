"""Keep the predictions of a shard: one parquet file, complete or absent, that proves itself.

A part holds nothing that was measured, so that it has the same bytes whoever predicts the shard, and when. What the
shard cost lies beside it and is written first: where the part is, its cost is.
"""

import hashlib
import io
import json
import re
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from boundby import files
from utils.artifacts import EvaluationFolder
from utils.evaluation.plan import Plan, Shard
from utils.evaluation.rows import rows_sha256

METADATA_KEY = b"boundby"
SEAL_KEY = b"boundby.sha256"
UNSEALED = b"0" * 64
SEAL = re.compile(re.escape(SEAL_KEY) + rb".{2,4}?([0-9a-f]{64})", re.DOTALL)  # Thrift puts type and length between


@dataclass(frozen=True)
class Facts:
    """What a part says of itself besides its rows.

    Texts with the same ids are computed once and count once in `computed_texts` and `useful_tokens`. `texts_sha256` is
    of the texts as they were read, `lengths_sha256` of their token counts, which decide the batches.
    """

    plan: str
    shard: int
    tokens: int
    truncated: int | None
    computed_texts: int
    useful_tokens: int
    computed_tokens: int
    guarded_texts: int
    texts_sha256: str
    lengths_sha256: str


@dataclass(frozen=True)
class Cost:
    """What predicting a shard took: seconds in all and in its phases, bytes at the peak, and where.

    `host` and `device_id` are the same for what shares a machine and a device; an earlier version did not note them.
    """

    plan: str
    shard: int
    started_unix_s: float
    seconds: float
    phases_s: dict[str, float]
    device: str
    device_peak_bytes: int | None
    process_peak_bytes: int | None
    memory_reasons: tuple[str, ...]
    out_of_memory: int
    host: str | None = None
    device_id: str | None = None
    started_s: float | None = None  # on the monotonic clock of the host, which nobody sets; None: an earlier version

    @property
    def span(self) -> tuple[float, float]:
        """Start and length in seconds, to be compared within one host alone."""
        return self.started_unix_s if self.started_s is None else self.started_s, self.seconds


@dataclass(frozen=True)
class Part:
    """The predictions of one shard, in the order of its rows."""

    table: pa.Table
    facts: Facts
    sha256: str


def lengths_sha256(lengths: np.ndarray) -> str:
    """Return a hash of the token counts of a shard's rows in their order."""
    return hashlib.sha256(lengths.astype("<i4").tobytes()).hexdigest()


def commit(table: pa.Table, facts: Facts, cost: Cost, folder: EvaluationFolder) -> Part:
    """Write cost and part of a shard, each all or nothing, the part last; return the part."""
    content = encode(table, facts)
    record = asdict(cost)
    files.write_json(folder.cost(facts.shard), {"sha256": files.sha256_of(record), **record})
    files.write_bytes(folder.part(facts.shard), content)
    return Part(table, facts, hashlib.sha256(content).hexdigest())


def encode(table: pa.Table, facts: Facts) -> bytes:
    """Return the part as parquet, with a hash of all its bytes inside."""
    buffer = io.BytesIO()
    # Without the schema of Arrow, which would hold a second copy of the metadata.
    with pq.ParquetWriter(buffer, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({METADATA_KEY: files.encode_json(asdict(facts)), SEAL_KEY: UNSEALED})
    content = buffer.getvalue()
    return _with_seal(content, hashlib.sha256(content).hexdigest().encode())


def load(folder: EvaluationFolder, plan: Plan, shard: Shard) -> Part | None:
    """Return the finished part of `shard`; None where part or cost is absent, damaged, or of another plan or shard."""
    if load_cost(folder, plan, shard) is None:
        return None
    try:
        with files.naming(folder.part(shard.id)):
            content = folder.part(shard.id).read_bytes()
    except FileNotFoundError:
        return None
    part = decode(content)
    return part if part and _is_of(part, plan, shard) else None


def decode(content: bytes) -> Part | None:
    """Return the part that these bytes are; None when any of them has changed since `encode`."""
    found = SEAL.findall(content)
    if not found or hashlib.sha256(_with_seal(content, UNSEALED)).hexdigest().encode() != found[-1]:
        return None
    try:
        with pq.ParquetFile(io.BytesIO(content)) as file:
            table, metadata = file.read(use_threads=False), file.metadata.metadata
        facts = msgspec.convert(json.loads(metadata[METADATA_KEY]), Facts)
    except (pa.ArrowException, OSError, ValueError, KeyError):  # a sealed file of another program
        return None
    return Part(table, facts, hashlib.sha256(content).hexdigest())


def load_cost(folder: EvaluationFolder, plan: Plan, shard: Shard) -> Cost | None:
    """Return what `shard` cost; None where that is absent, damaged or of another plan."""
    try:
        record = files.read_json(folder.cost(shard.id))
        if record.pop("sha256") != files.sha256_of(record):
            return None
        cost = msgspec.convert(record, Cost)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return cost if (cost.plan, cost.shard) == (plan.fingerprint, shard.id) else None


def _is_of(part: Part, plan: Plan, shard: Shard) -> bool:
    facts, table = part.facts, part.table
    if (facts.plan, facts.shard, table.num_rows) != (plan.fingerprint, shard.id, shard.rows):
        return False
    labels = None if table["label"].null_count else table["label"].to_numpy()
    return rows_sha256(table["row_id"].to_numpy(), labels, facts.texts_sha256) == shard.rows_sha256


def _with_seal(content: bytes, seal: bytes) -> bytes:
    """Return `content` with another seal of equal length; the last place that looks like one is it."""
    place = next(reversed(list(SEAL.finditer(content))), None)
    return content if place is None else content[: place.start(1)] + seal + content[place.end(1) :]
