"""The whole dataset: predicted in shards, checked, and scored.

In: a model, its texts, and a rule for precision. Out: predictions, metrics with intervals, and speed; here or on a
Ray cluster, resumed after any kill with equal bytes.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
