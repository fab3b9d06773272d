"""The labelled texts: `sources` reads them, `checks` looks at each row, `normalised` keeps the copy that steps read."""

from utils.data.normalised import (
    DataReceipt,
    Rows,
    check_receipt,
    inspect,
    load_texts,
    normalise,
    open_normalised,
    sample,
)
from utils.data.sources import open_source

__all__ = [
    "DataReceipt",
    "Rows",
    "check_receipt",
    "inspect",
    "load_texts",
    "normalise",
    "open_normalised",
    "open_source",
    "sample",
]
