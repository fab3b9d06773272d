"""The labelled texts.

In: a dataset of the Hub, CSV, Parquet or JSONL. Out: one normalised copy that all steps read, its receipt, and what
is wrong with its rows.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
