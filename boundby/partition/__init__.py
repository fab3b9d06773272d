"""Split a model over devices: measured units, nodes and links in, the best plan out, or what is missing for one.

`ExecutionPlanner` is the door. `units` reads a profile by layer, `costs` makes tables of integers of it, `solver` finds
the optimum for an objective, `alternatives` are what it is held against. `simulation` computes a plan event by event,
`running` runs it with `torchrun` as the modules that `stages` cuts, `plan` holds the prediction against the run.
Loads no torch but in `running` and `stages`.
"""

from boundby.partition.alternatives import Infeasible
from boundby.partition.nodes import Link, Links, VirtualNode
from boundby.partition.plan import PartitionPlan
from boundby.partition.planner import ExecutionPlanner
from boundby.partition.units import Chain, Unit, units_of

__all__ = [
    "Chain",
    "ExecutionPlanner",
    "Infeasible",
    "Link",
    "Links",
    "PartitionPlan",
    "Unit",
    "VirtualNode",
    "units_of",
]
