"""Stage times as a JSON document, and back."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec
import numpy as np

from boundby.training.records import MetricSummary, Name, OpenStage, StageSummary, StageTimes, Status
from boundby.training.remarks import Remark
from boundby.training.ring import ABSENT, METRIC, OCCURRENCE

SCHEMA_VERSION = 1
NO_ROWS = b""
NULLABLE = ("device_ns", "gap_ns", "parent")
_Columns = dict[str, list[int | float | None] | None]


@dataclass(frozen=True)
class _Plain:
    """The fields that stand in the document as they do in `StageTimes`."""

    status: Status
    error: str | None
    rank: int
    world_size: int
    pid: int | None
    started_unix_s: float | None
    written_unix_s: float | None
    elapsed_s: float
    first_step: int
    last_step: int | None
    device: str | None
    num_occurrences: int
    num_metric_rows: int


@dataclass(frozen=True)
class _Summary:
    stages: tuple[StageSummary, ...]
    metrics: tuple[MetricSummary, ...]


@dataclass(frozen=True)
class _Document(_Plain):
    schema_version: int
    summary: _Summary
    open: tuple[OpenStage, ...]
    remarks: tuple[Remark, ...]
    names: tuple[Name, ...]
    metric_names: tuple[str, ...]
    occurrences: msgspec.Raw
    metrics: msgspec.Raw


PLAIN = tuple(each.name for each in fields(_Plain))


def bytes_of(times: StageTimes) -> bytes:
    """Return the document as strict JSON, encoded at a fiftieth of the cost of Python's own encoder."""
    return msgspec.json.encode(document_of(times)) + b"\n"


def document_of(times: StageTimes) -> dict[str, Any]:
    """Return the records as plain values; rows become columns, and what is not known in them null."""
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(times, name) for name in PLAIN},
        "summary": {
            "stages": [asdict(each) for each in times.stages],
            "metrics": [asdict(each) for each in times.metrics],
        },
        "open": [asdict(each) for each in times.open],
        "remarks": [asdict(each) for each in times.remarks],
        "names": [asdict(each) for each in times.names],
        "metric_names": list(times.metric_names),
        "occurrences": {name: _column(times.occurrences, name) for name in OCCURRENCE.names or ()},
        "metrics": {name: _column(times.metric_rows, name) for name in METRIC.names or ()},
    }


def times_from(content: bytes, *, with_rows: bool = True) -> StageTimes:
    """Return the records of a document, without any rows if not `with_rows`.

    Raises ValueError naming what is wrong with it.
    """
    document = msgspec.json.decode(content, type=_Document)
    if document.schema_version != SCHEMA_VERSION:
        raise ValueError(f"its schema_version is {document.schema_version}, not {SCHEMA_VERSION}")
    try:
        return StageTimes(
            **{name: getattr(document, name) for name in PLAIN},
            stages=document.summary.stages,
            metrics=document.summary.metrics,
            open=document.open,
            remarks=document.remarks,
            names=document.names,
            metric_names=document.metric_names,
            occurrences=_rows(document.occurrences if with_rows else NO_ROWS, OCCURRENCE),
            metric_rows=_rows(document.metrics if with_rows else NO_ROWS, METRIC),
        )
    except (KeyError, OverflowError) as error:
        raise ValueError(f"its columns are no table: {type(error).__name__}: {error}") from None


def name_of(name: Any, kind: Any) -> Name:
    """Return a name; raise ValueError for one that cannot be."""
    return msgspec.convert({"name": name, "kind": kind}, Name)


def _column(rows: np.ndarray, name: str) -> list[Any] | None:
    """Return the values of a column, None in place of one in which nothing is known."""
    values = rows[name]
    if values.dtype.kind == "f":
        return [each if math.isfinite(each) else None for each in values.tolist()]
    if name not in NULLABLE:
        return values.tolist()
    return None if (values == ABSENT).all() else [None if each == ABSENT else each for each in values.tolist()]


def _rows(content: bytes | msgspec.Raw, dtype: np.dtype) -> np.ndarray:
    if content is NO_ROWS:
        return np.zeros(0, dtype=dtype)
    columns = msgspec.json.decode(content, type=_Columns)
    rows = np.zeros(len(columns["index"] or ()), dtype=dtype)
    for name in dtype.names or ():
        values = columns[name]
        absent = math.nan if dtype[name].kind == "f" else ABSENT
        rows[name] = absent if values is None else [absent if each is None else each for each in values]
    return rows
