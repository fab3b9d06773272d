"""Two runs, or two dtypes of one, beside each other.

In: result folders, or a saved baseline. Out: same, faster, slower or ambiguous for each batch size, with intervals,
and the exit code of a gate in CI.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
