"""Step 05: the same texts by other dtypes, kernels and engines, in turns with the model as it is.

In: a model, texts, and a budget of seconds. Out: a row per variant with speed, labels kept and memory, or the reason
why it is not available here; and which one to use.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
