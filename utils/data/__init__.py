"""The labelled texts.

`sources` and `tables` read them, `normalisation` writes the copy that every step reads, `receipt` says what that copy
was made from, `statistics` what it looks like, and `rows` hands it to the measuring steps.
"""

from utils.data.normalisation import inspect, normalise, open_normalised
from utils.data.receipt import DataReceipt, check_receipt
from utils.data.rows import Rows, load_texts, sample
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
