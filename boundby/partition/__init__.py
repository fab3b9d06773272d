"""Split a model over devices: measured units, nodes and links in, the best plan out, or what is missing for one.

`ExecutionPlanner` is the door. `units` reads a profile by layer, `costs` makes tables of integers of it, `solver` finds
the optimum, `baselines` are the splits it is held against. Loads no torch.
"""

from boundby.partition.links import Link, Links
from boundby.partition.nodes import VirtualNode
from boundby.partition.plan import PartitionPlan
from boundby.partition.planner import ExecutionPlanner
from boundby.partition.shortfall import Infeasible
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
