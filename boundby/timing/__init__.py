"""How long something takes, and how sure that is.

In: a callable, or seconds that were measured in rounds. Out: seconds with intervals, the fastest of several, whether
one is faster than another, and what batches of a size add up to over a whole dataset. Loads no torch; the clock is
an argument.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
