"""Step 02: the sweep over batch sizes, its verdict, and the whole dataset.

In: a model and texts. Out: rounds of every batch size in turn, committed as they are made; rows of
`detailed_metrics.csv` and `baseline_metrics.json` with the verdict of `boundby.bound`.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
