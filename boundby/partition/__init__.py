"""Split a model over devices.

In: measured units of a profile by layer, nodes and links. Out: the optimal plan for an objective with the plans it
is held against, or what is missing for one; the plan simulated event by event, and run with `torchrun`. Loads torch
only to run.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
