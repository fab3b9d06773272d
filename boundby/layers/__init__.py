"""Time, memory and work of every layer of a model.

In: any module and its input. Out: a record per module with intervals, its bound and rank, the cost of the probes
subtracted, and an HTML dashboard.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
