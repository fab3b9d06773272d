"""Bring a dataset into the one form that every step reads: `row_id, text, labels, label_name`."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from boundby import files
from utils.artifacts import Layout
from utils.config import Config
from utils.data.receipt import SCHEMA_VERSION, DataReceipt, identify_file, identify_model, request_of
from utils.data.rows import COLUMNS
from utils.data.sources import OpenedSource, open_file, open_source
from utils.data.statistics import TokenCounter
from utils.labels import ModelLabels, Reconciler
from utils.model_source import ModelSource, Progress, read_labels
from utils.validate import AcceptedRow, Validator

NOTED_ROWS = 100_000  # rows between two notes of progress


def normalise(
    config: Config,
    layout: Layout,
    model: ModelSource,
    *,
    progress: Progress,
    count_tokens: TokenCounter | None = None,
) -> DataReceipt:
    """Write the dataset in its normalised form, label mappings and rejected rows beside it; return its receipt.

    The receipt is written last, so that a reader who finds one that matches finds everything.
    """
    opened = open_source(config.dataset, layout.dataset.parent, progress)
    labels = read_labels(model)
    validator = Validator(Reconciler(labels, opened.class_names), count_tokens)
    accepted = (row._asdict() for row in _noted(_accepted(validator, opened), progress))
    files.write_table(layout.dataset, accepted, COLUMNS)
    statistics = validator.statistics()
    files.write_json(layout.label_mappings, _mappings(labels, statistics.counts))
    files.write_csv(layout.rejected_rows, map(asdict, validator.rejected), ("row", "reason", "excerpt"))
    receipt = DataReceipt(
        schema_version=SCHEMA_VERSION,
        request=request_of(config),
        source=asdict(opened.source),
        model=identify_model(model),
        labels_sha256=files.sha256_of(list(labels.names)),
        dataset=identify_file(layout.dataset),
        rows=statistics.rows,
        synthetic=config.dataset.quickstart,
        statistics=statistics,
        doubts=validator.doubts(statistics),
    )
    receipt.save(layout.data_receipt)
    return receipt


def inspect(
    opened: OpenedSource, model: ModelSource, progress: Progress, count_tokens: TokenCounter | None = None
) -> Validator:
    """Return what the checks find in the rows of a source, which are read but not written."""
    validator = Validator(Reconciler(read_labels(model), opened.class_names), count_tokens)
    for _ in _noted(_accepted(validator, opened), progress):
        pass
    return validator


def open_normalised(layout: Layout) -> OpenedSource:
    """Return the normalised dataset as a source, to be inspected like any other."""
    return open_file(layout.dataset, "text", "labels")


def _accepted(validator: Validator, opened: OpenedSource) -> Iterator[AcceptedRow]:
    return validator.accept(opened.rows, str(opened.source), opened.label_column)


def _noted(rows: Iterable[AcceptedRow], progress: Progress) -> Iterator[AcceptedRow]:
    for count, row in enumerate(rows, start=1):
        if count % NOTED_ROWS == 0:
            progress(f"{count:,} rows read")
        yield row


def _mappings(labels: ModelLabels, counts: Any) -> dict[str, Any]:
    return {
        "id2label": {str(index): name for index, name in enumerate(labels.names)},
        "label2id": {name: index for index, name in enumerate(labels.names)},
        "counts": counts,
    }
