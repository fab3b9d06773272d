"""The offline default: synthetic review-like texts and a small classifier trained on them.

In: a folder for the cache. Out: a dataset and a model, made once and verified by content.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
