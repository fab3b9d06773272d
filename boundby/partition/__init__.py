"""Split a model over devices: measured units, nodes and links in, the best plan out, or what is missing for one.

In: profiles by layer, `VirtualNode`s and `Link`s, for `ExecutionPlanner`. Out: a `PartitionPlan`, or `Infeasible`.
`units` reads a profile, `costs` makes tables of integers of it, `solver` finds the optimum, `alternatives` are what it
is compared with. `simulate` computes a plan event by event, `run` runs it under `torchrun` as the modules that `stages`
cuts, and `compare` holds the prediction against the run. Only `running` and `stages` load torch.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
