"""Split a model over devices: measured units, nodes and links in, the best plan out, or what is missing for one.

`ExecutionPlanner` is the door. `units` reads a profile by layer, `costs` makes tables of integers of it, `solver` finds
the optimum for an objective, `alternatives` are what it is held against. `simulation` computes a plan event by event,
`running` runs it with `torchrun` as the modules that `stages` cuts, `plan` holds the prediction against the run.
Loads no torch but in `running` and `stages`.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
